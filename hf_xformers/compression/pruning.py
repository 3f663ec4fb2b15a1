# SPDX-License-Identifier: Apache-2.0
"""A model without some of its heads, layers or weights, from a folder into a folder.

model.safetensors, config.json, tokenizer.json, training_summary.json, ...   the smaller model, as the source's folder
compression.json   what was done, step by step, with the table before and after each
training/          where parts are chosen by training: the run, with its checkpoints
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ..conversion.swap_config import layer_numbers
from ..training.run import Run
from ..training.run_folder import refuse_own_source, result_in
from .choice import Pruning
from .geometry import towers_of
from .head_pruning import HeadLayer, Kept, alike_by_tower, head_layers, prune_heads, whole
from .importance import head_importance, layer_angles, layer_losses, least_important, normalised
from .layers import choose_layers, least_important_layers, prune_layers
from .quantization import refuse_quantized_source
from .report import (
    FILE,
    Measuring,
    Row,
    compare,
    count,
    measure,
    open_model,
    refuse_any_adapter,
    refuse_processes,
    size_on_disk,
    write_table,
)
from .rows import save_rest, saving_result, training_batches
from .weights import apply_masks, magnitude_masks, prunable_weights, two_of_four

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Seq2SeqTrainingArguments, TrainerCallback

TRAINING = "training"
Told = Callable[[str], None]


class Pruner:
    """Checks a request and prunes; what can be refused is refused before anything is written.

    args: of the training, where there is one, and the seed and the batch size of importance. say: takes lines about
    the progress. Raises ValueError and TypeError that name the value and the remedy.
    """

    def __init__(
        self,
        choice: Pruning,
        measuring: Measuring,
        args: Seq2SeqTrainingArguments,
        *,
        callbacks: Sequence[TrainerCallback] = (),
        say: Told = lambda line: None,
    ) -> None:
        choice.check()
        measuring.check()
        refuse_processes(args, trains=choice.trains)
        self.choice, self.measuring, self.args, self.say = choice, measuring, args, say
        measuring.use_cpu = args.use_cpu
        self.callbacks = callbacks
        self.this_run = Run(args, overwrite=choice.overwrite_output_dir)
        self.this_run.refuse_named_checkpoint()
        self.folder = self.this_run.folder
        self.details: dict[str, Any] = {}
        refuse_own_source(self.folder, choice.model, "--model", (TRAINING,))

    def run(self) -> tuple[Row, Row] | None:
        """Prunes, saves and measures: the rows before and after, None without measuring."""
        with self.this_run.lock():
            there = result_in(self.folder) or (TRAINING if (self.folder / TRAINING).exists() else None)
            if there:
                self.this_run.refuse_loss(repr(there))
            model = open_model(self.choice.model)
            refuse_any_adapter(model, repr(self.choice.model))
            refuse_quantized_source(self.choice.model)
            self._look(model)
            before = measure(self.choice.model, self.measuring) if self.choice.measure else None
            if not self.this_run.resumes:
                shutil.rmtree(self.folder / TRAINING, ignore_errors=True)
            if self.choice.trains:
                from .learned import train

                train(self.choice, self.args, self.folder / TRAINING, self.callbacks, self.say)
                model = open_model(self.folder / TRAINING)
            return self._save(self._pruned(model), before)

    def _look(self, model: PreTrainedModel) -> None:
        """Refuses a model that this method has no hold on, before anything is measured."""
        choice = self.choice
        towers_of(model)
        if choice.method == "heads":
            layers = head_layers(model)
            if choice.heads:
                self._explicit(layers)
            _trial_removal(model, layers)
        elif choice.method == "layers":
            kept = self._fixed_layers(model)
            prune_layers(model, kept or {name: [0] for name in towers_of(model)})  # refuses what has no such layers
        else:
            weights = prunable_weights(model, choice.exclude)
            if choice.pattern == "2:4":
                for module in weights.values():
                    two_of_four(module.weight[:1])

    # ------------------------------------------------------------------------------------------------ methods

    def _pruned(self, model: PreTrainedModel) -> PreTrainedModel:
        if self.choice.method == "heads":
            return self._without_heads(model)
        if self.choice.method == "layers":
            return self._without_layers(model)
        return self._without_weights(model)

    def _without_heads(self, model: PreTrainedModel) -> PreTrainedModel:
        layers = head_layers(model)
        if self.choice.trains:
            from .learned import kept_heads

            kept = _as_alike(kept_heads(self.folder / TRAINING), layers, alike_by_tower(model, layers))
        elif self.choice.heads:
            kept = self._explicit(layers)
        else:
            batches = self._batches(model)
            with self._on_device(model):
                found = normalised(head_importance(model, layers, batches))
            alike = alike_by_tower(model, layers)
            for tower, kind in alike.items():
                if kind != "free" and not self.choice.by_layer:
                    what = "the same heads" if kind == "heads" else "as many heads each"
                    self.say(f"the layers of {tower or 'the model'} share tables or weights, so they lose {what}")
            kept = least_important(layers, found, self.choice.share, alike, by_layer=self.choice.by_layer)
            self.details["importance"] = {_place(key): value.tolist() for key, value in found.items()}
        self.details["kept_heads"] = {_place(key): heads for key, heads in kept.items()}
        total = sum(layer.heads * len(layer.modules) for layer in layers)
        left = sum(len(heads) for found in kept.values() for heads in found)
        self.say(f"{total - left} of {total} heads go")
        if left == total:
            raise ValueError(
                "no gate was closed; start anew (--overwrite_output_dir) with a higher --gate_penalty or more steps,"
                " or choose heads by --by gradient"
                if self.choice.chosen_by == "gates"
                else f"--share {self.choice.share} of {total} heads is none here; take a larger share"
            )
        return prune_heads(model, kept)

    def _explicit(self, layers: Sequence[HeadLayer]) -> Kept:
        """What `--heads` leaves; of an encoder-decoder in both towers."""
        kept = whole(layers)
        for text in self.choice.heads:
            number, colon, names = text.partition(":")
            heads = names.split(",")
            if not (colon and number.isdecimal() and all(name.strip().isdecimal() for name in heads)):
                raise ValueError(f"--heads {text!r} is no LAYER:HEAD,HEAD, such as 0:1,3; correct it")
            named = [layer for layer in layers if layer.index == int(number)]
            if not named:
                raise ValueError(
                    f"--heads {text!r} names layer {number}, and layers with heads are"
                    f" {', '.join(str(layer.index) for layer in layers)}"
                )
            for layer in named:
                gone = {int(name) for name in heads}
                beyond = [head for head in gone if head >= layer.heads]
                if beyond:
                    raise ValueError(f"--heads {text!r}: layer {number} has heads 0 to {layer.heads - 1}")
                kept[layer.key] = [[head for head in row if head not in gone] for row in kept[layer.key]]
                if not kept[layer.key][0]:
                    raise ValueError(
                        f"--heads {text!r} takes all {layer.heads} heads of layer {number}; leave it one, or remove"
                        " the whole layer with --method layers"
                    )
        return kept

    def _fixed_layers(self, model: PreTrainedModel) -> dict[str, list[int]] | None:
        """The layers that stay in each tower where no data says so; None where data does."""
        kept = {}
        for name, tower in towers_of(model).items():
            total = tower.config.num_hidden_layers
            if total < 2:
                raise ValueError(f"{self.choice.model!r} has a tower of one layer, which stays; take another --method")
            if self.choice.layers is not None:
                kept[name] = layer_numbers("attention", self.choice.layers, total)
                if len(kept[name]) == total:
                    raise ValueError(f"--layers {self.choice.layers} are all {total} layers; name those that stay")
                continue
            keep = total // 2 if self.choice.keep_layers is None else self.choice.keep_layers
            kind = self.choice.chosen_by
            kept[name] = choose_layers(total, keep, kind if kind in ("top", "alternate") else "top")
        return kept if self.choice.layers is not None or self.choice.chosen_by in ("top", "alternate") else None

    def _without_layers(self, model: PreTrainedModel) -> PreTrainedModel:
        kept = self._fixed_layers(model)
        if kept is None:
            kept, batches = {}, self._batches(model)
            for name, tower in towers_of(model).items():
                total = tower.config.num_hidden_layers
                with self._on_device(model):
                    if self.choice.chosen_by == "loss":
                        base, scores = layer_losses(model, tower, batches)
                        self.details.setdefault("loss", base)
                    else:
                        scores = layer_angles(model, tower, batches)
                self.details.setdefault("importance", {})[name] = scores
                keep = total // 2 if self.choice.keep_layers is None else self.choice.keep_layers
                kept[name] = least_important_layers(scores, keep)
        self.details["kept_layers"] = kept
        for name, layers in kept.items():
            whose = f" of the {name.rpartition('.')[2]}" if len(kept) > 1 else ""
            numbers = ", ".join(map(str, layers))
            self.say(f"layer {numbers}{whose} stays" if len(layers) == 1 else f"layers {numbers}{whose} stay")
        return prune_layers(model, kept)

    def _without_weights(self, model: PreTrainedModel) -> PreTrainedModel:
        weights = prunable_weights(model, self.choice.exclude)
        if not self.choice.trains:
            values = {name: module.weight.detach() for name, module in weights.items()}
            if self.choice.pattern == "2:4":
                masks = {name: two_of_four(value) for name, value in values.items()}
            else:
                masks = magnitude_masks(values, self.choice.sparsity, self.choice.granularity)
            apply_masks(weights, masks)
        zeros = sum(int((module.weight == 0).sum()) for module in weights.values())
        total = sum(module.weight.numel() for module in weights.values())
        self.details |= {"zeros": zeros, "prunable": total}
        self.say(f"{zeros:,} of {total:,} weights in {len(weights)} matrices are zero")
        return model

    def _batches(self, model: PreTrainedModel) -> list[dict[str, Any]]:
        size = self.args.per_device_train_batch_size
        found = training_batches(self.choice.model, model, self.choice.data, self.choice.rows, size, self.args.seed)
        self.say(f"measuring importance on {self.choice.rows} rows at most, in {len(found)} batches")
        return found

    @contextmanager
    def _on_device(self, model: Any) -> Iterator[None]:
        """The model where Trainer would compute, and afterwards where it was."""
        before = model.device
        model.to(self.args.device)
        try:
            yield
        finally:
            model.to(before)

    # ------------------------------------------------------------------------------------------------ the end

    def _save(self, model: PreTrainedModel, before: Row | None) -> tuple[Row, Row] | None:
        """The model with all that belongs to it, each file whole or not at all."""
        with saving_result(self.folder) as staging:
            model.save_pretrained(staging)
            save_rest(self.choice.model, staging, parameters=count(model)[0])
            settings = {**dataclasses.asdict(self.choice), "by": self.choice.told_by, **self.details}
            settings.pop("overwrite_output_dir")
            if before is not None:
                first, second = compare(before, staging, self.measuring)
                rows = (first, dataclasses.replace(second, model=str(self.folder)))
            else:
                source = open_model(self.choice.model)
                rows = (
                    Row(self.choice.model, *count(source), size_on_disk(self.choice.model, source)),
                    Row(str(self.folder), *count(model), size_on_disk(str(staging), model)),
                )
            write_table(*rows, staging, command="prune", settings=settings)
        return rows if before is not None else None


def _place(key: tuple[str, int]) -> str:
    return f"{key[0]}.{key[1]}".lstrip(".")


def _trial_removal(model: PreTrainedModel, layers: Sequence[HeadLayer]) -> None:
    """Removes as little as can be, to refuse at once what cannot lose heads at all."""
    if all(layer.units < 2 for layer in layers):
        raise ValueError(
            "every layer has one head, or one group of heads that share keys, which stays; take `--method layers` or"
            " `--method weights`"
        )
    kept: Kept = {}
    for layer in layers:
        left = layer.heads_of(range(1, layer.units)) if layer.units > 1 else list(range(layer.heads))
        kept[layer.key] = [left for _ in layer.modules]
    with torch.no_grad():
        prune_heads(model, kept)


def _as_alike(kept: Kept, layers: Sequence[HeadLayer], alike: dict[str, str]) -> Kept:
    """What gates have left, with as many heads (or the same ones) in all layers of a tower where these have to be
    alike: as many as the fullest layer has, or all that are open anywhere."""
    found = dict(kept)
    for tower, kind in alike.items():
        mine = [layer for layer in layers if layer.tower == tower]
        if kind == "heads":
            union = sorted({head for layer in mine for heads in kept[layer.key] for head in heads})
            found |= {layer.key: [union for _ in layer.modules] for layer in mine}
        elif kind == "counts":
            most = max(len(kept[layer.key][0]) for layer in mine)
            for layer in mine:
                found[layer.key] = [
                    sorted([*heads, *[h for h in range(layer.heads) if h not in heads][: most - len(heads)]])
                    for heads in kept[layer.key]
                ]
    return found


def prune(choice: Pruning, measuring: Measuring, args: Any, **options: Any) -> tuple[Row, Row] | None:
    """[`Pruner`] in one call; what `hf-xformers prune` does."""
    return Pruner(choice, measuring, args, **options).run()


__all__ = ["FILE", "TRAINING", "Pruner", "Pruning", "prune"]
