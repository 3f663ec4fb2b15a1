"""Which architectures of transformers convert, one file each: tiny and base-sized configs, heads, and what is
special.

A file dropped in here with an `ARCHITECTURE` (or several, in `ARCHITECTURES`) is tried by `test_architectures.py` and
measured by `benchmarks/conversion.py`. `tiny` gives single classes of them to other tests.
"""

from __future__ import annotations

import copy
import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor

VOCAB, LENGTH, FIRST = 60, 9, 5  # ids below FIRST are special tokens
LENGTHS = (9, 6, 1)
TARGET_LENGTHS = (5, 3, 1)
SMALL: dict[str, Any] = {  # sizes by the names that most configs have for them
    **{"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"intermediate_size": 48, "max_position_embeddings": 24},
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TASKS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


def named(family: str, *heads: str) -> dict[str, str]:
    """transformers' classes that are called as ours are, after their family."""
    return {f"{family}{head}": head for head in heads}


def one_bias(model: transformers.PreTrainedModel) -> None:
    """An untied output has a second bias that nothing reads."""
    for module in model.modules():
        if isinstance(getattr(module, "decoder", None), torch.nn.Linear) and hasattr(module, "bias"):
            module.bias.copy_(module.decoder.bias)


@dataclass(frozen=True)
class Architecture:
    """One model type of transformers.

    model_type: theirs. ours: the model type that it converts to. tiny: fields of a config of a few thousand weights.
    heads: transformers' class -> the name of our head; all of them convert with their head. headless: classes whose
    head has no counterpart, the same way. settings: by class, fields that it needs. variations: by name, fields that
    make another tiny config worth trying (odd geometry, an activation, untied tables); they are tried with the first
    head that generates, or else the first.
    tried_with: by variation, the class that it is tried with instead.
    apart: by variation, outputs that have another meaning there than ours.
    base: fields of a base-sized config where transformers' defaults are larger than that, or smaller.
    sides: where padding may stand so that transformers numbers positions rightly. first_slot: classes that read the
    vector in the first slot, whether it is padding or not. left_prompts: whether that holds for
    prompts padded on the left while text is generated. generates_as_forward: whether their `generate` gives what their
    forward calls say (RoBERTa numbers positions from 0 there). unpadded_losses: classes whose loss in transformers
    reads padding, too. refused, noted, unread: fields of their config that, changed alone, do not convert, are
    reported as acting in training only, or are read by nothing that converts. other_values: another valid value of a
    field, where none can be guessed. inputs: changes what both models are given (class name, inputs). ready: changes a
    fresh model of theirs, so that every tensor matters. back_as: class that comes back, where several share one of
    ours. renamed: names of labels and outputs in transformers -> ours, where they differ.
    raw_last_state: whether their last hidden state is what the last layer gives, and ours what the final norm makes of
    it. idle: by class, the ends of names of tensors that nothing in transformers reads, so that they come back fresh.
    uncompared: outputs that transformers lays out in another way.
    tolerance: of outputs, relative to the largest of them.
    """

    model_type: str
    ours: str
    tiny: Mapping[str, Any]
    heads: Mapping[str, str]
    headless: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    variations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tried_with: Mapping[str, str] = field(default_factory=dict)
    apart: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    base: Mapping[str, Any] = field(default_factory=dict)
    sides: tuple[str, ...] = ("right", "left")
    first_slot: tuple[str, ...] = ()
    left_prompts: bool = True
    generates_as_forward: bool = True
    unpadded_losses: tuple[str, ...] = ()
    refused: frozenset[str] = frozenset()
    noted: frozenset[str] = frozenset()
    unread: frozenset[str] = frozenset()
    other_values: Mapping[str, Any] = field(default_factory=dict)
    inputs: Callable[[str, dict[str, Tensor]], dict[str, Tensor]] | None = None
    ready: Callable[[transformers.PreTrainedModel], None] | None = None
    back_as: Mapping[str, str] = field(default_factory=dict)
    raw_last_state: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)
    idle: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    uncompared: tuple[str, ...] = ()
    tolerance: float = 1e-5

    def __str__(self) -> str:
        return self.model_type

    # ------------------------------------------------------------------------------------------------ models

    def config(self, **changes: Any) -> transformers.PreTrainedConfig:
        config_class = type(transformers.AutoConfig.for_model(self.model_type))
        return config_class(**copy.deepcopy({**self.tiny, **changes}))

    def make(self, head: str, seed: int = 0, **changes: Any) -> transformers.PreTrainedModel:
        """A model whose every tensor is random: fresh biases and norms are 0 and 1, and would hide a wrong mapping."""
        torch.manual_seed(seed)
        model = getattr(transformers, head)(self.config(**{**self.settings.get(head, {}), **changes}))
        with torch.no_grad():
            for tensor in {id(tensor): tensor for tensor in model.parameters() if tensor.requires_grad}.values():
                tensor.add_(0.2 * torch.randn_like(tensor))
            if self.ready is not None:
                self.ready(model)
        return model.eval()

    @property
    def classes(self) -> dict[str, str]:
        """All classes that convert, with their head or without."""
        return {**self.heads, **self.headless}

    def generating(self) -> str | None:
        """The first class that continues text."""
        names = (name for name, ours in self.heads.items() if ours in ("ForCausalLM", "ForSeq2SeqLM"))
        return next(names, None)

    # ------------------------------------------------------------------------------------------------ inputs

    def given(self, head: str, side: str = "right", lengths: tuple[int, ...] = LENGTHS) -> dict[str, Tensor]:
        """Rows of 9, 6 and 1 tokens, padded on one side; what an image model reads instead."""
        generator = torch.Generator().manual_seed(7)
        config = self.config()
        if hasattr(config, "image_size"):
            shape = (len(lengths), config.num_channels, config.image_size, config.image_size)
            given = {"pixel_values": torch.randn(shape, generator=generator)}
            return given if self.inputs is None else self.inputs(head, given)
        ids = torch.randint(FIRST, VOCAB, (len(lengths), LENGTH), generator=generator)
        order = torch.arange(LENGTH)
        mask = torch.stack([order >= LENGTH - n if side == "left" else order < n for n in lengths])
        padding = getattr(config, "pad_token_id", None)
        given = {"input_ids": ids.masked_fill(~mask, 0 if padding is None else padding), "attention_mask": mask.long()}
        if "MultipleChoice" in head:
            given = {name: torch.stack([tensor, tensor.flip(0)], dim=1) for name, tensor in given.items()}
        if config.is_encoder_decoder and "Encoder" not in head and "CausalLM" not in head:
            target = torch.randint(FIRST, VOCAB, (len(lengths), TARGET_LENGTHS[0]), generator=generator)
            given["decoder_input_ids"] = target
            seen = torch.arange(TARGET_LENGTHS[0]) < torch.tensor(TARGET_LENGTHS)[:, None]
            given["decoder_attention_mask"] = seen.long()
        return given if self.inputs is None else self.inputs(head, given)

    def labels(self, head: str, given: Mapping[str, Tensor], num_labels: int) -> dict[str, Tensor]:
        """Labels for the real tokens of `given`; none for a bare model."""
        generator = torch.Generator().manual_seed(8)

        def draw(high: int, *shape: int) -> Tensor:
            return torch.randint(0, high, shape, generator=generator)

        rows = len(next(iter(given.values())))
        task = self.classes[head]
        if task in ("ForSequenceClassification", "ForImageClassification"):
            return {"labels": draw(num_labels, rows)}
        if task == "ForMaskedImageModeling":
            config = self.config()
            return {"bool_masked_pos": draw(2, rows, (config.image_size // config.patch_size) ** 2).bool()}
        if task == "ForQuestionAnswering":
            return {"start_positions": draw(LENGTH, rows), "end_positions": draw(LENGTH, rows)}
        if task in ("ForMultipleChoice", "ForNextSentencePrediction"):
            return {"labels": draw(2, rows)}
        if task == "Model":
            return {}
        mask = given["decoder_attention_mask" if task == "ForSeq2SeqLM" else "attention_mask"].bool()
        if task == "ForReplacedTokenDetection":
            return {"labels": draw(2, *mask.shape).masked_fill(~mask, -100)}
        if task == "ForTokenClassification":
            return {"labels": draw(num_labels, *mask.shape).masked_fill(~mask, -100)}
        before = mask.roll(1, dims=-1)  # a first token after padding is predicted from padding: no target
        labels = {"labels": draw(VOCAB, *mask.shape).masked_fill(~mask | ~before, -100)}
        if task == "ForPreTraining":
            labels["next_sentence_label"] = draw(2, rows)
        return labels


@functools.cache
def architectures() -> dict[str, Architecture]:
    """All of them, by name."""
    found: dict[str, Architecture] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for entry in getattr(module, "ARCHITECTURES", None) or (module.ARCHITECTURE,):
            found[str(entry)] = entry
    return found


@dataclass(frozen=True)
class Tiny:
    """One class of transformers, by name, and what makes its tiny models another size or form."""

    head: str
    changes: Mapping[str, Any]

    @property
    def entry(self) -> Architecture:
        return next(entry for entry in architectures().values() if self.head in entry.classes)

    def make(self, seed: int = 0, **changes: Any) -> transformers.PreTrainedModel:
        return self.entry.make(self.head, seed, **self.changes, **changes)

    def given(self, side: str = "right", lengths: tuple[int, ...] = LENGTHS) -> dict[str, Tensor]:
        return self.entry.given(self.head, side, lengths)

    def labelled(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {**given, **self.entry.labels(self.head, given, self.make().config.num_labels)}


def tiny(head: str, **changes: Any) -> Tiny:
    return Tiny(head, changes)


__all__ = ["Architecture", "architectures", "tiny"]
