# SPDX-License-Identifier: Apache-2.0
"""Linear maps of which others have to know something: that they are no more than their weights, or that these are
shared."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..compat import has_hooks
from .initialization import start_linear


def is_plain_linear(module: nn.Module) -> bool:
    """Whether the weight and bias of a projection are all there is to it, so that a mechanism may use them without
    calling it: no adapter, hook, offloading, quantization or sharding."""
    if type(module) is not nn.Linear or "forward" in vars(module) or type(module.weight) is not nn.Parameter:
        return False
    return not has_hooks(module)


class TiedLinear(nn.Module):
    """y = W x + b, W [out, in], which another module may have as well.

    It is no `nn.Linear`, so that peft leaves it out of "all-linear" and refuses it by name: an adapter that is merged
    into one of the two modules would change the other.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def initialize(self, config, init) -> None:
        init.normal_(self.weight, mean=0.0, std=config.initializer_range)
        if self.bias is not None:
            init.zeros_(self.bias)
        start_linear(config, init, cast(nn.Linear, self))  # it reads no more than the sizes and the weight

    def forward(self, states: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return F.linear(states, self.weight, self.bias)
