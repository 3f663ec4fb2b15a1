# SPDX-License-Identifier: Apache-2.0
"""The attention contract and what all mechanisms share: projections, rotation, cache, cross-attention."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, EncoderDecoderCache

from ...core.cache import appended, appended_with_numbers
from ...core.call import Call, Sublayer, SublayerOutput, dropout_rate, self_attention_cache
from ...core.initialization import start_projections
from ...core.prepared import State, States
from ...core.weight_decay import Undecayed
from ...ops.common.products import wide_products
from ...position.base import CallBias, PositionTerms, Rotation, ScoreBias, TokenNumbers, Turns
from ...position.score_terms import SelfAttentionTerms
from .head_parts import HeadAggregation, HeadLossModule, Heads
from .spec import AttentionSpec


class KeyStates(State):
    """What keys and values are made of where that is not the queries' own states, [B, S, D]."""

    states: Tensor


class LeadingKeys(State):
    """Keys and values [B, K, n, d] that a stack has made, which stand before those of the tokens and are in no cache:
    the keys that the context counts begin with them."""

    keys: Tensor
    values: Tensor


class Attention(Undecayed, Sublayer):
    """Multi-head attention up to the mechanism itself.

    A mechanism implements [`Attention.attend`] on per-head tensors (and [`Sublayer.prepare`] for what all layers can
    share); one with other projections or another state overrides more. Contract, for every mechanism:

    - padding comes as a boolean mask [B, S], True = real token; causality from the context;
    - no padded or later position changes a valid output, at any length, 1 and odd ones included; a row whose keys are
      all padding gives zeros, in the gradient as well;
    - the literal equation runs when attention weights are wanted or `attn_implementation="eager"`, with the same
      parameters and the same result as the fast path;
    - with a cache, token by token equals the whole sequence at once.

    What the config's position has inside attention reaches every mechanism from here: a rotation and what it adds to
    queries, keys and values in [`Attention.place`], what it adds to scores in [`Attention.score_terms`]. A spec says
    which of these its mechanism reads (`acts`); configs refuse the others. Cross-attention has none of them.

    unpads: [`Attention.forward`] and [`Attention.project_self`] can be given real tokens alone. A class that brings
    its own does not, unless it says so. joins_projections: the same of queries, keys and values of one text made by
    [`Attention.projected`], which may be one product.
    """

    unpads: ClassVar[bool] = True
    joins_projections: ClassVar[bool] = True
    undecayed: ClassVar[tuple[str, ...]] = ("sinks",)

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        if not {"forward", "project_self"}.isdisjoint(vars(cls)):
            cls.unpads = vars(cls).get("unpads", False)
            cls.joins_projections = vars(cls).get("joins_projections", False)

    dropout = dropout_rate("attention_dropout")

    def __init__(self, config: Any, spec: AttentionSpec, *, layer_idx: int, cross: bool = False):
        super().__init__()
        self.config, self.spec, self.layer_idx, self.cross = config, spec, layer_idx, cross
        width, self.head_dim = config.hidden_size, config.head_width
        self.num_heads, self.num_key_value_heads = config.num_attention_heads, config.key_value_heads
        self.num_key_value_groups = self.num_heads // self.num_key_value_heads
        self.is_causal = config.is_decoder and not cross
        self.scaling = self.head_dim**-0.5 if spec.scale is None else spec.scale
        self.dropout = config.attention_probs_dropout_prob
        self.q_proj = nn.Linear(width, self.num_heads * self.head_dim, bias=spec.bias)
        self.k_proj = nn.Linear(width, self.num_key_value_heads * self.head_dim, bias=spec.bias)
        self.v_proj = nn.Linear(width, self.num_key_value_heads * self.head_dim, bias=spec.bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, width, bias=spec.has_output_bias)
        self.qkv_proj: nn.Module | None = None  # the three above as one, where `inference` has joined them
        self.aggregation: nn.Module | None = None
        if spec.aggregation is not None:
            joining = cast(HeadAggregation, spec.aggregation)
            self.aggregation = joining.build(config, layer_idx=layer_idx)
            if self.aggregation is not None and not joining.final_linear:
                self.o_proj = None  # type: ignore[assignment]
        self.head_losses = nn.ModuleList(loss.build(config, layer_idx=layer_idx) for loss in spec.losses)
        self.gate_proj: nn.Linear | None = None
        if spec.output_gate != "none":
            gates = self.num_heads * (self.head_dim if spec.output_gate == "element" else 1)
            self.gate_proj = nn.Linear(width, gates, bias=spec.bias)
        self.sinks = nn.Parameter(torch.empty(self.num_heads)) if spec.learned_sinks else None
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if spec.query_key_norm == "each_head":
            counts = (self.num_heads, self.num_key_value_heads)
            self.q_norm, self.k_norm = (config.normalization.build_for_heads(config, count) for count in counts)
        elif spec.query_key_norm != "none":
            whole = spec.query_key_norm == "projection"
            widths = [self.head_dim * (heads if whole else 1) for heads in (self.num_heads, self.num_key_value_heads)]
            self.q_norm, self.k_norm = (config.normalization.build(config, width=width) for width in widths)
        self.position_terms: PositionTerms | None = None
        if not cross and config.position.acts & {"score_terms", "head_terms"}:
            self.position_terms = config.position.build_terms(config, layer_idx=layer_idx)

    @property
    def takes_unpadded(self) -> bool:
        """Whether it reads real tokens alone (`context.unpadding`): projections do, and lay them out in rows for the
        rest."""
        return self.unpads and not self.cross and self.position_terms is None

    # ------------------------------------------------------------------------------------------- for mechanisms

    def prepare(self, context: Call, past_key_values: Cache | None) -> None:
        """Called once per forward call and layer before the first layer runs: let the call make what layers can share,
        once (`context.prepare`). What carries gradients it is given by `context.start`. A mechanism that has
        something of its own to prepare calls this as well."""
        if self.position_terms is not None:
            self.position_terms.prepare(context)
        for loss in self.losses_of_heads:
            # What is frozen (under adapters) keeps its counts as well.
            loss.prepare(context, learns=self.q_proj.weight.requires_grad and torch.is_grad_enabled())

    def attend(self, query: Tensor, key: Tensor, value: Tensor, context: Call) -> tuple[Tensor, Tensor | None]:
        """query [B, H, T, d], key and value [B, K, S, d] -> (output [B, T, H, d], weights [B, H, T, S] or None)."""
        raise NotImplementedError

    @property
    def dropout_now(self) -> float:
        """The dropout on weights in this call: training alone has some."""
        return self.dropout if self.training else 0.0

    def wants_weights(self, context: Call) -> bool:
        """Whether the literal path must run."""
        return context.output_attentions or context.implementation == "eager"

    def passed_on(self, key: Tensor, value: Tensor) -> States | None:
        """What the next layer is given of the keys and values [B, K, S, d] of all tokens seen so far (of the current
        ones, where a mechanism keeps a state in their place)."""
        return None

    def weights_of_block(self, query: Tensor, key: Tensor, context: Call, rows: slice, heads: slice) -> Tensor:
        """The attention weights of some queries and heads alone, before dropout, in float32 at least, where the spec
        has the head option `blocks`. query [B, h, t, d]: of these rows and heads; key [B, K, S, d] -> [B, h, t, s], on
        the first s keys, which hold all that the queries see."""
        raise NotImplementedError(f"{type(self).__name__} does not give weights of blocks.")

    def initialize(self, config: Any, init: Any) -> None:
        """Projections as the config's initializer says (the generic rule has run before)."""
        inputs = [part for part in (self.k_proj, self.v_proj, self.gate_proj) if part is not None]
        start_projections(config, init, inputs=inputs, output=self.o_proj)
        if self.sinks is not None:
            init.zeros_(self.sinks)  # as a key with the score 0
        self.start_queries(config, init)

    def start_queries(self, config: Any, init: Any) -> None:
        """The query carries the 1 / sqrt(d) that T5's scores lack."""
        if config.initializer == "t5":
            std = config.initializer_factor * (config.hidden_size * self.head_dim) ** -0.5
            init.normal_(self.q_proj.weight, mean=0.0, std=std)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        joined: Any = getattr(self, "qkv_proj", None)  # what has no projections of heads does not have it
        if hasattr(joined, "join"):  # files have its parts
            joined.join(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    # ------------------------------------------------------------------------------------------- shared machinery

    def heads(self, projected: Tensor) -> Tensor:
        """[B, T, heads * d] -> [B, heads, T, d]."""
        return projected.view(*projected.shape[:-1], -1, self.head_dim).transpose(1, 2)

    def normalized(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [..., H * d] and keys [..., K * d] as they are projected -> the same, normalized where the spec says
        so."""
        return self._normalized(self.q_norm, query), self._normalized(self.k_norm, key)

    def _normalized(self, norm: nn.Module | None, projected: Tensor) -> Tensor:
        if norm is None:
            return projected
        if self.spec.query_key_norm == "projection":
            return norm(projected)
        return norm(projected.unflatten(-1, (-1, self.head_dim))).flatten(-2)

    def queries(self, hidden_states: Tensor) -> Tensor:
        """[B, T, D] -> queries [B, H, T, d], before positions."""
        return self.heads(self._normalized(self.q_norm, self.q_proj(hidden_states)))

    def keys(self, hidden_states: Tensor) -> Tensor:
        """[B, S, D] -> keys [B, K, S, d], before positions."""
        return self.heads(self._normalized(self.k_norm, self.k_proj(hidden_states)))

    def projected(self, hidden_states: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of `hidden_states` [..., D], keys and values of `source` [..., D], side by side for all heads."""
        if self.qkv_proj is not None and source is hidden_states:
            heads = (self.num_heads, self.num_key_value_heads, self.num_key_value_heads)
            return self.qkv_proj(hidden_states).split([count * self.head_dim for count in heads], dim=-1)
        return self.q_proj(hidden_states), self.k_proj(source), self.v_proj(source)

    def projected_heads(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, D] -> queries [B, H, T, d], keys and values [B, K, T, d], before positions."""
        query, key, value = self.projected(hidden_states, hidden_states)
        query, key = self.normalized(query, key)
        return self.heads(query), self.heads(key), self.heads(value)

    def rotation(self, context: Call) -> Rotation | None:
        """What the position turns queries and keys of this layer by, if it does."""
        turns = context.find(Turns, self.spec.angles)
        return None if turns is None else turns.tokens

    def repeated(self, x: Tensor) -> Tensor:
        """Keys or values [B, K, S, d], one for each head."""
        return x.repeat_interleave(self.num_key_value_groups, dim=1) if self.num_key_value_groups > 1 else x

    def project_self(
        self, hidden_states: Tensor, context: Call, past_key_values: Cache | None, step: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, and the keys and values of all tokens seen so far."""
        source = context.state(KeyStates)
        query, key, value = self.projected(hidden_states, hidden_states if source is None else source.states)
        if self.q_norm is not None:
            query, key = self.normalized(query, key)
        if context.unpadding is not None:
            query, key, value = (context.padded(x) for x in (query, key, value))
        query, key, value = self.heads(query), self.heads(key), self.heads(value)
        rotation = self.rotation(context)
        late = rotation is not None and rotation.by_length
        query, key, value = self.place(query, key, value, context, turn_keys=not late)
        cache = self_attention_cache(past_key_values)
        beside = context.state(TokenNumbers)
        if cache is not None and beside is not None:
            key, value, numbers = appended_with_numbers(cache, key, value, beside.numbers, step)
            context.start(TokenNumbers(numbers))
        elif cache is not None:
            key, value = appended(cache, key, value, step)
        if late:
            key = self.turned_late(key, context)
        leading = context.state(LeadingKeys)
        if leading is not None:
            key = torch.cat([leading.keys.to(key.dtype), key], dim=2)
            value = torch.cat([leading.values.to(value.dtype), value], dim=2)
        return query, key, value

    def turned(self, query: Tensor, key: Tensor, context: Call) -> tuple[Tensor, Tensor]:
        """query [B, H, T, d] and key [B, K, T, d] of the current tokens -> the same, rotated as they go into a cache;
        what comes out of it is for [`Attention.turned_late`]."""
        rotation = self.rotation(context)
        if rotation is None:
            return query, key
        return rotation(query), key if rotation.by_length else rotation(key)

    def turned_late(self, key: Tensor, context: Call) -> Tensor:
        """Keys [B, K, S, d] of the last S tokens seen so far, as they come out of a cache -> rotated, where that is
        not done before they go in."""
        turns = context.find(Turns, self.spec.angles)
        if turns is None or not turns.tokens.by_length:
            return key
        return turns.keys.of_last(key.shape[2])(key)

    def place(
        self, query: Tensor, key: Tensor, value: Tensor, context: Call, *, turn_keys: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """query [B, H, T, d], key and value [B, K, T, d] of the current tokens -> the same with what the position does
        to them. turn_keys: whether keys are rotated here."""
        rotation = self.rotation(context)
        if rotation is not None:
            query, key = rotation(query), rotation(key) if turn_keys else key
            value = rotation(value) if rotation.values else value
        if self.position_terms is not None:
            query, key, value = self.position_terms.heads(query, key, value, context)
        return query, key, value

    def of_states(self, hidden_states: Tensor, context: Call) -> Call:
        """The call as this layer sees it, with what its position makes of the layer's input [B, T, D]."""
        return context if self.position_terms is None else self.position_terms.of_states(hidden_states, context)

    @property
    def changes_scores(self) -> bool:
        """Whether the position adds terms with parameters of this layer to its scores."""
        return self.position_terms is not None and self.position_terms.changes_scores

    def score_bias(self, context: Call) -> ScoreBias | None:
        """The bias that the position adds to scores, if it does."""
        found = None if self.cross else context.find(CallBias)
        return None if found is None else found.bias

    def score_terms(self, context: Call) -> SelfAttentionTerms | None:
        """What is added to the scores of all heads in this call, a bias included; None: nothing."""
        if self.position_terms is None:
            bias = self.score_bias(context)
            return None if bias is None else bias.score_terms(self.num_heads, self.scaling, context)
        if not self.position_terms.changes_scores:
            return None
        return self.position_terms.score_terms(self, self.scaling * self.position_terms.content_scale, context)

    def project_cross(
        self, hidden_states: Tensor, memory: Tensor | None, past_key_values: Cache | None, step: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of the tokens, and keys and values of the memory [B, S, D], computed once per generated text."""
        query = self.queries(hidden_states)
        cache = cross_cache(past_key_values)
        if cache is not None and cache.is_updated.get(step):
            layer: Any = cache.cross_attention_cache.layers[step]
            return query, layer.keys, layer.values
        memory = given_memory(memory)
        key, value = self.keys(memory), self.heads(self.v_proj(memory))
        if cache is not None:
            key, value = cache.cross_attention_cache.update(key, value, step)
            cache.is_updated[step] = True
        return query, key, value

    @property
    def losses_of_heads(self) -> list[HeadLossModule]:
        """What acts in this call: losses are for training alone."""
        return cast("list[HeadLossModule]", list(self.head_losses)) if self.training and self.spec.losses else []

    def losses(self, heads: Heads) -> dict[str, Tensor] | None:
        """The auxiliary losses on what the heads of this layer did (`AttentionSpec.losses`), by name."""
        found: dict[str, Tensor] = {}
        for loss in self.losses_of_heads:
            found.update(loss(heads))
        return found or None

    def less_sinks(self, output: Tensor, norm: Tensor) -> Tensor:
        """Softmax attention [B, H, T, d], and the logarithm of its denominator [B, H, T] (-inf: it sees nothing) ->
        what it is with the learned sinks in the denominator, sigmoid(norm - s) times as much."""
        if self.sinks is None:
            return output
        lowest = torch.finfo(norm.dtype).min  # finite, for the gradient of a row that sees nothing
        left = torch.sigmoid(norm.clamp(min=lowest) - self.sinks.to(norm.dtype)[:, None])
        return (output * left[..., None]).to(output.dtype)

    def written(self, output: Tensor, context: Call, hidden_states: Tensor) -> Tensor:
        """What the heads have read, [B, T, H, d] -> [B, T, D] for the residual stream: side by side through the output
        projection, or as the spec's `aggregation` joins them. hidden_states [B, T, D]: the layer's input, which the
        output gate reads."""
        joined = output.flatten(2)
        if context.unpadding is not None:
            joined = context.packed(joined)
        if self.gate_proj is not None:
            gate = torch.sigmoid(self.gate_proj(hidden_states))
            if self.spec.output_gate == "head":
                gate = gate.repeat_interleave(self.head_dim, dim=-1)
            joined = joined * gate
        if self.aggregation is not None:
            joined = self.aggregation(joined)
        return joined if self.o_proj is None else self.o_proj(joined)

    def forward(
        self,
        hidden_states: Tensor,
        context: Call,
        *,
        memory: Tensor | None = None,
        past_key_values: Cache | None = None,
        step: int | None = None,
    ) -> SublayerOutput:
        """hidden_states [B, T, D] (and, for cross-attention, memory [B, S, D]) -> [B, T, D].

        step: execution step, which is the cache slot; `None`: this layer's index.
        """
        step = self.layer_idx if step is None else step
        if self.cross:
            query, key, value = self.project_cross(hidden_states, memory, past_key_values, step)
        else:
            context = self.of_states(hidden_states, context)
            query, key, value = self.project_self(hidden_states, context, past_key_values, step)
        output, weights = self.attend(query, key, value, context)
        written, states = self.written(output, context, hidden_states), self.passed_on(key, value)
        if not self.losses_of_heads:
            return SublayerOutput(written, weights, states=states)
        losses = self.losses(Heads(self, query, key, value, output, weights, context))
        return SublayerOutput(written, weights, aux_losses=losses, states=states)


def given_memory(memory: Tensor | None) -> Tensor:
    """What cross-attention reads. Raises `ValueError` where the caller has given nothing."""
    if memory is None:
        raise ValueError("Cross-attention reads the `memory` of an encoder, and got None; give its last states.")
    return memory


def cross_cache(past_key_values: Cache | None) -> EncoderDecoderCache | None:
    """The cache, if it is one that holds what cross-attention has made of a memory."""
    return past_key_values if isinstance(past_key_values, EncoderDecoderCache) else None


def literal_softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale * Q K^T + bias) V with masked pairs excluded, written out; scores in float32 at least. cap: c,
    where scale * Q K^T becomes c tanh(scale * Q K^T / c). sinks [H]: scores of one more key, whose weights are left
    out.

    query [B, H, T, d], key and value [B, K, S, d] (K divides H); mask [B or 1, 1 or H, T or 1, S] boolean, True = may
    attend; bias broadcastable to [B, H, T, S] -> output [B, T, H, d], weights [B, H, T, S]. A row that may attend to
    nothing has zero weights and zero output.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = wide_products(query, key) * scaling
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is None:
        weights = torch.softmax(scores, dim=-1).to(query.dtype)
    else:
        more = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        weights = torch.softmax(torch.cat([scores, more], dim=-1), dim=-1)[..., :-1].to(query.dtype)
    if mask is not None:
        weights = weights.masked_fill(~mask, 0.0)
    dropped = nn.functional.dropout(weights, dropout) if dropout else weights
    return torch.matmul(dropped, value).transpose(1, 2), weights


__all__ = [
    "Attention",
    "AttentionSpec",
    "KeyStates",
    "LeadingKeys",
    "cross_cache",
    "given_memory",
    "literal_softmax_attention",
]
