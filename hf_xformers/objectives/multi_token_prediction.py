# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction: further tokens next to the next one (DeepSeek-AI 2024, arXiv 2412.19437, section 2.2)."""

from __future__ import annotations

from typing import Any, ClassVar

from ..core.components import bounded
from .base import register
from .causal_lm import CausalLMObjective


@register("mtp")
class MultiTokenObjective(CausalLMObjective):
    """Maximize sum_t log p(x_t | x_<t), and with further modules log p_k(x_{t+k} | x_<t+k, h_t) of the tokens behind
    it; they can draft tokens when the model writes (`generate(use_mtp=True)`).

    Args:
        mtp_depth: modules, each of which predicts a token further ahead.
        mtp_weight: of their mean loss next to that of the next token.
    """

    summary: ClassVar[str] = "each token and those behind it, by further modules (DeepSeek-V3)"
    head: ClassVar[str] = "MultiTokenPrediction"
    preferred: ClassVar[bool] = False

    mtp_depth: int = bounded(1, least=1)
    mtp_weight: float | int = bounded(0.3, least=0)

    def config_fields(self) -> dict[str, Any]:
        settings = {"depth": self.mtp_depth, "weight": self.mtp_weight}
        return {"pretraining": {"multi_token_prediction": settings}}
