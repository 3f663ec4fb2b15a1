# SPDX-License-Identifier: Apache-2.0
"""Families that other packages make: what finds a variant by its model type finds them as well."""

from __future__ import annotations

from collections.abc import Callable

FAMILIES: dict[str, str] = {}  # model type -> module
_LISTENERS: list[Callable[[str], None]] = []


def enter_family(model_type: str, module: str) -> None:
    """A module outside of this package has made the family of this type."""
    FAMILIES[model_type] = module
    for tell in _LISTENERS:
        tell(model_type)


def tell_of_families(tell: Callable[[str], None]) -> None:
    """Calls `tell` with the model type of every family, also of those that are made later."""
    _LISTENERS.append(tell)
    for model_type in FAMILIES:
        tell(model_type)
