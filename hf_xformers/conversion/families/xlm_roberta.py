# SPDX-License-Identifier: Apache-2.0
"""XLM-RoBERTa and CamemBERT: RoBERTa under other names, `xlm-roberta` and `camembert` <-> `xf_roberta`."""

from __future__ import annotations

import dataclasses

from ..base import register
from .roberta import CONVERTER as ROBERTA

for model_type, name in (("xlm-roberta", "XLMRoberta"), ("camembert", "Camembert")):
    register(
        dataclasses.replace(
            ROBERTA,
            model_type=model_type,
            heads=tuple(head.renamed("Roberta", name, "roberta.") for head in ROBERTA.heads),
            native=False,
        )
    )
