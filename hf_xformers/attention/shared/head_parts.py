# SPDX-License-Identifier: Apache-2.0
"""What any attention that hands out its heads may have besides them: another way to join them, and losses on them.

Both are specs of their own, registered under a name in a file of this package, and stand in fields of an attention:
`attention={"type": "dense", "losses": ["disagreement_regularization"], "aggregation": {"type": "capsule_heads"}}`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, dataclass_transform

import torch
from torch import Tensor, nn

from ...core.call import Call
from ...core.distributed import sum_over_processes
from ...core.specs import Registry, TypedSpec, build_in, register_in
from .query_blocks import over_query_blocks, rows_at_once


class GivesWeights(Protocol):
    """What losses ask of the attention that has them."""

    cross: bool

    def weights_of_block(self, query: Tensor, key: Tensor, context: Call, rows: slice, heads: slice) -> Tensor:
        """The weights of some queries and heads alone ([`Attention.weights_of_block`](base.py))."""


class AttentionAbilities(Protocol):
    """What aggregations and losses ask of the spec of an attention."""

    type: ClassVar[str]
    head_options: ClassVar[frozenset[str]]


@dataclass(frozen=True)
class Heads:
    """What the heads of one layer did in a call, as losses read it.

    query [B, H, T, d], key and value [B, K, S, d] as they were compared and read; output [B, T, H, d]: what each head
    has read; weights [B, H, T, S] before dropout where the call has made them, else None.
    """

    attention: GivesWeights
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    weights: Tensor | None
    context: Call

    @property
    def real_queries(self) -> Tensor:
        """[B, T] boolean, True = a real token."""
        batch, length = self.output.shape[:2]
        mask = self.context.query_padding_mask
        return self.output.new_ones(batch, length, dtype=torch.bool) if mask is None else mask

    @property
    def real_keys(self) -> Tensor:
        """[B, S] boolean, True = a real token."""
        mask = self.context.memory_padding_mask if self.attention.cross else self.context.padding_mask
        batch, length = self.value.shape[0], self.value.shape[2]
        return self.value.new_ones(batch, length, dtype=torch.bool) if mask is None else mask

    def sums_of_weights(self, reduce: Callable[[Tensor, slice], Tensor], heads: slice) -> Tensor:
        """`reduce(weights [B, h, t, s], rows)`, [B, t, ...], of the weights of `heads` for the queries `rows` on the
        first s keys, which hold all that these queries see; joined to [B, T, ...]. No more weights than those of a
        block of queries exist at once, in training neither, unless the call has made all of them anyway."""
        query, length = self.query[:, heads], self.query.shape[2]
        if self.weights is not None:
            return reduce(self.weights[:, heads], slice(0, length))

        def block(begin: int, end: int, part: Tensor) -> Tensor:
            rows = slice(begin, end)
            return reduce(self.attention.weights_of_block(part, self.key, self.context, rows, heads), rows)

        at_once = rows_at_once(query.shape[0] * query.shape[1] * self.key.shape[2])
        return over_query_blocks(block, length, at_once, (query, 2))


def mean_over_tokens(values: Tensor, real: Tensor) -> Tensor:
    """values [B, T], real [B, T] boolean -> their mean over the real tokens of all processes; 0 where there is
    none."""
    both = torch.stack((torch.where(real, values, 0.0).sum(), real.sum().to(values.dtype)))
    total, count = sum_over_processes(both)
    return total / count.clamp(min=1)


class HeadLossModule(nn.Module):
    """A loss on the heads of one layer."""

    def prepare(self, context: Call, learns: bool) -> None:
        """Called once per training call, before the first layer runs: a loss that counts calls counts here those from
        which the attention `learns`."""

    def forward(self, heads: Heads) -> dict[str, Tensor]:
        """Scalars by name, with their weight."""
        raise NotImplementedError


class _HeadPart(TypedSpec):
    """What aggregations and losses have in common."""

    field: ClassVar[str] = ""

    def check(self, attention: AttentionAbilities, slot: str, config) -> None:
        """Refuses an attention, or a config, that it does not fit. Raises `ValueError`."""
        if "parts" not in attention.head_options:
            raise ValueError(
                f"{slot} {attention.type!r} does not hand out what its heads read one by one, as {self.field}"
                f" {self.type!r} needs; leave {self.field!r} out, or use a mechanism such as 'dense' or"
                " 'sliding_window'."
            )

    def build(self, config, *, layer_idx: int) -> Any:
        raise NotImplementedError


class HeadAggregation(_HeadPart):
    """Base of the ways to join heads other than side by side. final_linear: whether the attention's output projection
    follows.

    `build(config, layer_idx=)` gives a module [..., H * d] -> [..., H * d], or without `final_linear` -> [..., D]; or
    None for a layer that joins its heads in the usual way."""

    field: ClassVar[str] = "aggregation"
    final_linear: bool = True


class HeadLoss(_HeadPart):
    """Base of losses on heads; `build(config, layer_idx=)` gives a [`HeadLossModule`].

    A loss that reads weights says so ([`HeadLoss.reads_weights`]); attention that does not form those of all pairs is
    then refused.
    """

    field: ClassVar[str] = "losses"

    def reads_weights(self) -> bool:
        """Whether it reads attention weights, as it is set."""
        return False

    def check(self, attention: AttentionAbilities, slot: str, config) -> None:
        super().check(attention, slot, config)
        if not self.reads_weights():
            return
        if "blocks" not in attention.head_options:
            raise ValueError(
                f"loss {self.type!r} as it is set reads the weights of all pairs of tokens, which {slot}"
                f" {attention.type!r} does not form: all of them would cost more than the mechanism itself; use a"
                " loss on outputs, or attention 'dense'."
            )
        if slot == "attention" and "score_terms" in config.position.acts:
            raise ValueError(
                f"loss {self.type!r} as it is set reads attention weights block by block, which position"
                f" {config.position.type!r} with its terms of queries and keys has no form for; use another position,"
                " such as 'rotary' or 't5_relative_bias', or a loss on outputs."
            )


AGGREGATIONS: Registry[HeadAggregation] = Registry("aggregation", room="attention", kind="aggregation of heads")
HEAD_LOSSES: Registry[HeadLoss] = Registry("losses", room="attention", kind="loss on heads")


@dataclass_transform(kw_only_default=True)
def register_aggregation(name: str):
    """Class decorator: makes `cls` a strict dataclass and registers it as an aggregation of heads."""

    def wrap(cls: type[HeadAggregation]) -> type[HeadAggregation]:
        return register_in(AGGREGATIONS, cls, name)

    return wrap


@dataclass_transform(kw_only_default=True)
def register_loss(name: str):
    """Class decorator: makes `cls` a strict dataclass and registers it as a loss on heads."""

    def wrap(cls: type[HeadLoss]) -> type[HeadLoss]:
        return register_in(HEAD_LOSSES, cls, name)

    return wrap


def build_aggregation(value: Any) -> HeadAggregation | None:
    """The aggregation that a name, a dict with `type` or such an object stands for; None: side by side."""
    return None if value is None else build_in(AGGREGATIONS, value, "aggregation")


def build_losses(value: Any) -> tuple[HeadLoss, ...]:
    """The losses that names, dicts with `type` or such objects stand for.

    Raises:
        ValueError: one of them twice.
    """
    if not isinstance(value, (list, tuple)):
        return value  # the check of types says what is wrong
    found = tuple(build_in(HEAD_LOSSES, entry, "losses") for entry in value)
    names = [loss.type for loss in found]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"`losses` has {name!r} {names.count(name)} times; give each loss once.")
    return found
