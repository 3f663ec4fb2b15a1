# SPDX-License-Identifier: Apache-2.0
"""Delta networks: a linear attention whose state corrects what it holds for a key instead of adding to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..core.cache import RecurrentStateLayer
from ..core.call import Call, SublayerOutput
from ..core.components import bounded, register
from ..core.sequence_parallel import SequenceForm, Unserved
from ..core.text_parts import TextParts
from ..ops.common.products import widened
from ..ops.common.segments import accumulation_dtype
from ..ops.linear.attention import LinearState, delta_rule, kernel_attention
from ..ops.linear.feature_maps import normalized_elu, normalized_positive_features
from ..ops.linear.feature_pullbacks import NormalizedDPFP, Rescaled
from .shared.base import Attention
from .shared.linear import state_layer
from .shared.random_rows import RandomRows
from .shared.spec import AttentionSpec
from .shared.state_parts import affine_state_before

# Added to sums of weights: what divides by them stays finite where a token has no feature in common with others.
_EPS = 1e-5


class DeltaNetAttention(RandomRows, Attention):
    """S_i = S_{i-1} + beta_i phi(k_i)^T (v_i - phi(k_i) S_{i-1}),   o_i = scale * phi(q_i) S_i,   beta_i = sigmoid(w
    x_i).

    Schlag, Irie and Schmidhuber 2021 (arXiv 2102.11174), section 4: each token reads what the state S [F, d] holds for
    its key and writes the difference to its value with strength beta, one number per head. phi is `dpfp` (F = 2 d nu),
    elu(x) + 1 (`elu`) or the hyperbolic random features of a Performer (`favor`: F = 2 m, [`RandomRows`]), divided by
    its sum (section 4.2), which keeps the update stable; divided by their sum, FAVOR+ features are a softmax over
    [W x, -W x]. There is no denominator. The released code multiplies the result by 1 / sqrt(d), and so does this
    (`scale`).

    `attention_normalize` (section 4.2) divides what is read, by keys and by queries, by the sum of the
    weights it is read with, z_i = sum_{j <= i} phi(k_j):

        S_i = S_{i-1} + beta_i phi(k_i)^T (v_i - phi(k_i) S_{i-1} / phi(k_i) z_{i-1}),   o_i = scale * phi(q_i) S_i /
        phi(q_i) z_i.

    A whole text is computed in chunks (Yang et al. 2024, arXiv 2406.06484): time O(T (C + d) F) per head, memory O(T
    D). A token with a cache takes one step. State: S (and z), the same size at any length. A padded token leaves it
    untouched.

    The weights given out are those that the rule implies for earlier values: they can be negative and do not sum to
    one. A cached text gives none. `attention_probs_dropout_prob` has no effect, as there are no probabilities. Rotary
    positions turn queries and keys before phi.
    """

    spec: DeltaNetSpec

    joins_projections = True

    def __init__(self, config, spec: DeltaNetSpec, **where):
        super().__init__(config, spec, **where)
        self.beta_proj = nn.Linear(config.hidden_size, self.num_heads, bias=False)
        # [B, H, t, d] -> normalized features [B, H, t, F].
        maps: dict[str, Any] = {"dpfp": NormalizedDPFP(spec.nu), "elu": normalized_elu}
        self.phi: Callable[..., Tensor] = maps.get(spec.feature_map, normalized_positive_features)
        if spec.feature_map == "favor":
            self.make_rows(spec.num_features or self.head_dim)

    def phi_params(self, context: Call) -> tuple[Tensor, ...]:
        return () if self.num_rows is None else (self.rows(context),)

    def forward(
        self,
        hidden_states: Tensor,
        context: Call,
        *,
        memory: Tensor | None = None,
        past_key_values: Cache | None = None,
        step: int | None = None,
    ) -> SublayerOutput:
        layer = state_layer(past_key_values, self.layer_idx if step is None else step)
        query, key, value = self.projected_heads(hidden_states)
        rotation = self.rotation(context)
        if rotation is not None:
            query, key = rotation(query), rotation(key)
        key, value = self.repeated(key), self.repeated(value)
        beta = torch.sigmoid(self.beta_proj(hidden_states)).transpose(1, 2)
        inputs, params = (query, key, value, beta, context.query_padding_mask), self.phi_params(context)
        state, weights = layer.state if layer is not None else {}, None
        if context.parts is not None:
            state = {"memory": self._state_before(*inputs[1:], params, context.parts)}
        if self.wants_weights(context) and not state:
            output, weights = self._literal(*inputs, params)
            if layer is not None:
                _, state = self._scan(*inputs, params, state)
        else:
            output, state = self._scan(*inputs, params, state)
            output = output * self.scaling
        if layer is not None:
            layer.advance(query.shape[2], **state)
        output = self.o_proj(output.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1))
        return SublayerOutput(output, weights)

    def _scan(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        beta: Tensor,
        mask: Tensor | None,
        params: tuple[Tensor, ...],
        state: dict[str, Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What queries read [B, H, T, d], without `scale`, and the state after these tokens."""
        options: dict[str, Any] = {"key_padding_mask": mask, "chunk_size": self.spec.chunk_size, "return_state": True}
        if not self.spec.attention_normalize:
            result: Any = delta_rule(
                *(query, key, value, beta, *params), feature_map=self.phi, state=state.get("memory"), **options
            )
            return result[0], {"memory": result[1]}
        query, key = widened(query, key)
        norm = state.get("norm")
        sums: dict[str, Any] = {"causal": True, "normalize": False, "chunk_size": self.spec.chunk_size}
        sums["state"] = None if norm is None else LinearState(norm[..., None], norm)
        ones = torch.ones_like(key[..., :1])
        found: Any = kernel_attention(
            query, key, ones, self.phi, *params, key_padding_mask=mask, return_state=True, **sums
        )
        total, after = found
        # A key reads what earlier ones have written, so they move on by one place.
        earlier = torch.zeros_like(ones[:, 0, :, 0], dtype=torch.bool)
        earlier[:, 1:] = True if mask is None else mask[:, :-1]
        moved = key.roll(1, dims=2)
        held: Any = kernel_attention(key, moved, ones, self.phi, *params, key_padding_mask=earlier, **sums)
        held = held + _EPS
        # beta' = beta n and phi' = phi / n write as beta and phi do, and read what is held divided by n.
        query, key = torch.cat([query, 1.0 / (total + _EPS)], dim=-1), torch.cat([key, 1.0 / held], dim=-1)
        beta = beta.to(held.dtype) * held[..., 0]
        found = delta_rule(
            *(query, key, value, beta, *params), feature_map=Rescaled(self.phi), state=state.get("memory"), **options
        )
        return found[0], {"memory": found[1], "norm": after.z}

    def _state_before(
        self,
        key: Tensor,
        value: Tensor,
        beta: Tensor,
        mask: Tensor | None,
        params: tuple[Tensor, ...],
        parts: TextParts,
    ) -> Tensor:
        """What earlier parts of the texts leave, [B, H, F, d]. The tokens of a part take a state S to M S + U, where M
        is what they make of the unit matrix without values, and U what they write into nothing."""
        width = self.phi(key[:, :, :1].detach().to(accumulation_dtype(value.dtype)), *params).shape[-1]
        unit = torch.eye(width, dtype=accumulation_dtype(value.dtype), device=value.device)
        start = torch.nn.functional.pad(unit, (0, value.shape[3])).expand(*key.shape[:2], -1, -1)
        options: dict[str, Any] = {"key_padding_mask": mask, "chunk_size": self.spec.chunk_size, "return_state": True}
        both = torch.nn.functional.pad(value, (width, 0))
        found: Any = delta_rule(key, key, both, beta, *params, feature_map=self.phi, state=start, **options)
        return affine_state_before(found[1], parts)

    def _literal(
        self, query: Tensor, key: Tensor, value: Tensor, beta: Tensor, mask: Tensor | None, params: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """The matrix of what each token reads of each value, [B, H, T, T], and its product with the values."""
        dtype = accumulation_dtype(value.dtype)
        strength = beta.to(dtype) if mask is None else beta.to(dtype) * mask[:, None]
        q, k = self.phi(query.to(dtype), *params), self.phi(key.to(dtype), *params)
        with torch.autocast(value.device.type, enabled=False):
            own, read = (k @ k.mT).tril(-1), (q @ k.mT).tril()
            overlaps = strength[..., None] * own
            if self.spec.attention_normalize:
                real = 1.0 if mask is None else mask[:, None, None].to(dtype)
                overlaps = overlaps / ((own * real).sum(-1, keepdim=True) + _EPS)
                read = read / ((read * real).sum(-1, keepdim=True) + _EPS)
            identity = torch.eye(key.shape[2], dtype=dtype, device=key.device)
            # Written differences U solve (I + overlaps) U = diag(beta) V.
            written = torch.linalg.solve_triangular(
                identity + overlaps, torch.diag_embed(strength), upper=False, unitriangular=True
            )
            weights = self.scaling * read @ written
            output = weights @ value.to(dtype)
        return output.to(value.dtype), weights.to(value.dtype)


@register("attention", "delta_net", aliases=("delta_rule",))
class DeltaNetSpec(AttentionSpec):
    """
    Args:
        feature_map: `dpfp` (nu shifted products, 2 d nu features), `elu` (d features) or `favor` (2 m random
            features).
        nu: the number of shifts.
        attention_normalize: what is read is divided by the sum of the weights that it is read with.
        num_features: random rows m of `favor` (None: the width of a head).
        orthogonal: these are orthogonal in blocks of the head width.
        redraw_interval: training passes between draws (0: never).
        seed: of the draws.
        chunk_size: tokens per triangular system.
    """

    summary = "fast weights that are corrected by the delta rule: linear time, causal"
    head_options = frozenset({"norm"})
    bidirectional = False
    acts = frozenset({"rotation"})
    keeps_rotated = True
    not_taken_over = ("scale",)  # here of what is read, not of scores

    feature_map: Literal["dpfp", "elu", "favor"] = "dpfp"
    nu: int = bounded(3, least=1)
    attention_normalize: bool = False
    num_features: int | None = bounded(None, least=1)
    orthogonal: bool = True
    redraw_interval: int = bounded(1000, least=0)
    seed: int = bounded(0, least=0)
    chunk_size: int = bounded(64, least=1)

    def check(self, config) -> None:
        most = 2 * config.head_width - 1
        if self.feature_map == "dpfp" and self.nu > most:
            raise ValueError(
                f"delta_net has {most} different shifts for heads of width {config.head_width}, got `nu={self.nu}`."
            )

    def weighs(self, config) -> bool:
        return False

    def sequence_form(self, config) -> SequenceForm | Unserved:
        if self.attention_normalize:
            return Unserved("with `attention_normalize` divides by sums of other parts inside its rule")
        return SequenceForm.AFFINE

    def cache_layer(self, config, layer_idx: int = 0) -> RecurrentStateLayer:
        return RecurrentStateLayer()

    def build(self, config, **where) -> DeltaNetAttention:
        return DeltaNetAttention(config, self, **where)
