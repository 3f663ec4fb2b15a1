"""The Linear Transformer's attention: features elu(x) + 1."""

from __future__ import annotations

from ..components import register
from ..ops.feature_pullbacks import EluPlusOne
from .linear import LinearAttention, LinearSpec


class LinearTransformerAttention(LinearAttention):
    """o_i = sum_j phi(q_i) phi(k_j) v_j / sum_j phi(q_i) phi(k_j), phi(x) = elu(x) + 1.

    Katharopoulos et al. 2020 (arXiv 2006.16236), eqs. 4-9. Queries and keys are not scaled (released code). With rotary
    positions phi(q) and phi(k) are rotated in the numerator alone (Su et al. 2021, eq. 19), whose weights can be negative
    and need not sum to one.
    """

    phi = EluPlusOne()

    def __init__(self, config, spec: LinearTransformerSpec, **where):
        super().__init__(config, spec, **where)
        self.eps = float(spec.eps)


@register("attention", "linear_transformer", aliases=("linear",))
class LinearTransformerSpec(LinearSpec):
    """chunk_size: tokens per quadratic block of the causal scan. eps: added to the denominator; the features are positive,
    so it needs none, but the released code has 1e-6."""

    splits_heads = True
    summary = "weights are products of features elu(x) + 1: linear time, a state of constant size"
    rotation = True

    chunk_size: int = 64
    eps: float | int = 0.0

    def check_fields(self) -> None:
        super().check_fields()
        if self.eps < 0:
            raise ValueError(f"linear_transformer needs `eps` >= 0, got {self.eps}.")
        if self.scale is not None:
            raise ValueError(
                f"linear_transformer has no scores to scale, got `scale={self.scale}`; leave it unset (None)."
            )

    def build(self, config, **where) -> LinearTransformerAttention:
        return LinearTransformerAttention(config, self, **where)
