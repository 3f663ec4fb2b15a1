"""Longformer: its windows, gaps and global tokens, and the tokens that tasks make global."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..core.components import aliased, register
from ..ops.block_sparse import patterns
from ..ops.block_sparse.patterns import Pattern
from ..ops.common.real_tokens import from_first_real, is_first_real
from .block_sparse import INSIDE, by_head, check_at_least, check_heads, check_layers, largest, of_layer, window_cache
from .block_sparse_terms import LongformerWithTerms
from .longformer_attention import LongformerAttention
from .shared.base import AttentionSpec


@register("attention", "longformer")
class LongformerSpec(AttentionSpec):
    """attention_window: W, even; a token sees W / 2 tokens on each side. One number, or a tuple with one per layer.
    attention_dilation: the gap g, one number, a tuple with one per layer, or in it tuples with one per head.
    separate_global_projections: whether global tokens have projections of their own. max_global_tokens: bound on the
    global tokens of a row (`None`: they are counted in each call; a compiled graph, which cannot count, then makes
    room for all tokens, at quadratic cost)."""

    summary = "a sliding window and global tokens with their own projections"
    normalizes_heads = True
    explicit_mask = True
    score_bias = True
    score_terms = True
    head_terms = True
    inputs: ClassVar[tuple[str, ...]] = ("global_attention_mask", "max_global_tokens")

    attention_window: int | tuple[int, ...] = aliased(512, "window")
    attention_dilation: int | tuple[int | tuple[int, ...], ...] = aliased(1, "dilation")
    separate_global_projections: bool = True
    max_global_tokens: int | None = None

    def check_fields(self) -> None:
        check_at_least(
            "longformer", 1, attention_dilation=self.attention_dilation, max_global_tokens=self.max_global_tokens
        )
        check_at_least("longformer", 2, attention_window=self.attention_window)
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

    def cache_layer(self, config) -> CacheLayerMixin:
        return window_cache(largest(self.attention_window) // 2 * largest(self.attention_dilation) + 1)

    def task_inputs(self, task: str, config, input_ids: Tensor | None, mask: Tensor) -> dict[str, Any]:
        """Global tokens that a head chooses when the caller does not, as transformers' Longformer does: for whole
        texts the first real token, for questions the tokens before the first separator (`sep_token_id`), for choices
        those after it (without a separator: none, and the first token). mask [B, T], True = real."""
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
        return {"global_attention_mask": torch.where(has, mask & seen & ~found, chosen)}

    def build(self, config, **where) -> LongformerAttention:
        if config.position.acts & {"score_bias", *INSIDE}:
            return LongformerWithTerms(config, self, **where)
        return LongformerAttention(config, self, **where)
