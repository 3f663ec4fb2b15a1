# SPDX-License-Identifier: Apache-2.0
"""Transformer-XL's attention: scores with relative positions, over the segment and what is remembered of earlier
ones."""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from ..core.cache import appended
from ..core.call import Call, SublayerOutput, dropout_rate, self_attention_cache
from ..core.components import bounded, register
from ..core.hand_overs import HandOver
from ..core.prepared import Carry, State
from ..core.reading_weights import weight_of
from ..core.segment_memory import MemoryLayout, SegmentCacheLayer, StepMemory, take_slots
from ..core.sequence_parallel import SequenceForm, Unserved
from ..ops.common.products import wide_products
from ..ops.common.relative_sinusoids import relative_sinusoids
from .shared.base import Attention, KeyStates
from .shared.query_blocks import visible_softmax
from .shared.query_grid import Grid, PairsInSight, QueryGrid
from .shared.relative_embeddings import DistanceTable, KeyTypes, RelativeEmbeddings, key_types
from .shared.relative_terms import RelativeTerms, by_key_type, by_segment, count_usage
from .shared.spec import AttentionSpec
from .shared.term_blocks import attend_with_terms, blocks_of


class SharedBiases(State):
    """u and v [H, d] of layer 0, and t where it has one."""

    content: Tensor
    position: Tensor
    types: Tensor | None = None


class LearnedVectors(State):
    """Vectors [n, D] with a gradient, of distances (slot "distances") or of token types ("types")."""

    rows: Tensor


class TransformerXLAttention(Attention):
    """score_ij = ((q_i + u) k_j + (q_i + v) W_R R_{i-j}) / sqrt(d) (Dai et al. 2019, arXiv 1901.02860, section 3.3).

    q_i k_j + q_i W_R R_{i-j} + u k_j + v W_R R_{i-j}: content, content-dependent position, global content bias, global
    position bias. R is a sinusoid of the distance i - j (positive for earlier keys, negative for later ones in an
    encoder), which counts slots: a memory of M states stands right before the segment. u and v [H, d] are the same in
    all layers unless `share_biases` is off.

    With `segments` a term (q_i + s) e_ij / sqrt(d) is added, where e_ij is one of two vectors per head: i and j are of
    one token type or of two (Yang et al. 2019, arXiv 1906.08237, section 2.5; Dai et al. 2020, arXiv 2006.03236,
    released code, where a token without a position has no such term either).

    With `distances="learned"` R_{i-j} is a row of a table. With `key_types` a term (q_i + t) W_T e_j / sqrt(d) is
    added, where e_j is the vector of the key's token type, that of a memory's states being the type of the row's first
    token (Ding et al. 2021, arXiv 2012.15688, released code). In a decoder, where all tokens are of one type, it is
    left out: a softmax does not see what is added to all scores.

    Time: twice the products of vanilla attention, and (M + T) D^2 for W_R R, which does not depend on the batch.
    Memory: the scores of one block of queries, O(M + T), also in training; O(H T (M + T)) on the literal path. State:
    keys and values of the last tokens, as many as the stack's memory is long (all of them under a stack without
    memory).
    """

    undecayed = ("content_bias", "position_bias", "segment_bias", "type_bias")

    spec: TransformerXLSpec

    table_dropout = dropout_rate("distance_dropout")

    def __init__(self, config, spec: TransformerXLSpec, **where):
        super().__init__(config, spec, **where)
        self.table_width = config.hidden_size
        size = (self.num_heads, self.head_dim)
        owner = not spec.share_biases or self.layer_idx == 0
        self.content_bias = nn.Parameter(torch.empty(size)) if owner else None
        self.position_bias = nn.Parameter(torch.empty(size)) if owner else None
        self.r_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim, bias=False)
        self.segment_bias = nn.Parameter(torch.empty(size)) if spec.segments else None
        self.segment_table = nn.Parameter(torch.empty(2, *size)) if spec.segments else None  # [different, same]
        self.table_dropout = config.hidden_dropout_prob
        types, learned = spec.types_of(config), spec.distances == "learned"
        self.t_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim, bias=False) if types else None
        self.type_bias = nn.Parameter(torch.empty(size)) if types and owner else None
        holds = (learned or types > 0) and self.layer_idx == 0
        self.relative = RelativeEmbeddings(config, learned, types) if holds else None

    def initialize(self, config, init) -> None:
        super().initialize(config, init)
        if config.initializer == "t5":
            for projection in (self.r_proj, self.t_proj):
                if projection is not None:
                    std = config.initializer_factor * config.hidden_size**-0.5
                    init.normal_(projection.weight, mean=0.0, std=std)
        for bias in (self.content_bias, self.position_bias, self.segment_bias, self.segment_table, self.type_bias):
            if bias is not None:
                init.normal_(bias, mean=0.0, std=config.initializer_range)

    # ------------------------------------------------------------------------------------------------ what layers
    # share

    def prepare(self, context: Call, past_key_values: Cache | None) -> None:
        if self.spec.share_biases and self.content_bias is not None and self.position_bias is not None:
            biases = (weight_of(self, "content_bias"), weight_of(self, "position_bias"))
            types = None if self.type_bias is None else weight_of(self, "type_bias")
            context.start(SharedBiases(*biases, types))
        if self.relative is not None and (types := self.relative.of_types()) is not None:
            context.start(LearnedVectors(types), "types")
            layout, given = MemoryLayout.of(context), context.inputs.get("token_type_ids")
            context.keep(KeyTypes(key_types(given, context, layout.length, layout.order)))
        learned = self.spec.distances == "learned"
        known = context.state(LearnedVectors, "distances") if learned else context.find(DistanceTable, self._slot)
        if known is None:
            length, moved = context.query_index.shape[0], context.find(QueryGrid)
            keys = None if moved is None else moved.count
            keys = length + self._slots_ahead(context, past_key_values) if keys is None else keys
            grid = self._grid(context, length, keys)
            distance = (
                torch.arange(grid.largest(length), grid.offset - keys, -1, device=context.query_index.device)
                * grid.stride
            )
            if self.spec.clamp is not None:
                distance = distance.clamp(-self.spec.clamp, self.spec.clamp)
            rows = None if self.relative is None else self.relative.of_distances(distance)
            if rows is not None:
                context.start(LearnedVectors(rows), "distances")
                return
            dtype = self._biases(context)[0].dtype  # weights of projections may be quantized
            table = relative_sinusoids(distance, self.table_width, dtype)
            table = F.dropout(table, self.table_dropout, self.training)
            context.keep(DistanceTable(table), self._slot)

    @property
    def _slot(self) -> tuple[str, int, int | None]:
        """Of R, where layers find it that make it alike."""
        return self.spec.type, self.table_width, self.spec.clamp

    @staticmethod
    def _grid(context: Call, length: int, keys: int) -> Grid:
        """The stack's, or that of a text whose last tokens are the queries."""
        found = context.find(QueryGrid)
        return Grid(keys - length) if found is None else found.grid

    def _slots_ahead(self, context: Call, past_key_values: Cache | None) -> int:
        """Keys before the segment: of the memory, or of the cache."""
        cache = self_attention_cache(past_key_values)
        if cache is None or not cache.get_seq_length():
            return MemoryLayout.of(context).length
        layer = cache.layers[0]
        return layer.stored if isinstance(layer, SegmentCacheLayer) else cache.get_seq_length()

    def _biases(self, context: Call) -> tuple[Tensor, Tensor]:
        if self.content_bias is not None and self.position_bias is not None:
            return self.content_bias, self.position_bias
        shared = context.state(SharedBiases)
        if shared is None:
            raise ValueError(
                "transformer_xl layers share the biases of layer 0, which has another attention here; set "
                "`share_biases=False`."
            )
        return shared.content, shared.position

    # ------------------------------------------------------------------------------------------------ the mechanism

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
        query = self.queries(hidden_states)
        key, value, real = self._keys_and_values(hidden_states, context, past_key_values, step)
        key, value = self.repeated(key), self.repeated(value)
        content_bias, position_bias = self._biases(context)
        key, of_types = self._typed(key, content_bias, context)
        content = (query + content_bias[:, None].to(query.dtype)) * self.scaling
        length, keys = query.shape[2], key.shape[2]
        learned = self.spec.distances == "learned"
        table = context.given(LearnedVectors, "distances") if learned else context.prepared(DistanceTable, self._slot)
        relative = self._relative(table.rows, keys, past_key_values, step)
        grid = self._grid(context, length, keys)
        if self.wants_weights(context):
            rows = slice(0, length)
            positional = (query + position_bias[:, None].to(query.dtype)) * self.scaling
            by_distance = wide_products(positional, relative.mT)
            column = grid.largest(length) - grid.distances(rows, slice(0, keys), query.device)
            column = column.clamp(0, by_distance.shape[-1] - 1).expand(*by_distance.shape[:2], -1, -1)
            scores = grid.without_first(by_distance.gather(-1, column), rows)
            scores = scores + wide_products(content, key)
            if of_types is not None:
                scores = scores + by_key_type(of_types, context.prepared(KeyTypes).types).mT
            if self.segment_bias is not None and self.segment_table is not None:
                segmental = (query + self.segment_bias[:, None].to(query.dtype)) * self.scaling
                by_kind = wide_products(segmental, self.segment_table.permute(1, 0, 2).to(query.dtype))
                same = self.same_segment(context, rows, slice(0, keys))
                scores = scores + grid.without_first(by_segment(by_kind, same), rows)
            mask = self.visible(rows, slice(0, keys), grid, context, real)
            can_be_empty = real is not None or context.find(PairsInSight) is not None
            weights = visible_softmax(scores, mask, can_be_empty, overwrite=True).to(value.dtype)
            count_usage(context, step, weights, rows, keys)
            dropped = F.dropout(weights, self.dropout) if self.training and self.dropout else weights
            return SublayerOutput(
                self.written(torch.matmul(dropped, value).transpose(1, 2), context, hidden_states), weights
            )

        blocks = blocks_of(query, keys)
        if self.is_causal:  # a block's first query meets keys as much later than itself as the block is long; not seen
            relative = F.pad(relative, (0, min(blocks.rows, length) - 1))
        tables = [relative.transpose(-1, -2), (position_bias - content_bias)[:, None].to(query.dtype) * self.scaling]
        if self.segment_bias is not None and self.segment_table is not None:
            tables.append((self.segment_bias - content_bias)[:, None].to(query.dtype) * self.scaling)
            tables.append(self.segment_table.permute(1, 2, 0).to(query.dtype))
        if of_types is not None:
            tables.append(of_types)
        terms = RelativeTerms(self, tuple(tables), context, keys, grid, real, step)
        mixed = attend_with_terms(content, key, value, terms, self.dropout_now, blocks)
        return SublayerOutput(self.written(mixed, context, hidden_states))

    def _typed(self, key: Tensor, content_bias: Tensor, context: Call) -> tuple[Tensor, Tensor | None]:
        """Keys [B, H, S, d] with what their types' vectors add to them, and a number for each type and head, [H, n, 1]
        (None: no types): (q + u) k + (q + t) e = (q + u) (k + e) + (t - u) e."""
        if self.t_proj is None:
            return key, None
        bias = cast(Tensor, context.given(SharedBiases).types if self.type_bias is None else self.type_bias)
        vectors = (
            self.t_proj(context.given(LearnedVectors, "types").rows)
            .unflatten(-1, (self.num_heads, -1))
            .transpose(0, 1)
        )
        number = wide_products(vectors, (bias - content_bias)[:, None].to(vectors.dtype)) * self.scaling
        return key + vectors[:, context.prepared(KeyTypes).types].transpose(0, 1), number.to(key.dtype)

    def _keys_and_values(
        self, hidden_states: Tensor, context: Call, past_key_values: Cache | None, step: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values of memory and tokens, and which are real [B, S] (None: all)."""
        tokens, real = hidden_states, context.query_padding_mask
        earlier, source = context.state(StepMemory), context.state(KeyStates)
        if source is not None:
            tokens, real = source.states, context.prepared(QueryGrid).real
        if earlier is not None:
            layout = context.prepared(MemoryLayout)
            tokens, real, order = torch.cat([earlier.states, hidden_states], dim=1), layout.real, layout.order
            tokens = tokens if order is None else take_slots(tokens, order)
        key, value = self.keys(tokens), self.heads(self.v_proj(tokens))
        cache = self_attention_cache(past_key_values)
        if cache is None:
            return key, value, real
        layer = cache.layers[step] if step < len(cache.layers) else None
        if isinstance(layer, SegmentCacheLayer):
            return layer.extend(key, value, real, hidden_states.shape[1], MemoryLayout.of(context).begun)
        if context.static or earlier is not None:
            raise ValueError(
                "transformer_xl keeps the last keys and values and a memory before them, which a"
                f" {type(cache).__name__} has no place for; leave `past_key_values` out, or make it with"
                " `hf_xformers.core.cache.make_cache(config)`."
            )
        return *appended(cache, key, value, step), context.padding_mask

    def by_head(self, table: Tensor) -> Tensor:
        """The vectors of distances that scores are made with: R [n, table_width] -> W_R R [H, d, n]."""
        # As one row of a batch: adapters that differ by row have to notice that distances are none.
        return self.r_proj(table[None])[0].unflatten(-1, (self.num_heads, -1)).permute(1, 2, 0)

    def _relative(self, table: Tensor, keys: int, past_key_values: Cache | None, step: int) -> Tensor:
        """W_R R by distance, [H, d, distances]: the largest, keys - 1, first; in an encoder negative ones follow 0."""
        if not self.is_causal:
            return self.by_head(table)
        cache = self_attention_cache(past_key_values)
        layer = None if cache is None or torch.is_grad_enabled() else cache.layers[step]
        if not isinstance(layer, SegmentCacheLayer):
            return self.by_head(table[:keys])
        # While generating only the distances that are new are projected.
        relative = layer.relative
        known = 0 if relative is None else relative.shape[-1]
        if relative is None or known < keys:
            new = self.by_head(table[: keys - known])
            relative = layer.relative = new if relative is None else torch.cat([new, relative], dim=-1)
        return relative[..., relative.shape[-1] - keys :]

    def same_segment(self, context: Call, rows: slice, keys: slice) -> Tensor:
        """Whether the queries `rows` and `keys` are of one segment, [B or 1, 1, t, s]."""
        moved = context.find(QueryGrid)
        of_queries, of_keys = (context.inputs.get("token_type_ids"),) * 2 if moved is None else moved.types
        if of_queries is None or of_keys is None:
            shape = (1, 1, rows.stop - rows.start, keys.stop - keys.start)
            return torch.ones(shape, dtype=torch.bool, device=context.query_index.device)
        of_queries, of_keys = of_queries[:, None, rows, None], of_keys[:, None, None, keys]
        same = of_queries == of_keys
        if self.spec.joint_type is None:
            return same
        return same | (of_queries == self.spec.joint_type) | (of_keys == self.spec.joint_type)

    def visible(
        self, rows: slice, keys: slice, grid: Grid, context: Call, real: Tensor | None, order: bool = True
    ) -> Tensor | None:
        """Which of `keys` the queries `rows` may see, [B or 1, 1, t or 1, s] (None: all); `order=False`: not minding
        that they may be later."""
        mask: Tensor | None = None
        reach, order = self.spec.reach, order and self.is_causal
        if order or reach is not None:
            distance = grid.distances(rows, keys, context.query_index.device) * grid.stride
            if reach is not None:
                mask = (distance <= reach) if self.is_causal else (distance.abs() <= reach)
            if order:
                mask = distance >= 0 if mask is None else mask & (distance >= 0)
            mask = mask if mask is None or mask.ndim == 4 else mask[None, None]
        sight = context.find(PairsInSight)
        if sight is not None:
            pairs = sight.pairs[:, None, rows, keys]
            mask = pairs if mask is None else mask & pairs
        if real is not None:
            padding = real[:, None, None, keys]
            mask = padding if mask is None else mask & padding
        segments = context.segment_ids
        if segments is not None:
            same = segments[:, None, rows, None] == segments[:, None, None, keys]
            mask = same if mask is None else mask & same
        return mask


@register("attention", "transformer_xl", aliases=("transformer_xl_relative",))
class TransformerXLSpec(AttentionSpec):
    """
    Args:
        share_biases: one u and one v for all layers, which stand in layer 0 (off: one pair per layer).
        clamp: distances (tokens) beyond which all count as this one, for texts longer than those trained on.
        reach: how far back (in an encoder: to either side) a query sees, in tokens; with a memory at least as long,
            every query sees as many keys.
        segments: a term of whether two tokens have the same `token_type_ids`, which need no table then
            (`type_vocab_size=0`).
        joint_type: the type whose tokens are of every segment (Funnel's [CLS]: 2).
        distances: the vectors of distances are sinusoids, or `learned` (a table that layer 0 has for all).
        key_types: how many `token_type_ids` there are whose keys get a term of their own (0: no such term), in an
            encoder.
    """

    summary = "content and relative-position scores with two global biases"
    layers_apart = False  # layer 0 owns the biases of all
    acts = frozenset()
    supports = frozenset({"packed_rows"})
    reads = frozenset(
        {HandOver.SEGMENT_MEMORY, HandOver.KEY_USAGE, HandOver.POOLED_QUERIES, HandOver.SCATTERED_QUERIES}
    )
    knows_order = True

    share_biases: bool = True
    clamp: int | None = bounded(None, least=0)
    reach: int | None = bounded(None, least=0)
    segments: bool = False
    joint_type: int | None = None
    distances: Literal["sinusoid", "learned"] = "sinusoid"
    key_types: int = 0

    @property
    def inputs(self) -> tuple[str, ...]:  # type: ignore[override]  # for other specs they do not depend on a field
        return ("token_type_ids",) if self.segments or self.key_types else ()

    def types_of(self, config) -> int:
        """Types of keys that are told apart."""
        return 0 if config.is_decoder else self.key_types

    def sequence_form(self, config) -> SequenceForm | Unserved:
        if self.segments or self.types_of(config):
            return Unserved("with `segments` or `key_types` compares token types, which a memory of states has not")
        return SequenceForm.MEMORY

    def check_fields(self) -> None:
        if self.key_types < 0 or self.key_types == 1:
            raise ValueError(
                f"transformer_xl tells `key_types` of two or more kinds apart, got {self.key_types}; set it to 0 for"
                " no such term."
            )
        if self.joint_type is not None and not self.segments:
            raise ValueError(f"transformer_xl's `joint_type` {self.joint_type} needs `segments=True`.")

    def check(self, config) -> None:
        if config.hidden_size % 2 and self.distances == "sinusoid":
            raise ValueError(f"transformer_xl's sinusoids need an even `hidden_size`, got {config.hidden_size}.")
        if self.key_types and not config.stack.keeps_tokens:
            raise ValueError(
                f"transformer_xl's `key_types` are those of the text's tokens, which stack {config.stack.type!r} does"
                " not keep; set `key_types=0`, or use the stack 'segment_recurrent'."
            )
        if self.segments and (config.is_decoder or config.stack.memory_slots(config) is not None):
            raise ValueError(
                "transformer_xl's `segments` compare the types of the tokens of one text, and earlier tokens in a"
                " cache or memory keep none; use it in an encoder without memory, or set `segments=False`."
            )

    def carries(self, config) -> Carry | None:
        if not (self.share_biases or self.distances == "learned" or self.types_of(config)):
            return None
        heads = (config.num_attention_heads, config.head_width) if self.share_biases else ()
        clamp = self.clamp if self.distances == "learned" else None
        return Carry(SharedBiases, (*heads, self.distances, clamp, self.types_of(config)), of_first=True)

    def cache_layer(self, config, layer_idx: int = 0) -> SegmentCacheLayer:
        """Room for the stack's memory, or for all tokens."""
        return SegmentCacheLayer(config.stack.cache_slots(config))

    def build(self, config, **where) -> TransformerXLAttention:
        return TransformerXLAttention(config, self, **where)
