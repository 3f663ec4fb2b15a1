# SPDX-License-Identifier: Apache-2.0
"""DARTSformer: parts of the channels that change one after the other, by operations that a search has chosen."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..core.call import Call, Sublayer, SublayerOutput, add_losses, self_attention_cache
from ..core.components import register
from ..core.weight_decay import Undecayed
from ..normalization.residual import PlainSum, Residual
from .base import BlockSpec, SublayerPlan, XFormerLayer
from .cache_parts import CellCacheLayer, part_of_cache
from .dartsformer_operations import CANDIDATES, CROSS, NOTHING, build_frame, build_operation, part_of
from .narrow import check_reshaped
from .window_state import check_window_block


class Choice(Undecayed, nn.Module):
    """G = sum_o softmax(alpha)_o o(h) over some operations o, or the only one; `zero` gives nothing, `identity` h."""

    undecayed = ("alpha",)

    def __init__(self, config, names: tuple[str, ...], parts: int, split: int, layer_idx: int):
        super().__init__()
        self.names, self.split = names, split
        working = [name for name in names if name not in NOTHING]
        self.operations = nn.ModuleDict(
            {name: build_operation(config, name, parts, f"split_{split}_{name}", layer_idx) for name in working}
        )
        self.frames = nn.ModuleDict({name: build_frame(config, parts, layer_idx) for name in working})
        self.alpha = nn.Parameter(torch.empty(len(names))) if len(names) > 1 else None

    def initialize(self, config, init) -> None:
        if self.alpha is not None:
            init.zeros_(self.alpha)

    def prepare(self, context: Call, past_key_values: Cache | None) -> None:
        for operation in self.operations.values():
            cast(Sublayer, operation).prepare(context, past_key_values)

    def shares(self) -> Tensor | None:
        """softmax(alpha), in float32 at least."""
        if self.alpha is None:
            return None
        return torch.softmax(self.alpha.to(torch.promote_types(self.alpha.dtype, torch.float32)), dim=0)

    def forward(
        self, hidden: Tensor, context: Call, losses: dict[str, Tensor], **given: Any
    ) -> tuple[Tensor, Tensor | None]:
        """h [B, T, D / n] -> G, and the attention weights where there are some."""
        total, weights, shares = torch.zeros_like(hidden), None, self.shares()
        for index, name in enumerate(self.names):
            if name == "zero" or (name == CROSS and given["memory"] is None):
                continue
            result = SublayerOutput(hidden)
            if name != "identity":
                result = self._run(name, hidden, context, **given)
                weights = weights if result.weights is None else result.weights
                add_losses(losses, result.aux_losses)
            total = total + (result.output if shares is None else shares[index].to(hidden.dtype) * result.output)
        return total, weights

    def _run(
        self,
        name: str,
        hidden: Tensor,
        context: Call,
        *,
        memory: Tensor | None,
        past_key_values: Cache | None,
        step: int,
        reading_slot: int,
    ) -> SublayerOutput:
        operation, frame = self.operations[name], cast(Residual, self.frames[name])
        entered = frame.enter(hidden, **frame.inputs(context))
        if name == "ffn":
            result = operation(entered, context)
        elif name == CROSS:
            result = operation(entered, context, memory=memory, past_key_values=past_key_values, step=reading_slot)
        else:
            own = part_of_cache(past_key_values, f"split_{self.split}") if name == "attention" else past_key_values
            result = operation(entered, context, past_key_values=own, step=step)
        left = frame.leave(hidden, result.output, result.gate, **frame.inputs(context))
        return result._replace(output=left, gate=None)


class DartsformerCell(Sublayer):
    """[G_1 ; ... ; G_n] with Y_k = X_k + G_k(pool(X_(i > k), Y_(i < k))) for the n parts X_k of the channels, in order
    (Zhao, Dong, Shen, Zhang, Wei and Chen 2021, arXiv 2105.14669, section 3).

    pool: elementwise maximum or mean. [`DartsformerCell.invert`] gives X for Y, so that a search need not keep what
    layers have read. Cost and state: those of the operations, on D / n channels.
    """

    def __init__(self, config, spec: DartsformerBlockSpec, layer_idx: int, cross: bool):
        super().__init__()
        choices = spec.choices(layer_idx, cross)
        self.pooling, self.reads = spec.pooling, sum(CROSS in names for names in choices)
        self.splits = nn.ModuleList(
            Choice(config, names, len(choices), split, layer_idx) for split, names in enumerate(choices)
        )
        self.slots = [sum(CROSS in names for names in choices[:split]) for split in range(len(choices))]

    def prepare(self, context: Call, past_key_values: Cache | None) -> None:
        for split in self.splits:
            cast(Choice, split).prepare(context, past_key_values)

    def pooled(self, parts: list[Tensor], split: int) -> Tensor:
        """What G of one part reads: all other parts, as they are then."""
        others = torch.stack([part for index, part in enumerate(parts) if index != split])
        return others.amax(0) if self.pooling == "max" else others.mean(0)

    def forward(
        self,
        hidden_states: Tensor,
        context: Call,
        *,
        memory: Tensor | None = None,
        past_key_values: Cache | None = None,
        step: int = 0,
    ) -> SublayerOutput:
        parts, changes = list(hidden_states.chunk(len(self.splits), dim=-1)), []
        losses: dict[str, Tensor] = {}
        weights: Tensor | None = None
        for index, split in enumerate(self.splits):
            change, seen = split(
                self.pooled(parts, index),
                context,
                losses,
                memory=memory,
                past_key_values=past_key_values,
                step=step,
                reading_slot=step * self.reads + self.slots[index],
            )
            parts[index] = parts[index] + change
            changes.append(change)
            weights = weights if seen is None else seen
        cache = self_attention_cache(past_key_values)
        if cache is not None:
            cast(CellCacheLayer, cache.layers[step]).advance(hidden_states.shape[1])
        return SublayerOutput(torch.cat(changes, dim=-1), weights, aux_losses=losses or None)

    def invert(self, output: Tensor, context: Call, memory: Tensor | None = None) -> Tensor:
        """Y [B, T, D] -> the X that the layer has made it of, without dropout."""
        parts = list(output.chunk(len(self.splits), dim=-1))
        for index in reversed(range(len(self.splits))):
            given = {"memory": memory, "past_key_values": None, "step": 0, "reading_slot": 0}
            change, _ = self.splits[index](self.pooled(parts, index), context, {}, **given)
            parts[index] = parts[index] - change
        return torch.cat(parts, dim=-1)


class DartsformerLayer(XFormerLayer):
    """y = x + cell(x)."""

    def __init__(self, config, block: DartsformerBlockSpec, *, layer_idx: int, cross: bool = False):
        super().__init__(config, block, layer_idx=layer_idx, cross=cross)
        frame = PlainSum(config)
        frame.dropout = nn.Dropout(0.0)  # operations have theirs
        self.add_module(f"{self.plan[0].name}_residual", frame)

    def memory_of(self, entry: SublayerPlan, memory: Tensor | None) -> Tensor | None:
        return memory

    @staticmethod
    def _build(config, entry: SublayerPlan, layer_idx: int):
        return DartsformerCell(config, config.block, layer_idx, entry.name == "reading_cell")


@register("block", "dartsformer")
class DartsformerBlockSpec(BlockSpec):
    """A layer whose channels are cut in parts; each part in turn is changed by what an operation makes of the others.

    Args:
        operations: for each layer of a period, the operation of each part: conv_3, conv_5, conv_7, conv_11,
            dynamic_conv_3, dynamic_conv_7, dynamic_conv_11, dynamic_conv_15, attention, glu, ffn, zero, identity.
            Deeper layers begin the period anew. A decoder that reads a memory has one more part, which cross-attention
            changes.
        search: whether each part has all `candidates`, weighed by the softmax of learned numbers, in place of its
            operation (`hf-xformers search`).
        candidates: what the search chooses among (`None`: all).
        pooling: how the other parts become the input of one.
    """

    passes_states: ClassVar[bool] = False
    mixes: ClassVar[str] = "its convolutions read a token's neighbors"

    summary = "parts of the channels change in turn, by operations that a search has chosen"

    operations: tuple[Any, ...] = (("attention", "ffn"),)
    search: bool = False
    candidates: tuple[str, ...] | None = None
    pooling: Literal["max", "mean"] = "max"

    def choices(self, layer_idx: int, cross: bool) -> list[tuple[str, ...]]:
        """The operations of each part of a layer."""
        chosen = self.operations[layer_idx % len(self.operations)]
        among = CANDIDATES if self.candidates is None else self.candidates
        parts = [tuple(among) if self.search else (name,) for name in chosen]
        return [*parts, (CROSS,)] if cross else parts

    def check_fields(self) -> None:
        periods = [(entry if isinstance(entry, tuple) else (entry,)) for entry in self.operations]
        if not periods or len({len(entry) for entry in periods}) != 1 or len(periods[0]) < 2:
            raise ValueError(
                "block 'dartsformer' needs an operation for each of two or more parts under `operations`, the same"
                f" number for each layer of the period, got {self.operations}."
            )
        named = [name for entry in (*periods, self.candidates or ()) for name in entry]
        unknown = [name for name in named if name not in CANDIDATES]
        if unknown:
            raise ValueError(f"block 'dartsformer': unknown operation {unknown[0]!r}; known: {', '.join(CANDIDATES)}.")
        if self.candidates is not None and len(set(self.candidates)) < 2:
            raise ValueError(
                f"block 'dartsformer' needs two different `candidates` or more to search among, got {self.candidates}."
            )

    def parts(self, config) -> int:
        return len(self.operations[0]) + (config.is_decoder and config.is_encoder_decoder)

    def check(self, config) -> None:
        parts = self.parts(config)
        if config.hidden_size % parts:
            raise ValueError(
                f"block 'dartsformer' cuts `hidden_size` {config.hidden_size} in {parts} parts here, which do not"
                " divide it; change one of them."
            )
        norm = config.normalization
        if norm.over_tokens or not norm.any_width:
            raise ValueError(
                f"block 'dartsformer' normalizes parts of the channels, which normalization {norm.type!r} cannot; use"
                " 'layer_norm' or 'rms_norm'."
            )
        if "parts" not in config.cross_attention.head_options and config.is_decoder and config.is_encoder_decoder:
            raise ValueError(
                "block 'dartsformer' reads a memory that is wider than its parts, which cross_attention"
                f" {config.cross_attention.type!r} is not made for; use 'dense'."
            )
        check_window_block("dartsformer", config, "windows of inputs and keys of several attentions")
        check_reshaped("dartsformer", config, part_of(config, parts))

    def plan(self, config, layer_idx: int, cross: bool) -> list[SublayerPlan]:
        # Of type attention: it is given the cache.
        return [SublayerPlan("reading_cell" if cross else "cell", "attention")]

    def cache_layer(self, config) -> CellCacheLayer:
        return CellCacheLayer()

    def build(self, config, **where) -> DartsformerLayer:
        return DartsformerLayer(config, self, **where)
