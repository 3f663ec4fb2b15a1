# SPDX-License-Identifier: Apache-2.0
"""Adapters whose maps can be added to the weights of their base."""

from __future__ import annotations

import copy
from typing import Any

from .bottleneck import STATE

# Why an adapter of this package is no change of its base's weights.
_WHY_NOT = {
    "houlsby": "it has a nonlinearity between its two maps",
    "pfeiffer": "it has a nonlinearity between its two maps",
    "fusion": "it weighs adapters anew for every token",
    "k_adapter": "it is a network of its own besides the layers",
}


def merge_adapter(model: Any) -> Any:
    """A plain model that computes what its base with the active adapter does; `model` stays as it is.

    Of `peft`'s methods it is those that change weights by sums or factors (LoRA and its relatives, IA3): W + (alpha /
    r) B A, a head that was trained along included.

    Raises:
        ValueError: there is no adapter, or one that is more than a change of weights; says why.
    """
    state = getattr(model, STATE, None)
    if state is not None and state.active is not None:
        kind = state.configs[state.active].kind
        raise ValueError(
            f"the adapter {state.active!r} of kind {kind!r} cannot become a part of the weights: {_WHY_NOT[kind]};"
            " save it next to its base (save_adapter), or train LoRA, which can"
        )
    if not (hasattr(model, "peft_config") and hasattr(model, "get_base_model")):
        raise ValueError(f"{type(model).__name__} has no adapter that could be merged; give a `peft.PeftModel`")
    (method,) = {str(getattr(config.peft_type, "value", config.peft_type)) for config in model.peft_config.values()}
    if not hasattr(model.base_model, "merge_and_unload"):
        raise ValueError(
            f"an adapter of the method {method} cannot become a part of the weights: it is read next to the text; save"
            " it next to its base, or train LoRA, which can"
        )
    return copy.deepcopy(model).merge_and_unload()
