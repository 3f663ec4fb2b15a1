"""Dense softmax attention: the vanilla mechanism, through transformers' attention back-ends."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..components import register
from ..context import LayerContext
from .base import Attention, AttentionSpec, literal_softmax_attention


def boolean_mask(context: LayerContext) -> Tensor | None:
    """Who may attend to whom, [B or 1, 1, T or 1, S], True = may; None if everybody may, or if plain causal order is all
    there is (the kernels' own `is_causal`)."""
    mask = context.explicit_mask
    if mask is not None:
        return mask if mask.dtype == torch.bool else mask == 0
    queries, keys = context.query_index, context.key_index
    padding, segments = context.padding_mask, context.segment_ids
    if padding is not None:
        mask = padding[:, None, None, :]
    if segments is not None:
        same = segments[:, None, :, None] == segments[:, None, None, :]
        mask = same if mask is None else mask & same
    if not context.causal or (queries.shape[0] == 1 and not context.static):
        return mask  # a single query is the last token: it sees all that is there
    if mask is None and context.fresh:
        return None
    order = (keys[None, :] <= queries[:, None])[None, None]
    return order if mask is None else mask & order


class DenseAttention(Attention):
    """o_i = sum_j softmax_j(scale * q_i k_j + b_ij) v_j over all j that i may see.

    Vaswani et al. 2017 (arXiv 1706.03762), eq. 1. Cost O(T S D) time; memory O(T) with the fused kernels, O(H T S) on the
    literal path. State: keys and values of all tokens seen.
    """

    def prepare(self, context: LayerContext, past_key_values: Cache | None) -> None:
        if self.cross:
            return
        implementation = context.implementation
        if "dense_mask" not in context.shared:
            if implementation in ("eager", "sdpa") or context.output_attentions:
                context.shared["dense_mask"] = boolean_mask(context)
            else:
                context.shared["dense_mask"] = self._backend_mask(context, past_key_values)
        if "score_bias" in self.config.position.acts:
            self.prepare_bias(context)

    def prepare_bias(self, context: LayerContext) -> None:
        """The bias of all pairs, for all layers."""
        bias = context.shared.get("score_bias")
        if bias is not None and "dense_bias" not in context.streams:
            matrix = bias.block(context.query_index, context.key_index)
            context.streams["dense_bias"] = matrix if matrix.ndim == 4 else matrix[None]

    def _backend_mask(self, context: LayerContext, past_key_values: Cache | None):
        """The mask in the form that a FlexAttention or FlashAttention back-end expects."""
        make = create_causal_mask if context.causal else create_bidirectional_mask
        arguments = {"position_ids": context.position_ids} if context.causal else {}
        return make(
            config=self.config,
            inputs_embeds=context.inputs_embeds,
            attention_mask=context.padding_mask if context.explicit_mask is None else context.explicit_mask,
            past_key_values=past_key_values,
            **arguments,
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, context: LayerContext) -> tuple[Tensor, Tensor | None]:
        if self.cross:
            padding = context.memory_padding_mask
            mask, bias = (None if padding is None else padding[:, None, None, :]), None
        else:
            mask, bias = context.shared["dense_mask"], context.streams.get("dense_bias")
        dropout = self.dropout if self.training else 0.0
        causal = self.is_causal and mask is None and context.fresh
        if self.wants_weights(context):
            if causal:
                mask = (context.key_index[None, :] <= context.query_index[:, None])[None, None]
            return literal_softmax_attention(query, key, value, mask, bias, self.scaling, dropout)
        if context.implementation == "sdpa" and mask is not None and mask.shape[-2] == 1 and query.shape[2] > 1:
            # A key mask is broadcast by the kernel; expanding it would cost T x S bytes per row of the batch.
            mask = mask.expand(-1, -1, query.shape[2], -1)
        backend = ALL_ATTENTION_FUNCTIONS[context.implementation]
        output, _ = backend(
            self,
            query,
            key,
            value,
            mask,
            dropout=dropout,
            scaling=self.scaling,
            is_causal=causal,
            position_bias=bias,
        )
        if bias is not None and context.implementation == "sdpa" and mask is not None:
            # With a bias the mask becomes large negative numbers, under which a row that sees nothing sees everything.
            sees = mask.any(dim=-1).transpose(1, 2).unsqueeze(-1)
            output = output.masked_fill(~sees, 0.0)
        return output, None


@register("attention", "dense", aliases=("vanilla", "softmax"))
class DenseSpec(AttentionSpec):
    """Every token reads every token (that it may see)."""

    summary = "full softmax attention"
    cross = True
    score_bias = True
    score_terms = True
    head_terms = True
    explicit_mask = True
    packed = True
    splits_heads = True

    def cache_layer(self, config) -> CacheLayerMixin:
        make = getattr(config.block, "cache_layer", None)  # a block with a state of its own keeps it beside ours
        return DynamicLayer() if make is None else make(config)

    def build(self, config, **where) -> DenseAttention:
        if config.position.acts & {"score_terms", "head_terms"} and not where.get("cross"):
            from .dense_terms import DenseWithTerms  # it stands on the loop over queries, which stands on this file

            return DenseWithTerms(config, self, **where)
        if "score_bias" in config.position.acts and not where.get("cross"):
            from .dense_bias import DenseWithBias

            return DenseWithBias(config, self, **where)
        return DenseAttention(config, self, **where)
