"""Clusters of queries: k-means token by token, blocks of one cluster, and the planes."""

import pytest
import torch

from hf_xformers.ops.bucketed.query_clusters import QueryClusters, cluster_blocks, hashed_clusters
from tests.attention.references.compressed import clusters_by_hand
from tests.attention.score_helpers import (
    HEADS,
    PADDING,
    WIDTH,
    build_layers,
)

D = WIDTH // HEADS
PLAIN = {"type": "clustered_attention", "num_clusters": 3}


# ------------------------------------------------------------------------------------------- clusters


@pytest.mark.parametrize(("bits", "steps"), [(4, 0), (4, 3), (12, 10)])
def test_kmeans(bits, steps):
    generator = torch.Generator().manual_seed(bits)
    query = torch.randn(4, 2, 6, D, generator=generator, dtype=torch.float64)
    planes = torch.randn(bits, D + 1, generator=generator, dtype=torch.float64)
    for mask in (None, PADDING):
        found = hashed_clusters(query, planes, 3, steps, mask)
        for b in range(3):
            real = torch.ones(6).bool() if mask is None else mask[b]
            for h in range(2):
                labels = clusters_by_hand(query[b, h, real], planes, 3, steps)
                assert found.labels[b, h, real].tolist() == labels
                assert found.counts[b, h].tolist() == [labels.count(c) for c in range(3)]
    assert found.counts[3].sum() == 0


@pytest.mark.parametrize("width", [1, 2, 4])
def test_blocks(width):
    """Every real token stands in one block, among tokens of its cluster alone."""
    generator = torch.Generator().manual_seed(width)
    labels = torch.randint(0, 5, (2, 3, 17), generator=generator)
    mask = torch.rand(2, 17, generator=generator) < 0.7
    for real in (None, mask):
        kept = torch.ones_like(mask) if real is None else real
        counts = torch.stack([((labels == c) & kept[:, None]).sum(-1) for c in range(6)], -1)  # the last one is empty
        tokens, used, cluster = cluster_blocks(QueryClusters(labels, counts), width, real)
        for b in range(2):
            for h in range(3):
                assert sorted(tokens[b, h][used[b, h]].tolist()) == kept[b].nonzero()[:, 0].tolist()
                for block in range(tokens.shape[2]):
                    inside = tokens[b, h, block][used[b, h, block]]
                    assert (labels[b, h, inside] == cluster[b, h, block]).all()


# ------------------------------------------------------------------------------------------- attention


def test_planes_are_saved_and_seeded():
    one, other = build_layers(PLAIN, 2)
    assert "planes" in one.state_dict() and not torch.equal(one.planes, other.planes)
    assert torch.equal(one.planes, build_layers(PLAIN)[0].planes)
    assert not torch.equal(one.planes, build_layers({**PLAIN, "hash_seed": 1})[0].planes)
    (flat,) = build_layers({**PLAIN, "hash_bias": False})
    assert (flat.planes[:, -1] == 0).all() and (flat.planes[:, :-1] != 0).all()
