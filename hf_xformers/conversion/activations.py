# SPDX-License-Identifier: Apache-2.0
"""Activations as transformers names them, and the feed-forward components that have them."""

from __future__ import annotations

from typing import Any

from ..core.components import Spec, build_spec
from .base import shown

# transformers' activation -> our feed-forward component; several names there are one function.
_PLAIN: dict[str, dict[str, Any]] = {
    "relu": {"type": "relu"},
    "gelu": {"type": "gelu", "approximate": "none"},
    "gelu_new": {"type": "gelu", "approximate": "tanh"},
    "quick_gelu": {"type": "gelu", "approximate": "sigmoid"},
    "relu2": {"type": "squared_relu"},
    "silu": {"type": "swish"},
}

_GATED: dict[str, dict[str, Any]] = {
    "relu": {"type": "reglu"},
    "gelu": {"type": "geglu", "approximate": "none"},
    "gelu_new": {"type": "geglu", "approximate": "tanh"},
    "quick_gelu": {"type": "geglu", "approximate": "sigmoid"},
    "relu2": {"type": "squared_reglu"},
    "silu": {"type": "swiglu"},
    "sigmoid": {"type": "glu"},
    "linear": {"type": "bilinear"},
}

_SYNONYMS = {"gelu_python": "gelu", "gelu_fast": "gelu_new", "gelu_pytorch_tanh": "gelu_new", "swish": "silu"}


def activation_name(name: str) -> str:
    """The one name that we keep of transformers' names for the same function."""
    return _SYNONYMS.get(name, name)


def feedforward(activation: str, *, gated: bool = False, bias: bool = True) -> dict[str, Any]:
    """Our feed-forward component with this activation of transformers.

    Raises:
        ValueError: we have none.
    """
    table = _GATED if gated else _PLAIN
    name = activation_name(activation)
    if name not in table:
        kind = "gated " if gated else ""
        raise ValueError(
            f"No {kind}feed-forward component has the activation {activation!r}; convertible: {', '.join(table)}."
        )
    return {**table[name], "bias": bias}


def activation(spec: Spec) -> tuple[str, bool]:
    """(transformers' activation, gated) of a feed-forward component; the inverse of [`feedforward`].

    Raises:
        ValueError: transformers has no name for it.
    """
    bias = getattr(spec, "bias", True)
    for gated, table in ((False, _PLAIN), (True, _GATED)):
        for name, entry in table.items():
            if build_spec("feedforward", {**entry, "bias": bias}) == spec:
                return name, gated
    raise ValueError(f"transformers has no counterpart of the feed-forward component {shown(spec)}.")
