# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (MLA): all heads read one short vector per token, which is all that a cache holds."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from ..core.cache import appended
from ..core.call import Call, SublayerOutput, self_attention_cache
from ..core.components import bounded, register
from ..core.hand_overs import HandOver
from ..core.initialization import start_projections
from ..core.linear_maps import is_plain_linear
from ..core.sequence_parallel import SequenceForm, Unserved
from ..core.visibility import rows_can_be_empty, visible_pairs
from ..normalization.layer_norm import RMSNorm
from ..ops.common.products import product
from ..ops.common.segments import operand_dtype
from .dense import DenseAttention, DenseSpec
from .shared.base import KeyStates
from .shared.query_blocks import visible_softmax

# Queries next to a cache for which keys and values are not made: scores of so many against all tokens are written out.
FEW_QUERIES = 16


class LatentAttention(DenseAttention):
    """c = RMSNorm(W_c x), r = turn(W_r x) once for all heads; k_h = [K_h c | r], v_h = V_h c, q_h = [n_h | turn(p_h)];
    o_h = softmax(q_h k_h^T / sqrt(n + r)) v_h.

    DeepSeek-AI 2024 (arXiv 2405.04434), section 2.1. Queries are W_q x, or with a rank W_q RMSNorm(W_d x). A prompt,
    or a batch in training, has its keys and values written out: O(T S D) time and O(T D) memory, as dense attention. A
    step of decoding never makes them: (n_h K_h) c scores the latents and V_h reads their weighted sum, the same
    equation for H (2 c + r) multiplications per token of the text. State: c + r numbers for each token.
    """

    spec: LatentSpec
    unpads = True

    def __init__(self, config, spec: LatentSpec, **where):
        super().__init__(config, spec, **where)
        width, latent, heads = config.hidden_size, spec.kv_lora_rank, self.num_heads
        both = spec.qk_nope_head_dim + spec.qk_rope_head_dim
        self.scaling = both**-0.5 if spec.scale is None else spec.scale
        self.q_down_proj: nn.Linear | None = None
        self.q_down_norm: nn.Module | None = None
        source = width
        if spec.q_lora_rank is not None:
            source = spec.q_lora_rank
            self.q_down_proj = nn.Linear(width, source, bias=spec.bias)
            self.q_down_norm = RMSNorm(source, spec.norm_eps)
        self.q_proj = nn.Linear(source, heads * both, bias=False)
        self.kv_down_proj = nn.Linear(width, latent + spec.qk_rope_head_dim, bias=spec.bias)
        self.kv_down_norm = RMSNorm(latent, spec.norm_eps)
        self.k_proj = nn.Linear(latent, heads * spec.qk_nope_head_dim, bias=False)
        self.v_proj = nn.Linear(latent, heads * spec.v_head_dim, bias=False)
        self.o_proj = nn.Linear(heads * spec.v_head_dim, width, bias=spec.has_output_bias)

    def initialize(self, config, init) -> None:
        downs = () if self.q_down_proj is None else (self.q_down_proj,)
        inputs = (*downs, self.q_proj, self.kv_down_proj, self.k_proj, self.v_proj)
        start_projections(config, init, inputs=inputs, output=self.o_proj)

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
        query, latent, turned = self.project_latent(hidden_states, context, past_key_values, step)
        if self._reads_latents(query, context):
            output, weights = self.read_latents(query, latent, turned, context), None
        else:
            output, weights = self.attend(query, *self.written_out(latent, turned), context)
        return SublayerOutput(self.written(output, context, hidden_states), weights)

    def project_latent(
        self, hidden_states: Tensor, context: Call, past_key_values: Cache | None, step: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, D] -> queries [B, H, T, n + r], and of all tokens so far latents [B, 1, S, c] and the part of keys
        that is turned [B, 1, S, r]."""
        states = hidden_states
        if self.q_down_proj is not None and self.q_down_norm is not None:
            states = self.q_down_norm(self.q_down_proj(states))
        query = self.q_proj(states)
        source = context.state(KeyStates)
        latent, turned = self.kv_down_proj(hidden_states if source is None else source.states).split(
            (self.spec.kv_lora_rank, self.spec.qk_rope_head_dim), dim=-1
        )
        latent = self.kv_down_norm(latent)
        if context.unpadding is not None:
            query, latent, turned = (context.padded(x) for x in (query, latent, turned))
        query = query.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        latent, turned = latent.unsqueeze(1), turned.unsqueeze(1)
        rotation = self.rotation(context)
        if rotation is not None:
            plain, placed = self._parts(query)
            query = torch.cat((plain, rotation(placed)), dim=-1)
            turned = turned if rotation.by_length else rotation(turned)
        cache = self_attention_cache(past_key_values)
        if cache is not None:
            latent, turned = appended(cache, latent, turned, step)
        return query, latent, self.turned_late(turned, context)

    def _parts(self, query: Tensor) -> tuple[Tensor, ...]:
        return query.split((self.spec.qk_nope_head_dim, self.spec.qk_rope_head_dim), dim=-1)

    def written_out(self, latent: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [B, H, S, n + r] and values [B, H, S, v] of latents [B, 1, S, c] and what is turned [B, 1, S, r]."""
        key, value = (
            projection(latent[:, 0]).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for projection in (self.k_proj, self.v_proj)
        )
        return torch.cat((key, turned.expand(-1, key.shape[1], -1, -1)), dim=-1), value

    def attend(self, query: Tensor, key: Tensor, value: Tensor, context: Call) -> tuple[Tensor, Tensor | None]:
        """query and key [B, H, T or S, n + r], value [B, H, S, v] -> output [B, T, H, v], weights."""
        if self.wants_weights(context):
            return super().attend(query, key, value, context)
        of_keys, of_values = key.shape[-1], value.shape[-1]  # fused kernels want them to be as wide
        if of_keys < of_values:
            query, key = (F.pad(x, (0, of_values - of_keys)) for x in (query, key))
        else:
            value = F.pad(value, (0, of_keys - of_values))
        output, weights = super().attend(query, key, value, context)
        return output[..., :of_values], weights

    def _reads_latents(self, query: Tensor, context: Call) -> bool:
        if context.fresh or query.shape[2] > FEW_QUERIES or self.wants_weights(context) or torch.is_grad_enabled():
            return False
        plain = is_plain_linear(self.k_proj) and is_plain_linear(self.v_proj)
        return plain and self.score_bias(context) is None

    def read_latents(self, query: Tensor, latent: Tensor, turned: Tensor, context: Call) -> Tensor:
        """The same as [`LatentAttention.attend`] with what [`LatentAttention.written_out`] gives, [B, T, H, v]."""
        batch, heads, length, _ = query.shape
        plain, placed = self._parts(query * self.scaling)
        plain = torch.matmul(plain, self.k_proj.weight.unflatten(0, (heads, -1)))  # [B, H, T, c]
        operands = operand_dtype(query)
        # Heads are rows of one product, as they have the keys in common.
        scores = product(plain.flatten(1, 2).to(operands), latent[:, 0].to(operands).mT)
        scores = scores + product(placed.flatten(1, 2).to(operands), turned[:, 0].to(operands).mT)
        scores = scores.view(batch, heads, length, -1)
        weights = visible_softmax(scores, visible_pairs(context), rows_can_be_empty(context), overwrite=True)
        weights = F.dropout(weights, self.dropout, self.training).to(latent.dtype)
        read = torch.matmul(weights.flatten(1, 2), latent[:, 0]).view(batch, heads, length, -1)
        return torch.matmul(read, self.v_proj.weight.unflatten(0, (heads, -1)).mT).transpose(1, 2)


@register("attention", "multi_head_latent_attention", aliases=("mla",))
class LatentSpec(DenseSpec):
    """Widths are those of DeepSeek-V2, by its names.

    Args:
        kv_lora_rank: of a token's latent.
        q_lora_rank: of what queries are made of (None: of the states themselves).
        qk_nope_head_dim, qk_rope_head_dim: of a head's queries and keys, the part without and the part with a
            rotation.
        v_head_dim: of a head's values.
        norm_eps: added to the mean squares of both norms (1e-6 in DeepSeek-V2 and V3).
        bias: on the projections down to the latents and on the output projection, those up have none.
    """

    summary = "keys and values of all heads from one latent vector per token"
    cross = False
    acts = frozenset({"rotation", "score_bias"})
    splits = frozenset()
    reads = frozenset({HandOver.KEY_STATES})
    supports = frozenset({"packed_rows", "pair_mask"})
    head_options = frozenset()

    bias: bool = False
    kv_lora_rank: int = bounded(512, least=1)
    q_lora_rank: int | None = bounded(None, least=1)
    qk_nope_head_dim: int = bounded(128, least=1)
    qk_rope_head_dim: int = bounded(64, least=1)
    v_head_dim: int = bounded(128, least=1)
    norm_eps: float = bounded(1e-6, above=0)

    def check(self, config) -> None:
        if config.key_value_heads != config.num_attention_heads:
            raise ValueError(
                "multi_head_latent_attention makes keys and values of every head from one latent, got"
                f" `num_key_value_heads` {config.num_key_value_heads}; leave that out."
            )

    def rotated_width(self, config) -> int:
        return self.qk_rope_head_dim

    def projects_keys(self, config) -> bool:
        return False

    def sequence_form(self, config) -> SequenceForm | Unserved:
        return Unserved("reads every key of a text")

    def build(self, config, **where) -> LatentAttention:
        return LatentAttention(config, self, **where)
