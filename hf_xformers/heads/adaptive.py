# SPDX-License-Identifier: Apache-2.0
"""Adaptive softmax: rare words stand in clusters, which are predicted first and have narrow vectors."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.components import register
from ..core.linear_maps import TiedLinear
from ..core.vocabulary_clusters import ClusterFields
from .base import HeadSpec


class TransposedLinear(nn.Module):
    """y = x W, W [in, out]: the way back through a `nn.Linear` from `out` to `in`, whose weight it may share."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))

    def initialize(self, config, init) -> None:
        factor = config.initializer_factor * self.weight.shape[0] ** -0.5
        init.normal_(self.weight, mean=0.0, std=factor if config.initializer == "t5" else config.initializer_range)

    def forward(self, states: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return F.linear(states, self.weight.transpose(0, 1))


class AdaptiveHead(nn.Module):
    """Log probabilities of all words (Grave et al. 2017, arXiv 1609.04309, section 4.2, with projections and biases
    for all clusters, as of Transformer-XL's released code):

    log p(w) = log softmax([W_0 Q_0 h + b_0 ; C Q_0 h + d])_w for a word of the first cluster, and
    log p(w) = log softmax([...])_c + log softmax(W_c Q_c h + b_c)_w for one of the cluster c > 0,

    W_c [size, e_c], Q_c [e_c, D], C [clusters - 1, e_0]; `logits` are these log probabilities, so that a softmax over
    them changes nothing. Time O(T (D sum_c e_c + sum_c V_c e_c)), memory O(T V) for what is returned.
    """

    decoder: None = None  # no single projection gives the logits

    def __init__(self, config, spec: AdaptiveHeadSpec):
        super().__init__()
        self.clusters = spec.clusters(config)
        width = config.hidden_size
        self.projections = nn.ModuleList(
            TransposedLinear(width, cluster.width) if spec.projects(config) else nn.Identity()
            for cluster in self.clusters
        )
        self.tables = nn.ModuleList(
            TiedLinear(cluster.width, cluster.size, bias=spec.bias) for cluster in self.clusters
        )
        later = len(self.clusters) - 1
        self.cluster = nn.Linear(self.clusters[0].width, later, bias=spec.bias) if later else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., D] -> log probabilities [..., V], computed in float32 at least."""
        scores = [
            table(projection(hidden_states)) for table, projection in zip(self.tables, self.projections, strict=True)
        ]
        if self.cluster is None:
            return self._log_softmax(scores[0]).to(hidden_states.dtype)
        first = torch.cat([scores[0], self.cluster(self.projections[0](hidden_states))], dim=-1)
        words, clusters = self._log_softmax(first).split([self.clusters[0].size, len(self.clusters) - 1], dim=-1)
        later = [clusters[..., index : index + 1] + self._log_softmax(entry) for index, entry in enumerate(scores[1:])]
        return torch.cat([words, *later], dim=-1).to(hidden_states.dtype)

    @staticmethod
    def _log_softmax(scores: Tensor) -> Tensor:
        return scores.log_softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))


@register("head", "adaptive")
class AdaptiveHeadSpec(ClusterFields, HeadSpec):
    """
    Args:
        cutoffs, factor, width: as of the embedding 'adaptive', to whose tables this head's are tied unless the config
            unties them.
        tied_projections: which projections are the embedding's where the tables are: of `all` clusters, of those
            `after_first` (Transformer-XL), or `none`.
        bias: b_c and d.
    """

    supports = frozenset({"context_parallel"})
    summary = "clusters of rare words are predicted first; logits are log probabilities (adaptive softmax)"

    tied_projections: Literal["all", "after_first", "none"] = "all"
    bias: bool = False

    def check_fields(self) -> None:
        self.check_clusters()

    def check(self, config) -> None:
        if config.tie_word_embeddings and config.embedding.clusters(config) != self.clusters(config):
            raise ValueError(
                f"head 'adaptive' is tied to an embedding 'adaptive' with the same `cutoffs`, `factor` and `width`,"
                f" got embedding {config.embedding.type!r}; give that embedding, or set `tie_word_embeddings=False`."
            )

    def tied(self, config) -> dict[str, str]:
        indices = range(len(self.clusters(config)))
        names = [f"tables.{index}.weight" for index in indices]
        first = {"all": 0, "after_first": 1, "none": len(indices)}[self.tied_projections]
        if self.projects(config):
            names += [f"projections.{index}.weight" for index in indices[first:]]
        return {name: f"tokens.{name}" for name in names}

    def build(self, config, **where) -> AdaptiveHead:
        return AdaptiveHead(config, self)
