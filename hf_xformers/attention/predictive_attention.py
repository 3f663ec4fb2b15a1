# SPDX-License-Identifier: Apache-2.0
"""Predictive and evolving attention: a convolution over the scores of one layer predicts those of the next."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache, DynamicLayer

from ..core.cache import FollowsRows, alone
from ..core.call import Call, SublayerOutput, self_attention_cache
from ..core.components import bounded, register
from ..core.holes import take
from ..core.precision import Float32Module
from ..core.prepared import Carry, one_state
from ..core.visibility import visible_pairs
from ..ops.common.products import wide_products
from ..ops.common.real_tokens import real_first
from .shared.score_chain import Link, ScoreChain
from .shared.spec import AttentionSpec

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"leaky_relu": F.leaky_relu, "relu": F.relu, "none": lambda x: x}


class ScoreRowsLayer(FollowsRows, DynamicLayer):
    """Keys and values, and the last rows of scores that convolutions read, [B, H, rows, S] by chain."""

    is_croppable = False  # rows that were overwritten do not come back

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.rows: dict[Hashable, Tensor] = {}

    def _map(self, function) -> None:
        self.rows = {name: function(rows) for name, rows in self.rows.items()}

    def reset(self) -> None:
        super().reset()
        self.rows = {}

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError(
                "Predictive attention keeps the last rows of its scores and cannot forget its last tokens; decode"
                " without an assistant model (which drops tokens)."
            )


class ScoreConvolution(Float32Module):
    """conv over scores [B, H, T, S] as images with H channels, k x k. It stays in float32, as scores do.

    causal: a row reads itself and the k - 1 rows before it, not those after it.
    """

    def __init__(self, heads: int, kernel: int, causal: bool):
        super().__init__()
        rows = 0 if causal else kernel // 2
        self.conv = nn.Conv2d(heads, heads, kernel, padding=(rows, kernel // 2))
        self.above = kernel - 1 if causal else 0

    def forward(self, image: Tensor) -> Tensor:
        """image [B, H, above + T, S] -> [B, H, T, S]"""
        with torch.autocast(image.device.type, enabled=False):
            return self.conv(image.to(self.conv.weight.dtype)).to(image.dtype)


class PredictiveAttention(ScoreChain):
    """Z^0 = S^0, S^l = q^l (k^l)^T / sqrt(d); o = softmax(Z^l) v; for l > 0

    - `pat`: Z^l = alpha S^l + (1 - alpha) f(conv(Z^(l-1))) (Wang et al. 2021, Predictive Attention Transformer);
    - `evolving`: I^l = (1 - beta) S^l + beta Z^(l-1), Z^l = (1 - alpha) I^l + alpha f(conv(I^l)) (Wang et al. 2021,
      arXiv 2102.12895, section 3; released code, whose letters these are).

    The scores of all heads are an image with H channels, conv is k x k from H to H channels, f an activation. The
    first layer has no convolution and begins a chain wherever it runs.

    What a token may not see is zero in the image, padding on both sides as well, so that no padding counts. In a
    decoder that alone would still let rows of later tokens in: there the convolution of row i reads rows i - k + 1 to
    i. Time O(T^2 (D + k^2 H^2)), memory O(H T^2) in every layer: the image itself is what is passed on. State: keys
    and values, and the last k - 1 rows of the image, which grow with the text.

    Raises:
        ValueError: scores that do not fit to those passed on, or a cache without a place for rows.
    """

    spec: PredictiveSpec
    chain_name = "predictive"

    joins_projections = True

    def __init__(self, config, spec: PredictiveSpec, **where):
        super().__init__(config, spec, **where)
        self.in_order = self.is_causal or (self.cross and config.is_decoder)
        self.activation = ACTIVATIONS[spec.function]
        self.score_conv = None
        if self.layer_idx > 0:
            self.score_conv = ScoreConvolution(self.num_heads, spec.kernel, self.in_order)

    def prepare(self, context: Call, past_key_values: Cache | None) -> None:
        super().prepare(context, past_key_values)
        if not self.cross:
            visible_pairs(context)

    def forward(
        self,
        hidden_states: Tensor,
        context: Call,
        *,
        memory: Tensor | None = None,
        past_key_values: Cache | None = None,
        step: int | None = None,
    ) -> SublayerOutput:
        step = self.layer_idx if step is None else step
        if self.cross:
            query, key, value = self.project_cross(hidden_states, memory, past_key_values, step)
        else:
            query, key, value = self.project_self(hidden_states, context, past_key_values, step)
        scores = wide_products(query * self.scaling, self.repeated(key))
        handed = self.handed(context).scores
        if handed is not None and self.score_conv is not None:
            self.check_fit("scores", handed.shape, scores.shape)
            scores = self._evolved(scores, handed, self.score_conv, context, self._rows_layer(past_key_values, step))
        output, weights, _ = self.weigh(scores, self.repeated(value), context)
        output = self.o_proj(output.reshape(*hidden_states.shape[:-1], -1))
        states = one_state(Link(scores=scores), self.slot)
        return SublayerOutput(output, weights if self.wants_weights(context) else None, states=states)

    def _evolved(
        self,
        scores: Tensor,
        handed: Tensor,
        conv: ScoreConvolution,
        context: Call,
        layer: ScoreRowsLayer | None,
    ) -> Tensor:
        """S^l and Z^(l-1) -> Z^l, all [B, H, T, S]."""
        alpha, beta = self.spec.alpha, self.spec.beta
        evolving = self.spec.form == "evolving"
        mixed = (1 - beta) * scores + beta * handed if evolving else handed
        image = self._visible(mixed, context)
        real = context.memory_padding_mask if self.cross else None
        columns = None if real is None else real_first(real)  # neighbors are tokens, with nothing between them
        image = image if columns is None else take(image, columns, 3)
        if conv.above:
            before = image.new_zeros(*image.shape[:2], conv.above, image.shape[3])
            if layer is not None and self.slot in layer.rows:
                rows = layer.rows[self.slot]
                before = F.pad(rows, (0, image.shape[3] - rows.shape[3]))  # earlier rows do not see later tokens
            image = torch.cat((before, image), dim=2)
            if layer is not None:
                layer.rows[self.slot] = alone(image[:, :, image.shape[2] - conv.above :])
        found = self.activation(conv(image))
        found = found if columns is None else take(found, columns.argsort(-1), 3)
        return (1 - alpha) * mixed + alpha * found if evolving else alpha * scores + (1 - alpha) * found

    def _visible(self, scores: Tensor, context: Call) -> Tensor:
        """The same with zeros where nothing may be seen, and in the rows of padding."""
        seen, real = visible_pairs(context, self.cross), context.query_padding_mask
        if real is not None:
            rows = real[:, None, :, None]
            seen = rows if seen is None else seen & rows
        return scores if seen is None else scores.masked_fill(~seen, 0.0)

    def _rows_layer(self, past: Cache | None, step: int) -> ScoreRowsLayer | None:
        """Where rows are kept; None without a cache."""
        cache = self_attention_cache(past)
        if cache is None or not self.in_order:
            return None
        layer = cache.layers[step] if step < len(cache.layers) else None
        if not isinstance(layer, ScoreRowsLayer):
            raise ValueError(
                f"This attention keeps rows of scores next to keys and values, which the given {type(cache).__name__}"
                " has no place for; leave `past_key_values` out, or make it with"
                " `hf_xformers.core.cache.make_cache(config)`."
            )
        return layer


@register("attention", "predictive_attention", aliases=("evolving_attention",))
class PredictiveSpec(AttentionSpec):
    """
    Args:
        form: `evolving`, or `pat`, its predecessor.
        alpha: share of the convolution (`pat`: of the layer's own scores).
        beta: share of the scores of the layer below, in `evolving`.
        kernel: k, odd.
        activation: f (`None`: leaky_relu in `evolving`, none in `pat`).
    """

    summary = "a convolution over the scores of one layer predicts those of the next"
    head_options = frozenset({"norm"})
    cross = True
    acts = frozenset({"rotation", "score_bias"})

    form: Literal["evolving", "pat"] = "evolving"
    alpha: float | int = bounded(0.5, least=0, most=1)
    beta: float | int = bounded(0.3, least=0, most=1)
    kernel: int = 3
    activation: Literal["leaky_relu", "relu", "none"] | None = None

    @property
    def function(self) -> str:
        if self.activation is not None:
            return self.activation
        return "leaky_relu" if self.form == "evolving" else "none"

    def check_fields(self) -> None:
        if self.form == "evolving" and self.beta == 1:
            raise ValueError(
                "predictive_attention with `beta` 1 has scores of the first layer alone, so that others' queries and"
                " keys would never learn; give a smaller one."
            )
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"predictive_attention needs an odd `kernel` >= 1, got {self.kernel}.")

    def check(self, config) -> None:
        own = config.cross_attention is self and config.is_decoder and config.is_encoder_decoder
        if own and not isinstance(config.attention, PredictiveSpec):
            raise ValueError(
                "predictive_attention as `cross_attention` keeps rows of scores in the cache of a self-attention that"
                f" does so, too, but the decoder's `attention` is {config.attention.type!r}; make it"
                " 'predictive_attention', or leave `cross_attention` at 'dense'."
            )

    def carries(self, config) -> Carry:
        return Carry(Link, (config.num_attention_heads,), of_first=True, handed_on=True)

    def cache_layer(self, config, layer_idx: int = 0) -> ScoreRowsLayer:
        return ScoreRowsLayer()

    def build(self, config, **where) -> PredictiveAttention:
        return PredictiveAttention(config, self, **where)
