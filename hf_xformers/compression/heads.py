# SPDX-License-Identifier: Apache-2.0
"""What the heads of a model's attentions do in a pass: scores, values, and who sees whom, for losses that compare
them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.dense import DenseAttention
from ..attention.shared.base import Attention
from ..core.call import Call, SublayerOutput
from ..core.visibility import DenseBias, visible_pairs
from ..ops.common.products import wide_products


@dataclass(frozen=True)
class Heads:
    """One attention's heads in one pass.

    weights [B, H, T, S] (None: the mechanism gives none); scores [B, H, T, S]: what softmax is taken of, None where
    they are not wanted or there is no such thing; values [B, H, S, d] (None: it has none by head); visible [B or 1,
    1 or H, T or 1, S]: who may see whom, None if everybody may; real [B, T]: queries that are no padding, None if none
    is.
    """

    weights: Tensor | None
    scores: Tensor | None
    values: Tensor | None
    visible: Tensor | None
    real: Tensor | None

    def pairs(self, like: Tensor) -> Tensor:
        """Boolean, of the shape of `like` [B, H, T, S]: what a real query may see."""
        seen = torch.ones_like(like, dtype=torch.bool)
        if self.visible is not None:
            seen = seen & self.visible
        return seen if self.real is None else seen & self.real[:, None, :, None]


@contextlib.contextmanager
def heads_of(model: nn.Module, layers: Collection[int], *, scores: bool = False) -> Iterator[dict[int, Heads]]:
    """Inside the block a forward pass with `output_attentions=True` leaves here, by layer, what the self-attention's
    heads do. layers: which of the first tower's. scores: also scores."""
    found: dict[int, Heads] = {}
    attentions = self_attentions(model)
    chosen = {index: module for index, module in attentions.items() if index in layers}
    hooks = []
    for index, module in chosen.items():
        inside: dict[str, Tensor | None] = {}
        module.attend = _recording(module, inside, scores)  # type: ignore[method-assign]
        hooks.append(module.register_forward_hook(_leaving(index, found, inside), with_kwargs=True))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
        for module in chosen.values():
            vars(module).pop("attend", None)


def self_attentions(model: nn.Module) -> dict[int, Attention]:
    """The self-attention of each layer of the first tower, by layer; of several in a layer the last."""
    base: Any = getattr(model, "model", model)
    return {
        index: layer.function(entry)
        for index, layer in enumerate(base.trunk.layers)
        for entry in layer.plan
        if entry.kind == "attention"
    }


def _recording(module: Attention, inside: dict[str, Tensor | None], scores: bool) -> Any:
    """`attend`, which leaves scores and values. Some mechanisms go without it."""
    attend = module.attend

    def recorded(query: Tensor, key: Tensor, value: Tensor, context: Call) -> tuple[Tensor, Tensor | None]:
        inside["values"] = module.repeated(value)
        inside["scores"] = softmax_scores(module, query, key, context) if scores else None
        return attend(query, key, value, context)

    return recorded


def _leaving(index: int, found: dict[int, Heads], inside: dict[str, Tensor | None]) -> Any:
    def leave(_: nn.Module, given: tuple, named: dict[str, Any], result: SublayerOutput) -> None:
        context: Call = given[1]
        found[index] = Heads(
            result.weights,
            inside.get("scores"),
            inside.get("values"),
            visible_pairs(context),
            context.query_padding_mask,
        )

    return leave


def has_scores(module: nn.Module) -> bool:
    """Whether an attention's weights are a softmax over scores that can be had apart from it."""
    return isinstance(module, DenseAttention) and not module.changes_scores


def softmax_scores(module: Attention, query: Tensor, key: Tensor, context: Call) -> Tensor | None:
    """[B, H, T, S]: scale q k + bias, before masks and softmax; None of a mechanism without such scores."""
    if not has_scores(module):
        return None
    scores = wide_products(query, module.repeated(key)) * module.scaling
    if module.spec.score_cap is not None:
        scores = module.spec.score_cap * torch.tanh(scores / module.spec.score_cap)
    bias = context.state(DenseBias)
    return scores if bias is None else scores + bias.matrix
