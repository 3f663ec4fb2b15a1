# SPDX-License-Identifier: Apache-2.0
"""In place of cross-attention: the vector of what is to be written, added to every token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..core.call import Call, Sublayer, SublayerOutput
from ..core.components import register
from .shared.base import given_memory
from .shared.spec import AttentionSpec
from .shared.unread_input import check_unread_input, reads_memory


class MemoryVector(Sublayer):
    """o_t = d, the same for every token: Zhang, Wei and Zhou 2019 (arXiv 1905.06566), section 3.2, whose decoder
    writes the sentence k that d = d_k stands for.

    The memory [B, M, D] has one item there; of several, d is their mean. It has no parameters, and keeps nothing for
    generation.
    """

    def forward(
        self,
        hidden_states: Tensor,
        context: Call,
        *,
        memory: Tensor | None = None,
        past_key_values: Cache | None = None,
        step: int | None = None,
    ) -> SublayerOutput:
        """hidden_states [B, T, D], memory [B, M, D] -> [B, T, D]; zeros where no item is real."""
        memory, mask = given_memory(memory), context.memory_padding_mask
        wide = memory if memory.dtype == torch.float64 else memory.float()
        if mask is None:
            vector = wide.mean(1, keepdim=True)
        else:
            real = mask.unsqueeze(-1)
            vector = wide.masked_fill(~real, 0.0).sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp(min=1)
        return SublayerOutput(vector.to(hidden_states.dtype).expand_as(hidden_states))


@register("attention", "memory_vector")
class MemoryVectorSpec(AttentionSpec):
    """For `cross_attention` alone: adds the memory's one vector (of several, their mean) to every token."""

    not_taken_over = ("scale",)  # there are no scores
    summary = "adds the memory's vector in place of cross-attention"
    cross = True
    why_not: ClassVar[Mapping[str, str]] = {"causal": "it reads the memory of an encoder, and nothing else."}

    def check_fields(self) -> None:
        if self.scale is not None:
            raise ValueError(f"memory_vector has no scores to scale, got `scale={self.scale}`; leave it unset (None).")

    def check(self, config) -> None:
        if config.attention is self:
            raise ValueError(
                "attention 'memory_vector' reads the memory of an encoder, and nothing else; set it as"
                " `cross_attention`, and let `attention` be e.g. 'dense'."
            )
        if reads_memory(self, config):
            check_unread_input(config, "memory_vector as `cross_attention` reads the memory")

    def build(self, config, **where) -> MemoryVector:
        return MemoryVector()
