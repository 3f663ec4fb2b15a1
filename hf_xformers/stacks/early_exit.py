# SPDX-License-Identifier: Apache-2.0
"""Early exit: a row of the batch leaves the depth loop as soon as a classifier inside it is sure enough."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ..blocks.base import XFormerLayer
from ..core.call import Call, can_inspect
from ..core.unpadding import Unpadding
from ..position.base import Position
from .base import StackSpec
from .driver import Pass, StackOutput
from .plain import PlainStack


class ExitWatch(Protocol):
    """Looks at a layer's output while the loop runs; the head with the internal classifiers brings it."""

    def __call__(
        self, layer: int, hidden_states: Tensor, padding_mask: Tensor | None, rows: Tensor | None
    ) -> Tensor | None:
        """layer: 1, 2, ..., L - 1 (the last one is nobody's choice); hidden_states [R, T, D] of `rows` [R] (indices;
        None: the whole batch) -> [R] boolean, who leaves; None: nobody ever does."""
        ...


class Course:
    """One call's way through the depth, as the driver asks for it."""

    gathers = True  # whether rows that have left may be taken out of the batch

    def __init__(self, watch: Any):
        self.watch = watch

    def before(self, context: Call, gathers: bool) -> None:
        """Before each layer."""

    def after(self, before: Tensor, hidden_states: Tensor) -> Tensor:
        """The states [R, T, D] after a layer, by those that went into it and those that it gave."""
        return hidden_states

    def look(
        self, layer: int, hidden_states: Tensor, context: Call, rows: Tensor | None, gathers: bool
    ) -> Tensor | None:
        """After each layer but the last: which of the rows leave, [R] boolean; None: none of them ever."""
        raise NotImplementedError

    def narrow(self, stay: Tensor) -> None:
        """Of the running rows those with the indices `stay` continue."""

    def end(self, hidden_states: Tensor) -> Tensor:
        """The states of the whole batch, where no row was taken out."""
        return hidden_states


class RowCourse(Course):
    """Whole rows leave, as an [`ExitWatch`] says: a row's state is final then."""

    def __init__(self, watch: ExitWatch):
        super().__init__(watch)
        self.final: Tensor | None = None
        self.left: Tensor | None = None

    def look(
        self, layer: int, hidden_states: Tensor, context: Call, rows: Tensor | None, gathers: bool
    ) -> Tensor | None:
        leaves = self.watch(layer, hidden_states, context.query_padding_mask, rows)
        if leaves is not None and not gathers:
            self.final = self.end(hidden_states)
            self.left = leaves if self.left is None else self.left | leaves
        return leaves

    def end(self, hidden_states: Tensor) -> Tensor:
        if self.final is None or self.left is None:
            return hidden_states
        return torch.where(self.left[:, None, None], self.final, hidden_states)


class EarlyExitStack(PlainStack):
    """Every layer once, in order, until all rows have left.

    After each layer but the last, the model input `exit_watch` says which rows leave; a row's state is then final. The
    rows that stay are gathered, so that later layers run on them alone. Where values must not steer the program (a
    graph is being recorded), or each layer's output is wanted for the whole batch, all layers run on all rows instead
    and finished states are kept; no row reads another, so both ways give the same. Without a watch it is the plain
    stack.

    What leaves, and what becomes of it, is said by the [`Course`] of a call.
    """

    def __init__(self, steps: int):
        super().__init__()
        self.steps = steps

    def course(self, watch: Any, context: Call) -> Course:
        """How a call continues that `watch` looks at."""
        return RowCourse(watch)

    def run_layer(self, course: Course, layer: XFormerLayer, run: Pass, step: int) -> None:
        """States are rows between layers, of which some are read and leave; inside they may be those of real tokens
        alone."""
        run.hidden_states = run.context.packed(run.hidden_states)
        run.layer(step, layer)
        run.hidden_states = run.context.padded(run.hidden_states)

    def forward(self, run: Pass) -> StackOutput:
        hidden_states, context = run.hidden_states, run.context
        watch = context.inputs.get("exit_watch")
        depth = [run.layers[step % len(run.layers)] for step in range(self.steps)]
        if watch is None:
            run.layers = depth
            return super().forward(run)
        course = self.course(watch, context)
        recorded = context.output_hidden_states or context.output_attentions
        gathers = course.gathers and not recorded and can_inspect()
        whole, rows = context, None
        final: Tensor | None = None
        run.begin(self.steps)
        run.hidden_states, run.positions = hidden_states, context.positions
        for step, layer in enumerate(depth):
            before = run.hidden_states
            course.before(run.context, gathers)
            run.embed(step)
            self.run_layer(course, layer, run, step)
            run.hidden_states = hidden_states = course.after(before, run.hidden_states)
            if step == self.steps - 1:
                break
            leaves = course.look(step + 1, hidden_states, run.context, rows, gathers)
            if leaves is None or not gathers:
                continue
            stay = (~leaves).nonzero().squeeze(-1)
            if stay.shape[0] == leaves.shape[0]:
                continue
            final, rows = settle(final, hidden_states, rows, leaves)
            if stay.shape[0] == 0:
                return StackOutput(final, whole, run.losses)
            rows = rows[stay]
            course.narrow(stay)
            run.narrow(stay, take_rows(run.context, stay, run.position, hidden_states[stay]))
        if rows is not None and final is not None:
            return StackOutput(final.index_copy(0, rows, run.hidden_states), whole, run.losses)
        return StackOutput(course.end(run.hidden_states), whole, run.losses)


def settle(final: Tensor | None, hidden_states: Tensor, rows: Tensor | None, leaves: Tensor) -> tuple[Tensor, Tensor]:
    """The final states [B, T, D] with those of the rows that leave, and the indices [R] of the running rows."""
    if final is None or rows is None:
        return hidden_states, torch.arange(hidden_states.shape[0], device=hidden_states.device)
    return final.index_copy(0, rows[leaves], hidden_states[leaves]), rows


def take(tensor: Tensor, rows: Tensor) -> Tensor:
    """Rows of a tensor that leads with the batch; one that leads with 1 serves all rows."""
    return tensor if tensor.shape[0] == 1 else tensor[rows]


def take_rows(context: Call, rows: Tensor, position: Position, like: Tensor) -> Call:
    """The call's state bundle for some of its rows [R]; layers have to prepare anew."""
    kept = copy.copy(context)
    for name in ("padding_mask", "positions", "explicit_mask", "segment_ids", "inputs_embeds", "position_ids"):
        value = getattr(context, name)
        setattr(kept, name, None if value is None else take(value, rows))
    kept.inputs = {
        name: take(value, rows) if isinstance(value, Tensor) and value.ndim else value
        for name, value in context.inputs.items()
    }
    if kept.unpadding is not None and kept.padding_mask is not None:
        kept.unpadding = Unpadding(kept.padding_mask)
    kept.made, kept.states = {}, {}
    position.share(kept, like)
    return kept


@dataclass(kw_only=True)
class EarlyExitSpec(StackSpec):
    """Base of early-exit specs. The classifiers inside the stack belong to the head for sequence classification, which
    asks for them by [`StackSpec.build_exits`]; other heads run all layers.

    share_layers: one layer's weights at every depth, as in ALBERT.
    """

    inputs: ClassVar[tuple[str, ...]] = ("exit_watch",)
    exits = "texts"
    supports = frozenset({"packed_rows", "unpadding"})

    share_layers: bool = False

    def settings(self, config) -> dict[str, tuple]:
        """A field and the values of it at which a trained model is worth measuring, from all layers on to few."""
        return {}

    def num_layers(self, config) -> int:
        return min(1, config.num_hidden_layers) if self.share_layers else config.num_hidden_layers

    def check(self, config) -> None:
        if config.classifier_transform != "none" or config.classifier_pooling in ("late_mean", "attention"):
            raise ValueError(
                f"The classifiers inside stack {self.type!r} are linear, got"
                f" `classifier_transform={config.classifier_transform!r}` and"
                f" `classifier_pooling={config.classifier_pooling!r}`; leave out the transform and take 'mean'."
            )

    def build(self, config, **where) -> EarlyExitStack:
        if config.is_decoder or config.is_encoder_decoder:
            raise ValueError(
                f"stack {self.type!r} lets whole texts leave an encoder early, which is not defined for a decoder; use"
                " it with `is_decoder=False` and `is_encoder_decoder=False`, or take the stack 'plain'."
            )
        if self.share_layers and config.is_heterogeneous:
            raise ValueError(
                f"{self.type} with `share_layers` runs one layer at every depth, so single layers cannot differ; leave"
                " out `per_layer_config`."
            )
        return EarlyExitStack(config.num_hidden_layers)
