# SPDX-License-Identifier: Apache-2.0
"""Linear attention with deterministic features (DPFP), summed or corrected by the delta rule."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from torch import nn

from ..core.components import bounded, register
from ..core.sequence_parallel import SequenceForm, Unserved
from ..ops.linear.feature_maps import dpfp
from ..ops.linear.feature_pullbacks import NormalizedDPFP
from .delta_net import DeltaNetAttention, DeltaNetSpec
from .shared.linear import LinearAttention, LinearSpec


class DPFPAttention(LinearAttention):
    """o_i = sum_j phi(q_i) phi(k_j) v_j / (sum_j phi(q_i) phi(k_j) + eps),

        phi_{i + 2d(j - 1)}(x) = r_i r_{i+j},   r = relu([x, -x]),   i = 1..2d, j = 1..nu, i + j modulo 2d.

    Schlag, Irie and Schmidhuber 2021 (arXiv 2102.11174), section 5.3 and eqs. 36-37: a projection without parameters
    or random numbers, whose features are mostly zero, so that keys which point elsewhere are orthogonal. Features are
    divided by their sum (section 4.2). A query may have no feature in common with any key; it reads zeros.

    Without `attention_normalize` there is no denominator, and what is read is multiplied by `scale`, 1 / sqrt(d) as in
    the released code: the sum rule of fast weights, whose outputs grow with the length of a text. With
    `update_rule="delta"` it is [`DeltaNetAttention`]. Rotary positions turn queries and keys before phi.
    """

    spec: DPFPSpec
    rotates_inputs = True

    def __init__(self, config, spec: DPFPSpec, **where):
        super().__init__(config, spec, **where)
        self.normalizes = spec.has_denominator
        self.eps = float(spec.eps) if self.normalizes else 0.0
        factor = 1.0 if self.normalizes else float(self.scaling)
        self.phi = NormalizedDPFP(spec.nu) if spec.sum_normalize else partial(_scaled_dpfp, spec.nu, 1.0)
        self._of_queries = self.phi
        if factor != 1.0:
            normalized = NormalizedDPFP(spec.nu, factor=factor)
            self._of_queries = normalized if spec.sum_normalize else partial(_scaled_dpfp, spec.nu, factor)

    @property
    def query_phi(self):
        return self._of_queries


def _scaled_dpfp(nu: int, factor: float, x):
    return dpfp(x, nu) * factor


@register("attention", "dpfp")
class DPFPSpec(LinearSpec):
    """
    Args:
        nu: shifts, 2 d nu features for heads of width d.
        update_rule: `sum`, or `delta`, for causal self-attention alone.
        sum_normalize: features are divided by their sum.
        attention_normalize: what is read is divided by the sum of weights (None: by the sum rule, not by the delta
            rule).
        eps: added to that denominator of the sum rule.
        scale: factor on what is read by the delta rule, or without a denominator (None: 1 / sqrt(head width)).
        chunk_size: tokens per quadratic block of the causal scan, or per triangular system.
    """

    not_taken_over = ("scale",)  # here of what is read, not of scores
    adds_up = True
    summary = "deterministic sparse features of products of neighboring channels: linear time, sum or delta rule"
    acts = frozenset({"rotation"})
    head_options = frozenset({"norm", "parts"})

    nu: int = bounded(3, least=1)
    update_rule: Literal["sum", "delta"] = "sum"
    sum_normalize: bool = True
    attention_normalize: bool | None = None
    eps: float | int = bounded(1e-6, least=0)
    chunk_size: int = 64

    @property
    def splits(self) -> frozenset[str]:  # type: ignore[override]  # strengths of writing are those of all heads
        return frozenset({"heads"} if self.update_rule == "sum" else ())

    @property
    def has_denominator(self) -> bool:
        return self.update_rule == "sum" if self.attention_normalize is None else self.attention_normalize

    def check_fields(self) -> None:
        if self.update_rule == "delta" and not self.sum_normalize:
            raise ValueError(
                "dpfp with `update_rule='delta'` needs `sum_normalize=True`: larger keys make the rule diverge."
            )
        joined = {"aggregation": self.aggregation, "losses": self.losses, "output_gate": self.output_gate != "none"}
        wanted = next((name for name, given in joined.items() if given), None)
        if self.update_rule == "delta" and wanted:
            raise ValueError(
                f"dpfp with `update_rule='delta'` does not hand out what its heads read one by one, as `{wanted}`"
                " needs; leave that out, or set `update_rule='sum'`."
            )
        if self.scale is not None and self.update_rule == "sum" and self.has_denominator:
            raise ValueError(
                f"dpfp with a denominator has nothing to scale, got `scale={self.scale}`; leave it unset (None), or"
                " set `attention_normalize=False`."
            )

    def check(self, config) -> None:
        most = 2 * config.head_width - 1
        if self.nu > most:
            raise ValueError(
                f"dpfp needs `nu` of at most {most}, the different shifts for heads of width {config.head_width}, got"
                f" {self.nu}."
            )
        if self.update_rule == "delta" and (config.cross_attention is self or not config.is_decoder):
            raise ValueError(
                "dpfp with `update_rule='delta'` writes token after token and is for causal self-attention; set"
                " `update_rule='sum'` in an encoder and in `cross_attention`."
            )

    def weighs(self, config) -> bool:
        return False  # a query may share no feature with any key

    def sequence_form(self, config) -> SequenceForm | Unserved:
        if self.update_rule == "sum":
            return super().sequence_form(config)
        if self.has_denominator:
            return Unserved("with `attention_normalize` divides by sums of other parts inside its rule")
        return SequenceForm.AFFINE

    def build(self, config, **where) -> nn.Module:
        if self.update_rule == "sum":
            return DPFPAttention(config, self, **where)
        fields: dict[str, Any] = {"nu": self.nu, "chunk_size": self.chunk_size}
        fields["attention_normalize"] = self.has_denominator
        for name in (
            "bias",
            "output_bias",
            "scale",
            "query_key_norm",
            "angles",
        ):
            fields[name] = getattr(self, name)
        spec = DeltaNetSpec(**fields)
        return DeltaNetAttention(config, spec, **where)
