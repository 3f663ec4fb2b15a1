# SPDX-License-Identifier: Apache-2.0
"""Synthesizer: attention whose scores are made without comparing tokens."""

from __future__ import annotations

import math
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from ..core.cache import appended
from ..core.call import Call, SublayerOutput, can_inspect, self_attention_cache
from ..core.components import bounded, register
from ..core.holes import take
from ..core.initialization import start_projections
from ..core.prepared import Prepared
from ..core.visibility import mask_of_call, visible_pairs
from ..ops.common.fused import fused_attention
from ..ops.common.products import wide_products
from ..ops.common.real_tokens import real_first, real_places
from .shared.base import Attention
from .shared.query_blocks import over_query_blocks, rows_at_once, shared_rows, visible_softmax
from .shared.spec import AttentionSpec

KINDS = ("dot", "dense", "random", "fixed_random", "factorized_dense", "factorized_random")
# Kinds that are products of a vector of the query and one of the key, so that fused attention computes them.
PRODUCTS = ("dot", "dense", "factorized_random")


class Places(Prepared):
    """Numbers of queries and of keys among the real tokens of their rows, [B or 1, T] and [B or 1, S], and the slots
    of keys, real ones first [B, S] (None: as they stand)."""

    queries: Tensor
    keys: Tensor
    order: Tensor | None = None


class SynthesizerAttention(Attention):
    """o_h = softmax(B_h) v_h, where B_h[i, j] comes from token i and place j, or from the two places alone.

    Tay, Bahri, Metzler, Juan, Zhao and Zheng 2021 (arXiv 2005.00743), section 3. L = `max_length`, B cut to T x T:

    - dense: B_h[i] = relu(x_i W1_h + b1) W2_h + b2, W2_h [d, L];
    - random: B_h = R_h [L, L], trained; fixed_random: the same, never trained (a buffer, saved with the model);
    - factorized_dense: u = x Fa, w = x Fb of widths a b = L; B_h[i, p b + r] = u[i, p] w[i, r];
    - factorized_random: B_h = R1_h R2_h^T, [L, rank] each;
    - mixtures "m1+m2", also with "dot" = q k / sqrt(d): B = sum_m a_m B_m with a = softmax of learned numbers
      ("softmax"), (1 - s) dot + s other with s = sigmoid of one ("sigmoid", released code), or the sum ("sum").

    A place is a token's number among the real tokens of its row, so that padding on the left moves no table,
    whatever `position_ids` say. dot, dense and factorized_random are products of vectors of width d, d + 1 and
    `rank`, and a mixture of them is a product of the joined vectors: they run in fused attention in O(T) memory. The
    others need their scores written out, which happens in blocks of queries; where those depend on places alone they
    have no batch axis. Time O(T^2 D) as in dense attention. State: the values of all tokens seen, and keys in
    mixtures with dot.

    Raises:
        ValueError: a row has more than `max_length` tokens.
    """

    spec: SynthesizerSpec
    fixed_table: Tensor

    undecayed = ("mixture",)

    def __init__(self, config, spec: SynthesizerSpec, **where):
        super().__init__(config, spec, **where)
        self.members, self.length = spec.members, spec.table_length(config)
        self.by_products = all(member in PRODUCTS for member in self.members)
        width, heads, d, length = config.hidden_size, self.num_heads, self.head_dim, self.length
        tables = 1 if spec.share_heads else heads
        if "dot" not in self.members:
            self.q_proj = self.k_proj = None  # type: ignore[assignment]
        if "dense" in self.members:
            self.hidden_proj = nn.Linear(width, heads * d, bias=spec.bias)
            self.dense_table = nn.Parameter(torch.empty(tables, length, d))
            self.dense_bias = nn.Parameter(torch.empty(tables, length)) if spec.bias else None
        if "random" in self.members:
            self.random_table = nn.Parameter(torch.empty(tables, length, length))
        if "fixed_random" in self.members:
            self.register_buffer("fixed_table", torch.empty(tables, length, length))
        if "factorized_dense" in self.members:
            first = spec.first_factor(config)
            self.row_proj = nn.Linear(width, heads * first, bias=spec.bias)
            self.column_proj = nn.Linear(width, heads * (length // first), bias=spec.bias)
        if "factorized_random" in self.members:
            self.query_table = nn.Parameter(torch.empty(tables, length, spec.rank))
            self.key_table = nn.Parameter(torch.empty(tables, length, spec.rank))
        learned = {"softmax": len(self.members), "sigmoid": 1, "sum": 0}[spec.mixture]
        mixes = len(self.members) > 1 and learned > 0
        self.mixture = nn.Parameter(torch.empty(learned)) if mixes else None

    def initialize(self, config, init) -> None:
        own = [layer for layer in (self.k_proj, self.v_proj) if layer is not None]
        start_projections(config, init, inputs=own, output=self.o_proj)
        if self.q_proj is not None:
            self.start_queries(config, init)
        for name in ("dense_table", "random_table", "fixed_table", "query_table", "key_table"):
            table = getattr(self, name, None)
            if table is not None:  # Glorot's bound for each head's matrix, as in the released code
                bound = math.sqrt(6 / (table.shape[-2] + table.shape[-1]))
                init.uniform_(table, -bound, bound)
        for zero in (getattr(self, "dense_bias", None), self.mixture):
            if zero is not None:
                init.zeros_(zero)

    # ------------------------------------------------------------------------------------------------ places

    def prepare(self, context: Call, past_key_values: Cache | None) -> None:
        self._check_length(context)
        context.prepare(Places, lambda: self._places(context))

    @staticmethod
    def _places(context: Call) -> Places:
        padding = context.padding_mask
        if context.explicit_mask is not None:
            padding = cast(Tensor, visible_pairs(context)).any(dim=1).any(dim=1)  # real is what anybody may read
        if padding is None:
            return Places(context.query_index[None], context.key_index[None])
        places = real_places(padding)
        return Places(places[:, context.query_index], places, real_first(padding))

    def _check_length(self, context: Call) -> None:
        longest, padding = context.key_index.shape[0], context.padding_mask
        if longest <= self.length or (context.explicit_mask is not None and not context.static):
            return
        if padding is not None or context.static:
            if not can_inspect():
                return
            # Padding takes no place, and neither do slots that are empty yet.
            longest = int(context.positions.max()) + 1 if padding is None else int(padding.sum(-1).max())
        if longest > self.length:
            raise ValueError(
                f"The sequence has {longest} tokens, but this synthesizer's tables have {self.length} places; shorten"
                " it, or build the model with a larger `max_length` of the attention (or `max_position_embeddings`)."
            )

    def _rows(self, table: Tensor, places: Tensor) -> Tensor:
        """Rows of a table [H or 1, L, w] at places [B or 1, T] -> [B or 1, H or 1, T, w]."""
        return table[:, places.clamp(max=self.length - 1)].transpose(0, 1)

    # ------------------------------------------------------------------------------------------------ forward

    def forward(
        self,
        hidden_states: Tensor,
        context: Call,
        *,
        memory: Tensor | None = None,
        past_key_values: Cache | None = None,
        step: int | None = None,
    ) -> SublayerOutput:
        query, key, value = self._project(hidden_states, context, past_key_values, step)
        weights = None
        if self.wants_weights(context):
            output, weights = self._literal(hidden_states, query, key, value, context)
        elif self.by_products:
            output = self._fused(*self._vectors(hidden_states, query, key, context), value, context)
        elif context.explicit_mask is not None:
            output, _ = self._literal(hidden_states, query, key, value, context)
        else:
            output = self._blocks(hidden_states, query, key, value, context)
        return SublayerOutput(self.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), weights)

    def _project(
        self, hidden_states: Tensor, context: Call, past_key_values: Cache | None, step: int | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Queries and keys (None without dot) and values, [B, H, T or S, d]."""
        query = key = None
        value = self.heads(self.v_proj(hidden_states))
        if self.q_proj is not None:
            query, key = self.heads(self.q_proj(hidden_states)), self.heads(self.k_proj(hidden_states))
            query, key = self.turned(query, key, context)
        cache = self_attention_cache(past_key_values)
        if cache is not None:  # a cache counts its tokens by the keys: one number stands for each missing one
            kept = value[..., :1] if key is None else key
            kept, value = appended(cache, kept, value, self.layer_idx if step is None else step)
            key = None if key is None else kept
        key = None if key is None else self.repeated(self.turned_late(key, context))
        return query, key, self.repeated(value)

    def _shares(self) -> dict[str, Tensor | float]:
        """The factor of each member's scores."""
        if self.mixture is None:
            return dict.fromkeys(self.members, 1.0)
        if self.spec.mixture == "softmax":
            return dict(zip(self.members, torch.softmax(self.mixture, dim=0), strict=True))
        share = torch.sigmoid(self.mixture[0])
        return {member: 1 - share if member == "dot" else share for member in self.members}

    def _hidden(self, hidden_states: Tensor) -> Tensor:
        return torch.relu(self.heads(self.hidden_proj(hidden_states)))

    def _factors(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """u [B, H, T, a], w [B, H, T, b]."""
        u, w = self.row_proj(hidden_states), self.column_proj(hidden_states)
        return tuple(x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (u, w))

    def _literal(
        self, hidden_states: Tensor, query: Tensor | None, key: Tensor | None, value: Tensor, context: Call
    ) -> tuple[Tensor, Tensor]:
        """Every member's B [B or 1, H, T, S] by its definition -> output [B, T, H, d], weights [B, H, T, S]."""
        found = context.prepared(Places)
        at, places = (x.clamp(max=self.length - 1) for x in (found.queries, found.keys))
        columns = places[:, None, None, :]
        size = (value.shape[0], self.num_heads, hidden_states.shape[1], value.shape[2])
        scores: Any = 0.0
        for member, share in self._shares().items():
            if member == "dot":
                own = wide_products(cast(Tensor, query), cast(Tensor, key)) * self.scaling
            elif member in ("random", "fixed_random", "factorized_random"):
                if member == "factorized_random":
                    table = torch.matmul(self.query_table, self.key_table.transpose(-1, -2))
                else:
                    table = self.random_table if member == "random" else self.fixed_table
                own = table[:, at[:, :, None], places[:, None, :]].transpose(0, 1)
            else:
                if member == "dense":
                    whole = torch.matmul(self._hidden(hidden_states), self.dense_table.transpose(-1, -2))
                    whole = whole if self.dense_bias is None else whole + self.dense_bias[:, None]
                else:
                    u, w = self._factors(hidden_states)
                    whole = (u[..., :, None] * w[..., None, :]).flatten(-2)
                own = whole.gather(-1, columns.expand(*size))
            scores = scores + share * own
        weights = visible_softmax(scores.expand(*size), visible_pairs(context)).to(value.dtype)
        dropped = F.dropout(weights, self.dropout) if self.training and self.dropout else weights
        return torch.matmul(dropped, value).transpose(1, 2), weights

    def _vectors(
        self, hidden_states: Tensor, query: Tensor | None, key: Tensor | None, context: Call
    ) -> tuple[Tensor, Tensor]:
        """The members that are products: q' [B, H, T, w] and k' [B, H, S, w] with q' k' = the sum of their scores."""
        found = context.prepared(Places)
        at, places = found.queries, found.keys
        batch, length, keys = hidden_states.shape[0], hidden_states.shape[1], places.shape[1]
        queries, tables = [], []
        for member, share in self._shares().items():
            if member == "dot":
                own, table = cast(Tensor, query) * self.scaling, cast(Tensor, key)
            elif member == "dense":
                own, table = self._hidden(hidden_states), self._rows(self.dense_table, places)
                if self.dense_bias is not None:  # the bias of a place is one more number, which every query takes once
                    own = F.pad(own, (0, 1), value=1.0)
                    table = torch.cat((table, self._rows(self.dense_bias[..., None], places)), dim=-1)
            elif member == "factorized_random":
                own, table = self._rows(self.query_table, at), self._rows(self.key_table, places)
            else:
                continue
            queries.append((share * own).expand(batch, self.num_heads, length, -1))
            tables.append(table.expand(batch, self.num_heads, keys, -1))
        if len(queries) == 1:
            return queries[0], tables[0]
        return torch.cat(queries, dim=-1), torch.cat(tables, dim=-1)

    def _fused(self, query: Tensor, key: Tensor, value: Tensor, context: Call) -> Tensor:
        """Fused attention with scores q' k' -> [B, T, H, d]; it wants equal widths, which zeros provide."""
        mask = mask_of_call(context)
        causal = context.causal and mask is None and context.fresh
        if mask is not None and mask.shape[-2] == 1:
            mask = mask.expand(-1, -1, query.shape[2], -1)
        width = -(-max(query.shape[-1], value.shape[-1]) // 8) * 8
        query, key, value = (F.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
        blind = None if mask is None else ~mask.any(-1, keepdim=True)  # such queries see everything, and read nothing
        mask = mask if mask is None or blind is None else mask | blind
        output = fused_attention(query, key, value, mask, self.dropout_now, is_causal=causal, scale=1.0)
        output = output if blind is None else output.masked_fill(blind, 0.0)
        return output[..., : self.head_dim].transpose(1, 2)

    def _blocks(
        self, hidden_states: Tensor, query: Tensor | None, key: Tensor | None, value: Tensor, context: Call
    ) -> Tensor:
        """Scores in blocks of queries -> [B, T, H, d].

        Keys are sorted by place, real tokens first, and queries too where they are the same tokens: then row and
        column of a table are a slice, the causal order is that of places, and no score depends on padding.
        """
        found = context.prepared(Places)
        at, places, order, fresh = found.queries, found.keys, found.order, context.fresh
        length, keys = hidden_states.shape[1], min(value.shape[2], self.length)
        (batch, heads), real = value.shape[:2], None
        products = {member for member in self.members if member in PRODUCTS}
        own, other = self._vectors(hidden_states, query, key, context) if products else (None, None)
        factors: list[Tensor | None] = [None, None]
        if "factorized_dense" in self.members:
            factors = [*self._factors(hidden_states)]
        if order is not None:
            value, other = take(value, order, 2), None if other is None else take(other, order, 2)
            if fresh:
                own, *factors = (None if x is None else take(x, order, 2) for x in (own, *factors))
            if not context.causal:  # in causal order a real token sees no padding, which comes last
                count = cast(Tensor, context.padding_mask).sum(-1)
                real = (torch.arange(keys, device=value.device) < count[:, None])[:, None, None, :]
        shares = self._shares()
        names = {"random": "random_table", "fixed_random": "fixed_table"}
        tables: dict[str, Tensor] = {kind: getattr(self, name) for kind, name in names.items() if kind in self.members}
        dropout = self.dropout_now
        # Scores that are the same in all rows of the batch act on all rows' values at once.
        together = own is None and factors[0] is None and not dropout and real is None and (fresh or order is None)
        folded = value.permute(1, 2, 0, 3).flatten(2) if together else None

        rows_of_block = rows_at_once(heads * keys * (1 if together else batch))
        others = None if other is None else shared_rows(other, length, rows_of_block)
        values = shared_rows(value if folded is None else folded[None], length, rows_of_block)

        def block(begin: int, end: int, q: Tensor | None, u: Tensor | None, w: Tensor | None, *slices: Tensor | None):
            stop = min(end, keys) if context.causal and fresh else keys
            rows = torch.arange(begin, end, device=value.device)[None] if fresh else at[:, begin:end]
            scores: Any = 0.0
            if q is not None and others is not None:
                scores = wide_products(q, others.take(0, stop))
            if u is not None and w is not None:
                outer = (u[..., :, None] * w[..., None, :]).flatten(-2)[..., :stop]
                scores = scores + shares["factorized_dense"] * outer
            for (member, table), part in zip(tables.items(), slices, strict=True):
                part = self._rows(table, rows) if part is None else part[None]
                scores = scores + shares[member] * (part if stop == part.shape[-1] else part[..., :stop])
            mask = real
            if context.causal:
                mask = (torch.arange(stop, device=value.device) <= rows[..., None])[:, None]
            if scores.shape[1] < heads:
                scores = scores.expand(-1, heads, -1, -1)
            weights = visible_softmax(scores, mask, can_be_empty=real is not None).to(value.dtype)
            if together:
                mixed = torch.matmul(weights, values.take(0, stop))[0]
                return mixed.unflatten(-1, (batch, -1)).permute(2, 1, 0, 3)
            if dropout:
                weights = F.dropout(weights.expand(batch, -1, -1, -1), dropout)
            return torch.matmul(weights, values.take(0, stop)).transpose(1, 2)

        # Rows of a table are a slice of it where queries are sorted by place and none lies behind its end.
        sliced = fresh and length <= self.length
        slices = ((table[:, :length] if sliced else None, 1) for table in tables.values())
        output = over_query_blocks(block, length, rows_of_block, (own, 2), *((x, 2) for x in factors), *slices)
        if order is not None:
            if fresh:
                output = output.gather(1, places[:, :, None, None].expand(-1, -1, *output.shape[2:]))
            output = output.masked_fill(~cast(Tensor, context.query_padding_mask)[:, :, None, None], 0.0)
        return output


@register("attention", "synthesizer")
class SynthesizerSpec(AttentionSpec):
    """
    Args:
        kind: where scores come from, one of dot, dense, random, fixed_random, factorized_dense, factorized_random or
            several joined by "+".
        max_length: places in the tables (`None`: `max_position_embeddings`).
        rank: of factorized_random.
        factor: width a of factorized_dense, a divisor of max_length (`None`: the one next to its square root).
        mixture: how several kinds mix.
        share_heads: one table for all heads.
    """

    summary = "scores made from each token alone, or learned"
    supports = frozenset({"pair_mask"})

    kind: str = "dense"
    max_length: int | None = bounded(None, least=1)
    rank: int = bounded(8, least=1)
    factor: int | None = bounded(None, least=1)
    mixture: Literal["softmax", "sigmoid", "sum"] = "softmax"
    share_heads: bool = False

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(part.strip() for part in self.kind.split("+"))

    def places(self, config) -> int:
        return self.table_length(config)

    def table_length(self, config) -> int:
        return config.max_position_embeddings if self.max_length is None else self.max_length

    def first_factor(self, config) -> int:
        length = self.table_length(config)
        if self.factor is not None:
            return self.factor
        return next(a for a in range(math.isqrt(length), 0, -1) if length % a == 0)

    def check_fields(self) -> None:
        members = self.members
        unknown = [member for member in members if member not in KINDS]
        if unknown:
            raise ValueError(
                f"synthesizer takes {', '.join(KINDS)} as `kind`, or several joined by '+', got {self.kind!r}."
            )
        if len(set(members)) < len(members) or members == ("dot",):
            raise ValueError(
                f"synthesizer `kind` {self.kind!r} must name different kinds, dot only besides others; for dot"
                " products alone use attention 'dense'."
            )
        if self.mixture == "sigmoid" and len(members) > 1 and (len(members) != 2 or "dot" not in members):
            raise ValueError(f"synthesizer with mixture 'sigmoid' mixes dot and one other kind, got {self.kind!r}.")

    def check(self, config) -> None:
        length = self.table_length(config)
        if self.factor is not None and length % self.factor:
            raise ValueError(f"synthesizer needs a `factor` that divides its {length} places, got {self.factor}.")
        if "rotation" in config.position.acts and "dot" not in self.members:
            raise ValueError(
                f"position {config.position.type!r} rotates queries and keys, which synthesizer of kind {self.kind!r}"
                " lacks; use an input-level position such as 'learned_absolute', or a mixture with dot."
            )

    def build(self, config, **where) -> SynthesizerAttention:
        return SynthesizerAttention(config, self, **where)
