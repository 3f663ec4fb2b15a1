# SPDX-License-Identifier: Apache-2.0
"""Star-Transformer: each token reads its two neighbors and a relay, which reads all tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from ..core.call import Call, SublayerOutput, dropout_rate
from ..core.components import register
from ..core.initialization import start_projections
from ..core.pooling import TextPooler, pool
from ..core.prepared import Carry, Prepared, State, one_state
from ..normalization.base import norm_inputs
from ..ops.common.fused import fused_attention
from ..ops.common.head_groups import over_head_groups
from ..ops.common.products import widened
from ..ops.common.real_tokens import real_first, real_places
from .shared.base import Attention, literal_softmax_attention
from .shared.spec import AttentionSpec


class Relay(State):
    """s [B, 1, D]."""

    states: Tensor


class Embedded(State):
    """e [B, T, D]."""

    tokens: Tensor


Neighbours = tuple[Tensor, Tensor]  # of each token one next to it: its slot, and whether it counts

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "leaky_relu": F.leaky_relu}


class BothNeighbours(Prepared):
    """The tokens before and after each one, in a slot for each `border`."""

    before: Neighbours
    after: Neighbours


class RelayAttention(nn.Module):
    """s' = LN(ReLU(MHA(s, [s; h_1; ...; h_T]))) over the real tokens (Guo et al. 2019, section 3.2.2)."""

    dropout = dropout_rate("attention_dropout")

    def __init__(self, config, spec: StarTransformerSpec):
        super().__init__()
        self.spec, self.head_dim, inner = spec, config.head_width, config.num_attention_heads * config.head_width
        self.scaling = self.head_dim**-0.5 if spec.scale is None else spec.scale
        self.dropout = config.attention_probs_dropout_prob
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(config.hidden_size, inner, bias=spec.bias) for _ in range(3)
        )
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=spec.has_output_bias)
        self.norm = config.normalization.build(config) if spec.relay_norm else None

    def initialize(self, config, init) -> None:
        start_projections(config, init, inputs=(self.k_proj, self.v_proj), output=self.o_proj)

    def forward(self, relay: Tensor, hidden_states: Tensor, real: Tensor | None, literal: bool = False) -> Tensor:
        """relay [B, 1, D], hidden_states [B, T, D], real [B, T] or None -> [B, 1, D]."""
        read = torch.cat([relay, hidden_states], dim=1)
        query, key, value = (
            projection(states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection, states in ((self.q_proj, relay), (self.k_proj, read), (self.v_proj, read))
        )
        mask = None if real is None else F.pad(real, (1, 0), value=True)[:, None, None, :]
        dropout = self.dropout if self.training else 0.0
        if literal:
            found = literal_softmax_attention(query, key, value, mask, None, self.scaling, dropout)[0]
        else:
            found = fused_attention(query, key, value, mask, dropout, scale=self.scaling)
            found = found.transpose(1, 2)
        found = _ACTIVATIONS[self.spec.relay_activation](self.o_proj(found.flatten(2)))
        return found if self.norm is None else self.norm(found)


class StarTransformerAttention(Attention):
    """o_i = MHA(h_i, C_i), C_i = [h_{i-1}; h_i; h_{i+1}; e_i; s] (Guo et al. 2019, arXiv 1902.09113, section 3.2.1).

    h are the states that the layer reads, e those that the first layer read, s the relay, one vector for a text. It
    starts as the mean of e. With h^t the states after layer t (of the paper LN(ReLU(o)), which is the frame
    `no_residual`),

        s^0 = mean_i e_i,    s^t = LN(ReLU(MHA(s^{t-1}, [s^{t-1}; h^t_1; ...; h^t_T])))            (section 3.2.2)

    which the next layer computes before it reads s^t, and after the last layer the pooler
    ([`StarPooler`]). s and e are passed on as [`Relay`] and [`Embedded`].

    The text is a ring: the first real token and the last are neighbors. A neighbor is read once: a text of two
    tokens has one, a single token none. Time O(T D) besides projections. The weights given out are those of tokens:
    e_i counts as token i, the relay has the rest.
    """

    spec: StarTransformerSpec

    def __init__(self, config, spec: StarTransformerSpec, *, layer_idx: int, cross: bool = False):
        super().__init__(config, spec, layer_idx=layer_idx, cross=cross)
        # The first layer reads the relay that it starts; where layers run several times, later runs move it.
        runs_once = config.stack.num_steps(config) == config.stack.num_layers(config)
        self.relay = None if layer_idx == 0 and runs_once else RelayAttention(config, spec)
        self.normalization = config.normalization
        self.input_norm = config.normalization.build(config) if spec.norm_inputs else None

    def forward(
        self,
        hidden_states: Tensor,
        context: Call,
        *,
        memory: Tensor | None = None,
        past_key_values: Cache | None = None,
        step: int | None = None,
    ) -> SublayerOutput:
        real, literal = context.padding_mask, self.wants_weights(context)
        below, first_states = context.state(Relay), context.state(Embedded)
        if below is None or first_states is None:
            tokens, relay = hidden_states, pool(hidden_states, real, "mean")[:, None]
        else:
            tokens, relay = first_states.tokens, below.states
            relay = relay if self.relay is None else self.relay(relay, hidden_states, real, literal)
        states = hidden_states
        if self.input_norm is not None:
            states = self.input_norm(states, **norm_inputs(self.normalization, context))
        query, key = self.normalized(self.q_proj(states), self.k_proj(states))
        own = self.heads(key), self.heads(self.v_proj(states))
        first = own if tokens is states else (self.keys(tokens), self.heads(self.v_proj(tokens)))
        shared = self.keys(relay), self.heads(self.v_proj(relay))
        arguments = (self.heads(query), own, first, shared, real, self._neighbours(context))
        output, weights = self._literal(*arguments) if literal else (self._gathered(*arguments), None)
        output = self.o_proj(output.flatten(2))
        return SublayerOutput(output, weights, states={**one_state(Relay(relay)), **one_state(Embedded(tokens))})

    def _neighbours(self, context: Call) -> tuple[Neighbours, Neighbours]:
        """For the token before and the one after, once per call: its slot [B or 1, T], and whether it is read."""
        found = context.prepare(BothNeighbours, lambda: self._make_neighbours(context), self.spec.border)
        return found.before, found.after

    def _make_neighbours(self, context: Call) -> BothNeighbours:
        real, length = context.padding_mask, context.query_index.shape[0]
        place = context.query_index[None]
        count = torch.full_like(place[:, :1], length)
        if real is not None:
            place, count = real_places(real), real.sum(-1, keepdim=True)
        found = []
        for offset in (-1, 1):
            ring = (place + offset) % count.clamp(min=1)
            if self.spec.border == "ring":
                counts = (count > 1).expand_as(place) if offset < 0 else (count > 2).expand_as(place)
            else:
                counts = (place + offset >= 0) & (place + offset < count)
            slot = ring if real is None else real_first(real).gather(1, ring)
            found.append((slot, counts if real is None else counts & real))
        return BothNeighbours(*found)

    def _gathered(
        self,
        query: Tensor,
        own: tuple[Tensor, Tensor],
        first: tuple[Tensor, Tensor],
        shared: tuple[Tensor, Tensor],
        real: Tensor | None,
        neighbours: tuple[Neighbours, Neighbours],
    ) -> Tensor:
        """[B, T, H, d] from five scores for each token; their parts are made again in the backward pass."""
        lowest = torch.finfo(widened(query)[0].dtype).min
        zeros = self.spec.border == "zeros"

        def read(query: Tensor, *pairs: Tensor) -> Tensor:
            """Some heads: queries [B, h, T, d], keys and values of tokens, of their embeddings and of the relay."""
            wide = widened(query)[0] * self.scaling
            values, scores = [], []
            for offset, (slot, counts) in zip((1, -1), neighbours, strict=True):
                key, value = (_shifted(x, slot, offset, real) for x in pairs[:2])
                hidden = ~counts[:, None]
                if zeros:
                    key, value = (x.masked_fill(hidden[..., None], 0.0) for x in (key, value))
                score = (wide * key).sum(-1)
                scores.append(score if zeros else score.masked_fill(hidden, lowest))
                values.append(value)
            for key, value in (pairs[:2], pairs[2:4], pairs[4:]):
                scores.append((wide * key).sum(-1))
                values.append(value)
            weights = torch.softmax(torch.stack(scores, dim=-1), dim=-1).to(query.dtype)
            if real is not None:
                weights = weights.masked_fill(~real[:, None, :, None], 0.0)
            weights = F.dropout(weights, self.dropout) if self.training and self.dropout else weights
            output = weights[..., :1] * values[0]
            for index, value in enumerate(values[1:], start=1):
                output = torch.addcmul(output, weights[..., index : index + 1], value)
            return output

        dropped = self.training and self.dropout > 0
        return over_head_groups(read, query, *own, *first, *shared, random=dropped).transpose(1, 2)

    def _literal(
        self,
        query: Tensor,
        own: tuple[Tensor, Tensor],
        first: tuple[Tensor, Tensor],
        shared: tuple[Tensor, Tensor],
        real: Tensor | None,
        neighbours: tuple[Neighbours, Neighbours],
    ) -> tuple[Tensor, Tensor]:
        """The same as attention over all keys [h; e; s] with a mask: output [B, T, H, d], weights [B, H, T, T]."""
        length = query.shape[2]
        diagonal = torch.eye(length, dtype=torch.bool, device=query.device)[None]
        near, nothing, slots = diagonal, [], torch.arange(length, device=query.device)
        for slot, counts in neighbours:
            near = near | ((slot[..., None] == slots) & counts[..., None])
            nothing.append(~counts[..., None])
        mask = [near, diagonal.expand_as(near), torch.ones_like(near[..., :1])]
        keys, values = ([own[x], first[x], shared[x]] for x in (0, 1))
        if self.spec.border == "zeros":  # what lies beyond a border is a key and a value of zeros
            mask += nothing
            for parts in (keys, values):
                parts += [torch.zeros_like(parts[2])] * 2
        allowed = torch.cat(mask, dim=-1)
        if real is not None:
            allowed = allowed & real[:, :, None]
        dropout = self.dropout_now
        output, weights = literal_softmax_attention(
            query, torch.cat(keys, dim=2), torch.cat(values, dim=2), allowed[:, None], None, self.scaling, dropout
        )
        return output, weights[..., :length] + weights[..., length : 2 * length]


def _shifted(x: Tensor, slot: Tensor, offset: int, real: Tensor | None) -> Tensor:
    """[B, H, T, d] -> of the neighbor at `slot` [B, T]; without padding that is a shift by `offset`."""
    if real is None:
        return x.roll(offset, dims=2)
    return x.gather(2, slot[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


class StarPooler(TextPooler):
    """max_i h_i + s: the largest number of each channel over real tokens, and the relay that has read the last states
    (Guo et al. 2019, section 3.3). Where a stack hands no relay on, one starts as the mean of the last states."""

    state = Relay

    def __init__(self, config):
        super().__init__()
        self.relay = RelayAttention(config, config.attention)

    def forward(self, hidden_states: Tensor, padding_mask: Tensor | None = None, state: Relay | None = None) -> Tensor:
        """[B, T, D] -> [B, D]."""
        relay = pool(hidden_states, padding_mask, "mean")[:, None] if state is None else state.states
        largest = hidden_states
        if padding_mask is not None:
            lowest = torch.finfo(hidden_states.dtype).min
            largest = largest.masked_fill(~padding_mask[..., None], lowest)
        largest = largest.amax(dim=1)
        if padding_mask is not None:
            largest = largest.masked_fill(~padding_mask.any(-1, keepdim=True), 0.0)
        return largest + self.relay(relay, hidden_states, padding_mask)[:, 0]


@register("attention", "star_transformer")
class StarTransformerSpec(AttentionSpec):
    """
    Args:
        border: the first and the last token are neighbors (`ring`), or have one neighbor less (`open`), or read zeros
            there (`zeros`: the released code).
        relay_activation, relay_norm: what the relay's attention is followed by; the released code has leaky_relu and
            no norm.
        norm_inputs: normalize what tokens are read as and read with, but not e and the relay (the released code, with
            a frame that has no norm).
    """

    summary = "each token reads its neighbors, its embedding and a relay that reads all tokens: linear time"
    why_not: ClassVar[Mapping[str, str]] = {"causal": "its relay reads the whole text."}
    acts = frozenset()
    head_options = frozenset({"norm"})

    border: Literal["ring", "open", "zeros"] = "ring"
    relay_activation: Literal["relu", "leaky_relu"] = "relu"
    relay_norm: bool = True
    norm_inputs: bool = False

    def check(self, config) -> None:
        if config.key_value_heads != config.num_attention_heads:
            raise ValueError(
                f"star_transformer does not group heads, so it cannot have {config.key_value_heads} key/value heads"
                f" for {config.num_attention_heads} heads; leave `num_key_value_heads` unset."
            )

    def carries(self, config) -> Carry:
        return Carry(Relay, handed_on=True, throughout=True, reach="pooler")

    def weighs(self, config) -> bool:
        return False

    def build_pooler(self, config) -> StarPooler:
        return StarPooler(config)

    def build(self, config, **where) -> StarTransformerAttention:
        return StarTransformerAttention(config, self, **where)
