# SPDX-License-Identifier: Apache-2.0
"""Families that convert and are near to one of transformers' that does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

NEAR = 0.6  # of the fields of both configs, which are in both
COUNT = 3


def nearest(model_type: str, known: Iterable[str]) -> list[str]:
    """Up to three of the `known` model types whose configs have most fields in common with that of `model_type`, the
    nearest first; those that share its name before others that are as near."""
    own = _fields(model_type)
    shares = {name: len(own & _fields(name)) / len(own | _fields(name)) for name in known if name in CONFIG_MAPPING}
    found = [name for name, share in shares.items() if share >= NEAR]
    return sorted(found, key=lambda name: (-round(shares[name], 1), not model_type.startswith(name), name))[:COUNT]


def _fields(model_type: str) -> set[str]:
    inherited = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    return {field.name for field in dataclasses.fields(CONFIG_MAPPING[model_type])} - inherited
