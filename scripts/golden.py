"""A record of what all models compute, to see that a change of the code's structure has changed nothing.

python scripts/golden.py record FILE [--folders DIR] [--only PATTERN]
python scripts/golden.py compare FILE [--folders DIR] [--only PATTERN]

Of every head of every family, and of 200 drawn mixes, under a seed and in one thread: configuration, fresh weights in
their order, outputs at lengths 1, 7 and 40 and of rows padded on either side, what layers give besides them, cached
steps, generated ids, and of a training step with dropout the loss, all gradients and all buffers; or the words of a
refusal. The file keeps hashes, with sums of magnitudes by which to guess how far something has moved. `compare` exits
with 1 where anything is not equal bit for bit, and lists it; models that the record does not know are only counted.

--folders DIR: `record` saves a model of every family there, and `compare` reads it from there.
--only PATTERN: those models alone, as `'xf_bert *'` (all heads) or `'mix *'`.

A record fits the processor and the torch that it was made with.
"""

from __future__ import annotations

import argparse
import ast
import functools
import gzip
import hashlib
import itertools
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hf_xformers import XFormerConfig  # noqa: E402
from hf_xformers.variants import config_class, family, model_types  # noqa: E402
from tests.common.test_heads import LABELS  # noqa: E402
from tests.helpers import aligned, make_strong, pad, tiny_fields, tokens  # noqa: E402
from tests.mixes import check, draw  # noqa: E402

MIXES = 200
SHAPES = {"ForMaskedLM": "encoder", "ForCausalLM": "decoder", "ForSeq2SeqLM": "seq2seq"}  # heads that get all checks
UNSAVED = ("transformers_version", "_name_or_path")
Items = dict[str, Any]


# ------------------------------------------------------------------------------------------------ hashes


def digest(value: Any) -> list[str]:
    """A hash of a tensor or of a JSON value, and by what to guess how far it has moved."""
    if not isinstance(value, Tensor):
        text = json.dumps(value, sort_keys=True, default=str)
        return [hashlib.blake2b(text.encode(), digest_size=6).hexdigest(), text[:200]]
    value = value.detach()
    value = (value.to_dense() if value.is_sparse else value).contiguous()
    about = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} ".encode()
    found = hashlib.blake2b(about + value.reshape(-1).view(torch.uint8).numpy().tobytes(), digest_size=6)
    return [found.hexdigest(), f"{about.decode()}{value.double().abs().sum().item():.9g}"]


def leaves(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors in an output, by where they stand; a cache shows itself in the steps that follow."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, (Mapping, list, tuple)):
        for name, entry in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from leaves(entry, f"{path}.{name}")


class Subject:
    """One model and what is found of it. given: makes the inputs of a head of rows of ids and a mask."""

    def __init__(self, model: nn.Module, shape: str, head: str, given: Callable[..., dict[str, Any]], rows: list):
        self.model, self.shape, self.head, self.given, self.rows = model, shape, head, given, rows
        self.items: Items = {}
        self.settings()

    def note(self, name: str, make: Callable[[], Any]) -> None:
        """The tensors of what `make` gives, or its refusal."""
        torch.manual_seed(0)
        try:
            found = make()
        except Exception as error:
            self.items[name] = digest(f"{type(error).__name__}: {error}")
        else:
            self.items |= {path: digest(tensor) for path, tensor in leaves(found, name)}

    def batch(self, side: str) -> tuple[Tensor, Tensor]:
        return pad(self.rows, max(map(len, self.rows)), side, seed=9)

    def settings(self) -> None:
        fields = self.model.config.to_dict()
        self.items |= {f"config.{key}": digest(fields[key]) for key in fields if key not in UNSAVED}
        state = self.model.state_dict()
        self.items["order of weights"] = digest(list(state))
        self.items |= {f"weight.{name}": digest(tensor) for name, tensor in state.items()}

    def run(self, ids: Tensor, mask: Tensor | None = None, **more: Any) -> Any:
        with torch.no_grad():
            return self.model(**self.given(ids, mask), **more)

    def padded(self) -> None:
        for side in ("left", "right"):
            self.note(side, lambda side=side: self.run(*self.batch(side)))

    def lengths(self) -> None:
        for row in self.rows:
            self.note(f"length {len(row)}", lambda row=row: self.run(row[None], output_hidden_states=True))
        before, self.model.config._attn_implementation = self.model.config._attn_implementation, "eager"
        self.note("weights", lambda: self.run(self.rows[1][None], output_attentions=True))
        self.model.config._attn_implementation = before

    def steps(self) -> None:
        """By pieces with a cache, padded on the left, and what `generate` writes."""
        ids, mask = self.batch("left")

        def pieces() -> list[Tensor]:
            found, past, done, more = [], None, 0, {}
            given, name = self.given(ids, mask), "decoder_" if self.shape == "seq2seq" else ""
            alike = [key for key, value in given.items() if key.startswith(name) and value.shape[:2] == ids.shape]
            if name:
                more = {key: value for key, value in given.items() if key not in alike}
                more["encoder_outputs"] = self.model.get_encoder()(**more)
                more = {key: more[key] for key in ("attention_mask", "encoder_outputs")}
            for size in (ids.shape[1] - 4, 1, 1, 2):
                masks = {key: given[key][:, : done + size] for key in alike if key.endswith("attention_mask")}
                own = {key: given[key][:, done : done + size] for key in alike if key not in masks}
                output = self.model(**more, **own, **masks, past_key_values=past, use_cache=True)
                past, done = output.past_key_values, done + size
                found.append(output.logits)
            return found

        wanted = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
        with torch.no_grad():
            self.note("steps", pieces)
            self.note("written", lambda: self.model.generate(input_ids=ids, attention_mask=mask, **wanted))

    def training(self) -> None:
        """A step with dropout; of models without a loss of a random form of what they give."""
        model = self.model.train()

        def step() -> dict[str, Any]:
            output = model(**self.given(*self.batch("left"), labelled=True))
            loss = getattr(output, "loss", None)
            for name, tensor in leaves(output, "") if loss is None else ():
                if tensor.requires_grad and "losses" not in name:
                    loss = (0 if loss is None else loss) + (tensor * torch.randn_like(tensor)).sum()
            loss.backward()
            slopes = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            return {"loss": loss, "losses": getattr(output, "aux_losses", None), "gradient": slopes}

        self.note("training", step)
        self.items |= {f"buffer.{name}": digest(buffer) for name, buffer in model.named_buffers()}


# ------------------------------------------------------------------------------------------------ models


def of_family(name: str, head: str) -> Subject:
    cls = config_class(name)
    shape = SHAPES.get(head, "encoder")
    if head == "ForTimeSeriesPrediction":
        series = {"embedding": {"type": "series", "channels": 2, "time_features": 3}, "is_encoder_decoder": True}
        sizes = {"type": "forecast", "context_length": 13, "prediction_length": 4}
        config = cls(**tiny_fields(cls, "seq2seq", **series, head=sizes))
    else:
        config = cls(**tiny_fields(cls, shape, **({} if cls.modality == "sound" else {"num_labels": 3})))
    torch.manual_seed(0)
    model = family(name)[head](config).eval()
    rows = [tokens(40), tokens(7, seed=1), *([tokens(1, seed=2)] if head in SHAPES else ())]
    subject = Subject(model, shape, head, lambda *given, **more: inputs(model, shape, head, *given, **more), rows)
    make_strong(model)
    return subject


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs(
    model: Any, shape: str, head: str, ids: Tensor, mask: Tensor | None, labelled: bool = False
) -> dict[str, Any]:
    """What a head of a family takes; those that read no ids have always the same."""
    config = model.config
    if head == "ForTimeSeriesPrediction":
        sizes = {"past_values": (13, 2), "past_time_features": (13, 3), "future_time_features": (4, 3)}
        sizes |= {"future_values": (4, 2)} if labelled else {}
        return {name: noise(2, *size, seed=seed) for seed, (name, size) in enumerate(sizes.items())}
    if config.modality == "sound":
        labels = {"labels": torch.tensor([[7, 7, 9], [5, -100, -100]])} if labelled and head != "Model" else {}
        return {"input_features": noise(2, 37, config.num_mel_bins), **labels}
    if config.modality == "image":
        given = {"pixel_values": noise(2, config.num_channels, *config.image_shape)}
        if head == "ForMaskedImageModeling":
            count = config.grid[0] * config.grid[1]
            given["bool_masked_pos"] = (torch.arange(2 * count) % 3 == 0).view(2, count)
        return {**given, **({"labels": torch.tensor([2, 0])} if labelled and "Class" in head else {})}
    given = {} if not labelled else {name: wide(value, ids) for name, value in LABELS.get(head, {}).items()}
    if head == "ForMultipleChoice":
        ids = torch.stack([ids, ids.flip(0)], dim=1)
        mask = None if mask is None else torch.stack([mask, mask.flip(0)], dim=1)
    given |= {"input_ids": ids, "attention_mask": mask}
    if shape == "seq2seq":
        given |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    return {key: value for key, value in given.items() if value is not None}


def wide(value: Tensor | str, ids: Tensor) -> Tensor:
    """Labels of the heads' tests, for longer rows."""
    if isinstance(value, str):
        return ids
    return value.repeat(1, ids.shape[1])[:, : ids.shape[1]] if value.shape[1:] == (7,) else value


def of_mix(mix: draw.Mix) -> Subject:
    torch.manual_seed(0)
    model = family("xformer")[mix.head](XFormerConfig(**mix.fields))
    checks = check.Checks(mix, model)
    labels = {"ForQuestionAnswering": ("start_positions", "end_positions"), "ForSequenceClassification": ("labels",)}

    def given(ids: Tensor, mask: Tensor | None, labelled: bool = False) -> dict[str, Any]:
        found = {"input_ids": ids, "attention_mask": mask, **checks.kinds(ids)}
        if mix.shape == "seq2seq":
            found |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
        if labelled and mix.head != "Model":
            whole = dict.fromkeys(labels.get(mix.head, ()), ids[:, 0] % 2)
            found |= whole or {"labels": ids % 2}
        return {key: value for key, value in found.items() if value is not None}

    return Subject(model, mix.shape, mix.head, given, checks.rows)


# ------------------------------------------------------------------------------------------------ records


def found_of(make: Callable[[], Subject], folder: Path | None = None, saves: bool = False) -> Items:
    """All items of a model. folder: where it is saved, or read from."""
    try:
        subject = make()
    except (ValueError, TypeError) as error:
        return {"refusal": digest(f"{type(error).__name__}: {error}")}
    if folder is not None and saves:
        subject.model.save_pretrained(folder)
    elif folder is not None:
        model, report = type(subject.model).from_pretrained(folder, output_loading_info=True)
        subject.model = aligned(model.eval())
        subject.items |= {f"folder, {kind}": digest(sorted(names)) for kind, names in report.items() if names}
    subject.padded()
    if subject.head in SHAPES:
        subject.lengths()
    if subject.head in ("ForCausalLM", "ForSeq2SeqLM"):
        subject.steps()
    subject.training()
    return subject.items


def quiet() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)


def families() -> list[str]:
    return [f"{name} {head}" for name in model_types() for head in family(name)]


def kept_folder(name: str, folders: Path | None) -> Path | None:
    """Where the first model with a head of a family is kept."""
    model_type, head = name.split()
    first = next((found for found in family(model_type) if found != "Model"), "Model")
    return folders / model_type if folders is not None and head == first else None


def record(path: Path, folders: Path | None, only: str) -> int:
    entries: dict[str, Any] = {}
    for name in families():
        if fnmatchcase(name, only):
            make = functools.partial(of_family, *name.split())
            entries[name] = {"items": found_of(make, kept_folder(name, folders), saves=True)}
    built = 0 if fnmatchcase("mix 0", only) else MIXES
    for seed in itertools.count():
        if built == MIXES:
            break
        mix = draw.draw(seed)
        items = found_of(functools.partial(of_mix, mix))
        entries[f"mix {seed}"] = {"mix": repr((mix.shape, mix.head, mix.fields)), "items": items}
        built += "refusal" not in items
    with gzip.open(path, "wt") as file:
        json.dump(entries, file)
    print(f"recorded {len(entries)} models, {sum(len(entry['items']) for entry in entries.values()):,} items")
    return 0


def compare(path: Path, folders: Path | None, only: str) -> int:
    with gzip.open(path, "rt") as file:
        entries = {name: entry for name, entry in json.load(file).items() if fnmatchcase(name, only)}
    there, lines = set(families()), []
    for name, entry in entries.items():
        if "mix" in entry:
            mix = draw.Mix(*ast.literal_eval(entry["mix"]))
            found = found_of(functools.partial(of_mix, mix))
        elif name in there:
            found = found_of(functools.partial(of_family, *name.split()), kept_folder(name, folders))
        else:
            lines.append(f"{name}: there is no such model any more")
            continue
        lines += [f"{name}: {line}" for line in differences(entry["items"], found)]
    print("\n".join(lines or [f"{len(entries)} models are equal bit for bit"]))
    new = [name for name in there - entries.keys() if fnmatchcase(name, only)]
    if new:
        print(f"{len(new)} models are not in the record")
    return int(bool(lines))


def differences(before: Items, now: Items) -> list[str]:
    """A line for each item that is not as it was."""
    lines = []
    for name in {**before, **now}:
        old, new = before.get(name), now.get(name)
        if old is None or new is None:
            lines.append(f"{name} {'is new' if old is None else 'is gone'}: {(new or old)[1]}")
        elif old[0] != new[0]:
            lines.append(f"{name} was {old[1]}, is {new[1]}")
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--folders", type=Path)
    parser.add_argument("--only", default="*")
    given = parser.parse_args(arguments)
    quiet()
    return {"record": record, "compare": compare}[given.action](given.file, given.folders, given.only)


if __name__ == "__main__":
    sys.exit(main())
