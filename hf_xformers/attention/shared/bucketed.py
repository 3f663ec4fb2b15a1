# SPDX-License-Identifier: Apache-2.0
"""What mechanisms that sort tokens into buckets share: the cache of labels, and short queries over a long cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from ...core.cache import FollowsRows
from ...core.call import Call
from ...core.holes import take
from ...ops.bucketed.attention import Chunks, Recent, bucketed_attention, bucketed_reference
from ...ops.common.constants import constant
from ...ops.common.real_tokens import real_first, real_places
from ...ops.score_terms.attention import tile_attention
from ...ops.score_terms.bucket_tiles import bucket_tiles
from ...ops.score_terms.terms import ScoreTerms, Tiles
from .spec import AttentionSpec

# Up to this many queries against a cache meet all keys at once; more of them run the whole sequence again.
FEW_QUERIES = 16


class BucketLayer(FollowsRows, DynamicLayer):
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


def attend_in_buckets(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    labels: Tensor,
    sets: Recent | Chunks,
    added: ScoreTerms,
    dropout: float,
    *,
    key_padding_mask: Tensor | None,
    **options: Any,
) -> Tensor:
    """[`bucketed_attention`] with terms for the last T tokens, [B, H, T, d]; options: of [`bucket_tiles`]."""
    first = key.shape[2] - query.shape[2]
    rounds = bucket_tiles(labels, sets, key_padding_mask=key_padding_mask, query_offset=first, **options)
    output = tile_attention(query * added.scale, key, value, added.tables, added, rounds, dropout)
    if key_padding_mask is None:
        return output
    return output.masked_fill(~key_padding_mask[:, None, first:, None], 0.0)


def labels_of_all(
    labels: Tensor, keys: Tensor, cache: Cache | None, step: int, find: Callable[[Tensor], Tensor]
) -> Tensor:
    """Labels of all `keys` [B, H, S, d], given those of the new ones; `find` is asked where the cache keeps none."""
    if cache is None:
        return labels
    layer = cache.layers[step]
    return layer.add_labels(labels) if isinstance(layer, BucketLayer) else find(keys)


class Stage(NamedTuple):
    """What tokens from some position on read: the `window` most recent ones of their label among labels of this stage.

    How fine buckets should be depends on the length of the text, which a causal model does not know: its later tokens
    must change no earlier result. So a token takes the buckets of a text that ends about where it stands, and the keys
    before it are labeled anew for each stage, 4 times as long as the one before. A stage runs over the text up to its
    end, so that all of them together cost a third more than the last.
    """

    begin: int
    window: int


def recent_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    labels: Tensor,
    stages: Sequence[Stage],
    context: Call,
    *,
    literal: bool,
    num_labels: int,
    own_key_last: bool,
    distinct: bool,
    scale: float,
    dropout: float,
    added: ScoreTerms | None = None,
) -> tuple[Tensor, Tensor | None]:
    """[`Recent`] sets for queries [B, H, T, d] over all keys [B, H, S, d] -> output [B, H, T, d] and weights or None.

    labels: [B, H, stages * R, S], the rounds of one stage after those of another; a row's positions count its real
    tokens.
    added: what a position adds to the scores.
    """
    valid, length = context.padding_mask, key.shape[2]
    sets: dict[str, Any] = {"own_key_last": own_key_last, "distinct": distinct}
    given = labels.unflatten(2, (len(stages), -1)).unbind(2)
    used = [(stage, own) for stage, own in zip(stages, given, strict=True) if stage.begin < length]
    place = torch.arange(length, device=key.device)[None] if valid is None else real_places(valid)
    reached = [stage.begin for stage, _ in used[1:]]
    number = torch.bucketize(place, constant(reached, key.device), right=True)  # [B or 1, S], of their stages
    few = query.shape[2] <= FEW_QUERIES and not context.fresh
    if literal or few:
        asked = number[:, context.query_index][:, None, :, None]

        def reference(**options: Any) -> tuple[Tensor, Tensor]:
            output: Any = None
            weights: Any = None
            for at, (stage, own) in enumerate(used):
                found = bucketed_reference(
                    query,
                    key,
                    value,
                    own,
                    Recent(stage.window),
                    query_index=context.query_index,
                    key_padding_mask=valid,
                    **sets,
                    **options,
                )
                output = found[0] if output is None else torch.where(asked == at, found[0], output)
                weights = found[1] if weights is None else torch.where(asked == at, found[1], weights)
            return output, weights

        if added is not None:
            output, weights = added.from_matrix(reference, query, key, value, dropout)
        else:
            output, weights = reference(scale=scale, dropout=dropout)
        return output, weights if literal else None
    if added is not None:
        rounds: list[list[Tiles]] = []
        first = length - query.shape[2]
        for at, (stage, own) in enumerate(used):
            # Keys beyond the stage's end are after all of its queries: absent, so that no tile holds them.
            real = valid
            if at < len(used) - 1:
                real = number <= at if valid is None else (number <= at) & valid
            real = None if real is None else real.expand(key.shape[0], -1)
            found = bucket_tiles(
                own,
                Recent(stage.window),
                key_padding_mask=real,
                query_offset=first,
                num_labels=num_labels,
                **sets,
            )
            if len(used) > 1:
                found = [[_of_stage(tiles, number[:, first:] == at) for tiles in tiled] for tiled in found]
            rounds = [[*one, *other] for one, other in zip(rounds, found, strict=True)] if rounds else found
        output = tile_attention(query * added.scale, key, value, added.tables, added, rounds, dropout)
        return output if valid is None else output.masked_fill(~valid[:, None, first:, None], 0.0), None
    if not context.fresh:  # the queries of cached tokens are gone; their results are not asked for
        query = torch.zeros_like(key).index_copy(2, context.query_index, query)
    sets.update(num_labels=num_labels, scale=scale, dropout=dropout)
    inputs = (query, key, value)
    if len(used) == 1:
        output = bucketed_attention(*inputs, used[0][1], Recent(used[0][0].window), key_padding_mask=valid, **sets)
    else:
        output = _by_stages(inputs, used, valid, sets)
    return output if context.fresh else output.index_select(2, context.query_index), None


def _by_stages(
    inputs: tuple[Tensor, Tensor, Tensor], used: list[tuple[Stage, Tensor]], valid: Tensor | None, sets: dict[str, Any]
) -> Tensor:
    """Each stage over the text up to its end."""
    order = None
    if valid is not None:  # real tokens first, so that places are positions
        order = real_first(valid)
        valid = valid.gather(1, order)
        query, key, value = (take(x, order, 2) for x in inputs)
        inputs = (query, key, value)
    parts = []
    for at, (stage, labels) in enumerate(used):
        end = inputs[0].shape[2] if at == len(used) - 1 else used[at + 1][0].begin
        if order is not None:
            labels = labels.gather(3, order[:, None, None].expand_as(labels))
        query, key, value = (x[:, :, :end] for x in inputs)
        real = None if valid is None else valid[:, :end]
        output = bucketed_attention(
            query, key, value, labels[..., :end], Recent(stage.window), key_padding_mask=real, **sets
        )
        parts.append(output[:, :, stage.begin :])
    output = torch.cat(parts, dim=2)
    return output if order is None else take(output, order.argsort(dim=-1), 2)


def _of_stage(tiles: Tiles, chosen: Tensor) -> Tiles:
    """The tiles with only those queries that are chosen, [B or 1, T]."""
    at = tiles.query_at
    own = chosen[:, None].expand(*at.shape[:2], -1).gather(2, at.clamp(min=0).flatten(2)).view_as(at)
    return replace(tiles, query_at=torch.where(own, at, -1))


@dataclass(kw_only=True)
class BucketedSpec(AttentionSpec):
    """Base of the specs. causal_form: what a decoder reads, `strict` or the `paper`'s form, in which later tokens
    change the buckets; that one cannot generate."""

    acts = frozenset({"rotation", "score_bias", "score_terms"})
    later_tokens: ClassVar[str]  # what they change in the paper's form

    causal_form: Literal["strict", "paper"] = "strict"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.causal_form == "paper":
            reason = (
                f"{self.type} with causal_form='paper' cannot generate: later tokens change {self.later_tokens}. Use "
                "causal_form='strict'."
            )
            self.why_not = {"generate": reason}  # type: ignore[misc]  # of this spec alone

    def check_causal_form(self, config) -> None:
        """Refuses a decoder in the paper's form that is set to generate."""
        if self.causal_form == "paper" and config.use_cache:
            raise ValueError(f"{self.why_not['generate']} To train it all the same, set `use_cache=False`.")

    def cache_layer(self, config, layer_idx: int = 0) -> BucketLayer:
        return BucketLayer()
