# SPDX-License-Identifier: Apache-2.0
"""Informer: queries whose attention is far from uniform attend, all others take the mean of the values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.call import Call
from ..core.components import bounded, register
from ..ops.common.products import masked_softmax, wide_products
from ..ops.prob_sparse import ActiveQueries, active_queries, mean_of_real, mean_so_far, measured
from .shared.base import Attention, literal_softmax_attention
from .shared.multihead_block import masked_attention
from .shared.spec import AttentionSpec


class InformerAttention(Attention):
    """o_i = sum_j softmax_j(scale * q_i k_j) v_j for the u queries of largest M_i, (1 / n) sum_j v_j for the others.

    Zhou et al. 2021 (arXiv 2012.07436), section 3.1: M_i = max_j q_i k_j - (1 / n) sum_j q_i k_j over keys j sampled
    for query i, u = c ceil(ln n) of n real tokens, and as many samples. Samples are functions of `seed`, the layer and
    a token's place in its text ([`sampled_keys`]): they are the same in every call, and neither other rows nor padding
    changes them. The choice of queries has no gradient.

    Time O(T c ln T d) per head, memory O(T d + T c ln T).
    """

    spec: InformerSpec

    def active(self, query: Tensor, key: Tensor, mask: Tensor | None) -> ActiveQueries:
        """The queries that attend, of [B, H, T, d]; mask [B, T]."""
        if mask is None and isinstance(query.shape[2], torch.SymInt):  # how many attend is told row by row
            mask = torch.ones(query.shape[0], query.shape[2], dtype=torch.bool, device=query.device)
        seed = self.spec.seed * 1009 + self.layer_idx
        measure = measured(query, key, mask, self.spec.sampling_factor, seed)
        return active_queries(measure, mask, self.spec.sampling_factor)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, context: Call) -> tuple[Tensor, Tensor | None]:
        key, value, mask = self.repeated(key), self.repeated(value), context.padding_mask
        found = self.active(query, key, mask)
        if self.wants_weights(context):
            weights, lazy = self.matrix(query, key, found, mask)
            weights = torch.where(lazy, weights, F.dropout(weights, self.dropout_now))
            return (weights @ value).transpose(1, 2), weights
        base = self.base(value, mask)
        at = found.places[..., None].expand(*found.places.shape, query.shape[-1])
        exact = self.exact(query.gather(2, at), key, value, found, mask)
        if found.used is not None:
            exact = torch.where(found.used[..., None], exact, base.gather(2, at))
        output = base.scatter(2, at, exact.to(base.dtype))
        output = output if mask is None else output.masked_fill(~mask[:, None, :, None], 0.0)
        return output.transpose(1, 2), None

    def base(self, value: Tensor, mask: Tensor | None) -> Tensor:
        """What queries that do not attend read, [B, H, T, d]."""
        return mean_of_real(value, mask).expand_as(value)

    def exact(self, query: Tensor, key: Tensor, value: Tensor, found: ActiveQueries, mask: Tensor | None) -> Tensor:
        """What active queries [B, H, u, d] read, [B, H, u, d]."""
        return masked_attention(query, key, value, mask, self.scaling, self.dropout_now)[0].transpose(1, 2)

    def matrix(self, query: Tensor, key: Tensor, found: ActiveQueries, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """The attention matrix [B, H, T, T] that this is, and which of its rows do not attend, [B, H, T, 1]."""
        seen = self.seen(query, mask)
        used = torch.ones_like(found.places, dtype=torch.bool) if found.used is None else found.used
        active = torch.zeros(query.shape[:3], dtype=torch.bool, device=query.device)
        lazy = ~active.scatter(2, found.places, used.expand_as(found.places))[..., None]
        exact = masked_softmax(wide_products(query, key) * self.scaling, seen)
        weights = torch.where(lazy, self.lazy_weights(seen, exact), exact)
        if mask is not None:
            weights = weights.masked_fill(~mask[:, None, :, None], 0.0)
        return weights.to(query.dtype), lazy

    def seen(self, query: Tensor, mask: Tensor | None) -> Tensor:
        """Which keys a query may read, [B or 1, 1, T or 1, T]."""
        length = query.shape[2]
        return query.new_ones(1, 1, 1, length, dtype=torch.bool) if mask is None else mask[:, None, None]

    def lazy_weights(self, seen: Tensor, like: Tensor) -> Tensor:
        """The weights of queries that do not attend."""
        return seen.to(like) / seen.sum(-1, keepdim=True).clamp(min=1)


class MaskedInformerAttention(InformerAttention):
    """The same in causal order: o_i = sum_{j <= i} softmax_j(scale * q_i k_j) v_j for the u queries of largest M_i,
    sum_{j <= i} v_j for the others (released code; `causal_context="mean"`: their mean).

    What an output reads is masked, but M_i is measured on later keys as well, and whether a query is among the largest
    depends on later queries.
    """

    def base(self, value: Tensor, mask: Tensor | None) -> Tensor:
        return mean_so_far(value, mask, total=self.spec.causal_context == "sum")

    def exact(self, query: Tensor, key: Tensor, value: Tensor, found: ActiveQueries, mask: Tensor | None) -> Tensor:
        slots = torch.arange(key.shape[2], device=key.device)
        allowed = slots <= found.places[..., None]
        allowed = allowed if mask is None else allowed & mask[:, None, None]
        read, _ = literal_softmax_attention(query, key, value, allowed, None, self.scaling, self.dropout_now)
        return read.transpose(1, 2)

    def seen(self, query: Tensor, mask: Tensor | None) -> Tensor:
        slots = torch.arange(query.shape[2], device=query.device)
        earlier = (slots <= slots[:, None])[None, None]
        return earlier if mask is None else earlier & mask[:, None, None]

    def lazy_weights(self, seen: Tensor, like: Tensor) -> Tensor:
        return seen.to(like) if self.spec.causal_context == "sum" else super().lazy_weights(seen, like)


@register("attention", "informer", aliases=("prob_sparse",))
class InformerSpec(AttentionSpec):
    """
    Args:
        sampling_factor: c, of c ceil(ln n) queries that attend in a text of n tokens, and as many keys on which each
            is measured.
        seed: of the keys' sample.
        causal_form: what stands in a decoder; `none`: nothing; `paper`: the masked form, in which later tokens decide
            which queries attend, so that it cannot generate.
        causal_context: what a query that does not attend takes there of the values up to its own, their `sum` or their
            `mean`.
    """

    summary = "queries far from uniform attend, the others take the mean of the values"
    head_options = frozenset({"norm"})
    why_not: ClassVar[Mapping[str, str]] = {
        "causal": "which queries attend depends on all others, later ones too (`causal_form='paper'` is masked all the"
        " same)."
    }

    sampling_factor: int = bounded(5, "factor", least=1)
    seed: int = bounded(0, least=0)
    causal_form: Literal["none", "paper"] = "none"
    causal_context: Literal["sum", "mean"] = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.causal_form == "paper":
            reason = (
                "informer with causal_form='paper' cannot generate: later tokens change which queries attend. Use"
                " attention 'dense' in the decoder."
            )
            self.why_not = {"generate": reason}  # type: ignore[misc]  # of this spec alone

    def check(self, config) -> None:
        if config.is_decoder and config.use_cache and self.causal_form == "paper":
            raise ValueError(f"{self.why_not['generate']} To train it all the same, set `use_cache=False`.")

    def weighs(self, config) -> bool:
        return not config.is_decoder or self.causal_context == "mean"

    def build(self, config, **where) -> InformerAttention:
        kind = MaskedInformerAttention if config.is_decoder else InformerAttention
        return kind(config, self, **where)
