# SPDX-License-Identifier: Apache-2.0
"""Parameters that weight decay leaves alone, such as norms and biases: zero is not their neutral value."""

from __future__ import annotations

from typing import ClassVar

from torch import nn


class Undecayed:
    """Mixin of modules that name parameters which must not decay.

    undecayed: names of such parameters, as seen from the module (`"frequency"`, `"tokens.weight"`).
    """

    undecayed: ClassVar[tuple[str, ...]] = ()


def declared_undecayed(model: nn.Module) -> set[str]:
    """Names of the parameters in `model` that its modules declare as [`Undecayed`], as `model.named_parameters` has
    them (through wrappers and adapters, too)."""
    found = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, Undecayed)
        for name in module.undecayed
    }
    return found & {name for name, _ in model.named_parameters(remove_duplicate=False)}
