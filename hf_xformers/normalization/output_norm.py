# SPDX-License-Identifier: Apache-2.0
"""Residual frames that normalize what a sublayer gives."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..core.components import register
from .residual import PostNorm, PreNorm, ResidualSpec, final_norm


class OutputNorm(PostNorm):
    """y = x + LN(f(x)) ("res-post-norm": Liu et al. 2021, Swin Transformer V2, arXiv 2111.09883, section 3.2; OLMo
    2)."""

    def leave(self, hidden_states: Tensor, output: Tensor, gate: Tensor | None = None, **inputs: Any) -> Tensor:
        return hidden_states + self.branch(self.norm(output, **inputs), gate)


class PeriNorm(PreNorm):
    """y = x + LN_out(f(LN(x))) (Kim et al. 2025, Peri-LN, arXiv 2502.02732, eq. 3; Gemma 2)."""

    def __init__(self, config, scale: float = 1.0):
        super().__init__(config, scale)
        self.output_norm = config.normalization.build(config)

    def leave(self, hidden_states: Tensor, output: Tensor, gate: Tensor | None = None, **inputs: Any) -> Tensor:
        return hidden_states + self.branch(self.output_norm(output, **inputs), gate)


@register("residual", "res_post_ln", aliases=("output_ln",))
class ResPostLNSpec(ResidualSpec):
    """final_norm: normalize the residual stream after the last layer."""

    supports = frozenset({"context_parallel"})
    summary = "normalize a sublayer's output, then add it"
    module = OutputNorm
    additive = True
    enters_as_is = True

    final_norm: bool = True

    def build_final(self, config) -> nn.Module | None:
        return final_norm(config) if self.final_norm else None


@register("residual", "peri_ln", aliases=("peri",))
class PeriLNSpec(ResidualSpec):
    """final_norm: normalize the residual stream after the last layer."""

    supports = frozenset({"context_parallel"})
    summary = "normalize a sublayer's input and its output"
    module = PeriNorm
    additive = True

    final_norm: bool = True

    def build_final(self, config) -> nn.Module | None:
        return final_norm(config) if self.final_norm else None
