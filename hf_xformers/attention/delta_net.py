"""Delta networks: a linear attention whose state corrects what it holds for a key instead of adding to it."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..core.cache import RecurrentStateLayer
from ..core.components import register
from ..core.context import LayerContext, SublayerOutput
from ..ops.common.segments import accumulation_dtype
from ..ops.linear.attention import delta_rule
from ..ops.linear.feature_maps import normalized_elu
from ..ops.linear.feature_pullbacks import NormalizedDPFP
from .shared.base import Attention, AttentionSpec
from .shared.linear import state_layer


class DeltaNetAttention(Attention):
    """S_i = S_{i-1} + beta_i phi(k_i)^T (v_i - phi(k_i) S_{i-1}),   o_i = scale * phi(q_i) S_i,   beta_i = sigmoid(w
    x_i).

    Schlag, Irie and Schmidhuber 2021 (arXiv 2102.11174), section 4: each token reads what the state S [F, d] holds for
    its key and writes the difference to its value with strength beta, one number per head. phi is `dpfp` (F = 2 d nu)
    or elu(x) + 1, divided by its sum (section 4.2), which keeps the update stable; there is no denominator. The
    released code multiplies the result by 1 / sqrt(d), and so does this (`scale`).

    A whole text is computed in chunks (Yang et al. 2024, arXiv 2406.06484): time O(T (C + d) F) per head, memory O(T
    D). A token with a cache takes one step. State: S, the same size at any length. A padded token leaves it untouched.

    The weights given out are those that the rule implies for earlier values: they can be negative and do not sum to
    one. A cached text gives none. `attention_probs_dropout_prob` has no effect, as there are no probabilities. Rotary
    positions turn queries and keys before phi.
    """

    spec: DeltaNetSpec

    def __init__(self, config, spec: DeltaNetSpec, **where):
        super().__init__(config, spec, **where)
        self.beta_proj = nn.Linear(config.hidden_size, self.num_heads, bias=False)
        # [B, H, t, d] -> normalised features [B, H, t, F].
        self.phi = NormalizedDPFP(spec.nu) if spec.feature_map == "dpfp" else normalized_elu

    def forward(
        self,
        hidden_states: Tensor,
        context: LayerContext,
        *,
        memory: Tensor | None = None,
        past_key_values: Cache | None = None,
        step: int | None = None,
    ) -> SublayerOutput:
        layer = state_layer(past_key_values, self.layer_idx if step is None else step)
        query, key = self.queries(hidden_states), self.keys(hidden_states)
        value = self.heads(self.v_proj(hidden_states))
        rotation = self.rotation(context)
        if rotation is not None:
            query, key = rotation(query), rotation(key)
        key, value = self.repeated(key), self.repeated(value)
        beta = torch.sigmoid(self.beta_proj(hidden_states)).transpose(1, 2)
        mask, weights = context.query_padding_mask, None
        output: Any = None
        state = layer.state.get("memory") if layer is not None else None
        if self.wants_weights(context) and state is None:
            output, weights = self._literal(query, key, value, beta, mask)
        if weights is None or layer is not None:
            options: dict[str, Any] = {"key_padding_mask": mask, "state": state, "chunk_size": self.spec.chunk_size}
            found, state = delta_rule(query, key, value, beta, feature_map=self.phi, return_state=True, **options)
            output = output if weights is not None else found * self.scaling
        if layer is not None and state is not None:
            layer.advance(query.shape[2], memory=state)
        output = self.o_proj(output.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1))
        return SublayerOutput(output, weights)

    def _literal(
        self, query: Tensor, key: Tensor, value: Tensor, beta: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The matrix of what each token reads of each value, [B, H, T, T], and its product with the values."""
        dtype = accumulation_dtype(value.dtype)
        strength = beta.to(dtype) if mask is None else beta.to(dtype) * mask[:, None]
        q, k = self.phi(query.to(dtype)), self.phi(key.to(dtype))
        with torch.autocast(value.device.type, enabled=False):
            overlaps = (strength[..., None] * (k @ k.mT)).tril(-1)
            identity = torch.eye(key.shape[2], dtype=dtype, device=key.device)
            # Written differences U solve (I + overlaps) U = diag(beta) V.
            written = torch.linalg.solve_triangular(
                identity + overlaps, torch.diag_embed(strength), upper=False, unitriangular=True
            )
            weights = self.scaling * (q @ k.mT).tril() @ written
            output = weights @ value.to(dtype)
        return output.to(value.dtype), weights.to(value.dtype)


@register("attention", "delta_net", aliases=("delta_rule",))
class DeltaNetSpec(AttentionSpec):
    """feature_map: `dpfp` (nu shifted products, 2 d nu features) or `elu` (d features). nu: its number of shifts.
    chunk_size: tokens per triangular system."""

    summary = "fast weights that are corrected by the delta rule: linear time, causal"
    normalizes_heads = True
    bidirectional = False
    rotation = True
    keeps_rotated = True
    not_taken_over = ("scale",)  # here of what is read, not of scores

    feature_map: Literal["dpfp", "elu"] = "dpfp"
    nu: int = 3
    chunk_size: int = 64

    def check_fields(self) -> None:
        for name in ("nu", "chunk_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"delta_net needs `{name}` >= 1, got {getattr(self, name)}.")

    def check(self, config) -> None:
        most = 2 * config.head_width - 1
        if self.feature_map == "dpfp" and self.nu > most:
            raise ValueError(
                f"delta_net has {most} different shifts for heads of width {config.head_width}, got `nu={self.nu}`."
            )

    def weighs(self, config) -> bool:
        return False

    def cache_layer(self, config) -> RecurrentStateLayer:
        return RecurrentStateLayer()

    def build(self, config, **where) -> DeltaNetAttention:
        return DeltaNetAttention(config, self, **where)
