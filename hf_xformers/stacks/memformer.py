# SPDX-License-Identifier: Apache-2.0
"""Memformer's stack: memory slots that are read in every layer and written after the last."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..blocks.memformer import MemorySlots
from ..compat import shared_setting
from ..core.call import self_attention_cache
from ..core.components import bounded, register
from ..core.hand_overs import HandOver
from ..core.segment_memory import SegmentMemory, read_single
from ..ops.common.products import wide_products
from .base import Stack, StackSpec
from .driver import Pass, StackOutput
from .plain import PlainStack

SEGMENT_MEMORY = "segment_memory"


def normalized(slots: Tensor) -> Tensor:
    """slots [..., D] of length 1, in float32 at least."""
    return F.normalize(slots if slots.dtype == torch.float64 else slots.float(), dim=-1).to(slots.dtype)


class SlotWriter(nn.Module):
    """m_i' = softmax([m_i W_q . m_i W_k ; m_i W_q . X W_k'] / (tau sqrt(d))) [m_i ; X W_v], for each head: a slot
    looks at itself and at the tokens, not at other slots (Wu et al. 2022, arXiv 2010.06891, section 3.4). Then

        bmn: m_i <- (m_i' + b_i) / |m_i' + b_i|, M_0 = b / |b|, which draws a slot back to its bias (section 3.5);
        gru: m_i <- GRU(m_i', m_i), and a feed-forward network around which m_i is kept; M_0 is learned.
    """

    def __init__(self, config, spec: MemformerSpec):
        super().__init__()
        width, self.heads = config.hidden_size, config.layer(0).num_attention_heads
        self.head_dim, self.eps = width // self.heads, shared_setting(config, "layer_norm_eps")
        self.scaling = 1.0 / (spec.temperature * self.head_dim**0.5)
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.token_k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.is_gated = spec.update == "gru"
        if self.is_gated:
            self.input_gates = nn.Linear(width, 3 * width)
            self.slot_gates = nn.Linear(width, 3 * width)
            self.norm = nn.LayerNorm(width, eps=self.eps)
            self.up_proj = nn.Linear(width, config.intermediate_size)
            self.down_proj = nn.Linear(config.intermediate_size, width)

    def read(self, slots: Tensor, tokens: Tensor, real: Tensor | None) -> Tensor:
        """slots [B, k, D], tokens [B, T, D], real [B, T] boolean or None (all) -> m' [B, k, D]."""

        def split(x: Tensor) -> Tensor:
            return x.unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)

        query = split(self.q_proj(slots)) * self.scaling
        of_tokens = wide_products(query, split(self.token_k_proj(tokens)))
        own = (query * split(self.k_proj(slots))).to(of_tokens.dtype).sum(-1, keepdim=True)
        if real is not None:
            of_tokens = of_tokens.masked_fill(~real[:, None, None], torch.finfo(of_tokens.dtype).min)
        weights = torch.softmax(torch.cat([own, of_tokens], dim=-1), dim=-1).to(slots.dtype)
        read = weights[..., :1] * split(slots) + torch.matmul(weights[..., 1:], split(self.v_proj(tokens)))
        return read.transpose(1, 2).flatten(2)

    def forward(self, slots: Tensor, tokens: Tensor, real: Tensor | None, bias: Tensor) -> Tensor:
        """The slots after a segment, [B, k, D]; those of a row of padding alone stay. bias: [k, D]."""
        written = self.read(slots, tokens, real)
        written = self.gated(written, slots) if self.is_gated else normalized(written + bias.to(written.dtype))
        return written if real is None else torch.where(real.any(1)[:, None, None], written, slots)

    def gated(self, read: Tensor, slots: Tensor) -> Tensor:
        reset, update, new = self.input_gates(read).chunk(3, dim=-1)
        own_reset, own_update, own_new = self.slot_gates(slots).chunk(3, dim=-1)
        update = torch.sigmoid(update + own_update)
        new = torch.tanh(new + torch.sigmoid(reset + own_reset) * own_new)
        slots = (1 - update) * new + update * slots
        return slots + self.down_proj(F.relu(self.up_proj(self.norm(slots))))


class MemformerStack(PlainStack):
    """X = layers(tokens; M_t), M_{t+1} = write(M_t, X) (Wu et al. 2022, section 3).

    The memory is k slots per row, whatever the length of the text, and comes and goes as `segment_memory`; without one
    it is M_0. Gradients go through it to earlier segments: cut them with `detach()`, or go back with memory replay
    (`hf_xformers.training.replay`). Padding is not written. A generation cache holds the segment that is being read;
    the memory is given with every call, and is written where a call has the whole segment.
    """

    undecayed = ("slots",)

    def __init__(self, config, spec: MemformerSpec):
        super().__init__()
        self.slots = nn.Parameter(torch.empty(spec.num_slots, config.hidden_size))
        self.normalizes = spec.update == "bmn"
        self.writer = SlotWriter(config, spec)

    def initialize(self, config, init) -> None:
        init.normal_(self.slots, mean=0.0, std=config.initializer_range)

    def begin(self, given: SegmentMemory | None, like: Tensor) -> Tensor:
        """The slots [B, k, D] that a segment reads. Raises `TypeError` and `ValueError` for a memory that does not
        fit."""
        start = (normalized(self.slots) if self.normalizes else self.slots).to(like.dtype)
        shape = (like.shape[0], *self.slots.shape)
        start = start.expand(shape)
        slots, mask = read_single(given, shape)
        if slots is None:
            return start
        slots = slots.to(like.dtype)
        return slots if mask is None else torch.where(mask[..., None], slots, start)

    def forward(self, run: Pass) -> StackOutput:
        context = run.context
        slots = self.begin(context.inputs.get(SEGMENT_MEMORY), run.hidden_states)
        context.start(MemorySlots(slots))
        cache = self_attention_cache(run.past_key_values)
        whole = cache is None or cache.get_seq_length() == 0
        output = super().forward(run)
        if whole:
            states, real = output.hidden_states, context.query_padding_mask
            written = self.writer(slots, states, real, self.slots)
            output.segment_memory = SegmentMemory((written,))
            if torch.is_grad_enabled():  # parameters that take no part would puzzle distributed training
                output.hidden_states = states + 0.0 * written.mean()
        return output


@register("stack", "memformer")
class MemformerSpec(StackSpec):
    """
    Args:
        num_slots: vectors of the memory, k.
        update: how a slot is written, `bmn` (biased memory normalization) or `gru` (a gated recurrent cell and a
            feed-forward network, as in the paper's first version).
        temperature: the smaller, the fewer tokens a slot is written from.
        replay: whether `XFormerTrainer` goes back through the segments of an optimizer's step (its micro-batches) by
            memory replay; else gradients end with a segment. Needs block 'memformer'. In an encoder-decoder the
            encoder has the memory.
    """

    summary = "memory slots, read in every layer and written per segment"
    inputs = (SEGMENT_MEMORY,)
    gives = frozenset({HandOver.SLOTS})

    num_slots: int = bounded(128, least=1)
    update: Literal["bmn", "gru"] = "bmn"
    temperature: float | int = bounded(0.5, above=0)
    replay: bool = True

    def replays(self) -> bool:
        return self.replay

    def check(self, config) -> None:
        if config.hidden_size % config.num_attention_heads:
            raise ValueError(
                f"memformer's slots are written with {config.num_attention_heads} heads, which do not divide"
                f" `hidden_size` {config.hidden_size}; choose another number of heads."
            )

    def build(self, config, **where) -> Stack:
        reads_encoder = config.is_decoder and config.is_encoder_decoder
        return PlainStack() if reads_encoder else MemformerStack(config, self)
