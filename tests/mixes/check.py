"""What must hold for a mix: it is refused at construction, in one sentence, or everything below works."""

from __future__ import annotations

import re
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_xformers import XFormerConfig
from hf_xformers.core.call import Call
from hf_xformers.stacks.base import Stack
from hf_xformers.variants import family
from tests.helpers import make_strong, pad, tokens
from tests.mixes.draw import VOCAB, Mix

LENGTHS, WIDTH = (12, 5, 1), 14
TOLERANCE = 1e-8
_MADE_BY_SAVING = dict.fromkeys(("architectures", "dtype", "_name_or_path", "transformers_version"))
LONGEST_REFUSAL = 800  # characters: a sentence, whatever names it lists
# What a refusal says beside what is wrong: a condition that holds, or what to do.
REMEDY = re.compile(
    r"\b(needs?|must|expected|[Kk]nown|did you mean|use|choose|give|set|leave|take|make|lower|let|name|enlarge|raise"
    r"|change|shorten|probability)\b"
)


@dataclass(frozen=True)
class Outcome:
    """kind: `refused`, `works`, or what went wrong; detail: the message."""

    kind: str
    detail: str = ""

    @property
    def third(self) -> bool:
        return self.kind not in ("refused", "works")


class Wrong(Exception):
    """Something that must hold does not."""

    def __init__(self, kind: str, detail: str):
        super().__init__(detail)
        self.kind = kind


def check(mix: Mix) -> Outcome:
    """What becomes of a mix."""
    torch.manual_seed(0)
    try:
        config = XFormerConfig(**mix.fields)
        model = family("xformer")[mix.head](config)
    except Exception as error:
        return refusal(error)
    if config.embedding.type == "series":  # tests/finetuning/test_forecasting.py has the models that read numbers
        return Outcome("refused", "The checks give ids.")
    try:
        Checks(mix, model).run()
    except Wrong as wrong:
        return Outcome(wrong.kind, str(wrong))
    except Exception as error:
        return Outcome("crash", _place(error))
    return Outcome("works")


def refusal(error: Exception) -> Outcome:
    """A refusal is a plain `ValueError` or `TypeError` whose message is one line that a reader can follow, and says
    what would do."""
    text = str(error)
    if type(error) not in (ValueError, TypeError):
        return Outcome("crash at construction", _place(error))
    if not text or "\n" in text or len(text) > LONGEST_REFUSAL or not _ours(error):
        return Outcome("unclear refusal", _place(error))
    if not REMEDY.search(text):
        return Outcome("refusal without a remedy", text)
    return Outcome("refused", text)


def _ours(error: Exception) -> bool:
    """Whether this package raised it, rather than something that fell over a value."""
    frames = traceback.extract_tb(error.__traceback__)
    return "hf_xformers" in frames[-1].filename


def _place(error: Exception) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "hf_xformers" in frame.filename]
    where = f" at {frames[-1].filename.rpartition('hf_xformers/')[2]}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {str(error)[:300]}{where}"


class Checks:
    """All that must hold for a model of a mix, in float64, with parameters that make every term count."""

    def __init__(self, mix: Mix, model: PreTrainedModel):
        self.mix, self.shape = mix, mix.shape
        self.model = make_strong(model.to(torch.float64).eval())
        exits = getattr(model, "exits", None)
        if exits is not None:  # answers that differ in how sure they are, so that some texts leave and others stay
            with torch.no_grad():
                for parameter in exits.parameters():
                    parameter.mul_(5.0)
        self.vocabulary = min(model.config.vocab_size, VOCAB)
        self.rows = [tokens(length, seed=length, high=self.vocabulary) for length in LENGTHS]

    def run(self) -> None:
        with torch.no_grad():
            alone = [self.output(row[None]) for row in self.rows]
            for row in alone:
                if not row.isfinite().all():
                    raise Wrong("not finite", "output")
            for side in ("right", "left"):
                self.padding(alone, side)
            self.rows_of_padding()
            if self.shape != "encoder" and self.by_token:
                self.causality(alone[0])
                if self.mix.head in ("ForCausalLM", "ForSeq2SeqLM"):
                    self.cache()
                    self.generation()
            self.saving(alone[0])
        self.training(alone[0].shape[-1])

    # ------------------------------------------------------------------------------------------------ outputs

    @property
    def by_token(self) -> bool:
        return self.mix.head != "ForSequenceClassification"

    def output(self, ids: Tensor, mask: Tensor | None = None, model: PreTrainedModel | None = None, **more) -> Tensor:
        """[B, T, n], or [B, n] of whole texts."""
        given = {"input_ids": ids, "attention_mask": mask, **self.kinds(ids)}
        if self.shape == "seq2seq" and "decoder_input_ids" not in more:
            more = {"decoder_input_ids": ids, "decoder_attention_mask": mask, **more}
        output = (self.model if model is None else model)(**{**given, **more})
        if self.mix.head == "Model":
            return output.last_hidden_state
        if self.mix.head == "ForQuestionAnswering":
            return torch.stack((output.start_logits, output.end_logits), dim=-1)
        return output.logits

    def kinds(self, ids: Tensor) -> dict[str, Tensor]:
        """Types and further ids of the tokens, as far as the model has tables of them."""
        config, made = self.model.config, {}
        if config.type_vocab_size or "token_type_ids" in self.model.base_model.trunk.extra_inputs:
            made["token_type_ids"] = ids % max(config.type_vocab_size, 2)
        if "character_ids" in self.model.base_model.trunk.extra_inputs:
            made["character_ids"] = 1 + (ids[..., None] * torch.tensor([1, 3, 7])) % 50
        for number, (name, rows) in enumerate(getattr(config.embedding, "all_id_tables", ())):
            made[name] = (ids + number) % rows
        return made

    # ------------------------------------------------------------------------------------------------ what must hold

    def padding(self, alone: list[Tensor], side: str) -> None:
        """A padded batch gives each row what it gets alone, whatever stands under the padding."""
        ids, mask = pad(self.rows, WIDTH, side, seed=9)
        output = self.output(ids % self.vocabulary, mask)
        for index, expected in enumerate(alone):
            found = output[index] if not self.by_token else output[index][mask[index].bool()]
            self.same(f"{side} padding", found, expected[0])

    def rows_of_padding(self) -> None:
        ids, mask = pad(self.rows[:2], LENGTHS[0], "right")
        mask[1] = 0
        if not self.output(ids, mask).isfinite().all():
            raise Wrong("not finite", "a row of padding alone")

    def causality(self, expected: Tensor) -> None:
        ids = self.rows[0][None]
        for place in (1, 6, 11):
            changed = ids.clone()
            changed[:, place] = 5 + (ids[:, place] - 4) % (self.vocabulary - 6)
            more = {} if self.shape == "decoder" else {"decoder_input_ids": changed}
            output = self.output(changed if self.shape == "decoder" else ids, **more)
            self.same("future leaks", output[:, :place], expected[:, :place])

    def cache(self) -> None:
        """In pieces with a cache as at once without, for a batch that is padded on the left."""
        ids, mask = pad(self.rows[:2], LENGTHS[0], "left")
        expected = self.output(ids, mask, use_cache=False)
        given, memory = {"attention_mask": mask}, {}
        if self.shape == "seq2seq":
            memory = {
                "encoder_outputs": self.model.get_encoder()(input_ids=ids, attention_mask=mask, **self.kinds(ids))
            }
        found, past, done = [], None, 0
        for size in (1, 4, 1, 1, 5):
            seen = done + size
            piece, so_far = ids[:, done:seen], mask[:, :seen]
            if self.shape == "seq2seq":
                own = {"decoder_input_ids": piece, "decoder_attention_mask": so_far}
            else:
                own = {"input_ids": piece, "attention_mask": so_far, **self.kinds(piece)}
            result = self.model(**{**given, **memory, **own}, past_key_values=past, use_cache=True)
            past, done = result.past_key_values, seen
            found.append(result.logits)
        self.same("cached differs", torch.cat(found, 1)[mask.bool()], expected[mask.bool()])

    def generation(self) -> None:
        ids, mask = pad(self.rows[:2], LENGTHS[0], "left")
        settings = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
        made = []
        for use_cache in (True, False):
            try:
                made.append(self.model.generate(input_ids=ids, attention_mask=mask, use_cache=use_cache, **settings))
            except ValueError as error:
                if str(error) in {layer.attention.why_not.get("generate", "") for layer in self.layers()}:
                    return  # it is declared
                raise
        if not torch.equal(*made):
            raise Wrong("cached generation differs", "")

    def layers(self) -> list[XFormerConfig]:
        views = self.model.config.tower_configs()
        return [view.layer(index) for view in views for index in range(view.num_hidden_layers)]

    def saving(self, expected: Tensor) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.model.save_pretrained(folder)
            again, report = type(self.model).from_pretrained(folder, dtype=torch.float64, output_loading_info=True)
        for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if report[key]:
                raise Wrong("save/load differs", f"{key}: {sorted(report[key])[:3]}")
        before, after = ({**one.config.to_dict(), **_MADE_BY_SAVING} for one in (self.model, again))
        if before != after:
            raise Wrong("save/load differs", f"config: {[name for name in before if before[name] != after.get(name)]}")
        again.config._attn_implementation = self.model.config._attn_implementation
        self.same("save/load differs", self.output(self.rows[0][None], model=again.eval()), expected)

    def training(self, predicted: int) -> None:
        """One step: a finite loss, and a finite gradient for every parameter that is to be trained. predicted: how
        many ids have logits, where tokens are predicted."""
        model = self.model.train()
        ids, mask = pad(self.rows[:2], LENGTHS[0], "right")
        given = {"input_ids": ids, "attention_mask": mask, **self.kinds(ids)}
        if self.shape == "seq2seq":
            given.update(decoder_input_ids=ids, decoder_attention_mask=mask)
        head = self.mix.head
        if "LM" in head or head == "ForTokenClassification":
            given["labels"] = torch.where(mask.bool(), ids % 2 if "Token" in head else ids % predicted, -100)
        elif head == "ForQuestionAnswering":
            given.update(start_positions=ids[:, 0] % 4, end_positions=ids[:, 1] % 4)
        elif head == "ForSequenceClassification":
            given["labels"] = ids[:, 0] % 2
        contexts: list[Call] = []
        for module in model.modules():
            if isinstance(module, Stack):
                module.register_forward_pre_hook(lambda module, inputs: contexts.append(inputs[0].context))
        output = model(**given)
        for context in contexts:
            for name, value in context.made.items():
                if any(tensor.requires_grad for tensor in tensors_in(value)):
                    raise Wrong("gradient in `context.made`", str(name))
        if head == "Model":
            loss = self._form(output.last_hidden_state)
            if getattr(output, "pooler_output", None) is not None:
                loss = loss + self._form(output.pooler_output)
            loss = loss + sum((output.aux_losses or {}).values())
        else:
            loss = output.loss
        if not loss.isfinite():
            raise Wrong("not finite", "loss")
        loss.backward()
        bare = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                bare.append(name)
            elif not parameter.grad.to_dense().isfinite().all():
                raise Wrong("not finite", f"gradient of {name}")
        if bare:
            raise Wrong("no gradient", f"{len(bare)}: {', '.join(bare[:4])}")

    @staticmethod
    def _form(states: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        return (states * torch.randn(states.shape, generator=generator, dtype=torch.float64)).sum()

    @staticmethod
    def same(kind: str, found: Tensor, expected: Tensor) -> None:
        if found.shape != expected.shape:
            raise Wrong(kind, f"shape {list(found.shape)} instead of {list(expected.shape)}")
        error = (found - expected).abs().max().item() if found.numel() else 0.0
        scale = max(expected.abs().max().item(), 1.0) if expected.numel() else 1.0
        if not error <= TOLERANCE * scale:
            raise Wrong(kind, f"by {error:.2g}")


def tensors_in(value: object, depth: int = 4) -> Iterator[Tensor]:
    """All tensors that `value` holds, but those of modules."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module) or depth == 0:
        return
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from tensors_in(entry, depth - 1)
    else:
        held = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        for entry in held.values():
            yield from tensors_in(entry, depth - 1)


Checker = Callable[[Mix], Outcome]
