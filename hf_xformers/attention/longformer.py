# SPDX-License-Identifier: Apache-2.0
"""Longformer: a sliding window, and global tokens with projections of their own."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from ..core.call import Call, SublayerOutput
from ..core.components import bounded, register
from ..core.sequence_parallel import SequenceForm, Unserved
from ..ops.block_sparse import patterns
from ..ops.block_sparse.patterns import Pattern
from ..ops.common.real_tokens import from_first_real, is_first_real
from .shared.block_sparse import BlockSparseAttention, Inputs
from .shared.global_tokens import given_globals
from .shared.pattern_spec import (
    by_head,
    check_heads,
    check_layers,
    largest,
    of_layer,
    traced_length_of_patterns,
    window_cache,
)
from .shared.spec import AttentionSpec
from .shared.window_parts import form_of_window


class LongformerAttention(BlockSparseAttention):
    """Beltagy, Peters and Cohan 2020 (arXiv 2004.05150), section 3.1, with window W and global tokens G.

    Token i not in G: softmax over {j : |i - j| <= W / 2} and G with the projections Q, K, V. Token i in G: softmax
    over all tokens with Q_g, K_g, V_g, which start as copies of Q, K, V. G comes as the model input
    `global_attention_mask` [B, T], 1 = global; padding never is.

    Heads of a layer may have gaps ("dilation", section 3.1): |i - j| = g t, t <= W / 2. A decoder reads
    {i - g t : 0 <= t <= W / 2} and has no global tokens (the paper's character model).

    Time and memory O(T (W + |G|)), |G| that of the row with most. State: keys and values of the last g W / 2 + 1
    tokens.
    """

    spec: LongformerSpec

    joins_projections = True

    def __init__(self, config, spec: LongformerSpec, *, layer_idx: int, cross: bool = False):
        super().__init__(config, spec, layer_idx=layer_idx, cross=cross)
        self.separate = not self.is_causal and spec.separate_global_projections
        if self.separate:
            for name in "qkv":
                local = getattr(self, f"{name}_proj")
                own = nn.Linear(local.in_features, local.out_features, bias=spec.bias)
                self.add_module(f"{name}_global_proj", own)

    def initialize(self, config, init) -> None:
        super().initialize(config, init)
        if self.separate:
            for name in "qkv":
                local, own = getattr(self, f"{name}_proj"), getattr(self, f"{name}_global_proj")
                init.copy_(own.weight, local.weight)
                if own.bias is not None:
                    init.copy_(own.bias, local.bias)

    def prepare(self, context: Call, past_key_values: Cache | None) -> None:
        super().prepare(context, past_key_values)
        self.global_tokens(context)

    def global_tokens(self, context: Call) -> tuple[Tensor | None, int | None]:
        return given_globals(context, self.spec.max_global_tokens)

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
        query, key, value = self.project_self(hidden_states, context, past_key_values, step)
        rows = self._global_rows(hidden_states, context)
        output, weights = self.attend(query, key, value, context, rows)
        output = self.o_proj(output.reshape(*hidden_states.shape[:-1], -1))
        if self.separate and rows is None and torch.is_grad_enabled():
            # Without global tokens their projections still take part, with gradient zero: distributed training
            # waits for the gradient of every parameter.
            output = output + 0.0 * sum(p.sum() for name in "qkv" for p in self._own(name).parameters())
        return SublayerOutput(output, weights)

    def _own(self, name: str) -> nn.Linear:
        return getattr(self, f"{name}_global_proj")

    def _global_rows(self, hidden_states: Tensor, context: Call) -> Inputs | None:
        if not self.separate or self.global_tokens(context)[0] is None:
            return None
        query, key, value = (self._own(name)(hidden_states) for name in "qkv")
        query, key, value = (self.heads(x) for x in (*self.normalized(query, key), value))
        return self.place(query, key, value, context)


@register("attention", "longformer")
class LongformerSpec(AttentionSpec):
    """
    Args:
        attention_window: W, even; a token sees W / 2 tokens on each side. One number, or a tuple with one per layer.
        attention_dilation: the gap g, one number, a tuple with one per layer, or in it tuples with one per head.
        separate_global_projections: whether global tokens have projections of their own.
        max_global_tokens: bound on the global tokens of a row (`None`: they are counted in each call; a compiled
            graph, which cannot count, then makes room for all tokens, at quadratic cost).
    """

    summary = "a sliding window and global tokens with their own projections"
    head_options = frozenset({"norm"})
    supports = frozenset({"pair_mask"})
    acts = frozenset({"head_terms", "rotation", "score_bias", "score_terms"})
    inputs: ClassVar[tuple[str, ...]] = ("global_attention_mask", "max_global_tokens")

    attention_window: int | tuple[int, ...] = bounded(512, "window", least=2)
    attention_dilation: int | tuple[int | tuple[int, ...], ...] = bounded(1, "dilation", least=1)
    separate_global_projections: bool = True
    max_global_tokens: int | None = bounded(None, least=1)  # type: ignore[misc]

    def check_fields(self) -> None:
        windows = self.attention_window if isinstance(self.attention_window, tuple) else (self.attention_window,)
        for width in windows:
            if width % 2:
                raise ValueError(
                    f"longformer needs an even `attention_window` (half of it on each side), got {width}; use"
                    f" {width + 1}."
                )

    def check(self, config) -> None:
        check_layers("longformer", "attention_window", self.attention_window, config)
        check_layers("longformer", "attention_dilation", self.attention_dilation, config)
        check_heads("longformer", self.attention_dilation, config)

    def pattern(self, config, layer_idx: int) -> Pattern:
        half = of_layer(self.attention_window, layer_idx) // 2
        after = 0 if config.is_decoder else half
        return by_head(lambda gap: patterns.dilated(half, after, gap), of_layer(self.attention_dilation, layer_idx))

    def sequence_form(self, config) -> SequenceForm | Unserved:
        return form_of_window(self, config, SequenceForm.CHOSEN)

    def cache_layer(self, config, layer_idx: int = 0) -> CacheLayerMixin:
        return window_cache(largest(self.attention_window) // 2 * largest(self.attention_dilation) + 1)

    def task_inputs(self, task: str, config, input_ids: Tensor | None, mask: Tensor) -> dict[str, Any]:
        """Global tokens that a head chooses when the caller does not, as transformers' Longformer does: for whole
        texts the first real token, for questions the tokens before the first separator (`sep_token_id`), for choices
        those of the last part: after the second of two neighboring separators (RoBERTa's pairs), with the one at its
        end (without a separator: none, and the first token). mask [B, T], True = real."""
        if config.is_decoder:
            return {}
        chosen = is_first_real(mask)
        separator = getattr(config, "sep_token_id", None)
        if task == "sequence_classification":
            return {"global_attention_mask": chosen, "max_global_tokens": 1}
        if input_ids is None or separator is None:
            return {} if task == "question_answering" else {"global_attention_mask": chosen, "max_global_tokens": 1}
        found = (input_ids == separator) & mask
        seen = from_first_real(found)
        has = found.any(-1, keepdim=True)
        if task == "question_answering":
            return {"global_attention_mask": mask & ~seen & has}
        answer = seen.roll(2, dims=-1)  # from two places after the first separator
        answer[:, :2] = False
        return {"global_attention_mask": torch.where(has, mask & answer, chosen)}

    def traced_length(self, config) -> int:
        return traced_length_of_patterns(self, config)

    def build(self, config, **where) -> LongformerAttention:
        return LongformerAttention(config, self, **where)
