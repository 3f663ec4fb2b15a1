# SPDX-License-Identifier: Apache-2.0
"""Enters the classes of a family in transformers' Auto classes."""

from __future__ import annotations

from typing import Any

import transformers

from .compat import class_names

# Heads whose classes are named next to another Auto class as well, by which Trainer knows that their labels shift.
NAMED_AT = {"ForMultiTokenPrediction": "AutoModelForCausalLM"}
# (Auto class, config class) -> the model classes entered for them, by name.
_CLASSES: dict[tuple[str, Any], dict[str, Any]] = {}


def register_config(config_class: Any) -> None:
    """`AutoConfig` finds `config_class` by its `model_type`. Raises `ValueError` for a type that a class of another
    module has, be it inherited by mistake."""
    name, known = config_class.model_type, None
    if config_class.__module__.partition(".")[0] != __name__.partition(".")[0]:
        known = transformers.CONFIG_MAPPING[name] if name in transformers.CONFIG_MAPPING else None
    if known is not None and known.__module__ != config_class.__module__:
        raise ValueError(
            f"The model type {name!r} is already registered by {known.__module__}; give {config_class.__qualname__} a"
            " `model_type` of its own."
        )
    transformers.AutoConfig.register(config_class.model_type, config_class, exist_ok=True)


def enter_name(auto_class: Any, name: str) -> None:
    """Puts the name of a model class into the table next to an Auto class, where transformers looks up what a class is
    for: Trainer whether label smoothing shifts labels, model cards the task, `transformers serve` what it lists.

    Its key is the name itself: a family may be a decoder and an encoder-decoder, and who looks up a model type there,
    as lm-eval does, would take the one for the other."""
    class_names(auto_class)[name] = name


def enter_type(auto: str, model_class: Any) -> None:
    """Puts the model type there as well, for a family whose models that write texts are all of one shape."""
    class_names(getattr(transformers, auto))[model_class.config_class.model_type] = model_class.__name__


def register_model(auto: str, config_class: Any, model_class: Any) -> None:
    """The Auto class named `auto` makes `model_class` of a `config_class`, unless another class of the family is
    registered there: transformers could not choose for a config without `architectures`."""
    classes = _CLASSES.setdefault((auto, config_class), {})
    classes[model_class.__name__] = model_class
    if not hasattr(transformers, auto):  # some are of late releases
        return
    others = (other for head, other in NAMED_AT.items() if model_class.__name__.endswith(head))
    for name in (auto, *others):
        enter_name(getattr(transformers, name), model_class.__name__)
    if next(iter(classes)) == model_class.__name__:
        getattr(transformers, auto).register(config_class, model_class, exist_ok=True)


def registered(auto: str, config_class: Any) -> tuple[Any, ...]:
    """The classes that were entered under an Auto class for a config class."""
    return tuple(_CLASSES.get((auto, config_class), {}).values())
