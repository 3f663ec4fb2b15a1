# SPDX-License-Identifier: Apache-2.0
"""Attention with the arc-cosine kernel, estimated by random ReLU features."""

from __future__ import annotations

from torch import Tensor

from ..core.call import Call
from ..core.components import bounded, register
from ..ops.linear.feature_maps import unit_vectors
from ..ops.linear.feature_pullbacks import ReluFeatures
from .shared.linear import LinearAttention, LinearSpec
from .shared.random_rows import RandomRows


class ArccosAttention(RandomRows, LinearAttention):
    """o_i = sum_j phi(q_i) phi(k_j) v_j / sum_j phi(q_i) phi(k_j),    phi(x) = relu(W x) / sqrt(m) + eps.

    With normal rows in W and eps = 0, phi(x) phi(y) estimates half of the arc-cosine kernel of order 1 (Cho and Saul
    2009): |x| |y| (sin t + (pi - t) cos t) / (2 pi) for the angle t between x and y. Choromanski et al. 2021 (arXiv
    2009.14794), section 4 and appendix ("generalized attention", Performer-ReLU). Their released code adds eps = 1e-3,
    without which the features of a query may all be zero, and has by default no W: `num_features=None`, phi(x) =
    relu(x) + eps. Peng et al. 2021 (arXiv 2103.02143), section 3.1, give queries and keys the length 1 before the map
    (RFA-arccos): `normalize_qk`.

    The kernel is no softmax: a key weighs in proportion to its length, and a query's length says nothing. Rows are
    kept and drawn anew as [`RandomRows`] says. Rotary positions turn queries and keys before phi.
    """

    spec: ArccosSpec
    rotates_inputs = True  # the angle is between turned queries and keys

    def __init__(self, config, spec: ArccosSpec, **where):
        super().__init__(config, spec, **where)
        self.phi = ReluFeatures(eps=float(spec.kernel_eps))
        if spec.num_features is not None:
            self.make_rows(spec.num_features)

    def measured(self, vectors: Tensor) -> Tensor:
        return unit_vectors(vectors) if self.spec.normalize_qk else vectors

    def phi_params(self, context: Call) -> tuple[Tensor, ...]:
        return () if self.num_rows is None else (self.rows(context),)


@register("attention", "arccos_attention", aliases=("arccos",))
class ArccosSpec(LinearSpec):
    """
    Args:
        num_features: random rows m (None: no projection, the head's own channels).
        normalize_qk: queries and keys of length 1.
        kernel_eps: added to the features.
        orthogonal: rows orthogonal in blocks of the head width.
        redraw_interval: training passes between draws (0: never).
        seed: of the draws.
        chunk_size: tokens per quadratic block of the causal scan.
    """

    splits = frozenset({"heads"})
    not_taken_over = ("scale",)  # a query's length, and with it a factor on scores, cancels
    adds_up = True
    summary = "the arc-cosine kernel by random ReLU features: linear time, a state of constant size"
    acts = frozenset({"rotation"})
    head_options = frozenset({"norm", "parts"})

    num_features: int | None = bounded(256, "features", least=1)
    normalize_qk: bool = False
    kernel_eps: float | int = bounded(1e-3, least=0)
    orthogonal: bool = True
    redraw_interval: int = bounded(0, least=0)
    seed: int = bounded(0, least=0)
    chunk_size: int = 64

    def check_fields(self) -> None:
        if not self.kernel_eps and (self.num_features is None or self.num_features < 32):
            raise ValueError(
                "arccos_attention with few features and without `kernel_eps` leaves some queries nothing to read;"
                f" set `kernel_eps` above 0, or `num_features` to 32 or more (got {self.num_features})."
            )
        if self.scale is not None:
            raise ValueError(
                f"arccos_attention has no scores to scale, got `scale={self.scale}`; leave it unset (None)."
            )

    def build(self, config, **where) -> ArccosAttention:
        return ArccosAttention(config, self, **where)
