"""Early exit: a row of the batch leaves the depth loop as soon as a classifier inside it is sure enough."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..blocks.base import XFormerLayer, unpack_layer
from ..core.context import LayerContext, add_losses
from ..position.base import Position
from .base import StackOutput, StackSpec
from .plain import PlainStack


class ExitWatch(Protocol):
    """Looks at a layer's output while the loop runs; the head with the internal classifiers brings it."""

    def __call__(
        self, layer: int, hidden_states: Tensor, padding_mask: Tensor | None, rows: Tensor | None
    ) -> Tensor | None:
        """layer: 1, 2, ..., L - 1 (the last one is nobody's choice); hidden_states [R, T, D] of `rows` [R] (indices;
        None: the whole batch) -> [R] boolean, who leaves; None: nobody ever does."""
        ...


class EarlyExitStack(PlainStack):
    """Every layer once, in order, until all rows have left.

    After each layer but the last, the model input `exit_watch` says which rows leave; a row's state is then final. The
    rows that stay are gathered, so that later layers run on them alone. Where values must not steer the program (a
    graph is being recorded), or each layer's output is wanted for the whole batch, all layers run on all rows instead
    and finished states are kept; no row reads another, so both ways give the same. Without a watch it is the plain
    stack.
    """

    def __init__(self, steps: int):
        super().__init__()
        self.steps = steps

    def forward(
        self,
        layers: Sequence[XFormerLayer],
        hidden_states: Tensor,
        context: LayerContext,
        *,
        position: Position,
        memory: Tensor | None = None,
        past_key_values: Cache | None = None,
        **more,
    ) -> StackOutput:
        watch: ExitWatch | None = context.inputs.get("exit_watch")
        depth = [layers[step % len(layers)] for step in range(self.steps)]
        if watch is None:
            return super().forward(
                depth,
                hidden_states,
                context,
                position=position,
                memory=memory,
                past_key_values=past_key_values,
                **more,
            )
        gathers = not (
            context.output_hidden_states
            or context.output_attentions
            or torch.compiler.is_compiling()
            or torch.jit.is_tracing()
        )
        whole, rows = context, None
        final: Tensor | None = None
        left: Tensor | None = None
        aux_losses: dict[str, Tensor] = {}
        for layer in layers:
            layer.prepare(context, None)
        streams = context.streams
        for step, layer in enumerate(depth):
            hidden_states = position.embed_layer(hidden_states, context.positions, step)
            output = layer(
                hidden_states, None, *streams.values(), context=context, step=step, stream_names=tuple(streams)
            )
            hidden_states, streams, losses = unpack_layer(output)
            add_losses(aux_losses, losses)
            if step == self.steps - 1:
                break
            leaves = watch(step + 1, hidden_states, context.query_padding_mask, rows)
            if leaves is None:
                continue
            if not gathers:
                final = (
                    hidden_states
                    if final is None or left is None
                    else torch.where(left[:, None, None], final, hidden_states)
                )
                left = leaves if left is None else left | leaves
                continue
            stay = (~leaves).nonzero().squeeze(-1)
            if stay.shape[0] == leaves.shape[0]:
                continue
            final, rows = settle(final, hidden_states, rows, leaves)
            if stay.shape[0] == 0:
                return StackOutput(final, whole, aux_losses)
            hidden_states, rows = hidden_states[stay], rows[stay]
            prepared = context.streams
            context = take_rows(context, stay, position, hidden_states)
            for other in layers:
                other.prepare(context, None)
            # What no layer has touched is made anew with the rest; what layers hand on is cut.
            handed = {name: take(x, stay) for name, x in streams.items() if x is not prepared.get(name)}
            streams = {**context.streams, **handed}
        if left is not None and final is not None:
            hidden_states = torch.where(left[:, None, None], final, hidden_states)
        elif rows is not None and final is not None:
            hidden_states = final.index_copy(0, rows, hidden_states)
        return StackOutput(hidden_states, whole, aux_losses)


def settle(final: Tensor | None, hidden_states: Tensor, rows: Tensor | None, leaves: Tensor) -> tuple[Tensor, Tensor]:
    """The final states [B, T, D] with those of the rows that leave, and the indices [R] of the running rows."""
    if final is None or rows is None:
        return hidden_states, torch.arange(hidden_states.shape[0], device=hidden_states.device)
    return final.index_copy(0, rows[leaves], hidden_states[leaves]), rows


def take(tensor: Tensor, rows: Tensor) -> Tensor:
    """Rows of a tensor that leads with the batch; one that leads with 1 serves all rows."""
    return tensor if tensor.shape[0] == 1 else tensor[rows]


def take_rows(context: LayerContext, rows: Tensor, position: Position, like: Tensor) -> LayerContext:
    """The call's state bundle for some of its rows [R]; layers have to prepare anew."""
    kept = copy.copy(context)
    for name in ("padding_mask", "positions", "explicit_mask", "segment_ids", "inputs_embeds", "position_ids"):
        value = getattr(context, name)
        setattr(kept, name, None if value is None else take(value, rows))
    kept.inputs = {
        name: take(value, rows) if isinstance(value, Tensor) and value.ndim else value
        for name, value in context.inputs.items()
    }
    kept.shared, kept.streams = {}, {}
    if "score_bias" in context.shared:  # a function of positions in the table, not of rows
        kept.shared["score_bias"] = context.shared["score_bias"]
    position.share_rotations(kept, like)
    return kept


@dataclass(kw_only=True)
class EarlyExitSpec(StackSpec):
    """Base of early-exit specs. The classifiers inside the stack belong to the head for sequence classification, which
    asks for them by [`StackSpec.build_exits`]; other heads run all layers.

    share_layers: one layer's weights at every depth, as in ALBERT.
    """

    inputs: ClassVar[tuple[str, ...]] = ("exit_watch",)
    has_exits = True
    packed = True

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
