# SPDX-License-Identifier: Apache-2.0
"""Differentiable architecture search: which operation each part of a DARTSformer's layer has (Zhao et al. 2021)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

import torch
from torch import Tensor, nn

from ..blocks.dartsformer import Choice
from ..configuration_xformer import XFormerConfig
from ..core.saved_files import saving_into, write_json
from .building import build_model
from .preparation import Further, ModelChoice, Preparation
from .pretraining import train
from .text import TextData
from .trainer import XFormerTrainer

if TYPE_CHECKING:
    from transformers import TrainerCallback, TrainingArguments

DERIVED = "derived"  # folder of the model that the search ends in
FOUND_FILE = "architecture.json"
_OPTIMIZER_FILE = "architecture_optimizer.pt"


@dataclass
class Searching:
    """How the weights of operations are learned."""

    _argument_group_name = "search"

    architecture_learning_rate: float = field(
        default=3e-3, metadata={"help": "Learning rate of the weights of operations (Adam)."}
    )
    architecture_weight_decay: float = field(default=1e-3, metadata={"help": "L2 penalty on these weights."})
    derived_layers: int | None = field(
        default=None,
        metadata={"help": "Layers of the derived model, which repeat those searched. Default: as many."},
    )


class SearchTrainer(XFormerTrainer):
    """Before each step of the model's parameters on training text, one of the weights of operations on held-out text
    (first-order DARTS: Liu, Simonyan and Yang 2019, arXiv 1806.09055, section 2.3).

    Which held-out rows a step reads follows from its number, and the optimizer's state is saved with checkpoints: a
    search that is resumed continues as if it had not been stopped.
    """

    def __init__(self, *args: Any, searching: Searching, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.args.world_size > 1:
            raise ValueError(f"a search runs in one process, got {self.args.world_size}; start it without a launcher")
        if not self.eval_dataset:
            raise ValueError(
                "a search learns the weights of operations on held-out text; raise --validation_fraction above 0"
            )
        self.weights = [choice.alpha for choice in choices_of(cast(nn.Module, self.model)) if choice.alpha is not None]
        if not self.weights:
            raise ValueError("a search needs a model with `--block.search true`")
        for weight in self.weights:
            weight.requires_grad_(False)  # it is not a parameter of the training text
        self.architecture_optimizer = torch.optim.Adam(
            self.weights,
            lr=searching.architecture_learning_rate,
            betas=(0.5, 0.999),
            weight_decay=searching.architecture_weight_decay,
        )
        self._moved_at = -1

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        if self.state.global_step != self._moved_at:  # once, however many batches a step has
            self._moved_at = self.state.global_step
            self._move_weights(model)
        return super().training_step(model, inputs, *args, **kwargs)

    def _move_weights(self, model: nn.Module) -> None:
        rows: Any = self.eval_dataset
        draw = torch.Generator().manual_seed(self.args.seed + 7919 * (self.state.global_step + 1))
        chosen = torch.randint(len(rows), (self.args.train_batch_size,), generator=draw).tolist()
        batch = self._prepare_inputs(self.data_collator([rows[index] for index in chosen]))
        model.train()
        for weight in self.weights:
            weight.requires_grad_(True)
        try:
            with self.compute_loss_context_manager():
                loss = model(**batch).loss
            slopes = torch.autograd.grad(loss, self.weights, allow_unused=True)
        finally:
            for weight in self.weights:
                weight.requires_grad_(False)
        for weight, slope in zip(self.weights, slopes, strict=True):
            weight.grad = slope
        self.architecture_optimizer.step()
        self.architecture_optimizer.zero_grad(set_to_none=True)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            torch.save(self.architecture_optimizer.state_dict(), Path(output_dir) / _OPTIMIZER_FILE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            if not (Path(checkpoint) / _OPTIMIZER_FILE).is_file():
                raise ValueError(
                    f"the checkpoint {str(checkpoint)!r} has no {_OPTIMIZER_FILE}, so that the search cannot continue"
                    " from it; resume from another checkpoint, or begin anew with --overwrite_output_dir"
                )
            state = torch.load(Path(checkpoint) / _OPTIMIZER_FILE, weights_only=True, map_location="cpu")
            self.architecture_optimizer.load_state_dict(state)


def choices_of(model: nn.Module) -> list[Choice]:
    """The choices in a model, layer by layer and part by part."""
    return [module for module in model.modules() if isinstance(module, Choice)]


def found_operations(layers: Sequence[nn.Module]) -> list[list[dict[str, Any]]]:
    """For each layer and each part of it that has candidates: the share of each, and the heaviest."""
    found = []
    for layer in layers:
        parts = []
        for choice in choices_of(layer):
            shares = choice.shares()
            if shares is not None:
                heaviest = choice.names[int(shares.argmax())]
                parts.append({"operation": heaviest, "shares": dict(zip(choice.names, shares.tolist(), strict=True))})
        found.append(parts)
    return found


def derived_config(model: Any, layers: int | None = None) -> XFormerConfig:
    """The config of the cell with the heaviest operation of each part, in `layers` layers (None: as many as were
    searched), which repeat those searched."""
    config: XFormerConfig = model.config
    given = config.to_dict()
    for name in ("model_type", "transformers_version", "architectures", "dtype"):
        given.pop(name, None)

    def block(tower: Any, view: XFormerConfig) -> dict[str, Any]:
        chosen = [[part["operation"] for part in parts] for parts in found_operations(tower.layers)]
        return {**view.block.to_dict(), "search": False, "candidates": None, "operations": chosen}

    base = model.base_model
    given["block"] = block(base.trunk, config.tower("trunk"))
    if config.is_encoder_decoder:
        view = config.tower("decoder")
        given["decoder"] = {**(given.get("decoder") or {}), "block": block(base.decoder, view)}
    if layers is not None:
        given["num_hidden_layers"] = layers
        if config.num_decoder_layers is not None:
            given["num_decoder_layers"] = layers
    return type(config)(**given)


def search(
    searching: Searching,
    choice: ModelChoice,
    source: TextData,
    args: TrainingArguments,
    *,
    callbacks: Sequence[TrainerCallback] = (),
    **further: Unpack[Further],
) -> dict[str, Any]:
    """Trains a model with all operations, and writes what it has found.

    In `args.output_dir`: the model of the search with its checkpoints, `architecture.json` (the share of each
    operation), and under `derived` a model of the heaviest operations with new weights and the tokenizer, to be
    trained from there (`pretrain --init_from`). Returns the content of that file and the summary of the training.

    Raises:
        ValueError: settings that cannot work.
    """
    if searching.architecture_learning_rate <= 0:
        raise ValueError(
            f"--architecture_learning_rate {searching.architecture_learning_rate} learns nothing; give a number above"
            " 0"
        )
    if not 0 <= searching.architecture_weight_decay < math.inf:
        raise ValueError(
            f"--architecture_weight_decay {searching.architecture_weight_decay} must be a number of at least 0"
        )
    if searching.derived_layers is not None and searching.derived_layers < 1:
        raise ValueError(f"--derived_layers must be 1 or more, got {searching.derived_layers}")
    if source.streaming:
        raise ValueError("a search draws held-out rows, of which a stream has no number; leave --streaming out")
    given = dict(further.get("components") or {})
    block = given.get("block", {})
    block = {"type": block} if isinstance(block, str) else dict(block)
    if block.setdefault("type", "dartsformer") != "dartsformer":
        raise ValueError(f"a search is for block 'dartsformer', got --block {block['type']}; leave it out")
    choice = dataclasses.replace(choice, variant=choice.variant or "dartsformer")
    further["components"] = {**given, "block": {**block, "search": True}}
    preparation = Preparation(choice, source, args, **further)
    made: list[SearchTrainer] = []

    def make_trainer(**settings: Any) -> SearchTrainer:
        made.append(SearchTrainer(searching=searching, **settings))
        return made[0]

    with preparation.this_run.lock():
        prepared = preparation.run()
        summary = train(prepared, args, callbacks, make_trainer)
        model: Any = made[0].model
        config = derived_config(model, searching.derived_layers)
        found: dict[str, Any] = {"layers": found_operations(model.base_model.trunk.layers)}
        if config.is_encoder_decoder:
            found["decoder_layers"] = found_operations(model.base_model.decoder.layers)
        write_json(preparation.folder / FOUND_FILE, found)
        with saving_into(preparation.folder / DERIVED) as staging:
            build_model(config, prepared.objective).save_pretrained(staging)
            prepared.tokenizer.save_pretrained(staging)
    return {"found": found, "summary": summary, "config": config}
