# SPDX-License-Identifier: Apache-2.0
"""Luna: attention nested through a short memory that travels from layer to layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from ..core.cache import RecurrentStateLayer
from ..core.call import Call, SublayerOutput, dropout_rate
from ..core.components import bounded, register
from ..core.initialization import start_projections
from ..core.prepared import Carry, State, one_state
from ..ops.common.head_groups import over_head_groups
from ..ops.common.products import wide_products
from ..ops.common.segments import accumulation_dtype
from ..ops.linear.attention import LinearState, linear_attention
from ..ops.linear.feature_maps import elu_plus_one
from .shared.base import Attention, cross_cache, given_memory
from .shared.linear import state_layer
from .shared.multihead_block import masked_attention
from .shared.spec import AttentionSpec


class PackedMemory(State):
    """P, [1 or B, l, D]."""

    states: Tensor


class LunaAttention(Attention):
    """Pack a text X into a memory P of l vectors, then let each token read the packed memory.

    Ma et al. 2021 (arXiv 2106.01540), section 3, with Attn(Q, K, V) = softmax(scale * Q K^T) V by heads:

        Yp = Attn(P Wpq, X Wpk, X Wpv),   Yx = Attn(X Wq, Yp Wk, Yp Wv) Wo,   P' = LN(P + Yp)         (eqs. 2, 3, 5)

    Keys and values are tied by default (Wpk = Wpv, Wk = Wv). P starts as a parameter of the first layer and is the
    stream `luna_memory`; P' goes to the next layer. In an encoder a text of T tokens uses the first T vectors only
    (dynamic projection, section 3.3). In cross-attention the encoder's text is packed, and the decoder's tokens read
    it.

    Decoder (section 3.4): with f(A, B, C)_t = A_t / t * sum_{j<=t} B_j^T C_j and omega = elu + 1,

        a_j = omega(scale * (P Wpq) (x_j Wk)),   u_t = softmax(f(scale * X Wq, X Wk, a)_t),   Yx_t = f(u, a, X Wv)_t
        Wo.

    P is then the same in all layers, as packing a whole text would show the future; only cross-attention changes it. t
    counts real tokens. All l vectors take part, since a decoder does not know its length.

    Time O(T l D), memory O(T (D + H l)). State in a decoder: sum x_j Wk a_j and sum a_j x_j Wv, [d, l] and [l, d] per
    head (one of them when tied), and t. The weights given out are products of the two steps; in a decoder they do not
    sum to one. `attention_probs_dropout_prob` acts on both softmaxes of an encoder, `memory_dropout` on Yp where it is
    added to P (released code), as `hidden_dropout_prob` does on Yx where that is added to X.
    """

    spec: LunaSpec

    memory_dropout = dropout_rate("added_dropout")

    def __init__(self, config, spec: LunaSpec, *, layer_idx: int, cross: bool = False):
        super().__init__(config, spec, layer_idx=layer_idx, cross=cross)
        del self.k_proj, self.v_proj
        width, inner = config.hidden_size, self.num_heads * self.head_dim
        self.slots = spec.projected_length
        self.pack_heads = self.num_heads if spec.pack_heads is None else spec.pack_heads

        def projection() -> nn.Linear:
            return nn.Linear(width, inner, bias=spec.bias)

        self.pack_q_proj, self.k_proj = projection(), projection()
        self.v_proj: nn.Linear | None = None if spec.tie_kv else projection()  # type: ignore[assignment]
        self.pack_k_proj: Any = None if self.is_causal else projection()
        self.pack_v_proj = None if self.is_causal or spec.tie_kv else projection()
        first = layer_idx == 0 and not (cross and _goes_on(config))
        self.memory = nn.Parameter(torch.empty(self.slots, width)) if first else None
        self.dynamic = spec.dynamic_projection and not cross
        self.memory_dropout = config.hidden_dropout_prob if spec.memory_dropout is None else spec.memory_dropout
        count = config.stack.num_layers(config)
        last = layer_idx == count - 1 and config.stack.num_steps(config) == count
        # The last layer's P' would be read by nobody.
        self.memory_norm = None if self.is_causal or last else config.normalization.build(config)

    def initialize(self, config, init) -> None:
        named = (self.k_proj, self.v_proj, self.pack_q_proj, self.pack_k_proj, self.pack_v_proj)
        inputs = [projection for projection in named if projection is not None]
        start_projections(config, init, inputs=inputs, output=self.o_proj)
        self.start_queries(config, init)
        if self.memory is not None:
            init.normal_(self.memory, mean=0.0, std=config.hidden_size**-0.5)

    # ------------------------------------------------------------------------------------------- forward

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
        handed = self._memory(context)
        passed: Tensor | None = handed
        if self.is_causal:
            output, weights = self._decode(hidden_states, handed, context, past_key_values, step)
        else:
            output, weights, passed = self._encode(hidden_states, handed, memory, context, past_key_values, step)
        output = self.o_proj(output.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1))
        return SublayerOutput(output, weights, states=None if passed is None else one_state(PackedMemory(passed)))

    def _memory(self, context: Call) -> Tensor:
        """P, [1 or B, l, D]."""
        handed = context.state(PackedMemory)
        if handed is not None:
            return handed.states
        if self.memory is None:
            raise ValueError(
                f"luna layer {self.layer_idx} was handed no memory, which the layers below it carry; make all layers"
                " from the first one luna."
            )
        return self.memory[None].clone()  # a parameter that is sharded over devices is whole only inside its own layer

    def _split(self, x: Tensor, heads: int) -> Tensor:
        """[B, T, H * d] -> [B, heads, T, H * d / heads]."""
        return x.view(*x.shape[:-1], heads, -1).transpose(1, 2)

    # ------------------------------------------------------------------------------------------- encoder

    def _encode(
        self,
        hidden_states: Tensor,
        handed: Tensor,
        memory: Tensor | None,
        context: Call,
        past: Cache | None,
        step: int,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        read = given_memory(memory) if self.cross else hidden_states
        mask = context.memory_padding_mask if self.cross else context.padding_mask
        if self.dynamic:
            handed = handed[:, : read.shape[1]]
        literal = self.wants_weights(context)
        cache = cross_cache(past) if self.cross and not context.static else None
        packing: Tensor | None = None
        if cache is not None and cache.is_updated.get(step) and not literal:
            layer: Any = cache.cross_attention_cache.layers[step]
            packed = layer.keys[:, 0]
        else:
            packed, packing = self._pack(handed, read, mask, literal)
            if cache is not None and not cache.is_updated.get(step):
                cache.cross_attention_cache.update(packed[:, None], packed[:, None, :, :0], step)
                cache.is_updated[step] = True
        passed = None
        if self.memory_norm is not None:
            added = F.dropout(packed, self.memory_dropout) if self.training and self.memory_dropout else packed
            passed = self.memory_norm(handed + added)
        key = self._split(self.k_proj(packed), self.num_heads)
        value = key if self.v_proj is None else self._split(self.v_proj(packed), self.num_heads)
        query = self._split(self.q_proj(hidden_states), self.num_heads)
        slots = self._slots_in_use(read, packed, mask)
        output, reading = masked_attention(query, key, value, slots, self.scaling, self.dropout_now, literal)
        weights = None
        if packing is not None and reading is not None:
            if self.pack_heads != self.num_heads:
                packing = packing.mean(1, keepdim=True)
            weights = reading @ packing
        return output.transpose(1, 2), weights, passed

    def _pack(self, handed: Tensor, read: Tensor, mask: Tensor | None, literal: bool) -> tuple[Tensor, Tensor | None]:
        """Yp [B, l, D] and its weights [B, pack heads, l, S]."""
        heads, batch = self.pack_heads, read.shape[0]
        query = self._split(self.pack_q_proj(handed), heads).expand(batch, -1, -1, -1)
        key = self._split(self.pack_k_proj(read), heads)
        value = key if self.pack_v_proj is None else self._split(self.pack_v_proj(read), heads)
        scaling = self.scaling if heads == self.num_heads else query.shape[-1] ** -0.5
        packed, weights = masked_attention(query, key, value, mask, scaling, self.dropout_now, literal)
        return packed.flatten(2), weights

    def _slots_in_use(self, read: Tensor, packed: Tensor, mask: Tensor | None) -> Tensor | None:
        """[B, l]: which vectors tokens may read; none in a row of padding alone."""
        if mask is None:
            return None
        count = mask.sum(-1, keepdim=True)
        if self.dynamic:
            return torch.arange(packed.shape[1], device=read.device) < count
        return (count > 0).expand(-1, packed.shape[1])

    # ------------------------------------------------------------------------------------------- decoder

    def _decode(
        self, hidden_states: Tensor, handed: Tensor, context: Call, past: Cache | None, step: int
    ) -> tuple[Tensor, Tensor | None]:
        heads, mask = self.num_heads, context.query_padding_mask
        query = self._split(self.q_proj(hidden_states), heads) * self.scaling
        key = self._split(self.k_proj(hidden_states), heads)
        value = key if self.v_proj is None else self._split(self.v_proj(hidden_states), heads)
        slots = self._split(self.pack_q_proj(handed), heads) * self.scaling
        layer = state_layer(past, step)
        state = layer.state if layer is not None else {}
        # Tokens read so far, at least one, so that padding before a text divides by something.
        real = hidden_states.new_ones(hidden_states.shape[:2], dtype=torch.bool) if mask is None else mask
        count = real.long().cumsum(-1)
        if state:
            count = count + state["count"]
        share = (1.0 / count.clamp(min=1).to(accumulation_dtype(value.dtype)))[:, None, :, None]
        weights = None
        if self.wants_weights(context) and not state:
            output, weights = self._decode_literal(query, key, value, slots, share, real)
        if layer is not None:
            found, keys, values = self._scan(query, key, value, slots, share, mask, state)
            output = output if weights is not None else found
            more = {} if self.v_proj is None else {"values": values.kv}
            layer.advance(query.shape[2], keys=keys.kv, count=count[:, -1:], **more)
        elif weights is None:

            def scan(query: Tensor, key: Tensor, value: Tensor | None, slots: Tensor) -> Tensor:
                return self._scan(query, key, key if value is None else value, slots, share, mask, {})[0]

            slots = slots.expand(query.shape[0], -1, -1, -1)
            output = over_head_groups(scan, query, key, None if self.v_proj is None else value, slots)
        return output, weights

    def _scan(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        slots: Tensor,
        share: Tensor,
        mask: Tensor | None,
        state: dict[str, Tensor],
    ) -> tuple[Tensor, LinearState, LinearState]:
        """Both sums as causal scans, and the states after them."""
        opened = elu_plus_one(wide_products(key, slots))  # a, [B, H, T, l]
        options: dict[str, Any] = {"causal": True, "key_padding_mask": mask, "normalize": False, "return_state": True}
        options["chunk_size"] = self.spec.chunk_size
        before = (state["keys"], _sums(state["keys"])) if state else None
        # Sums grow with the text: they are divided before anything is brought back to half precision.
        scores, keys = linear_attention(query.to(share.dtype) * share, key, opened, state=before, **options)
        chosen = torch.softmax(scores, dim=-1) * share
        # When tied, what the values were written to is what the keys were written to, turned over.
        if state:
            kept = state.get("values", state["keys"].mT.contiguous())
            before = (kept, _sums(kept))
        found, values = linear_attention(chosen, opened, value, state=before, **options)
        return found, keys, values

    def _decode_literal(
        self, query: Tensor, key: Tensor, value: Tensor, slots: Tensor, share: Tensor, real: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Both sums with their [T, T] matrices."""
        length, opened = query.shape[2], elu_plus_one(wide_products(key, slots))
        seen = torch.ones(length, length, dtype=torch.bool, device=query.device).tril() & real[:, None, None]
        scores = wide_products(wide_products(query, key) * seen, opened.mT) * share
        weights = wide_products(torch.softmax(scores, dim=-1), opened) * seen * share
        return wide_products(weights, value.mT).to(value.dtype), weights.to(value.dtype)


def _sums(kv: Tensor) -> Tensor:
    """In place of the sums of keys, which only a denominator would need."""
    return torch.zeros_like(kv[..., 0])


def _goes_on(config: Any) -> bool:
    """Whether the memory of self-attention continues in cross-attention."""
    carry = config.attention.carries(config)
    return carry is not None and carry.kind is PackedMemory


@register("attention", "luna")
class LunaSpec(AttentionSpec):
    """
    Args:
        projected_length: vectors l of the memory.
        pack_heads: heads of the packing (`None`: as many as the attention has).
        tie_kv: keys are values.
        dynamic_projection: in an encoder a text uses no more vectors than it has tokens.
        memory_dropout: probability on what is added to the memory (`None`: `hidden_dropout_prob`).
        chunk_size: tokens per quadratic block of a decoder's scans.
    """

    summary = "packs a text into a short memory that tokens then read: linear time"
    cross = True
    acts = frozenset()

    projected_length: int = bounded(128, least=1)
    pack_heads: int | None = bounded(None, least=1)
    tie_kv: bool = True
    dynamic_projection: bool = True
    memory_dropout: float | int | None = bounded(None, least=0, below=1)
    chunk_size: int = bounded(64, least=1)

    def check(self, config) -> None:
        heads = config.num_attention_heads
        if config.key_value_heads != heads:
            raise ValueError(
                f"luna does not group heads, so it cannot have {config.key_value_heads} key/value heads for {heads}"
                " heads; leave `num_key_value_heads` unset."
            )
        if heads * config.head_width != config.hidden_size:
            raise ValueError(
                "luna adds what it packs to a memory as wide as the model, so heads must make up `hidden_size` "
                f"{config.hidden_size}, not {heads * config.head_width}; leave `head_dim` unset."
            )
        if self.pack_heads is not None and config.hidden_size % self.pack_heads:
            raise ValueError(
                f"luna needs `pack_heads` that divide `hidden_size` {config.hidden_size}, got {self.pack_heads}."
            )

    def carries(self, config) -> Carry:
        where: Any = {"of_first": True, "handed_on": True, "throughout": True, "reach": "cross_attention"}
        return Carry(PackedMemory, (self.projected_length,), **where)

    def cache_layer(self, config, layer_idx: int = 0) -> RecurrentStateLayer:
        return RecurrentStateLayer()

    def weighs(self, config) -> bool:
        return not config.is_decoder

    def build(self, config, **where) -> LunaAttention:
        return LunaAttention(config, self, **where)
