# SPDX-License-Identifier: Apache-2.0
"""UniLM's four masks: one encoder that reads a text from both sides, from one of them, or as source and target."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from ..core.call import Call, can_inspect
from ..core.components import register
from ..core.mask_modes import BIDIRECTIONAL, LEFT_TO_RIGHT, MODES, RIGHT_TO_LEFT, SEQ2SEQ
from ..ops.common.real_tokens import real_places
from .driver import Pass, StackOutput
from .plain import PlainStack, PlainStackSpec


def mode_mask(modes: Tensor, source: Tensor, query_index: Tensor, key_index: Tensor) -> Tensor:
    """Who may see whom, [B, T, S] boolean.

    modes [B]; source [B, S] boolean: which keys are of the first text (read under SEQ2SEQ alone); query_index [T],
    key_index [S]: slots. Token i sees j: always; j <= i; j >= i; j in the first text, or j <= i where i is in the
    second one (Dong et al. 2019, UniLM, arXiv 1905.03197, section 2.2 and figure 1).
    """
    code = modes[:, None, None]
    earlier = (key_index <= query_index[:, None])[None]
    later = (key_index >= query_index[:, None])[None]
    pairs = source[:, None, :] | (earlier & ~source[:, query_index, None])
    one_sided = torch.where(code == LEFT_TO_RIGHT, earlier, later)
    return (code == BIDIRECTIONAL) | torch.where(code == SEQ2SEQ, pairs, one_sided)


class MaskModesStack(PlainStack):
    """The plain stack under the mask that each row of the input `mask_modes` [B, 2] names.

    Its first number is the mode: 0 bidirectional (what rows are without the input), 1 left-to-right, 2 right-to-left,
    3 sequence-to-sequence; the second how many real tokens the first text of a mode 3 row has, [SOS] S1 [EOS]. With a
    cache, tokens continue where the text ends, in the modes 1 and 3.
    """

    def forward(self, run: Pass) -> StackOutput:
        given = run.context.inputs.get(MODES)
        if given is not None:
            run.context = self._masked(given, run.context, run.hidden_states.shape[0])
        return super().forward(run)

    @staticmethod
    def _masked(given: Tensor, context: Call, batch: int) -> Call:
        """The call under the masks of its rows. Rows of one mode without padding share a mask, and have none
        where all are bidirectional."""
        if tuple(given.shape) != (batch, 2):
            raise ValueError(
                f"`{MODES}` must be [batch, 2] = {[batch, 2]}, a mode and the length of the first text, got"
                f" {list(given.shape)}."
            )
        if context.explicit_mask is not None or context.segment_ids is not None:
            raise ValueError(
                f"`{MODES}` says who sees whom and goes with a [batch, length] `attention_mask` and one text per row;"
                " leave the prepared mask or the restarting `position_ids` out."
            )
        if context.implementation not in ("eager", "sdpa"):
            raise ValueError(
                f"`{MODES}` needs `attn_implementation` 'sdpa' or 'eager', got {context.implementation!r}."
            )
        modes, lengths = given.unbind(-1)
        padding, keys = context.padding_mask, context.key_index
        if can_inspect():
            low, high = int(modes.min()), int(modes.max())
            if not BIDIRECTIONAL <= low <= high <= SEQ2SEQ:
                raise ValueError(f"`{MODES}` has modes from {low} to {high}; they are 0 to {SEQ2SEQ}.")
            if not context.fresh and bool(((modes == BIDIRECTIONAL) | (modes == RIGHT_TO_LEFT)).any()):
                raise ValueError(
                    f"`{MODES}` has rows in which earlier tokens see later ones, so no cache can continue with them;"
                    " use modes 1 or 3 with a cache."
                )
            if low == high == BIDIRECTIONAL:
                return context
            if low == high != SEQ2SEQ and padding is None:
                modes, lengths = modes[:1], lengths[:1]
        places = keys[None] if padding is None else real_places(padding)
        mask = mode_mask(modes, places < lengths[:, None], context.query_index, keys)
        if padding is not None:
            mask = mask & padding[:, None, :]
        masked = copy.copy(context)
        masked.explicit_mask = mask[:, None].expand(batch, -1, -1, -1)
        return masked


@register("stack", "mask_modes")
class MaskModesSpec(PlainStackSpec):
    """Layers one after the other, under one of four masks for each row (Dong et al. 2019)."""

    summary = "layers one after the other, under one of four masks for each row"
    inputs = (MODES,)
    supports = frozenset({"choices", "layer_drop", "unpadding"})

    def check(self, config) -> None:
        if config.is_decoder or config.is_encoder_decoder:
            raise ValueError(
                "stack 'mask_modes' is an encoder that also reads from left to right, and cannot stand in a decoder or"
                " an encoder-decoder; use 'plain' there."
            )
        for layer in config.layer_configs():
            if "pair_mask" not in layer.attention.supports:
                raise ValueError(
                    "stack 'mask_modes' has masks of pairs of tokens, which attention"
                    f" {layer.attention.type!r} does not take; set `attention='dense'`, or `stack='plain'`."
                )
            if layer.block.mixes or "unpadding" not in layer.block.supports:
                raise ValueError(
                    f"stack 'mask_modes' hides tokens in attention alone, and block {layer.block.type!r} reads"
                    " neighbors as well; set `block='vanilla'`, or `stack='plain'`."
                )
            if layer.normalization.over_tokens:
                raise ValueError(
                    f"stack 'mask_modes' hides tokens, over which normalization {layer.normalization.type!r} takes"
                    " statistics; set `normalization='layer_norm'`, or `stack='plain'`."
                )

    def build(self, config, **where) -> MaskModesStack:
        return MaskModesStack()
