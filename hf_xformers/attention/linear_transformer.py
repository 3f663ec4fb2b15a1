# SPDX-License-Identifier: Apache-2.0
"""The Linear Transformer's attention: features elu(x) + 1."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..core.call import Call
from ..core.components import bounded, register
from ..core.linear_maps import is_plain_linear
from ..ops.linear.attention import folded_sums, read_folded_sums
from ..ops.linear.feature_pullbacks import EluPlusOne, RelativeElu
from .shared.linear import LinearAttention, LinearSpec


class LinearTransformerAttention(LinearAttention):
    """o_i = sum_j phi(q_i) phi(k_j) v_j / sum_j phi(q_i) phi(k_j), phi(x) = elu(x) + 1.

    Katharopoulos et al. 2020 (arXiv 2006.16236), eqs. 4-9. Queries and keys are not scaled (released code). With
    rotary positions phi(q) and phi(k) are rotated in the numerator alone (Su et al. 2021, eq. 19), whose weights can
    be negative and need not sum to one.

    An encoder reads texts longer than its states are wide with the projections of values and outputs folded into the
    sums ([`folded_sums`]), as long as these projections are plain ones.
    """

    spec: LinearTransformerSpec

    phi = EluPlusOne()
    relative_phi = RelativeElu()

    def __init__(self, config, spec: LinearTransformerSpec, **where):
        super().__init__(config, spec, **where)
        self.eps = float(spec.eps)

    @property
    def query_phi(self) -> Callable[..., Tensor]:
        """Features relative to their largest, which cancels where nothing is added to the denominator: those of a
        query of large negative numbers would underflow."""
        return self.phi if self.eps else self.relative_phi

    def _folds(self, states: Tensor, context: Call) -> bool:
        """Whether the projections of values and outputs may go into the sums, and whether that pays."""
        if self.cross or self.is_causal or self.wants_weights(context) or self.num_key_value_groups > 1:
            return False
        # A compiler is left the form that has no condition on the length.
        recorded = torch.compiler.is_compiling() or torch.jit.is_tracing()
        if context.parts is not None or recorded or states.shape[1] <= states.shape[2]:
            return False
        # In half precision the sums of states would lose what sums in float32 keep.
        precise = states.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled(states.device.type)
        plain = is_plain_linear(self.v_proj) and is_plain_linear(self.o_proj)
        return precise and plain and self.rotation(context) is None

    def at_once(self, states: Tensor, context: Call) -> Tensor | None:
        if not self._folds(states, context):
            return None
        value, output = self.v_proj, self.o_proj
        sums = folded_sums(
            *(self.keys(states), states, value.weight, value.bias),
            key_padding_mask=context.query_padding_mask,
        )
        return read_folded_sums(self.queries(states), sums, output.weight, output.bias, eps=self.eps)


@register("attention", "linear_transformer", aliases=("linear",))
class LinearTransformerSpec(LinearSpec):
    """chunk_size: tokens per quadratic block of the causal scan. eps: added to the denominator; the features are
    positive, so it needs none, but the released code has 1e-6."""

    splits = frozenset({"heads"})
    not_taken_over = ("scale",)  # features of elu have no scores
    adds_up = True
    summary = "weights are products of features elu(x) + 1: linear time, a state of constant size"
    head_options = frozenset({"norm", "parts"})
    acts = frozenset({"rotation"})

    chunk_size: int = 64
    eps: float | int = bounded(0.0, least=0)

    def check_fields(self) -> None:
        if self.scale is not None:
            raise ValueError(
                f"linear_transformer has no scores to scale, got `scale={self.scale}`; leave it unset (None)."
            )

    def weighs(self, config) -> bool:
        return "rotation" not in config.position.acts

    def build(self, config, **where) -> LinearTransformerAttention:
        return LinearTransformerAttention(config, self, **where)
