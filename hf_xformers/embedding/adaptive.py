# SPDX-License-Identifier: Apache-2.0
"""Adaptive input embedding: rare words have narrow vectors, which are projected onto the model's width."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..core.components import register
from ..core.linear_maps import TiedLinear
from ..core.vocabulary_clusters import Cluster, ClusterFields
from .token import TokenEmbedding, TokenEmbeddingSpec


class AdaptiveTable(nn.Module):
    """E[w] = embed_scale * P_c E_c[w - l_c] for a word w of the cluster c of ids l_c, l_c + 1, ...; E_c [size, e_c],
    P_c [D, e_c].

    Every cluster looks up all tokens, with the ids that are not its own replaced, so that shapes do not depend on the
    text: time O(T D sum_c e_c).
    """

    def __init__(self, clusters: tuple[Cluster, ...], width: int, projects: bool, embed_scale: float = 1.0):
        super().__init__()
        self.embed_scale = embed_scale
        self.clusters = clusters
        self.tables = nn.ModuleList(nn.Embedding(cluster.size, cluster.width) for cluster in clusters)
        self.projections = nn.ModuleList(
            TiedLinear(cluster.width, width, bias=False) if projects else nn.Identity() for cluster in clusters
        )

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "num_embeddings"):  # which peft reads
            raise AttributeError(
                f"embedding 'adaptive' has tables of several widths and no one `{name}`, which prompt tuning starts"
                " from words by and places token types by; leave `prompt_tuning_init` at 'RANDOM' and `token_type_ids`"
                " out."
            )
        return super().__getattr__(name)

    def forward(self, input_ids: Tensor) -> Tensor:
        """[B, T] -> [B, T, D]."""
        found = None
        for cluster, table, projection in zip(self.clusters, self.tables, self.projections, strict=True):
            place = input_ids - cluster.start  # an id that is none of the vocabulary stays so for the table
            if found is not None:
                place = place.clamp(min=0)
            if cluster is not self.clusters[-1]:
                place = place.clamp(max=cluster.size - 1)
            vectors = projection(table(place))
            own = (input_ids >= cluster.start)[..., None]  # later clusters replace what earlier ones gave
            found = vectors if found is None else torch.where(own, vectors, found)
        if found is None:
            raise ValueError("An adaptive table needs one cluster at least, got none.")
        return found if self.embed_scale == 1.0 else found * self.embed_scale


class AdaptiveEmbedding(TokenEmbedding):
    """The embedding `token` with the words' vectors of [`AdaptiveTable`] (Baevski & Auli 2019, arXiv 1809.10853,
    section 3): V_c e_c + e_c D parameters for each cluster in place of V D. `inputs_embeds` have width D."""

    tokens: AdaptiveTable
    spec: AdaptiveEmbeddingSpec

    def word_vectors(self, config) -> AdaptiveTable:
        return AdaptiveTable(self.spec.clusters(config), config.hidden_size, self.spec.projects(config), self.scale)

    def initialize(self, config, init) -> None:
        if config.initializer not in ("xavier", "t5"):
            return
        for table in cast(Iterable[nn.Embedding], self.tokens.tables):
            width = table.embedding_dim if config.initializer == "xavier" else 1
            init.normal_(table.weight, mean=0.0, std=config.initializer_factor * width**-0.5)


@register("embedding", "adaptive")
class AdaptiveEmbeddingSpec(ClusterFields, TokenEmbeddingSpec):
    """
    Args:
        cutoffs: the ids at which clusters begin, after the first, which begins at 0; ids are ordered by frequency, the
            most frequent first. Those behind the vocabulary's end divide nothing.
        factor: by which each cluster's vectors are narrower than those before.
        width: e_0, of the first cluster (None: hidden_size). The projections are left out where all clusters have the
            model's width.
        scale, normalize, id_tables, languages, absent_ids: as of the embedding 'token'.

    Its tables are tied to the head `adaptive` with the same three fields.
    """

    supports = frozenset({"context_parallel"})
    splits = frozenset()
    summary = "narrow vectors for rare words, projected onto the model's width (adaptive input)"

    def check_fields(self) -> None:
        super().check_fields()
        self.check_clusters()

    def check(self, config) -> None:
        super().check(config)
        if config.tie_word_embeddings and config.head.clusters(config) != self.clusters(config):
            raise ValueError(
                f"embedding 'adaptive' is tied to a head 'adaptive' with the same `cutoffs`, `factor` and `width`, got"
                f" head {config.head.type!r}; give that head, or set `tie_word_embeddings=False`."
            )

    def tables(self, config) -> tuple[str, ...]:
        parts = ("tables", "projections") if self.projects(config) else ("tables",)
        return tuple(f"tokens.{part}.{index}.weight" for part in parts for index in range(len(self.clusters(config))))

    def build(self, config, **where) -> AdaptiveEmbedding:
        return AdaptiveEmbedding(config, self)
