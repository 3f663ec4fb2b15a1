# SPDX-License-Identifier: Apache-2.0
"""Dense attention, the vanilla mechanism, through transformers' attention back-ends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_causal_mask,
    packed_sequence_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..compat import CACHE
from ..core.call import Call, reads_pairs
from ..core.components import register
from ..core.hand_overs import HandOver
from ..core.prepared import Prepared
from ..core.sequence_parallel import SequenceForm, Unserved
from ..core.visibility import DenseBias, boolean_mask, last_key, mask_of_call, rows_can_be_empty, visible_block
from ..ops.block_sparse.attention import block_sparse_attention
from ..ops.block_sparse.flex import flex_applies
from ..ops.block_sparse.patterns import FULL
from ..ops.common.fused import kernels_for
from ..ops.common.products import wide_products
from ..ops.score_terms.attention import applies
from ..position.base import ScoreBias
from ..position.score_terms import SelfAttentionTerms
from .shared.base import Attention, literal_softmax_attention
from .shared.query_blocks import visible_softmax
from .shared.spec import AttentionSpec
from .shared.term_blocks import attend_with_terms, weights_with_terms

# Largest bias, in numbers over heads, to materialize at once for all layers and rows: 32 MiB in float32.
BIAS_AT_ONCE = 1 << 23
# The same where the bias is trained on a processor in full precision: torch's kernels would write all scores out for
# its gradient, so that tiles pay from about 256 tokens on.
TRAINED_BIAS_AT_ONCE = 1 << 19


class DenseMask(Prepared):
    """The mask of a call as the back-end reads it, and which queries see nothing, [B, 1, T or 1, 1], where these see
    everything in `mask`."""

    mask: Any
    blind: Tensor | None = None


class DenseAttention(Attention):
    """o_i = sum_j softmax_j(scale * q_i k_j + b_ij) v_j over all j that i may see.

    Vaswani et al. 2017 (arXiv 1706.03762), eq. 1. Cost O(T S D) time; memory O(T) with the fused kernels, O(H T S) on
    the literal path. State: keys and values of all tokens seen.

    A short text has the bias b of the config's position [H, T, S] made once, for all layers. What no fused kernel
    knows the derivative of, score terms and the bias of a long text that is a number for each distance, is made for a
    block of queries at a time, in every layer and again in the backward pass: O(T + S) memory, also in training.

    On a GPU, torch's kernels make a number for each pair of tokens of a mask. With `unpad_inputs` and without dropout
    FlexAttention hides padding instead.
    """

    def prepare(self, context: Call, past_key_values: Cache | None) -> None:
        super().prepare(context, past_key_values)
        if self.cross or self.changes_scores:  # what follows is not read
            return
        if context.padding_mask is None or not self._hides_in_kernel(context):
            self._made_mask(context, past_key_values)
        bias = self.score_bias(context)
        if bias is not None and context.state(DenseBias) is None and not self._bias_in_blocks(context):
            matrix = bias.block(context.query_index, context.key_index)
            context.start(DenseBias(matrix if matrix.ndim == 4 else matrix[None]))

    def _made_mask(self, context: Call, past_key_values: Cache | None = None) -> DenseMask:
        return context.prepare(
            DenseMask, lambda: DenseMask(*self._open(self._mask(context, past_key_values), context))
        )

    def _hides_in_kernel(self, context: Call) -> bool:
        """Whether padding is hidden by FlexAttention, if that takes the tensors."""
        if not self.config.unpad_inputs or context.key_index.device.type != "cuda":
            return False
        if context.implementation != "sdpa" or self.wants_weights(context) or (self.training and self.dropout > 0):
            return False
        if context.explicit_mask is not None or context.static or context.parts is not None:
            return False
        return context.query_index.shape[0] > 1 and (self.cross or self.score_bias(context) is None)

    @staticmethod
    def _open(mask: Any, context: Call) -> tuple[Any, Tensor | None]:
        """Off the processor, fused kernels of half precision give gradients of any size for a query that sees
        nothing: it sees everything, and what it has read is put to zero."""
        if context.implementation != "sdpa" or not isinstance(mask, Tensor) or mask.device.type == "cpu":
            return mask, None
        if mask.dtype != torch.bool or not rows_can_be_empty(context):
            return mask, None
        if context.query_index.shape[0] == 1:  # a step of generation, which sees itself and has no gradient
            return mask, None
        blind = ~mask.any(-1, keepdim=True)
        return mask | blind, blind

    def _mask(self, context: Call, past_key_values: Cache | None) -> Any:
        """The mask in the form that the back-end expects: none, where it has no function that makes masks."""
        if context.output_attentions or reads_pairs(context.implementation):
            return mask_of_call(context)
        make: Callable[..., Any] = create_causal_mask if context.causal else create_bidirectional_mask
        arguments: dict[str, Any] = {}
        if context.causal:
            arguments["position_ids"] = context.position_ids
        elif context.segment_ids is not None:
            arguments["and_mask_function"] = packed_sequence_mask_function(context.segment_ids)
        return make(
            config=self.config,
            inputs_embeds=context.inputs_embeds,
            attention_mask=context.padding_mask if context.explicit_mask is None else context.explicit_mask,
            **{CACHE: past_key_values},
            **arguments,
        )

    def _memory_mask(self, context: Call) -> Any:
        """The same of what cross-attention reads."""
        padding = context.memory_padding_mask
        if padding is None:
            return None
        if context.output_attentions or reads_pairs(context.implementation):
            return padding[:, None, None, :]
        given = {"config": self.config, "inputs_embeds": context.inputs_embeds, "attention_mask": padding}
        return context.prepare(DenseMask, lambda: DenseMask(create_bidirectional_mask(**given)), "memory").mask

    def _bias_in_blocks(self, context: Call) -> bool:
        bias = self.score_bias(context)
        if bias is None or not bias.relative or context.static or torch.compiler.is_compiling():
            return False
        if context.implementation != "sdpa" or self.wants_weights(context):
            return False
        pairs = context.query_index.shape[0] * context.key_index.shape[0]
        return self.num_heads * pairs >= self._bias_at_once

    @property
    def _bias_at_once(self) -> int:
        tiles = torch.is_grad_enabled() and applies(self.v_proj.weight, self.dropout_now)
        return TRAINED_BIAS_AT_ONCE if tiles else BIAS_AT_ONCE

    def _in_blocks(self, context: Call) -> SelfAttentionTerms | None:
        """What is added to scores and no kernel takes as it is; None: nothing."""
        if self.cross or (self.position_terms is None and self.score_bias(context) is None):
            return None
        if self.changes_scores or (context.state(DenseBias) is None and self._bias_in_blocks(context)):
            return self.score_terms(context)
        return None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, context: Call) -> tuple[Tensor, Tensor | None]:
        dropout, added = self.dropout_now, self._in_blocks(context)
        if added is not None and self._bias_in_kernel(query, key, value, context, dropout):
            return self._in_tiles(query, key, value, context, dropout, self.score_bias(context)), None
        if added is not None:
            inputs = (query * added.scale, self.repeated(key), self.repeated(value), added, dropout)
            return weights_with_terms(*inputs) if self.wants_weights(context) else (attend_with_terms(*inputs), None)
        padding = context.memory_padding_mask if self.cross else context.padding_mask
        if padding is not None and self._hides_in_kernel(context) and flex_applies(query, key, value):
            return self._in_tiles(query, key, value, context, dropout), None
        blind: Tensor | None = None
        if self.cross:
            mask, bias = self._memory_mask(context), None
        else:
            prepared, made = self._made_mask(context), context.state(DenseBias)
            mask, blind = prepared.mask, prepared.blind
            bias = None if made is None else made.matrix
        causal = self.is_causal and mask is None and context.fresh
        if self.wants_weights(context):
            if causal:
                mask = (context.key_index[None, :] <= context.query_index[:, None])[None, None]
            mask = mask if mask is None or blind is None else mask & ~blind
            return literal_softmax_attention(
                query, key, value, mask, bias, self.scaling, dropout, self.spec.score_cap, self.sinks
            )
        if self.spec.score_cap is not None or self.sinks is not None:
            return self._in_tiles(query, key, value, context, dropout), None
        pairs = mask is not None and reads_pairs(context.implementation)
        if pairs and mask.shape[-2] == 1 and query.shape[2] > 1:
            # A key mask is broadcast by the kernel; expanding it would cost T x S bytes per row of the batch.
            mask = mask.expand(-1, -1, query.shape[2], -1)
        backend, more = ALL_ATTENTION_FUNCTIONS[context.implementation], context.back_end
        if context.segment_ids is not None and not self.cross:
            more = {"position_ids": context.position_ids, **more}  # FlashAttention finds documents by them
        if bias is not None and context.implementation == "flex_attention":
            bias = bias.expand(query.shape[0], -1, -1, -1)
        with kernels_for(key, mask) if key.device.type == "cuda" else nullcontext():
            output, _ = backend(
                self,
                query,
                key,
                value,
                mask,
                dropout=dropout,
                scaling=self.scaling,
                is_causal=self.is_causal and context.causal,  # read where the back-end is given no mask of pairs
                position_bias=bias,
                **more,
            )
        if context.back_end:  # engines give tokens side by side, without batch and heads
            output = output.reshape(query.shape[0], query.shape[2], self.num_heads, -1)
        if blind is not None:
            output = output.masked_fill(blind.transpose(1, 2), 0.0)
        elif bias is not None and pairs:
            # With a bias the mask becomes large negative numbers, under which a row that sees nothing sees everything.
            sees = mask.any(dim=-1).transpose(1, 2).unsqueeze(-1)
            output = output.masked_fill(~sees, 0.0)
        return output, None

    def _bias_in_kernel(self, query: Tensor, key: Tensor, value: Tensor, context: Call, dropout: float) -> bool:
        """Whether FlexAttention adds the bias, which is a number for each distance."""
        if self.changes_scores or self.wants_weights(context) or self.spec.score_cap or self.sinks is not None:
            return False
        if context.explicit_mask is not None or context.parts is not None or dropout > 0:
            return False
        return flex_applies(query, key, value)

    def _in_tiles(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context: Call,
        dropout: float,
        bias: ScoreBias | None = None,
    ) -> Tensor:
        """[B, T, H, d]. No back-end for all devices caps scores, or tells the denominator that sinks add to: they are
        made tile by tile, and where the caller or a cache with unwritten slots says who sees whom, all at once."""
        cap = self.spec.score_cap
        if not self.cross and (context.explicit_mask is not None or context.static):
            mask = boolean_mask(context)
            inputs = (query, key, value, mask, None, self.scaling, dropout, cap, self.sinks)
            return literal_softmax_attention(*inputs)[0]
        output: Any = block_sparse_attention(
            query,
            key,
            value,
            FULL,
            key_padding_mask=context.memory_padding_mask if self.cross else context.padding_mask,
            query_offset=0 if self.cross else key.shape[2] - query.shape[2],
            causal=self.is_causal,
            scale=self.scaling,
            dropout=dropout,
            segment_ids=None if self.cross else context.segment_ids,
            score_bias=None if bias is None else bias.block,
            bias_is_relative=True,
            score_cap=cap,
            return_lse=self.sinks is not None,
        )
        output = output if self.sinks is None else self.less_sinks(*output)
        return output.transpose(1, 2)

    def weights_of_block(self, query: Tensor, key: Tensor, context: Call, rows: slice, heads: slice) -> Tensor:
        keys = slice(0, last_key(context, self.cross, key.shape[2], rows.stop))
        scores = wide_products(query * self.scaling, self.repeated(key[:, :, keys])[:, heads])
        if self.spec.score_cap is not None:
            scores = self.spec.score_cap * torch.tanh(scores / self.spec.score_cap)
        bias = None if self.cross else self.score_bias(context)
        if bias is not None:
            whole = context.state(DenseBias)
            if whole is None:
                made = bias.block(context.query_index[rows], context.key_index[keys])
            else:
                made = whole.matrix[..., rows, keys]
            scores = scores + made[..., heads, :, :]
        mask = visible_block(context, self.cross, rows, keys)
        mask = mask if mask is None or mask.shape[1] == 1 else mask[:, heads]
        if self.sinks is not None:  # one more key that is always seen
            more = self.sinks[heads].to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, more], dim=-1)
            mask = None if mask is None else nn.functional.pad(mask, (0, 1), value=True)
            return visible_softmax(scores, mask, False)[..., :-1]
        return visible_softmax(scores, mask, rows_can_be_empty(context, self.cross))


_SUPPORTS = frozenset({"packed_rows", "pages", "pair_mask", "token_numbers"})


@register("attention", "dense", aliases=("vanilla", "softmax"))
class DenseSpec(AttentionSpec):
    """Every token reads every token (that it may see)."""

    summary = "full softmax attention"
    cross = True
    acts = frozenset({"head_terms", "rotation", "score_bias", "score_terms", "values"})
    splits = frozenset({"heads"})
    keeps_keys_alone = True
    reads = frozenset({HandOver.KEY_STATES, HandOver.LEADING_KEYS})
    head_options = frozenset({"blocks", "cap", "norm", "parts", "sink"})

    @property
    def supports(self) -> frozenset[str]:  # type: ignore[override]  # only SDPA itself is divided, and asked for
        usual = self.score_cap is None and not self.learned_sinks
        return _SUPPORTS | ({"interface", "context_parallel"} if usual else set())

    def sequence_form(self, config) -> SequenceForm | Unserved:
        return Unserved(
            "reads every key of a text, which in a causal decoder Accelerate's context parallelism (`cp_size`) brings"
        )

    def takes_global_tokens(self) -> bool:
        return True  # as all others

    def build(self, config, **where) -> DenseAttention:
        return DenseAttention(config, self, **where)
