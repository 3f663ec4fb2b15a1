# SPDX-License-Identifier: Apache-2.0
"""Modules that change by what they have counted, once per step of the optimizer that trains them."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

_following: dict[int, weakref.ref[StepFollower]] = {}  # in the order in which they were made, alike in all processes


class StepFollower(nn.Module):
    """Base of such modules: whoever calls `optimizer.step()` (Trainer, Accelerate, a loop of one's own), each module
    whose [`StepFollower.leader`] the optimizer has is told afterwards.

    A step that gradient scaling leaves out is none, and what is counted over several batches before a step belongs to
    that step. DeepSpeed's optimizers hold copies of parameters, which lead nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        _follow(self)

    def __setstate__(self, state: dict[str, Any]) -> None:  # of a copy
        super().__setstate__(state)
        _follow(self)

    def leader(self) -> nn.Parameter | None:
        """The parameter whose optimizer's steps it follows; None: it follows none now."""
        raise NotImplementedError

    def after_step(self) -> None:
        """Called without gradients after every step of the optimizer that has the leader."""
        raise NotImplementedError


def _follow(module: StepFollower) -> None:
    if not _following:
        global _hook
        _hook = _hook or register_optimizer_step_post_hook(_tell)
    _following[id(module)] = weakref.ref(module)


_hook: Any = None


@torch.no_grad()
def _tell(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    found = {key: reference() for key, reference in _following.items()}
    for key, module in found.items():
        if module is None:
            del _following[key]
    modules = [module for module in found.values() if module is not None]
    if modules:
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for module in modules:
            if id(module.leader()) in stepped:
                module.after_step()
