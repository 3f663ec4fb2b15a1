# SPDX-License-Identifier: Apache-2.0
"""Informer's encoder: between layers a convolution and a maximum over neighbors halve the sequence."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.call import add_losses
from ..core.components import bounded, register
from ..core.segment_memory import take_slots
from ..ops.common.real_tokens import real_first
from .base import Stack, StackSpec
from .driver import Pass, StackOutput


class DistillingStack(Stack):
    """x^{l+1} = MaxPool(ELU(Conv1d(layer_l(x^l)))), kernels of 3, the maximum with stride 2 (Zhou et al. 2021, arXiv
    2012.07436, section 3.2, equation 5): n tokens become ceil(n / 2). The last layer is followed by none.

    The released code has a BatchNorm between convolution and ELU, which mixes the rows of a batch and which the
    equation lacks; that of a trained model is a factor and a bias of the convolution. Between the first layer and the
    last padding stands behind each row's tokens; next to a text's ends stand zeros or, `circular`, its other end.

    With `upsample` each final state is repeated over the tokens it stands for and added to the first layer's output.
    """

    def __init__(self, config, spec: DistillingSpec):
        super().__init__()
        self.spec, self.halvings, self.upsample = spec, spec.times(config), spec.gives_every_token(config)
        width = config.hidden_size
        self.convolutions = nn.ModuleList(nn.Conv1d(width, width, 3) for _ in range(self.halvings))

    def forward(self, run: Pass) -> StackOutput:
        hidden_states, context = run.hidden_states, run.context
        real, order = context.padding_mask, None
        losses: dict[str, Tensor] = {}
        first, first_real, inner = hidden_states, real, context
        for step, layer in enumerate(run.layers):
            if step:
                index = torch.arange(hidden_states.shape[1], device=hidden_states.device)
                inner = context.derive(
                    padding_mask=real, positions=index[None], query_index=index, key_index=index, fresh=True
                )
            layer.prepare(inner, None)
            hidden_states, _, new_losses = layer(hidden_states, None, inner.states, context=inner, step=step)
            add_losses(losses, new_losses)
            if step == 0 and self.halvings:
                if real is not None:
                    order = real_first(real)
                    hidden_states, real = take_slots(hidden_states, order), real.gather(1, order)
                first, first_real = hidden_states, real
            if step < self.halvings:
                hidden_states, real = self.halved(step, hidden_states, real)
        if not self.halvings:
            return StackOutput(hidden_states, context, losses)
        if not self.upsample:
            if real is None:  # whoever reads these states must not take the mask of the longer text for theirs
                real = hidden_states.new_ones(hidden_states.shape[:2], dtype=torch.bool)
            return StackOutput(hidden_states, context.derive(padding_mask=real), losses)
        place = torch.arange(first.shape[1], device=first.device)
        hidden_states = hidden_states[:, place // 2**self.halvings] + first
        if order is not None and first_real is not None:
            hidden_states = take_slots(hidden_states.masked_fill(~first_real[..., None], 0.0), order.argsort(1))
        return StackOutput(hidden_states, context, losses)

    def halved(self, gap: int, states: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """states [B, T, D], real [B, T] with padding last or None -> [B, ceil(T / 2), D] and which are real."""
        mixed = F.elu(self.convolutions[gap](self.with_ends(states, real).transpose(1, 2)))
        if real is not None:
            mixed = mixed.masked_fill(~real[:, None], torch.finfo(mixed.dtype).min)
        # Of two axes, as a graph of the one in one axis is that of one length.
        pooled = F.max_pool2d(mixed[:, :, None], (1, 3), stride=(1, 2), padding=(0, 1))[:, :, 0].transpose(1, 2)
        if real is None:
            return pooled, None
        kept = real[:, ::2]
        return pooled.masked_fill(~kept[..., None], 0.0), kept

    def with_ends(self, states: Tensor, real: Tensor | None) -> Tensor:
        """[B, T, D] -> [B, T + 2, D]: the states between what the convolution reads next to a text's ends."""
        if self.spec.padding_mode == "zeros":
            states = states if real is None else states.masked_fill(~real[..., None], 0.0)
            return F.pad(states, (0, 0, 1, 1))
        slot = torch.arange(-1, states.shape[1] + 1, device=states.device)
        if real is None:
            return states[:, slot % states.shape[1]]
        count = real.sum(1, keepdim=True)
        around = take_slots(states, slot % count.clamp(min=1))
        return around.masked_fill((slot > count)[..., None], 0.0)


@register("stack", "distilling")
class DistillingSpec(StackSpec):
    """halvings: how often the sequence is halved, after the first layers (`None`: after every layer but the last).
    padding_mode: what the convolution reads next to a text's ends, `zeros` or, as the released code, the other end
    (`circular`). upsample: give states of the full length (`None`: as the only tower, not as the encoder of an
    encoder-decoder)."""

    shares = "nothing"
    keeps_tokens = False

    summary = "a convolution and a maximum over neighbors halve the sequence between layers"

    halvings: int | None = bounded(None, least=0)
    padding_mode: Literal["zeros", "circular"] = "zeros"
    upsample: bool | None = None

    def times(self, config) -> int:
        """How often the sequence is halved."""
        return config.num_hidden_layers - 1 if self.halvings is None else self.halvings

    def gives_every_token(self, config) -> bool:
        return not config.is_encoder_decoder if self.upsample is None else self.upsample

    def check(self, config) -> None:
        if self.halvings is not None and self.halvings >= max(config.num_hidden_layers, 1):
            raise ValueError(
                f"distilling halves between layers, of which there are {config.num_hidden_layers}, so `halvings`"
                f" {self.halvings} is too many; set it to at most {max(config.num_hidden_layers - 1, 0)}."
            )
        if config.position.acts - {"input"}:
            raise ValueError(
                f"distilling's lengths differ between layers, where position {config.position.type!r} acts; use"
                " 'none' or one that acts on the input, such as 'sinusoidal_absolute'."
            )

    def build(self, config, **where) -> DistillingStack:
        if config.is_decoder:
            raise ValueError(
                "distilling takes later tokens into earlier ones and cannot stand in a decoder; give the decoder"
                " another stack, e.g. `decoder={'stack': 'plain'}` in an encoder-decoder."
            )
        return DistillingStack(config, self)
