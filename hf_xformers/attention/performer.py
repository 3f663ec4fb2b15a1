"""FAVOR+: softmax attention estimated by products of positive random features."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..core.components import aliased, register
from ..core.context import LayerContext
from ..core.initialization import seeded_generator
from ..ops.linear.feature_maps import hyperbolic_features, random_matrix
from ..ops.linear.feature_pullbacks import PositiveFeatures
from .shared.linear import LinearAttention, LinearSpec


def _hyperbolic(scale: float, x: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
    return hyperbolic_features(x * scale, directions)


class PerformerAttention(LinearAttention):
    """Linear attention whose phi(q) phi(k) is an unbiased estimate of exp(scale * q k).

    Choromanski et al. 2021 (arXiv 2009.14794), section 2: with x = sqrt(scale) * q and random rows w_r,

        phi(x) = exp(-|x|^2 / 2) / sqrt(m) * [exp(w_r x)], r = 1..m                         (`positive`)
        phi(x) = exp(-|x|^2 / 2) / sqrt(2 m) * [exp(w_r x), exp(-w_r x)], r = 1..m          (`hyperbolic`)

    The rows are orthogonal in blocks of d and have the lengths of normal vectors. All heads of a layer share them.
    They are a saved buffer, drawn from `seed`, the layer and the number of the draw, so that all processes hold the
    same ones.

    What keeps exponentials in range is taken from a query's own features and from the keys seen so far, never from
    later keys, and nothing is added to the features: released implementations subtract the maximum over all keys and
    add a small number, which lets the future and the rest of the batch change a result.

    Redrawing (section 4.2 of the paper): every `redraw_interval` training passes, counted in the buffer `passes`;
    between passes by [`redraw_features`]. Evaluation, frozen projections (under adapters) and compiled training never
    redraw.

    Rotary positions turn queries and keys before phi: what is estimated is softmax attention with these positions.
    """

    spec: PerformerSpec
    directions: Tensor
    passes: Tensor
    draws: Tensor
    rotates_inputs = True  # the scores that are estimated are those of turned queries and keys

    def __init__(self, config, spec: PerformerSpec, **where):
        super().__init__(config, spec, **where)
        root = self.scaling**0.5
        self.phi = PositiveFeatures(root) if spec.feature_kind == "positive" else partial(_hyperbolic, root)
        self.register_buffer("directions", self.draw(0).to(torch.empty(0).device))
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))
        self.register_buffer("draws", torch.zeros((), dtype=torch.long))
        self._counted: int | None = None  # `passes` as a number, so that counting does not wait for a device

    def initialize(self, config, init) -> None:
        super().initialize(config, init)
        init.copy_(self.directions, self.draw(0).to(self.directions.device))
        init.zeros_(self.passes)
        init.zeros_(self.draws)

    def draw(self, number: int) -> Tensor:
        """Draw `number` of this layer's rows, [m, d] in float32."""
        spec = self.spec
        kind = "cross" if self.cross else "causal" if self.is_causal else "self"
        generator = seeded_generator("performer", spec.seed, number, self.layer_idx, kind)
        with torch.device("cpu"):
            return random_matrix(
                spec.num_features,
                self.head_dim,
                orthogonal=spec.orthogonal,
                scaling=int(spec.regularized),
                generator=generator,
            )

    @torch.no_grad()
    def redraw(self) -> None:
        """Replaces the random rows by the next draw."""
        self.draws += 1
        self.directions.copy_(self.draw(int(self.draws)))

    def prepare(self, context: LayerContext, past_key_values: Cache | None) -> None:
        super().prepare(context, past_key_values)
        if not self.training:
            return
        interval = self.spec.redraw_interval
        frozen = not (torch.is_grad_enabled() and self.q_proj.weight.requires_grad)
        if interval and not frozen and not torch.compiler.is_compiling():
            self._counted = int(self.passes) if self._counted is None else self._counted
            if self._counted and self._counted % interval == 0:
                self.redraw()
            self._counted += 1
            self.passes += 1
        # A pass keeps the rows that it began with, also where it is computed again for its gradients.
        context.shared[self._key()] = self.directions.clone()

    def _key(self) -> str:
        return f"performer_{self.layer_idx}_{'cross' if self.cross else 'self'}"

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._counted = None

    def phi_params(self, context: LayerContext) -> tuple[Tensor, ...]:
        return (context.shared.get(self._key(), self.directions),)


def redraw_features(model: nn.Module) -> int:
    """Gives every FAVOR+ layer of `model` its next random features; returns how many layers there were.

    For training loops that draw by a schedule of their own (with `redraw_interval=0`) or compile the model. Not for
    the middle of generating a text, whose state belongs to the features it was made with.
    """
    layers = [module for module in model.modules() if isinstance(module, PerformerAttention)]
    for layer in layers:
        layer.redraw()
    return len(layers)


@register("attention", "performer", aliases=("favor",))
class PerformerSpec(LinearSpec):
    """num_features: random rows m. feature_kind: `positive` (m features) or `hyperbolic` (2 m features, less
    variance).
    orthogonal: rows orthogonal in blocks of the head width. regularized: all rows of length sqrt(d), a kernel other
    than softmax (the paper's SMREG). redraw_interval: training passes between draws (0: never). seed: of the draws.
    chunk_size: tokens per quadratic block of the causal scan."""

    splits_heads = True
    summary = "softmax attention estimated by positive orthogonal random features: linear time"
    rotation = True
    normalizes_heads = True

    num_features: int = aliased(256, "features")
    feature_kind: Literal["positive", "hyperbolic"] = "positive"
    orthogonal: bool = True
    regularized: bool = False
    redraw_interval: int = 1000
    seed: int = 0
    chunk_size: int = 64

    def check_fields(self) -> None:
        super().check_fields()
        for name, least in (("num_features", 1), ("redraw_interval", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"performer needs `{name}` >= {least}, got {getattr(self, name)}.")
        if self.scale is not None and self.scale <= 0:
            raise ValueError(f"performer needs `scale` > 0, got {self.scale}.")
        if self.regularized and not self.orthogonal:
            raise ValueError("performer has `regularized` lengths for orthogonal rows only; set `orthogonal=True`.")

    def build(self, config, **where) -> PerformerAttention:
        return PerformerAttention(config, self, **where)
