# SPDX-License-Identifier: Apache-2.0
"""Working on some heads at a time, so that what lies between a mechanism's inputs and its output is never there at
once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def over_head_groups(
    function: Callable[..., Tensor], *tensors: Tensor | None, random: bool = False, groups: int = 4
) -> Tensor:
    """`function(*tensors)` for tensors `[B, H, ...]` whose heads do not depend on each other.

    Where gradients are wanted, the heads go through in a few groups, and each group's intermediate results are
    computed again in the backward pass: a forward pass more in time, and a share of the memory that falls with the
    number of groups. Under torch.compile, and without gradients, all heads go through together.

    random: `function` draws random numbers. Then the groups are the same without gradients: where a caller's
    checkpoint runs first without and then with them, both draw the same.
    """
    heads = next(x.shape[1] for x in tensors if x is not None)
    trained = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    if not (trained or random) or heads == 1 or torch.compiler.is_compiling():
        return function(*tensors)
    run = partial(checkpoint, function, use_reentrant=False) if trained else function
    step = -(-heads // groups)
    # split, not slices: its gradient is put together once, where every slice would make one as large as the whole.
    pieces = [None if x is None else x.split(step, dim=1) for x in tensors]
    return torch.cat(
        [run(*(None if p is None else p[group] for p in pieces)) for group in range(-(-heads // step))],
        dim=1,
    )
