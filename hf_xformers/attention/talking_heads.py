# SPDX-License-Identifier: Apache-2.0
"""Talking-heads attention: heads mix before and after the softmax."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache, EncoderDecoderCache

from ..core.cache import appended
from ..core.call import Call, SublayerOutput, self_attention_cache
from ..core.components import bounded, register
from ..core.visibility import last_key, rows_can_be_empty, visible_block
from ..ops.common.products import wide_products
from .shared.base import Attention, given_memory
from .shared.query_blocks import over_query_blocks, rows_at_once, shared_rows, visible_softmax
from .shared.spec import AttentionSpec

DYNAMIC = ("x2l", "m2l", "x2w", "m2w")  # by query (x) or by key (m), to the scores (l) or to the weights (w)


class TalkingHeadsAttention(Attention):
    """J_k = q_k k_k^T / sqrt(d); L_h = sum_k J_k P^l[k, h]; W = softmax(L); U_v = sum_h W_h P^w[h, v]; o_v = U_v v_v.

    Shazeer, Lan, Cheng, Ding and Hou 2020 (arXiv 2003.02436), with as many key heads, softmax heads and value heads as
    one likes (`num_attention_heads` counts the softmax heads). Masks and position biases belong to L, after the first
    mixing; dropout belongs to U, after the second. With dynamic projections P^l and P^w gain a linear function of the
    query's token x or of the key's token m.

    The weights given out are W, whose rows sum to one; those of U need not, and may be negative.

    Time: that of vanilla attention and (key heads + value heads) * softmax heads products per pair. Memory: the scores
    of one block of queries, O(S), also in training; O(heads T S) on the literal path. State: keys and values of all
    tokens seen; what a key's token adds to the projections is stored behind them.
    """

    spec: TalkingHeadsSpec

    def __init__(self, config, spec: TalkingHeadsSpec, **where):
        super().__init__(config, spec, **where)
        width, heads, d = config.hidden_size, self.num_heads, self.head_dim
        self.key_heads, self.value_heads = spec.numbers(config)
        self.num_key_value_heads, self.num_key_value_groups = self.key_heads, 1
        self.q_proj = nn.Linear(width, self.key_heads * d, bias=spec.bias)
        self.k_proj = nn.Linear(width, self.key_heads * d, bias=spec.bias)
        self.v_proj = nn.Linear(width, self.value_heads * d, bias=spec.bias)
        self.o_proj = nn.Linear(self.value_heads * d, width, bias=spec.has_output_bias)
        self.score_mixing = nn.Parameter(torch.empty(self.key_heads, heads)) if spec.mix_scores else None
        self.weight_mixing = nn.Parameter(torch.empty(heads, self.value_heads)) if spec.mix_weights else None
        sizes = {"l": self.key_heads * heads, "w": heads * self.value_heads}
        self.dynamic = nn.ModuleDict({name: nn.Linear(width, sizes[name[-1]]) for name in spec.dynamic})

    def initialize(self, config, init) -> None:
        super().initialize(config, init)
        for mixing in (self.score_mixing, self.weight_mixing):
            if mixing is not None:
                (init.eye_ if self.spec.start == "identity" else init.xavier_uniform_)(mixing)
        projection: Any
        for projection in self.dynamic.values():  # the released code: a hundredth of the variance that keeps the scale
            init.normal_(projection.weight, mean=0.0, std=0.1 * projection.in_features**-0.5)
            init.zeros_(projection.bias)

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
        query = self.heads(self.q_proj(hidden_states))
        rotation = None if self.cross else self.rotation(context)
        if rotation is not None:
            query = rotation(query)
        key, value = self._state(hidden_states, memory, rotation, past_key_values, step)
        # What tokens add to the projections: [B, T or S, heads, heads].
        added = {
            name: self._matrices(name, self.dynamic[name](hidden_states)) for name in self.dynamic if name[0] == "x"
        }
        if "m2l" in self.dynamic:
            key, extra = key.split((self.head_dim, self.num_heads), dim=-1)
            added["m2l"] = extra.transpose(1, 2)
        key = key if self.cross else self.turned_late(key, context)
        if "m2w" in self.dynamic:
            value, extra = value.split((self.head_dim, self.num_heads), dim=-1)
            added["m2w"] = extra.permute(0, 2, 3, 1)

        by_rows = ((query, 2), (added.get("x2l"), 1), (added.get("x2w"), 1))
        if self.wants_weights(context):
            own = (query, added.get("x2l"), added.get("x2w"))
            mixed, weights = self._block(*own, key, value, added, context, slice(0, query.shape[2]))
            return SublayerOutput(self.o_proj(mixed.flatten(2)), weights)

        heads = max(self.num_heads, self.key_heads, self.value_heads)
        rows = rows_at_once(query.shape[0] * heads * key.shape[2])
        whole = [shared_rows(x, query.shape[2], rows) for x in (key, value)]

        def block(begin: int, end: int, part: Tensor, x2l: Tensor | None, x2w: Tensor | None) -> Tensor:
            stop = last_key(context, self.cross, key.shape[2], end)
            near_key, near_value = (x.take(0, stop) for x in whole)
            return self._block(part, x2l, x2w, near_key, near_value, added, context, slice(begin, end))[0]

        mixed = over_query_blocks(block, query.shape[2], rows, *by_rows)
        return SublayerOutput(self.o_proj(mixed.flatten(2)))

    def _block(
        self,
        query: Tensor,
        x2l: Tensor | None,
        x2w: Tensor | None,
        key: Tensor,
        value: Tensor,
        added: dict[str, Tensor],
        context: Call,
        rows: slice,
    ) -> tuple[Tensor, Tensor]:
        """The equation for the queries `rows` and the first keys -> output [B, t, value heads, d], W [B, H, t, s]."""
        keys = slice(0, key.shape[2])
        scores = wide_products(query * self.scaling, key)
        with torch.autocast(query.device.type, enabled=False):  # scores stay wide
            scores = _mix(scores, self.score_mixing, x2l, added.get("m2l"))
        bias = self.score_bias(context)
        if bias is not None:
            scores = scores + bias.block(context.query_index[rows], context.key_index[keys])
        mask = visible_block(context, self.cross, rows, keys)
        weights = visible_softmax(scores, mask, rows_can_be_empty(context, self.cross), overwrite=True).to(query.dtype)
        mixed = _mix(weights, self.weight_mixing, x2w, added.get("m2w"))
        if self.training and self.dropout:
            mixed = F.dropout(mixed, self.dropout)
        return torch.matmul(mixed, value).transpose(1, 2), weights

    # ------------------------------------------------------------------------------------------------ keys and values

    def _matrices(self, name: str, projected: Tensor) -> Tensor:
        """[B, T, from * to] -> [B, T, from, to], one mixing matrix for each token."""
        return projected.unflatten(-1, (-1, self.num_heads if name[-1] == "l" else self.value_heads))

    def _keys_and_values(self, tokens: Tensor, rotation) -> tuple[Tensor, Tensor]:
        """tokens [B, S, D] -> keys [B, key heads, S, d + ...], values [B, value heads, S, d + ...]."""
        key, value = self.heads(self.k_proj(tokens)), self.heads(self.v_proj(tokens))
        if rotation is not None and not rotation.by_length:
            key = rotation(key)
        if "m2l" in self.dynamic:
            key = torch.cat((key, self._matrices("m2l", self.dynamic["m2l"](tokens)).transpose(1, 2)), dim=-1)
        if "m2w" in self.dynamic:
            value = torch.cat((value, self._matrices("m2w", self.dynamic["m2w"](tokens)).permute(0, 3, 1, 2)), dim=-1)
        return key, value

    def _state(
        self, hidden_states: Tensor, memory: Tensor | None, rotation, past_key_values: Cache | None, step: int
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens seen so far, or of the memory, through the cache where there is one."""
        if not self.cross:
            key, value = self._keys_and_values(hidden_states, rotation)
            cache = self_attention_cache(past_key_values)
            return (key, value) if cache is None else self._through(cache, key, value, step)
        if not isinstance(past_key_values, EncoderDecoderCache):
            return self._keys_and_values(given_memory(memory), None)
        cache = past_key_values.cross_attention_cache
        if past_key_values.is_updated.get(step):
            layer: Any = cache.layers[step]
            return self._unfolded(layer.keys, layer.values)
        past_key_values.is_updated[step] = True
        return self._through(cache, *self._keys_and_values(given_memory(memory), None), step)

    def _through(self, cache: Cache, key: Tensor, value: Tensor, step: int) -> tuple[Tensor, Tensor]:
        if self.key_heads != self.value_heads:  # some caches want one number of heads: all side by side as one
            key, value = (x.transpose(1, 2).flatten(2).unsqueeze(1) for x in (key, value))
        return self._unfolded(*appended(cache, key, value, step))

    def _unfolded(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if self.key_heads == self.value_heads:
            return key, value
        numbers = (self.key_heads, self.value_heads)
        key, value = (
            x[:, 0].unflatten(-1, (n, -1)).transpose(1, 2) for x, n in zip((key, value), numbers, strict=True)
        )
        return key, value


def _mix(x: Tensor, mixing: Tensor | None, by_query: Tensor | None, by_key: Tensor | None) -> Tensor:
    """x [B, K, t, s] -> sum over k of x_k (P[k, h] + P_t[k, h] + P_s[k, h]), [B, H, t, s]; `mixing` None: P = 1.

    mixing [K, H], by_query [B, t, K, H], by_key [B, S, K, H] of which the first s count.
    """
    mixing, by_query, by_key = (None if each is None else each.to(x.dtype) for each in (mixing, by_query, by_key))
    mixed = x if mixing is None else torch.matmul(mixing.t(), x.flatten(2)).unflatten(2, x.shape[2:])
    if by_query is not None:
        mixed = mixed + torch.einsum("bkts,btkh->bhts", x, by_query)
    if by_key is not None:
        mixed = mixed + torch.einsum("bkts,bskh->bhts", x, by_key[:, : x.shape[3]])
    return mixed


@register("attention", "talking_heads")
class TalkingHeadsSpec(AttentionSpec):
    """
    Args:
        num_key_heads, num_value_heads: heads of scores before and of weights after the mixing (`None`: as many as
            `num_attention_heads`, which counts those of the softmax).
        mix_scores, mix_weights: the first and the second mixing.
        dynamic: which projections depend on tokens as well, of x2l, m2l, x2w, m2w (by query x or key m, of scores l or
            weights w).
        start: of the mixing matrices; identity is plain multi-head attention.
    """

    summary = "heads mix before and after the softmax"
    cross = True
    acts = frozenset({"rotation", "score_bias"})
    supports = frozenset({"packed_rows", "pair_mask"})

    num_key_heads: int | None = bounded(None, least=1)
    num_value_heads: int | None = bounded(None, least=1)
    mix_scores: bool = True
    mix_weights: bool = True
    dynamic: tuple[str, ...] = ()
    start: Literal["glorot", "identity"] = "glorot"

    def numbers(self, config) -> tuple[int, int]:
        """Key heads and value heads."""
        heads = config.num_attention_heads
        return self.num_key_heads or heads, self.num_value_heads or heads

    def check_fields(self) -> None:
        for name in self.dynamic:
            if name not in DYNAMIC or self.dynamic.count(name) > 1:
                raise ValueError(
                    f"talking_heads needs {', '.join(DYNAMIC)} under `dynamic`, each once, got {self.dynamic}."
                )
            if not (self.mix_scores if name[-1] == "l" else self.mix_weights):
                which = "mix_scores" if name[-1] == "l" else "mix_weights"
                raise ValueError(f"talking_heads with dynamic {name!r} needs `{which}=True`.")

    def check(self, config) -> None:
        if config.num_key_value_heads not in (None, config.num_attention_heads):
            raise ValueError(
                f"talking_heads does not group heads (`num_key_value_heads` is {config.num_key_value_heads}); leave"
                " that at None and set `num_key_heads` and `num_value_heads` of the mechanism."
            )
        for mixed, number, name in zip(
            (self.mix_scores, self.mix_weights),
            self.numbers(config),
            ("num_key_heads", "num_value_heads"),
            strict=True,
        ):
            if not mixed and number != config.num_attention_heads:
                raise ValueError(
                    f"talking_heads with {number} as `{name}` and {config.num_attention_heads} attention heads needs"
                    " the mixing between them; switch it on or make the numbers equal."
                )

    def build(self, config, **where) -> TalkingHeadsAttention:
        return TalkingHeadsAttention(config, self, **where)
