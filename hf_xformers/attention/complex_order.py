# SPDX-License-Identifier: Apache-2.0
"""Attention between complex states."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from ..core.cache import appended
from ..core.call import Call, SublayerOutput, self_attention_cache
from ..core.components import register
from ..core.visibility import last_key, rows_can_be_empty, visible_block
from ..ops.common.products import wide_products
from .shared.base import Attention, cross_cache, given_memory
from .shared.query_blocks import over_query_blocks, rows_at_once, shared_rows, visible_softmax
from .shared.spec import AttentionSpec

_NAMES = ("q", "k", "v", "o")


class ComplexAttention(Attention):
    """score_ij = |sum_c q_ic k_jc| / sqrt(d), softmax over real scores, complex values (Wang et al. 2020, arXiv
    1912.12333, released code). d: complex channels of a head, half its width.

    States are [real | imaginary]. A projection is real and serves both parts, or with `weights="full"` is the complex
    product z W of W = W_r + i W_i, whose W_i (`q_imaginary`, ...) starts at 0. Each head keeps its two parts side by
    side.

    Time: twice the products of vanilla attention. Memory: the scores of one block of queries, O(S), also in training;
    O(H T S) on the literal path. State: keys and values of all tokens seen.
    """

    spec: ComplexOrderSpec

    def __init__(self, config, spec: ComplexOrderSpec, **where):
        super().__init__(config, spec, **where)
        half, self.channels = config.hidden_size // 2, self.head_dim // 2
        self.scaling = self.channels**-0.5 if spec.scale is None else spec.scale
        self.q_proj = nn.Linear(half, self.num_heads * self.channels, bias=spec.bias)
        self.k_proj = nn.Linear(half, self.num_key_value_heads * self.channels, bias=spec.bias)
        self.v_proj = nn.Linear(half, self.num_key_value_heads * self.channels, bias=spec.bias)
        self.o_proj = nn.Linear(self.num_heads * self.channels, half, bias=spec.has_output_bias)
        if spec.weights == "full":
            for name in _NAMES:
                real: nn.Linear = getattr(self, f"{name}_proj")
                own = nn.Linear(real.in_features, real.out_features, bias=real.bias is not None)
                setattr(self, f"{name}_imaginary", own)

    def initialize(self, config, init) -> None:
        super().initialize(config, init)
        for name in _NAMES if self.spec.weights == "full" else ():
            module: nn.Linear = getattr(self, f"{name}_imaginary")
            for parameter in module.parameters():
                init.zeros_(parameter)

    def _linear(self, name: str, parts: Tensor) -> Tensor:
        """[..., 2, n] -> [..., 2, m]; the second axis from the right holds real and imaginary parts."""
        output = getattr(self, f"{name}_proj")(parts)
        if self.spec.weights == "full":  # i (a + i b) = -b + i a
            a, b = getattr(self, f"{name}_imaginary")(parts).unbind(-2)
            output = output + torch.stack((-b, a), dim=-2)
        return output

    def _project(self, name: str, states: Tensor) -> Tensor:
        """[B, T, D] -> [B, heads, T, 2 d]."""
        parts = self._linear(name, states.unflatten(-1, (2, -1)))
        return parts.unflatten(-1, (-1, self.channels)).permute(0, 3, 1, 2, 4).flatten(-2)

    def _keys_and_values(
        self, hidden_states: Tensor, memory: Tensor | None, past_key_values: Cache | None, step: int
    ) -> tuple[Tensor, Tensor]:
        past = cross_cache(past_key_values) if self.cross else None
        if past is not None and past.is_updated.get(step):
            layer: Any = past.cross_attention_cache.layers[step]
            return layer.keys, layer.values
        source = given_memory(memory) if self.cross else hidden_states
        key, value = self._project("k", source), self._project("v", source)
        if past is not None:
            past.is_updated[step] = True
            return past.cross_attention_cache.update(key, value, step)
        cache = None if self.cross else self_attention_cache(past_key_values)
        return (key, value) if cache is None else appended(cache, key, value, step)

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
        query = self._project("q", hidden_states)
        key, value = self._keys_and_values(hidden_states, memory, past_key_values, step)
        key, value = self.repeated(key), self.repeated(value)
        output, weights = self.attend(query, key, value, context)
        output = self._linear("o", output.unflatten(-1, (2, -1)).transpose(2, 3).flatten(-2))
        return SublayerOutput(output.flatten(-2), weights)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, context: Call) -> tuple[Tensor, Tensor | None]:
        real, imaginary = query.chunk(2, dim=-1)
        if self.spec.product == "bilinear":
            first, second = torch.cat((real, -imaginary), dim=-1), torch.cat((imaginary, real), dim=-1)
        else:
            first, second = query, torch.cat((imaginary, -real), dim=-1)
        if self.wants_weights(context):
            return self._block(first, second, key, value, context, slice(0, query.shape[2]))

        rows = rows_at_once(query.shape[0] * self.num_heads * key.shape[2])
        whole = [shared_rows(x, query.shape[2], rows) for x in (key, value)]

        def block(begin: int, end: int, *parts: Tensor) -> Tensor:
            stop = last_key(context, self.cross, key.shape[2], end)
            (one, other), (near_key, near_value) = parts, [x.take(0, stop) for x in whole]
            return self._block(one, other, near_key, near_value, context, slice(begin, end))[0]

        return over_query_blocks(block, query.shape[2], rows, (first, 2), (second, 2)), None

    def _block(
        self, first: Tensor, second: Tensor, key: Any, value: Any, context: Call, rows: slice
    ) -> tuple[Tensor, Tensor]:
        """first, second [B, H, t, 2 d]: what gives the real and the imaginary part of a product with a key."""
        real, imaginary = wide_products(first, key), wide_products(second, key)
        # The root has no slope at 0; a constant far below rounding gives it one.
        scores = (real.square() + imaginary.square() + 1e-12).sqrt() * self.scaling
        mask = visible_block(context, self.cross, rows, slice(0, key.shape[2]))
        weights = visible_softmax(scores, mask, rows_can_be_empty(context, self.cross), overwrite=True).to(value.dtype)
        dropped = F.dropout(weights, self.dropout) if self.training and self.dropout else weights
        return torch.matmul(dropped, value).transpose(1, 2), weights


@register("attention", "complex_order")
class ComplexOrderSpec(AttentionSpec):
    """product: of a query and a key, `bilinear` (released code) or `hermitian` (the key conjugated, so that states
    that turn at one common frequency give scores that depend on the distance alone). weights: of the projections,
    `shared_real` (released code: real, the same for both parts) or `full` (complex)."""

    summary = "scores are moduli of complex products"
    cross = True
    acts = frozenset()
    supports = frozenset({"packed_rows", "pair_mask"})

    product: Literal["bilinear", "hermitian"] = "bilinear"
    weights: Literal["shared_real", "full"] = "shared_real"

    def check(self, config) -> None:
        if config.hidden_size % 2 or config.head_width % 2:
            raise ValueError(
                "attention 'complex_order' needs an even `hidden_size` and head width (two parts), got"
                f" {config.hidden_size} and {config.head_width}."
            )

    def build(self, config, **where) -> ComplexAttention:
        return ComplexAttention(config, self, **where)
