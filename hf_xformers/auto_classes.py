"""Enters the classes of a family in transformers' Auto classes."""

from __future__ import annotations

from typing import Any

import transformers


def register_config(config_class: Any) -> None:
    """`AutoConfig` finds `config_class` by its `model_type`."""
    transformers.AutoConfig.register(config_class.model_type, config_class, exist_ok=True)


def register_model(auto: str, config_class: Any, model_class: Any) -> None:
    """The Auto class named `auto` makes `model_class` of a `config_class`."""
    getattr(transformers, auto).register(config_class, model_class, exist_ok=True)
