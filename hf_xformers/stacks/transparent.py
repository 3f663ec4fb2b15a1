# SPDX-License-Identifier: Apache-2.0
"""Transparent attention: every decoder layer reads its own mixture of all encoder layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.call import dropout_rate
from ..core.components import bounded, register
from ..core.hand_overs import HandOver
from .base import StackSpec
from .driver import Pass, StackOutput
from .plain import PlainStack


class TransparentEncoderStack(PlainStack):
    """Z_j = sum_i s_ij H_i, with s_.j = softmax_i(W_.j) (Bapna et al. 2018, arXiv 1808.07561).

    H_0 .. H_N [B, T, D] are the encoder's input (embedding with position, after dropout) and its layers' outputs, j
    one of the M decoder layers, W [N + 1, M] starts at 0 (a plain mean). Softmax in float32 at least; in training,
    entries of s are dropped out (lingvo's released code). Where layers normalize their input, H_i is the plain
    residual stream; the tower's final norm, if it has one, is applied to each Z_j as it is to H_N, so that all of s on
    H_N gives the memory of the ordinary encoder-decoder. The decoder needs no other stack: each of its layers finds
    its Z_j in the memory [B, M, T, D]. Decoding keeps keys and values of Z_j, as many as ordinarily.
    """

    undecayed = ("mixture",)

    dropout = dropout_rate("mixing_dropout")

    def __init__(self, config, spec: TransparentSpec):
        super().__init__()
        decoder = config.tower("decoder")
        self.dropout = spec.weight_dropout
        states, readers = config.stack.num_steps(config) + 1, decoder.stack.num_steps(decoder)
        self.mixture = nn.Parameter(torch.zeros(states, readers))

    def initialize(self, config, init) -> None:
        init.zeros_(self.mixture)

    def weights(self) -> Tensor:
        """s [N + 1, M], columns sum to 1 (before dropout)."""
        wide = self.mixture if self.mixture.dtype == torch.float64 else self.mixture.float()
        return torch.softmax(wide, dim=0)

    def forward(self, run: Pass) -> StackOutput:
        context, dtype = run.context, run.hidden_states.dtype
        states = [context.packed(run.hidden_states)]
        run.collect = states.append
        result = super().forward(run)
        weights = F.dropout(self.weights(), self.dropout, self.training).to(dtype)
        batch, length, width = states[0].shape
        mixed = weights.t() @ torch.stack(states, dim=1).view(batch, len(states), length * width)
        mixed = mixed.view(batch, -1, length, width)
        if context.unpadding is not None:
            mixed = context.padded(mixed.transpose(1, 2)).transpose(1, 2)
        result.memories = mixed
        return result


@register("stack", "transparent")
class TransparentSpec(StackSpec):
    """weight_dropout: probability that an encoder layer's weight for a decoder layer is dropped in training."""

    supports = frozenset({"packed_rows", "unpadding"})
    summary = "each decoder layer reads its own mixture of all encoder layers"
    gives = frozenset({HandOver.MEMORIES})

    weight_dropout: float | int = bounded(0.1, least=0, below=1)

    def check(self, config) -> None:
        if not config.is_encoder_decoder:
            raise ValueError(
                "stack 'transparent' mixes an encoder's layers for a decoder, so it needs `is_encoder_decoder=True`;"
                " use 'plain' in a model with one tower."
            )

    def build(self, config, **where) -> PlainStack:
        return PlainStack() if config.is_decoder else TransparentEncoderStack(config, self)
