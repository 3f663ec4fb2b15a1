# SPDX-License-Identifier: Apache-2.0
"""Weights that are numbers: a diverged model is refused where it is loaded, not trained on or measured."""

from __future__ import annotations

from torch import Tensor, nn


def refuse_non_finite(model: nn.Module, name: str) -> None:
    """Checks the weights that were loaded from `name`.

    Raises:
        ValueError: the first parameter that holds NaN or an infinity, by name.
    """
    wrong = [
        key
        for key, parameter in model.named_parameters()
        if parameter.is_floating_point()
        and parameter.device.type != "meta"
        and not all(bool(part.isfinite().all()) for part in _numbers(parameter))
    ]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise ValueError(
            f"the weights {wrong[0]!r}{more} of {name!r} are not finite numbers, so the model diverged before it was"
            " saved; take an earlier checkpoint, or train it again with a smaller learning rate"
        )


def _numbers(parameter: Tensor) -> list[Tensor]:
    """What may be infinite of a parameter: of a quantized one its scales."""
    names = getattr(parameter, "tensor_data_names", None)  # torchao's
    if names is None:
        return [parameter]
    parts = [getattr(parameter, name) for name in names]
    return [part for part in parts if part is not None and part.is_floating_point()]
