# SPDX-License-Identifier: Apache-2.0
"""PEGASUS: `pegasus` <-> the free mix, a Marian that normalizes before its sublayers and after its towers.

What Marian's text says of the tables of sinusoids holds here, too.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import PreTrainedConfig

from ..base import register
from . import bart, marian


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:

    return {**marian.to_ours(config), "residual": "pre_ln"}


CONVERTER = register(
    dataclasses.replace(
        marian.CONVERTER,
        model_type="pegasus",
        components={"position": ("sinusoidal_absolute",), "residual": ("pre_ln",)},
        to_ours=to_ours,
        to_theirs=bart.towers_to_theirs,
        heads=bart.heads("Pegasus", classifiers=False, extra=("tables",)),
    )
)
