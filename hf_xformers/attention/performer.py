# SPDX-License-Identifier: Apache-2.0
"""FAVOR+ and its relatives: softmax attention estimated by products of random features."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from torch import Tensor

from ..core.call import Call
from ..core.components import bounded, register
from ..ops.linear.feature_maps import hyperbolic_features
from ..ops.linear.feature_pullbacks import FourierFeatures, PositiveFeatures, ReluFeatures
from .shared.linear import LinearAttention, LinearSpec
from .shared.random_rows import RandomRows, redraw_features


def _hyperbolic(scale: float, x: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
    return hyperbolic_features(x * scale, directions)


class PerformerAttention(RandomRows, LinearAttention):
    """Linear attention whose phi(q) phi(k) is an unbiased estimate of exp(scale * q k).

    Choromanski et al. 2021 (arXiv 2009.14794), section 2: with x = sqrt(scale) * q and random rows w_r,

        phi(x) = exp(-|x|^2 / 2) / sqrt(m) * [exp(w_r x)], r = 1..m                         (`positive`)
        phi(x) = exp(-|x|^2 / 2) / sqrt(2 m) * [exp(w_r x), exp(-w_r x)], r = 1..m          (`hyperbolic`)
        phi(x) = exp(|x|^2 / 2) / sqrt(m) * [cos(w_r x), sin(w_r x)], r = 1..m              (`trigonometric`)

    The last are those of the first version (Choromanski et al. 2020, arXiv 2006.03555): products can be negative, and
    where scores are large they are mostly noise. Denominators, relative to the largest factor exp(|y|^2 / 2) of a key
    seen so far, are kept `min_denominator` away from zero, with their sign. `relu` estimates no softmax, but half of
    the arc-cosine kernel of order 1 (section 4, "Performer-ReLU"): phi(x) = relu(w_r x) / sqrt(m) + kernel_eps.

    The rows are orthogonal in blocks of d and have the lengths of normal vectors; how they are kept and drawn anew
    (section 4.2) says [`RandomRows`]. All heads of a layer share them.

    What keeps exponentials in range is taken from a query's own features and from the keys seen so far, never from
    later keys, and nothing is added to positive features: released implementations subtract the maximum over all keys
    and add a small number, which lets the future and the rest of the batch change a result.

    Rotary positions turn queries and keys before phi: what is estimated is softmax attention with these positions.
    """

    spec: PerformerSpec
    rotates_inputs = True  # the scores that are estimated are those of turned queries and keys

    def __init__(self, config, spec: PerformerSpec, **where):
        super().__init__(config, spec, **where)
        root = self.scaling**0.5
        maps: dict[str, Any] = {
            "positive": PositiveFeatures(root),
            "hyperbolic": partial(_hyperbolic, root),
            "trigonometric": FourierFeatures(root, norm=True),
            "relu": ReluFeatures(root, spec.kernel_eps),
        }
        self.phi = maps[spec.feature_kind]
        if spec.feature_kind == "trigonometric":
            self.min_denominator = float(spec.min_denominator)
        self.make_rows(spec.num_features, regularized=spec.regularized)

    def phi_params(self, context: Call) -> tuple[Tensor, ...]:
        return (self.rows(context),)


@register("attention", "performer", aliases=("favor",))
class PerformerSpec(LinearSpec):
    """
    Args:
        num_features: random rows m.
        feature_kind: `positive` (m features), `hyperbolic` (2 m features, less variance), `trigonometric` (2 m
            features, of either sign) or `relu` (m features, of another kernel than softmax).
        orthogonal: rows orthogonal in blocks of the head width.
        regularized: all rows of length sqrt(d), a kernel other than softmax (the paper's SMREG).
        redraw_interval: training passes between draws (0: never).
        seed: of the draws.
        kernel_eps: added to `relu` features.
        min_denominator: least magnitude of a denominator of `trigonometric` features, relative to the largest factor
            of a key.
        chunk_size: tokens per quadratic block of the causal scan.
    """

    splits = frozenset({"heads"})
    adds_up = True
    summary = "softmax attention estimated by positive orthogonal random features: linear time"
    acts = frozenset({"rotation"})
    head_options = frozenset({"norm", "parts"})

    num_features: int = bounded(256, "features", least=1)
    feature_kind: Literal["positive", "hyperbolic", "trigonometric", "relu"] = "positive"
    orthogonal: bool = True
    regularized: bool = False
    redraw_interval: int = bounded(1000, least=0)
    seed: int = bounded(0, least=0)
    kernel_eps: float | int = bounded(1e-3, above=0)
    min_denominator: float | int = bounded(1e-3, above=0)
    chunk_size: int = 64

    def check_fields(self) -> None:
        if self.scale is not None and self.scale <= 0:
            raise ValueError(f"performer needs `scale` > 0, got {self.scale}.")
        if self.regularized and not self.orthogonal:
            raise ValueError("performer has `regularized` lengths for orthogonal rows only; set `orthogonal=True`.")

    def weighs(self, config) -> bool:
        return self.feature_kind != "trigonometric"

    def build(self, config, **where) -> PerformerAttention:
        return PerformerAttention(config, self, **where)


__all__ = ["PerformerAttention", "PerformerSpec", "redraw_features"]
