# SPDX-License-Identifier: Apache-2.0
"""Matrices with zeros in them: by magnitude, by movement, or two in every four.

magnitude   the largest |W| stay, in each matrix or over all of them (Gordon, Duh and Andrews 2020, arXiv 2002.08307)
movement    the highest scores S stay, which learn with the weights: dL/dS = dL/dW' * W for the masked weights W',
            straight through the mask (Sanh, Wolf and Rush 2020, arXiv 2005.07683, section 3)
2:4         the two largest |W| of every four along a row (Mishra et al. 2021, arXiv 2104.08378)

A mask is no part of a checkpoint: what it takes away stands there as zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..core.weight_decay import Undecayed
from ..modeling_tower import XFormerTower

Granularity = Literal["matrix", "model"]


def prunable_weights(model: nn.Module, exclude: Iterable[str] = ()) -> dict[str, nn.Linear]:
    """The linear maps inside the layers of a model's towers, by name: no embeddings, norms, positions, poolers and
    heads. exclude: parts of names that are left alone, too.

    Raises:
        ValueError: nothing is left, or a part to leave alone is in no name.
    """
    towers = [(name, module) for name, module in model.named_modules() if isinstance(module, XFormerTower)]
    found: dict[str, nn.Linear] = {}
    tied = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    for prefix, tower in towers:
        for name, module in tower.layers.named_modules():
            if isinstance(module, nn.Linear) and id(module.weight) not in tied and module.weight.is_floating_point():
                found[f"{prefix}.layers.{name}".lstrip(".")] = module
    left = dict(found)
    for part in exclude:
        matching = [name for name in found if part in name]
        if not matching:
            raise ValueError(
                f"--exclude {part!r} is in no name of a weight that could be pruned; there are"
                f" {', '.join(sorted({name.rpartition('.')[2] for name in found})[:8])}"
            )
        for name in matching:
            left.pop(name, None)
    if not left:
        raise ValueError(
            f"{type(model).__name__} has no linear map that could be pruned; leave some out of --exclude, or take a"
            " model of this package"
        )
    return left


# ------------------------------------------------------------------------------------------------ masks


def top_mask(scores: Tensor, sparsity: float) -> Tensor:
    """A boolean mask without the floor(sparsity * n) lowest of n scores; exact where scores tie, too."""
    count = int(sparsity * scores.numel() + 1e-9)
    mask = torch.ones(scores.numel(), dtype=torch.bool, device=scores.device)
    if count:
        mask[scores.flatten().topk(count, largest=False).indices] = False
    return mask.view_as(scores)


def magnitude_masks(
    weights: Mapping[str, Tensor], sparsity: float, granularity: Granularity = "matrix"
) -> dict[str, Tensor]:
    """The largest |W| of every matrix, or of all of them together, by name.

    Raises:
        ValueError: a sparsity out of [0, 1).
    """
    check_sparsity(sparsity)
    if granularity == "matrix":
        return {name: top_mask(weight.abs(), sparsity) for name, weight in weights.items()}
    joined = torch.cat([weight.abs().float().flatten() for weight in weights.values()])
    parts = top_mask(joined, sparsity).split([weight.numel() for weight in weights.values()])
    return {name: part.view_as(weight) for (name, weight), part in zip(weights.items(), parts)}


def two_of_four(weight: Tensor) -> Tensor:
    """weight [..., 4 n] -> a mask with exactly two of every four along the last axis, the largest |W|.

    Raises:
        ValueError: rows whose length is no multiple of 4.
    """
    if weight.shape[-1] % 4:
        raise ValueError(
            f"2:4 needs rows of a multiple of 4, and a weight of {list(weight.shape)} has none; leave it out with"
            " --exclude, or take --method weights --pattern unstructured"
        )
    groups = weight.abs().unflatten(-1, (-1, 4))
    mask = torch.zeros_like(groups, dtype=torch.bool)
    return mask.scatter_(-1, groups.topk(2, dim=-1).indices, True).flatten(-2)


def check_sparsity(sparsity: float) -> None:
    if not 0 <= sparsity < 1:
        raise ValueError(f"--sparsity {sparsity} is a share of weights in [0, 1); take a lower one")


@torch.no_grad()
def apply_masks(weights: Mapping[str, nn.Linear], masks: Mapping[str, Tensor]) -> None:
    """Zeros where masks say so, in place."""
    for name, module in weights.items():
        module.weight.masked_fill_(~masks[name], 0.0)


# ------------------------------------------------------------------------------------------------ while training


def cubic(step: int, total: int, final: float, start: float = 0.0, warm: float = 0.1, cool: float = 0.2) -> float:
    """The sparsity at a step: 0 for the share `warm` of the steps, then v_f + (v_i - v_f) (1 - t / T)^3, and v_f for
    the share `cool` at the end (Sanh et al. 2020, section 4; Zhu and Gupta 2017, arXiv 1710.01878)."""
    first, last = warm * total, (1 - cool) * total
    if step <= first:
        return start
    if step >= last or last <= first:
        return final
    return final + (start - final) * (1 - (step - first) / (last - first)) ** 3


class _Masked(torch.autograd.Function):
    """W times a mask of S. The gradient of W is masked; that of S is dL/dW' W, as if the mask were S itself."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scores: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(weight, mask)
        return weight * mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        weight, mask = ctx.saved_tensors
        return grad * mask, grad * weight, None


class MovementMask(Undecayed, nn.Module):
    """Parametrisation of a weight: what of it has the highest scores, learned next to it. `sparsity` is set by the
    schedule."""

    undecayed = ("scores",)

    def __init__(self, weight: Tensor):
        super().__init__()
        self.scores = nn.Parameter(torch.zeros_like(weight))
        self.sparsity = 0.0

    def forward(self, weight: Tensor) -> Tensor:
        mask = top_mask(self.scores.detach(), self.sparsity).to(weight.dtype)
        return _Masked.apply(weight, self.scores, mask)


class MagnitudeMask(nn.Module):
    """Parametrisation of a weight: its largest numbers, or two of every four; what is masked gets no gradient."""

    def __init__(self, pattern: str):
        super().__init__()
        self.pattern, self.sparsity = pattern, 0.0

    def forward(self, weight: Tensor) -> Tensor:
        wide = weight.detach()
        mask = two_of_four(wide) if self.pattern == "2:4" else top_mask(wide.abs(), self.sparsity)
        return weight * mask.to(weight.dtype)


def put_masks(weights: Mapping[str, nn.Linear], score: str, pattern: str) -> list[nn.Module]:
    """Parametrises the weights; returns the masks, whose `sparsity` is to be set."""
    made = []
    for module in weights.values():
        mask: nn.Module = MovementMask(module.weight) if score == "movement" else MagnitudeMask(pattern)
        parametrize.register_parametrization(module, "weight", mask)
        made.append(mask)
    return made


def take_masks(weights: Mapping[str, nn.Linear]) -> None:
    """Leaves the masked weights in the place of their parametrisation."""
    for module in weights.values():
        if parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)
