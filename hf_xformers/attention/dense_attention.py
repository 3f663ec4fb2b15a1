"""Dense softmax attention through transformers' attention back-ends."""

from __future__ import annotations

from torch import Tensor
from transformers.cache_utils import Cache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..core.context import LayerContext
from ..ops.block_sparse.attention import block_sparse_attention
from ..ops.block_sparse.patterns import full
from .shared.base import Attention, literal_softmax_attention
from .shared.visibility import boolean_mask

_ALL = full()  # made here, as a graph that is being recorded cannot make a pattern


class DenseAttention(Attention):
    """o_i = sum_j softmax_j(scale * q_i k_j + b_ij) v_j over all j that i may see.

    Vaswani et al. 2017 (arXiv 1706.03762), eq. 1. Cost O(T S D) time; memory O(T) with the fused kernels, O(H T S) on
    the literal path. State: keys and values of all tokens seen.
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
            return literal_softmax_attention(query, key, value, mask, bias, self.scaling, dropout, self.spec.score_cap)
        if self.spec.score_cap is not None:
            return self._capped(query, key, value, context, dropout), None
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

    def _capped(self, query: Tensor, key: Tensor, value: Tensor, context: LayerContext, dropout: float) -> Tensor:
        """[B, T, H, d]. No back-end for all devices caps scores: they are made tile by tile, and where the caller or a
        cache with unwritten slots says who sees whom, all at once."""
        whole = not self.cross and (context.explicit_mask is not None or context.static)
        if whole:
            return literal_softmax_attention(
                query, key, value, boolean_mask(context), None, self.scaling, dropout, self.spec.score_cap
            )[0]
        output = block_sparse_attention(
            query,
            key,
            value,
            _ALL,
            key_padding_mask=context.memory_padding_mask if self.cross else context.padding_mask,
            query_offset=0 if self.cross else key.shape[2] - query.shape[2],
            causal=self.is_causal,
            scale=self.scaling,
            dropout=dropout,
            segment_ids=None if self.cross else context.segment_ids,
            score_cap=self.spec.score_cap,
        )
        return output.transpose(1, 2)
