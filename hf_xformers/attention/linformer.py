# SPDX-License-Identifier: Apache-2.0
"""Linformer: keys and values projected to a short sequence by learned matrices over positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from ..core.call import Call, SublayerOutput
from ..core.components import bounded, register
from ..core.prepared import Carry, State, States, one_state
from ..core.sequence_parallel import SequenceForm, Unserved
from ..core.text_parts import TextParts
from ..core.visibility import tokens_in_order
from ..ops.common.fused import fused_attention
from ..ops.common.real_tokens import real_first, real_places
from ..ops.pooled_blocks import pooled_blocks
from .shared.base import Attention, cross_cache, given_memory, literal_softmax_attention
from .shared.multihead_block import masked_attention
from .shared.spec import AttentionSpec


class Projection(State):
    """E of layer 0, [1, ...]."""

    matrix: Tensor


class LinformerAttention(Attention):
    """o_i = softmax(scale * q_i (E K)^T) (F V) with learned E, F [k, n] over positions.

    Wang et al. 2020 (arXiv 2006.04768), section 4, eq. 7. n is `max_length`; a text of T tokens uses the first T
    columns, counted over its real tokens, so padding on either side takes none. Keys and values of padding are zero
    before the projection, and the short sequence needs no mask.

    Sharing: `none` (E_h and F_h for every head), `headwise` (E and F per layer), `key_value` (E = F per layer),
    `layerwise` (one matrix for all layers, owned by layer 0 and passed on). Where heads share, tokens are projected to
    k rows first and to keys and values then: E (X W + b) = (E X) W + (E 1) b.

    The same section's other projections take blocks of n / k tokens: the `mean` of their keys and values, the `max`,
    or a convolution (`conv`) of kernel and stride n / k over the channels of a head, whose kernels are shared as E and
    F are. A text of T tokens then has T k / n rows and no empty ones.

    Time O(T k D), memory O(T k). The weights given out are those of tokens, softmax(q (E K)^T) F: they can be negative
    and need not sum to one. What a block has is divided equally among its tokens.

    Raises:
        ValueError: a row has more than `max_length` tokens.
    """

    spec: LinformerSpec

    def __init__(self, config, spec: LinformerSpec, *, layer_idx: int, cross: bool = False):
        super().__init__(config, spec, layer_idx=layer_idx, cross=cross)
        if cross and spec.sharing == "layerwise":
            raise ValueError(
                "linformer as cross-attention has no layers below to share its projection with; choose another"
                " `sharing` than 'layerwise' there."
            )
        self.length, rows = spec.longest(config), spec.rows(config)
        self.block = -(-self.length // rows)  # tokens of a row, where it is one of a block
        shape: tuple[int, ...] = (rows, self.length)
        if spec.projection == "conv":
            shape = (self.head_dim, self.block * self.head_dim)
        shape = (self.num_key_value_heads, *shape) if spec.sharing == "none" else shape
        learned = spec.projection in ("linear", "conv")
        own, two = spec.sharing != "layerwise" or layer_idx == 0, spec.sharing in ("none", "headwise")
        self.key_projection = nn.Parameter(torch.empty(shape)) if learned and own else None
        self.value_projection = nn.Parameter(torch.empty(shape)) if learned and two else None

    def initialize(self, config, init) -> None:
        super().initialize(config, init)
        for projection in (self.key_projection, self.value_projection):
            if projection is not None:  # Glorot's bound for each matrix, times 1 / sqrt(2) (released code)
                bound = (3 / sum(projection.shape[-2:])) ** 0.5
                init.uniform_(projection, -bound, bound)

    # ------------------------------------------------------------------------------------------- positions

    def prepare(self, context: Call, past_key_values: Cache | None) -> None:
        if self.cross:
            return
        if context.parts is not None:
            self._check_length(context.parts.total_length, context.parts.mask)
            return
        self._check_length(context.key_index.shape[0], context.padding_mask)
        tokens_in_order(context)

    def _check_length(self, longest: int, padding: Tensor | None) -> None:
        if longest <= self.length:
            return
        if padding is not None:
            if torch.compiler.is_compiling() or torch.jit.is_tracing():
                return
            longest = int(padding.sum(-1).max())  # padding takes no column
        if longest > self.length:
            raise ValueError(
                f"The sequence has {longest} tokens, but this linformer projects {self.length}; shorten it, or build"
                " the model with a larger `max_length` of the attention (or `max_position_embeddings`)."
            )

    def _projections(self, context: Call) -> tuple[Tensor, Tensor, States | None]:
        """E, F and what to pass on."""
        if self.spec.sharing != "layerwise":
            first: Any = self.key_projection  # every layer has its own
            return first, first if self.value_projection is None else self.value_projection, None
        if self.key_projection is not None:
            # A copy: a parameter that is sharded over devices is whole only inside its own layer.
            own = self.key_projection.clone()
            return own, own, one_state(Projection(own[None]))
        handed = context.state(Projection)
        if handed is None:
            raise ValueError(
                f"linformer layer {self.layer_idx} was handed no projection, which layer 0 owns; make layer 0"
                " linformer with `sharing='layerwise'` too, or choose another `sharing`."
            )
        return handed.matrix[0], handed.matrix[0], None

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
        read: Any = memory if self.cross else hidden_states  # None where a cache has what is made of it
        if self.cross and read is not None:
            self._check_length(read.shape[1], context.memory_padding_mask)
        query = self.heads(self.q_proj(hidden_states))
        first, second, states = self._projections(context)
        if self.spec.projection != "linear":
            output, weights = self._by_blocks(query, read, first, second, context, past_key_values, step)
        elif self.wants_weights(context):
            output, weights = self._literal(query, given_memory(read), first, second, context)
        else:
            key, value = self._short(read, first, second, context, past_key_values, step)
            grouped = self.num_key_value_groups > 1
            output = fused_attention(
                query, key, value, dropout_p=self.dropout_now, scale=self.scaling, enable_gqa=grouped
            ).transpose(1, 2)
            weights = None
        output = self.o_proj(output.reshape(*hidden_states.shape[:-1], -1))
        return SublayerOutput(output, weights, states=states)

    def _by_blocks(
        self,
        query: Tensor,
        read: Tensor | None,
        first: Tensor,
        second: Tensor,
        context: Call,
        past: Cache | None,
        step: int,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention to the rows of blocks -> output [B, T, H, d] and, on the literal path, weights of tokens."""
        key, value = self._short(read, first, second, context, past, step)
        mask, _ = self._padding(context)
        starts = torch.arange(key.shape[2], device=key.device) * self.block
        used = None if mask is None else starts < mask.sum(-1, keepdim=True)
        output, weights = masked_attention(
            query, key, value, used, self.scaling, self.dropout_now, literal=self.wants_weights(context)
        )
        return output, None if weights is None else self._of_tokens(weights, given_memory(read).shape[1], mask)

    def _of_tokens(self, weights: Tensor, length: int, mask: Tensor | None) -> Tensor:
        """Weights of blocks [B, H, T, rows] -> of tokens [B, H, T, length]."""
        place = torch.arange(length, device=weights.device)[None] if mask is None else real_places(mask)
        total = place.new_full((1, 1), length) if mask is None else mask.sum(-1, keepdim=True)
        block = place // self.block
        size = (total - block * self.block).clamp(1, self.block)
        block = block.clamp(max=weights.shape[-1] - 1).expand(weights.shape[0], -1)
        shared = weights.gather(-1, block[:, None, None].expand(-1, *weights.shape[1:3], -1)) / size[:, None, None]
        return shared if mask is None else shared.masked_fill(~mask[:, None, None], 0.0)

    def _short(
        self, read: Tensor | None, first: Tensor, second: Tensor, context: Call, past: Cache | None, step: int
    ) -> tuple[Tensor, Tensor]:
        """E K and F V, [B, heads, k, d]; those of a memory are computed once per generated text."""
        cache = cross_cache(past) if self.cross and not context.static else None
        if cache is not None and cache.is_updated.get(step):
            layer: Any = cache.cross_attention_cache.layers[step]
            return layer.keys, layer.values
        read = given_memory(read)
        if context.parts is not None and not self.cross:
            return self._short_of_parts(read, first, second, context.parts)
        mask, order = self._padding(context)
        tokens, mask = self._by_place(read, mask, order)
        columns = tokens.shape[1]
        if self.spec.projection == "linear":
            key = self._project(tokens, mask, self.k_proj, first[..., :columns])
            value = self._project(tokens, mask, self.v_proj, second[..., :columns])
        else:
            key, value = self._pool(tokens, mask, self.k_proj, first), self._pool(tokens, mask, self.v_proj, second)
        if cache is not None:
            key, value = cache.cross_attention_cache.update(key, value, step)
            cache.is_updated[step] = True
        return key, value

    def _short_of_parts(
        self, tokens: Tensor, first: Tensor, second: Tensor, parts: TextParts
    ) -> tuple[Tensor, Tensor]:
        """[`LinformerAttention._short`] of texts of which each process holds a part, its tokens [B, t, D]: what every
        part adds to the rows goes to all."""
        mask = None if parts.mask is None else parts.own(parts.mask)[..., None]
        if mask is not None:
            tokens, mask = tokens.masked_fill(~mask, 0.0), mask.to(tokens.dtype)
        rows = []
        for projection, matrix in ((self.k_proj, first), (self.v_proj, second)):
            columns = self._columns_of_part(matrix.to(tokens.dtype), parts)
            if columns.ndim < 4:
                rows.append(self._project(tokens, mask, projection, columns))
            else:
                each = projection(tokens)
                rows.append(columns @ self.heads(each if mask is None else each * mask))
        key, value = parts.total(torch.cat(rows, dim=1)).chunk(2, dim=1)
        return key, value

    def _columns_of_part(self, matrix: Tensor, parts: TextParts) -> Tensor:
        """The columns of E or F [k, n] or [heads, k, n] for the tokens of a part, [.., k, t]; where padding stands
        before a text, those of each row, [B, heads or 1, k, t]."""
        if parts.mask is None or not bool((parts.mask[:, 1:] & ~parts.mask[:, :-1]).any()):
            return F.pad(matrix, (0, max(parts.total_length - self.length, 0)))[
                ..., parts.start : parts.start + parts.length
            ]
        places = parts.own(real_places(parts.mask)).clamp(max=self.length - 1)
        return (matrix if matrix.ndim == 3 else matrix[None])[..., places].permute(2, 0, 1, 3)

    def _padding(self, context: Call) -> tuple[Tensor | None, Tensor | None]:
        """The mask of what is read, [B, S], and its tokens with the real ones first."""
        if not self.cross:
            return context.padding_mask, tokens_in_order(context)
        mask = context.memory_padding_mask
        return mask, None if mask is None else real_first(mask)

    def _by_place(self, tokens: Tensor, mask: Tensor | None, order: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Real tokens first, zeros after them, at most n of them."""
        if mask is None or order is None:
            return tokens, mask
        order = order[:, : self.length]
        mask = mask.gather(1, order)[..., None]
        tokens = tokens.gather(1, order[..., None].expand(-1, -1, tokens.shape[-1]))
        return tokens.masked_fill(~mask, 0.0), mask.to(tokens.dtype)

    def _project(self, tokens: Tensor, mask: Tensor | None, projection: nn.Linear, matrix: Tensor) -> Tensor:
        """matrix [k, S] or [heads, k, S] times the keys or values of tokens [B, S, D] -> [B, heads, k, d]."""
        matrix = matrix.to(tokens.dtype)
        if matrix.ndim == 3:
            each = projection(tokens)
            return matrix @ self.heads(each if mask is None else each * mask)
        short = projection(matrix @ tokens)
        if projection.bias is not None:  # it was added once per row; it belongs there as often as E 1 says
            total = matrix.sum(-1, keepdim=True) if mask is None else matrix @ mask
            bias = projection(torch.zeros_like(tokens[:, :1]))  # what adapters make of it: IA3 has factors for it, too
            short = short + (total - 1) * bias
        return self.heads(short)

    def _pool(self, tokens: Tensor, mask: Tensor | None, projection: nn.Linear, kernel: Tensor) -> Tensor:
        """Keys or values of tokens [B, S, D], a row for each block, [B, heads, ceil(S / block), d]."""
        each = projection(tokens)
        each = self.heads(each if mask is None else each * mask)
        if self.spec.projection != "conv":
            count = None if mask is None else (mask[..., 0] > 0).sum(-1)
            return pooled_blocks(each, self.block, count, self.spec.projection)
        each = F.pad(each, (0, 0, 0, -each.shape[2] % self.block))
        return each.unflatten(2, (-1, self.block)).flatten(3) @ kernel.to(each.dtype).mT

    def _literal(
        self, query: Tensor, read: Tensor, first: Tensor, second: Tensor, context: Call
    ) -> tuple[Tensor, Tensor]:
        """The equation with keys and values of all tokens -> output [B, T, H, d], weights of tokens [B, H, T, S]."""
        mask, _ = self._padding(context)
        key, value = self.heads(self.k_proj(read)), self.heads(self.v_proj(read))
        count = read.shape[1]
        places = torch.arange(count, device=read.device)[None]
        if mask is not None:
            places = real_places(mask)
        columns = []
        for matrix in (first, second):
            matrix = matrix if matrix.ndim == 3 else matrix[None]
            chosen = matrix[..., places.clamp(max=self.length - 1)].permute(2, 0, 1, 3)  # [B or 1, heads or 1, k, S]
            columns.append(chosen if mask is None else chosen * mask[:, None, None])
        short = columns[0].to(key.dtype) @ key
        _, products = literal_softmax_attention(query, short, torch.zeros_like(short), None, None, self.scaling)
        products = F.dropout(products, self.dropout_now)
        spread = columns[1].to(value.dtype)
        groups = self.num_key_value_groups
        if groups > 1:
            value = value.repeat_interleave(groups, dim=1)
            spread = spread.repeat_interleave(groups, dim=1) if spread.shape[1] > 1 else spread
        weights = products @ spread
        return (weights @ value).transpose(1, 2), weights


@register("attention", "linformer")
class LinformerSpec(AttentionSpec):
    """
    Args:
        projected_length: rows k (`None`: a quarter of max_length).
        sharing: which projections are one and the same.
        max_length: columns n (`None`: `max_position_embeddings`).
        projection: what makes a row, a `linear` map of all positions, or of a block of n / k tokens the `mean`, the
            `max` or a convolution (`conv`).
    """

    summary = "keys and values projected to a short sequence over positions: linear time"
    cross = True
    acts = frozenset()
    why_not: ClassVar[Mapping[str, str]] = {
        "causal": "each row of its short sequence mixes all positions, later ones too."
    }

    projected_length: int | None = bounded(None, least=1)
    sharing: Literal["none", "headwise", "key_value", "layerwise"] = "headwise"
    max_length: int | None = bounded(None, least=1)
    projection: Literal["linear", "mean", "max", "conv"] = "linear"

    def longest(self, config) -> int:
        """Columns n."""
        return config.max_position_embeddings if self.max_length is None else self.max_length

    def places(self, config) -> int:
        return self.longest(config)

    def rows(self, config) -> int:
        """Rows k."""
        return max(self.longest(config) // 4, 1) if self.projected_length is None else self.projected_length

    def sequence_form(self, config) -> SequenceForm | Unserved:
        if self.projection == "linear":
            return SequenceForm.SHORT
        return Unserved(f"with `projection` {self.projection!r} makes rows of blocks that parts may cut")

    def carries(self, config) -> Carry | None:
        if self.sharing != "layerwise":
            return None
        sizes: tuple = (self.rows(config), self.longest(config))
        sizes = sizes if self.projection == "linear" else (*sizes, self.projection, config.head_width)
        return Carry(Projection, sizes, of_first=True, handed_on=True)

    def check_fields(self) -> None:
        if self.projection in ("mean", "max") and self.sharing != "headwise":
            raise ValueError(
                f"linformer with projection={self.projection!r} has no parameters that `sharing` {self.sharing!r}"
                " could make one; leave `sharing` out, or take the projection 'linear' or 'conv'."
            )

    def check(self, config) -> None:
        if self.rows(config) > self.longest(config):
            raise ValueError(
                f"linformer projects at most {self.longest(config)} tokens (`max_length`), so `projected_length` "
                f"{self.projected_length} would make them more, not fewer."
            )

    def weighs(self, config) -> bool:
        return self.projection in ("mean", "max")

    def build(self, config, **where) -> LinformerAttention:
        return LinformerAttention(config, self, **where)
