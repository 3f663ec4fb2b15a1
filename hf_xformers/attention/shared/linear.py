# SPDX-License-Identifier: Apache-2.0
"""What mechanisms whose weights are products of features share: the paths, the state for decoding, cross-attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from ...core.cache import RecurrentStateLayer
from ...core.call import Call, SublayerOutput, self_attention_cache
from ...core.components import bounded
from ...core.sequence_parallel import SequenceForm, Unserved
from ...ops.common.products import wide_products, widened
from ...ops.linear.attention import (
    LinearState,
    kernel_attention,
    kernel_attention_read,
    kernel_attention_write,
    linear_attention,
    linear_attention_read,
    linear_attention_write,
    vanishes,
)
from ...ops.linear.kernels import guard
from ...ops.linear.window import WindowState
from .base import Attention, cross_cache, given_memory
from .head_parts import Heads
from .spec import AttentionSpec
from .state_parts import state_before, state_of_all


class Decay(NamedTuple):
    """What the weight of a key becomes with time, relative to the state before the tokens of a call.

    With forget gates g_j and writing strengths w_j a key weighs w_j g_{j+1} ... g_i for query i. The part of i cancels
    in attention that divides by the sum of weights, and what is left of key j is w_j / (g_1 ... g_j).
    """

    log_weight: Tensor  # [B, H, T], log w_j - log(g_1 ... g_j), in float64 where there is such a type
    total: Tensor  # [B, H], log(g_1 ... g_T), what becomes of the state before


class LinearAttention(Attention):
    """o_i = sum_j phi(q_i) phi(k_j) v_j / sum_j phi(q_i) phi(k_j) over all j that i may see.

    A mechanism says what phi is ([`LinearAttention.phi`], [`LinearAttention.phi_params`]). Three forms: two matrix
    products (encoder, cross-attention), a scan over chunks of `chunk_size` tokens (decoder), one step with a state (a
    token with a cache). Time O(T F d) per head for F features, memory O(T D). State: sum phi(k) v^T and sum phi(k),
    the same size at any length; in cross-attention those of the memory take the place of its keys and values.

    There are no attention probabilities to drop: `attention_probs_dropout_prob` has no effect. The literal path writes
    the matrix [T, S] out; when it reads a cached text, whose keys are gone, it gives no weights.
    """

    eps: float = 0.0
    min_denominator: float = 0.0  # for features whose products can be negative
    normalizes: bool = True  # False: weighted sums alone, without a denominator
    rotates_inputs: ClassVar[bool] = False  # positions turn queries and keys before phi, not the features
    state_type: ClassVar[type[LinearState] | type[WindowState]] = LinearState

    joins_projections = True

    def __init__(self, config, spec: LinearSpec, **where):
        super().__init__(config, spec, **where)
        self.chunk_size = spec.chunk_size

    # ------------------------------------------------------------------------------------------- for mechanisms

    # `phi(x, *params)`: [B, H, t, d] -> features [B, H, t, F], or those and the logarithm of a factor [B, H, t]; token
    # by token. An object that knows its own derivative is handed to the engine as it is.
    phi: Callable[..., Tensor | tuple[Tensor, Tensor]]

    @property
    def query_phi(self) -> Callable[..., Tensor | tuple[Tensor, Tensor]]:
        """phi of a query, times any factor of its own, which cancels."""
        return self.phi

    def phi_params(self, context: Call) -> tuple[Tensor, ...]:
        """The tensors that `phi` needs besides its input."""
        return ()

    def decay(self, states: Tensor, context: Call) -> Decay | None:
        """How the weight of keys falls with time, from states [B, T, D]; None: it does not. Causal mechanisms only."""
        return None

    def at_once(self, states: Tensor, context: Call) -> Tensor | None:
        """The output [B, T, D] of the whole sublayer, where a mechanism has a shorter way to it than through its
        heads."""
        return None

    def finished(self, output: Tensor) -> Tensor:
        """What is made of the weighted sums [B, H, T, d] before the output projection."""
        return output

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
        losses = self.losses_of_heads
        whole = (
            None
            if losses or self.aggregation is not None or self.gate_proj is not None
            else self.at_once(hidden_states, context)
        )
        if whole is not None:
            return SublayerOutput(whole, None)
        if self.cross:
            query = self.queries(hidden_states)
            output, weights = self._read_memory(query, memory, context, past_key_values, step)
            key, value = self._keys_and_values(given_memory(memory)) if losses else (query, query)
        else:
            query, key, value = self.projected_heads(hidden_states)
            query, key = self.measured(query), self.measured(key)
            key, value = self.repeated(key), self.repeated(value)
            decay = self.decay(hidden_states, context)
            output, weights = self._read_tokens(query, key, value, decay, context, past_key_values, step)
        output = self.finished(output).transpose(1, 2)
        found = self.losses(Heads(self, query, key, value, output, weights, context)) if losses else None
        return SublayerOutput(self.written(output, context, hidden_states), weights, aux_losses=found)

    def measured(self, vectors: Tensor) -> Tensor:
        """Queries or keys [B, H, T, d] as the kernel reads them, such as those of length 1."""
        return vectors

    def queries(self, hidden_states: Tensor) -> Tensor:
        return self.measured(super().queries(hidden_states))

    def keys(self, hidden_states: Tensor) -> Tensor:
        return self.measured(super().keys(hidden_states))

    def _keys_and_values(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, D] -> [B, H, S, d] twice; grouped heads are repeated, as a state belongs to a query's head."""
        key, value = self.keys(states), self.heads(self.v_proj(states))
        return self.repeated(key), self.repeated(value)

    def _read_tokens(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Decay | None,
        context: Call,
        past: Cache | None,
        step: int,
    ) -> tuple[Tensor, Tensor | None]:
        layer = state_layer(past, step)
        state = self.state_type(**layer.state) if layer is not None and layer.state else None
        mask, rotation, weights = context.query_padding_mask, self.rotation(context), None
        if rotation is not None and self.rotates_inputs:
            query, key, rotation = rotation(query), rotation(key), None
        if self.wants_weights(context) and state is None:
            visible = visible_tokens(query, key, mask, self.is_causal)
            output, weights = self._literal(query, key, value, visible, context, rotation, decay)
            if layer is None:
                return output, weights
            _, state = self._mix(query, key, value, mask, context, None, rotation, decay, remember=True)
        else:
            remember = layer is not None
            output, state = self._mix(query, key, value, mask, context, state, rotation, decay, remember)
        if layer is not None:
            layer.advance(query.shape[2], **_named(state))
        return output, weights

    def _read_memory(
        self, query: Tensor, memory: Tensor | None, context: Call, past: Cache | None, step: int
    ) -> tuple[Tensor, Tensor | None]:
        mask = context.memory_padding_mask
        if self.wants_weights(context):
            key, value = self._keys_and_values(given_memory(memory))
            return self._literal(query, key, value, visible_tokens(query, key, mask, False), context, None)
        cache = None if context.static else cross_cache(past)
        if cache is not None and cache.is_updated.get(step):
            held: Any = cache.cross_attention_cache.layers[step]
            state = _unpack(held)
            features, _ = _pair(self.query_phi(*widened(query), *self.phi_params(context)))
            return linear_attention_read(features, state, **self._denominator).to(query.dtype), None
        key, value = self._keys_and_values(given_memory(memory))
        output, state = self._mix(query, key, value, mask, context, None, None, remember=cache is not None)
        if cache is not None:
            cache.cross_attention_cache.update(*_pack(state), step)
            cache.is_updated[step] = True
        return output, None

    def _mix(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        context: Call,
        state: Any,
        rotation: Callable[[Tensor], Tensor] | None,
        decay: Decay | None = None,
        remember: bool = False,
    ) -> tuple[Tensor, Any]:
        """The engine: output [B, H, T, d] and, where it is to `remember` them, the state after these keys."""
        params = self.phi_params(context)
        if context.parts is not None and not self.cross:
            own = self._state_of_part(key, value, mask, context, rotation)
            if not self.is_causal:
                state = state_of_all(own, context.parts)
                return self._read_state(query, state, context, rotation), state
            state = state_before(own, context.parts)
        options: dict[str, Any] = {
            "causal": self.is_causal,
            "key_padding_mask": mask,
            "state": state,
            "return_state": remember,
            "chunk_size": self.chunk_size,
            **self._denominator,
        }
        if rotation is None:  # features are made piece by piece, and again in the backward pass
            if decay is not None:
                options["log_weight"] = decay.log_weight
            found: Any = kernel_attention(query, key, value, self.query_phi, *params, key_map=self.phi, **options)
        else:
            phi_q, _ = _pair(self.query_phi(*widened(query), *params))
            phi_k, logs = _pair(self.phi(*widened(key), *params))
            options |= {"rotated_query": rotation(phi_q), "rotated_key": rotation(phi_k)}
            found = linear_attention(phi_q, phi_k, value, log_weight=logs, **options)
        output, after = found if remember else (found, None)
        if after is not None and decay is not None:
            after = after._replace(log_scale=after.log_scale + decay.total)
        return output, after

    def _state_of_part(
        self,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        context: Call,
        rotation: Callable[[Tensor], Tensor] | None,
    ) -> LinearState:
        """The state after these keys alone."""
        params = self.phi_params(context)
        if rotation is None:
            return kernel_attention_write(key, value, self.phi, *params, key_padding_mask=mask)
        phi, logs = _pair(self.phi(*widened(key), *params))
        return linear_attention_write(phi, value, key_padding_mask=mask, log_weight=logs, rotated_key=rotation(phi))

    def _read_state(
        self, query: Tensor, state: LinearState, context: Call, rotation: Callable[[Tensor], Tensor] | None
    ) -> Tensor:
        params = self.phi_params(context)
        if rotation is None:
            return kernel_attention_read(query, state, self.query_phi, *params, **self._denominator)
        phi, _ = _pair(self.query_phi(*widened(query), *params))
        return linear_attention_read(phi, state, rotated_query=rotation(phi), **self._denominator).to(query.dtype)

    @property
    def _denominator(self) -> dict[str, Any]:
        return {"eps": self.eps, "min_denominator": self.min_denominator, "normalize": self.normalizes}

    def _literal(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        visible: Tensor | None,
        context: Call,
        rotation: Callable[[Tensor], Tensor] | None,
        decay: Decay | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The matrix of all products, divided by its row sums -> output [B, H, T, d], weights [B, H, T, S]."""
        params = self.phi_params(context)
        phi_q, _ = _pair(self.query_phi(*widened(query), *params))
        phi_k, logs = _pair(self.phi(*widened(key), *params))
        products = wide_products(phi_q, phi_k)
        dtype = products.dtype
        factors = products.new_ones(()) if visible is None else visible.to(dtype)
        logs = logs if decay is None else decay.log_weight
        if logs is not None:
            # Relative to the largest factor that a query sees: a later key changes nothing, not even by underflow.
            logs = logs.to(torch.promote_types(dtype, logs.dtype))[:, :, None, :].expand_as(products)
            logs = logs if visible is None else logs.masked_fill(~visible, -torch.inf)
            top = logs.detach().amax(-1, keepdim=True)
            factors = (logs - top.masked_fill(top == -torch.inf, 0.0)).exp().to(dtype)
        if not self.normalizes:
            weights = products * factors
            return wide_products(weights, value.mT).to(value.dtype), weights.to(value.dtype)
        sums = guard((products * factors).sum(-1, keepdim=True), self.eps, self.min_denominator)
        if rotation is not None:
            products = wide_products(rotation(phi_q), rotation(phi_k))
        empty = vanishes(sums)
        weights = (products * factors / sums.masked_fill(empty, 1.0)).masked_fill(empty, 0.0)
        return wide_products(weights, value.mT).to(value.dtype), weights.to(value.dtype)


def state_layer(past_key_values: Cache | None, step: int) -> RecurrentStateLayer | None:
    """Where a mechanism with a recurrent state keeps it; None without a cache.

    Raises:
        ValueError: the cache has no place for a state.
    """
    cache = self_attention_cache(past_key_values)
    if cache is None:
        return None
    layer = cache.layers[step] if step < len(cache.layers) else None
    if not isinstance(layer, RecurrentStateLayer):
        raise ValueError(
            f"This attention keeps a state instead of keys and values, which the given {type(cache).__name__} has no"
            " place for; leave `past_key_values` out, or make it with `hf_xformers.core.cache.make_cache(config)`."
        )
    return layer


def visible_tokens(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool) -> Tensor | None:
    """Who may read whom, [B or 1, 1, T, S]; None if everybody may."""
    visible = None if mask is None else mask[:, None, None, :]
    if not causal:
        return visible
    order = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    return order[None, None] if visible is None else order & visible


def _pair(features: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
    return (features, None) if isinstance(features, Tensor) else (features[0], features[1])


def _named(state: LinearState | WindowState) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state._asdict().items() if tensor is not None}


def _pack(state: LinearState) -> tuple[Tensor, Tensor]:
    """A state in the form of keys and values, [B, H, F, d] and [B, H, F or F + 1, 1], which an ordinary cache
    keeps."""
    kv, z, scale = state
    return kv, (z if scale is None else torch.cat([z, scale[..., None]], dim=-1))[..., None]


def _unpack(layer: DynamicLayer) -> LinearState:
    keys, values = layer.keys, layer.values
    if keys is None or values is None:
        raise ValueError(
            "The cache holds no state of this memory yet; run the decoder once with the encoder's states."
        )
    kv, z = keys, values[..., 0]
    width = kv.shape[2]
    return LinearState(kv, z[..., :width], z[..., width] if z.shape[-1] > width else None)


class LinearSpec(AttentionSpec):
    """Base of the specs of linear attention. chunk_size: tokens per quadratic block of the causal scan.

    adds_up: whether the state of a text is the sum of the states of its parts, so that processes can hold these.
    """

    cross = True
    acts = frozenset()
    keeps_rotated = True
    head_options = frozenset({"parts"})
    adds_up: ClassVar[bool] = False

    chunk_size: int = bounded(64, least=1)

    def sequence_form(self, config) -> SequenceForm | Unserved:
        if not self.adds_up:
            return super().sequence_form(config)
        return SequenceForm.PREFIX if config.is_decoder else SequenceForm.SUM

    def cache_layer(self, config, layer_idx: int = 0) -> RecurrentStateLayer:
        return RecurrentStateLayer()
