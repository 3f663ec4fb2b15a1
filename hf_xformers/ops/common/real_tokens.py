# SPDX-License-Identifier: Apache-2.0
"""Where the real tokens of padded rows are. Every mask is boolean [B, S], True = real; padding may be anywhere."""

from __future__ import annotations

import torch
from torch import Tensor


def real_places(mask: Tensor) -> Tensor:
    """[B, S]: how many real tokens stand before each token of its row; padding after real tokens has the place of the
    last of them, padding before them 0."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def places_behind(mask: Tensor) -> Tensor:
    """[B, S]: how many slots each stands behind the last real token of its row; 0 up to that."""
    return (torch.arange(mask.shape[-1], device=mask.device) - last_real(mask)[:, None]).clamp(min=0)


def first_real(mask: Tensor) -> Tensor:
    """[B]: the slot of the first real token of each row; 0 where there is none."""
    return mask.int().argmax(-1)


def last_real(mask: Tensor) -> Tensor:
    """[B]: the slot of the last real token of each row; 0 where there is none."""
    return torch.where(mask, torch.arange(mask.shape[-1], device=mask.device), 0).amax(-1)


def is_first_real(mask: Tensor) -> Tensor:
    """[B, S], True at the first real token of each row alone."""
    return mask & (mask.long().cumsum(-1) == 1)


def from_first_real(mask: Tensor) -> Tensor:
    """[B, S], True from the first real token of each row on."""
    return mask.long().cumsum(-1) > 0


def up_to_last_real(mask: Tensor) -> Tensor:
    """[B, S], True up to the last real token of each row."""
    return from_first_real(mask.flip(-1)).flip(-1)


def real_together(mask: Tensor) -> Tensor:
    """The slots of a mask [B, T], such that real ones follow each other from the first of them on, which stays where
    it is, as padding before it does; what else is padding comes last."""
    return torch.where(mask, 1, torch.where(mask.cumsum(-1) == 0, 0, 2)).argsort(dim=-1, stable=True)


def real_first(mask: Tensor) -> Tensor:
    """[B, S]: the slots of each row in the order real tokens, padding, each as they stand. Its `argsort` leads
    back."""
    return (~mask).int().argsort(dim=-1, stable=True)


def real_last(mask: Tensor) -> Tensor:
    """[B, S]: the slots of each row in the order padding, real tokens, each as they stand."""
    return mask.int().argsort(dim=-1, stable=True)


__all__ = [
    "first_real",
    "from_first_real",
    "is_first_real",
    "last_real",
    "places_behind",
    "real_first",
    "real_last",
    "real_places",
    "real_together",
    "up_to_last_real",
]
