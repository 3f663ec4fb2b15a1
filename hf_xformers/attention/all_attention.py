# SPDX-License-Identifier: Apache-2.0
"""All-attention: learned keys and values next to those of the text take the feed-forward's place."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.call import Call
from ..core.components import bounded, register
from ..core.hand_overs import HandOver
from ..core.visibility import visible_pairs
from ..ops.common.fused import fused_attention
from .shared.base import Attention, literal_softmax_attention
from .shared.spec import AttentionSpec


class AllAttention(Attention):
    """o_i = sum_j a_ij v_j + sum_n a_in M^V_n, a_i = softmax over the keys of the text and the memory M^K together.

    Sukhbaatar et al. 2019 (arXiv 1907.01470), eqs. 8-10. Each head has N keys and values of its own, which have no
    position and are always visible. As in the authors' code a stored key is multiplied by sqrt(d) and a stored value
    by sqrt(N), which scales their gradients. Cost: O(T (S + N) D) time; state: keys and values of the text.
    """

    spec: AllAttentionSpec

    def __init__(self, config, spec: AllAttentionSpec, **where):
        super().__init__(config, spec, **where)
        self.slots = spec.slots(config)
        shape = (self.num_key_value_heads, self.slots, self.head_dim)
        self.memory_keys, self.memory_values = nn.Parameter(torch.empty(shape)), nn.Parameter(torch.empty(shape))

    def initialize(self, config, init) -> None:
        super().initialize(config, init)
        init.normal_(self.memory_keys, mean=0.0, std=self.head_dim**-0.5)
        init.normal_(self.memory_values, mean=0.0, std=self.slots**-0.5)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, context: Call) -> tuple[Tensor, Tensor | None]:
        """As the contract has it; weights are those of the text alone and sum to less than 1."""
        batch, mask = query.shape[0], visible_pairs(context)
        memory_keys = (self.memory_keys * self.head_dim**0.5).to(key.dtype).expand(batch, -1, -1, -1)
        memory_values = (self.memory_values * self.slots**0.5).to(value.dtype).expand(batch, -1, -1, -1)
        key, value = torch.cat([memory_keys, key], 2), torch.cat([memory_values, value], 2)
        if mask is not None:
            mask = F.pad(mask, (self.slots, 0), value=True)
        dropout = self.dropout_now
        key, value = self.repeated(key), self.repeated(value)
        if self.wants_weights(context):
            _, weights = literal_softmax_attention(query, key, value, mask, None, self.scaling)
            parts = weights.split([self.slots, weights.shape[-1] - self.slots], -1)
            values = value.split([self.slots, value.shape[2] - self.slots], 2)
            # In two products, so that what is given as weights is what the output is made of.
            read = [
                F.dropout(part, dropout) @ v if dropout else part @ v for part, v in zip(parts, values, strict=True)
            ]
            return (read[0] + read[1]).transpose(1, 2), parts[1]
        output = fused_attention(query, key, value, mask, dropout, scale=self.scaling)
        return output.transpose(1, 2), None


@register("attention", "all_attention", aliases=("persistent_memory",))
class AllAttentionSpec(AttentionSpec):
    """memory_size: N, learned slots per head (`None`: `intermediate_size`, which gives the layer the parameters of the
    feed-forward it replaces). Use it with block 'no_ffn'."""

    summary = "attention over the text and a learned memory"
    acts = frozenset()
    supports = frozenset({"packed_rows", "pair_mask"})
    gives = frozenset({HandOver.TOKEN_MAP})

    memory_size: int | None = bounded(None, least=1)

    def slots(self, config) -> int:
        """N for this config."""
        return config.intermediate_size if self.memory_size is None else self.memory_size

    def weighs(self, config) -> bool:
        return False

    def build(self, config, **where) -> AllAttention:
        return AllAttention(config, self, **where)
