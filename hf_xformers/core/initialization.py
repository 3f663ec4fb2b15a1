# SPDX-License-Identifier: Apache-2.0
"""How projections start, by the config's `initializer`; the generic rule N(0, initializer_range) needs no help."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@runtime_checkable
class Initialized(Protocol):
    """A module that knows its own start. `initialize` is called after the generic rule has run on it and on its
    children; config: of the model or of the layer that holds it; init: `transformers.initialization`, whose functions
    spare what was loaded."""

    def initialize(self, config: Any, init: Any) -> None: ...


def seeded_generator(*key: int | str) -> torch.Generator:
    """A CPU generator whose numbers depend on `key` alone (component, seed, layer, ...), for random buffers that must
    be equal in every process and after a reload."""
    # A checksum, as the generator reads no more than 32 bits of its seed.
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def seeded_normal(shape: Sequence[int], *key: int | str) -> Tensor:
    """N(0, 1) numbers of [`seeded_generator`], on the device that is being built on."""
    return torch.randn(*shape, generator=seeded_generator(*key), device="cpu").to(torch.empty(0).device)


def start_linear(config, init, linear: nn.Linear) -> None:
    """Starts any linear map, after the generic rule has run on it.

    xavier: Glorot uniform. small: normal of variance 2 / (fan in + fan out), and 2 / (5 fan in) for a square map, as
    if it were one of a feed-forward of four times the width (SmallInit; Nguyen & Salazar 2019, section 3.1). fan_in:
    normal of variance 1 / fan in, times the square of the factor (Child et al. 2019, arXiv 1904.10509, section 6).
    """
    if config.initializer == "xavier":
        init.xavier_uniform_(linear.weight, gain=config.initializer_factor)
    elif config.initializer == "small":
        fan_out, fan_in = linear.weight.shape
        total = 5 * fan_in if fan_in == fan_out else fan_in + fan_out
        init.normal_(linear.weight, mean=0.0, std=config.initializer_factor * (2 / total) ** 0.5)
    elif config.initializer == "fan_in":
        init.normal_(linear.weight, mean=0.0, std=config.initializer_factor * linear.in_features**-0.5)


def start_projections(config, init, *, inputs: Sequence[nn.Linear], output: nn.Linear | None) -> None:
    """Starts a sublayer's projections, after the generic rule has run on each of them. output: None where something
    else writes to the residual stream.

    scaled_residual: the projection that writes to the residual stream is divided by sqrt(2 * layers), so that the
    stream's variance does not grow with depth (Radford et al. 2019, section 2.3); fan_in does the same (Child et al.
    2019, section 6). t5: each weight has standard deviation 1 / sqrt(fan in) (Raffel et al. 2020, released code).
    """
    if config.initializer == "scaled_residual" and output is not None:
        layers = max(2 * config.num_hidden_layers, 1)
        init.normal_(output.weight, mean=0.0, std=config.initializer_range * layers**-0.5)
    elif config.initializer == "fan_in" and output is not None:
        layers = max(2 * config.num_hidden_layers, 1)
        std = config.initializer_factor * (layers * output.in_features) ** -0.5
        init.normal_(output.weight, mean=0.0, std=std)
    elif config.initializer == "t5":
        for projection in (*inputs, *(() if output is None else (output,))):
            init.normal_(projection.weight, mean=0.0, std=config.initializer_factor * projection.in_features**-0.5)
