"""What mechanisms that sort tokens into buckets share: the cache of labels, and short queries over a long cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from ..context import LayerContext
from ..ops.bucket_tiles import bucket_tiles
from ..ops.bucketed import Chunks, Recent, bucketed_attention, bucketed_reference
from ..ops.tile_attention import tile_attention
from .base import AttentionSpec
from .position_terms import ScoreTerms

# Up to this many queries against a cache meet all keys at once; more of them run the whole sequence again.
FEW_QUERIES = 16


class BucketLayer(DynamicLayer):
    """Keys, values and the labels [B, H, R, S] of the keys: a token's bucket is found once and for all."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.labels: Tensor | None = None

    def add_labels(self, labels: Tensor) -> Tensor:
        """Appends the labels of new tokens; returns all of them."""
        self.labels = labels if self.labels is None else torch.cat([self.labels, labels], dim=-1)
        return self.labels

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        if self.labels is not None:
            self.labels = function(self.labels)

    def offload(self) -> None:
        super().offload()
        self._map(lambda labels: labels.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        super().prefetch()
        if self.is_initialized:
            self._map(lambda labels: labels.to(self.device, non_blocking=True))

    def reset(self) -> None:
        super().reset()
        self.labels = None

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if tokens_to_remove < 0:
            self._map(lambda labels: labels[..., :tokens_to_remove])

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self._map(lambda labels: labels.index_select(0, beam_idx.to(labels.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._map(lambda labels: labels.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._map(lambda labels: labels[indices])


def attend_in_buckets(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    labels: Tensor,
    sets: Recent | Chunks,
    added: ScoreTerms,
    dropout: float,
    *,
    valid: Tensor | None,
    **options: Any,
) -> Tensor:
    """[`bucketed_attention`] with terms for the last T tokens, [B, H, T, d]; options: of [`bucket_tiles`]."""
    first = key.shape[2] - query.shape[2]
    rounds = bucket_tiles(labels, sets, valid=valid, first=first, **options)
    output = tile_attention(query * added.scale, key, value, added.tables, added.terms, rounds, dropout)
    return output if valid is None else output.masked_fill(~valid[:, None, first:, None], 0.0)


def labels_of_all(
    labels: Tensor, keys: Tensor, cache: Cache | None, step: int, find: Callable[[Tensor], Tensor]
) -> Tensor:
    """Labels of all `keys` [B, H, S, d], given those of the new ones; `find` is asked where the cache keeps none."""
    if cache is None:
        return labels
    layer = cache.layers[step]
    return layer.add_labels(labels) if isinstance(layer, BucketLayer) else find(keys)


def recent_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    labels: Tensor,
    window: int,
    context: LayerContext,
    *,
    literal: bool,
    num_labels: int,
    own_key_last: bool,
    distinct: bool,
    scale: float,
    dropout: float,
    added: ScoreTerms | None = None,
) -> tuple[Tensor, Tensor | None]:
    """[`Recent`] sets for queries [B, H, T, d] over all keys [B, H, S, d] -> output [B, H, T, d] and weights or None. added: what
    a position adds to the scores."""
    sets, valid = Recent(window), context.padding_mask
    options: dict[str, Any] = {"own_key_last": own_key_last, "distinct": distinct, "valid": valid}
    few = query.shape[2] <= FEW_QUERIES and not context.fresh
    reference = partial(
        bucketed_reference, query, key, value, labels, sets, query_index=context.query_index, **options
    )
    if added is not None:
        if literal or few:
            output, weights = added.from_matrix(reference, query, key, value, dropout)
            return output, weights if literal else None
        options.update(num_labels=num_labels)
        return attend_in_buckets(query, key, value, labels, sets, added, dropout, **options), None
    if literal or few:
        output, weights = reference(scale=scale, dropout_p=dropout)
        return output, weights if literal else None
    if not context.fresh:  # the queries of cached tokens are gone; their results are not asked for
        query = torch.zeros_like(key).index_copy(2, context.query_index, query)
    options.update(num_labels=num_labels, scale=scale, dropout_p=dropout)
    output = bucketed_attention(query, key, value, labels, sets, **options)
    return output if context.fresh else output.index_select(2, context.query_index), None


@dataclass(kw_only=True)
class BucketedSpec(AttentionSpec):
    """Base of the specs. causal_form: what a decoder reads, `strict` or the `paper`'s form, in which later tokens change the
    buckets; that one cannot generate."""

    score_bias: ClassVar[bool] = True
    score_terms: ClassVar[bool] = True
    later_tokens: ClassVar[str]  # what they change in the paper's form

    causal_form: Literal["strict", "paper"] = "strict"

    def check_causal_form(self, config) -> None:
        """Refuses a decoder in the paper's form that is set to generate."""
        if self.causal_form == "paper" and config.use_cache:
            raise ValueError(f"{self.why_not_generate()} To train it all the same, set `use_cache=False`.")

    def why_not_generate(self) -> str:
        if self.causal_form == "strict":
            return ""
        return (
            f"{self.type} with causal_form='paper' cannot generate: later tokens change {self.later_tokens}. Use "
            "causal_form='strict'."
        )

    def cache_layer(self, config) -> BucketLayer:
        return BucketLayer()
