"""How projections start, by the config's `initializer`; the generic rule N(0, initializer_range) needs no help."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def start_projections(config, init, *, inputs: Sequence[nn.Linear], output: nn.Linear) -> None:
    """Starts a sublayer's projections, after the generic rule has run on each of them.

    scaled_residual: the projection that writes to the residual stream is divided by sqrt(2 * layers), so that the
    stream's variance does not grow with depth (Radford et al. 2019, section 2.3). t5: each weight has standard deviation
    1 / sqrt(fan in) (Raffel et al. 2020, released code).
    """
    if config.initializer == "scaled_residual":
        layers = max(2 * config.num_hidden_layers, 1)
        init.normal_(output.weight, mean=0.0, std=config.initializer_range * layers**-0.5)
    elif config.initializer == "t5":
        for projection in (*inputs, output):
            init.normal_(projection.weight, mean=0.0, std=config.initializer_factor * projection.in_features**-0.5)
