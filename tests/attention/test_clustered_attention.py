"""Clustered attention against its matrix for given clusters, its bounds and limits, and k-means token by token."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from hf_xformers.ops.bucketed.query_clusters import QueryClusters, cluster_blocks, hashed_clusters
from tests.attention.references.compressed import clustered, clustered_weights, clusters_by_hand
from tests.attention.score_helpers import (
    HEADS,
    PADDING,
    WIDTH,
    build_layers,
    make_context,
    run_layers,
    split_heads,
    vectors,
)
from tests.helpers import close

D = WIDTH // HEADS
PLAIN = {"type": "clustered_attention", "num_clusters": 3}
IMPROVED = {**PLAIN, "type": "improved_clustered_attention", "topk": 2}
each_path = pytest.mark.parametrize("implementation", ["eager", "sdpa"])
each_spec = pytest.mark.parametrize("spec", [PLAIN, IMPROVED], ids=["plain", "improved"])


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


def projected(layer, states):
    parts = (split_heads(part(states), D) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
    return [x.repeat_interleave(HEADS // x.shape[1], 1) for x in parts]


def given(layer, monkeypatch, labels, clusters):
    counts = torch.nn.functional.one_hot(labels, clusters).sum(-2)
    monkeypatch.setattr(layer, "cluster", lambda query, mask: QueryClusters(labels, counts))


@each_path
@each_spec
def test_given_clusters(implementation, spec, monkeypatch):
    """Also clusters of one query each, which are exact attention."""
    (layer,) = build_layers(spec)
    states, generator = vectors(2, 7), torch.Generator().manual_seed(0)
    q, k, v = projected(layer, states)
    exact = layer.o_proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)).detach()
    for labels, clusters in (
        (torch.randint(0, 4, (2, HEADS, 7), generator=generator), 4),
        (torch.arange(7).expand(2, HEADS, 7), 7),
    ):
        given(layer, monkeypatch, labels, clusters)
        output = run_layers([layer], states, make_context(7, implementation=implementation))[0].output.detach()
        for row, of_row in enumerate(labels):
            close(output[row], clustered(layer, states[row : row + 1], labels=of_row)[0][0].detach())
        assert ((output - exact).abs().max() < 1e-12) == (clusters == 7)


def test_error_is_bounded_by_the_distance_from_the_mean():
    """|A^c - A_i| <= |q_i - Q^c| |K| / sqrt(d) in the spectral norm of K (proposition 1), rows of one cluster are the
    same bits, and equal queries are exact."""
    (layer,) = build_layers(PLAIN)
    states = vectors(2, 9)
    with torch.no_grad():
        q, k, _ = projected(layer, states)
        found = layer.cluster(q, None)
        weights = run_layers([layer], states, make_context(9, implementation="eager"))[0].weights
        exact = torch.cat([clustered_weights(layer, q[b : b + 1], k[b : b + 1])[1] for b in range(2)])
        for b in range(2):
            for h in range(HEADS):
                for i in range(9):
                    mean = q[b, h, found.labels[b, h] == found.labels[b, h, i]].mean(0)
                    bound = (q[b, h, i] - mean).norm() * torch.linalg.matrix_norm(k[b, h], 2) / D**0.5
                    assert (weights[b, h, i] - exact[b, h, i]).norm() <= bound + 1e-12
        output, _ = layer.attend(q, k, k, make_context(9))
        assert all(len(output[b, :, h].unique(dim=0)) <= 3 for b in range(2) for h in range(HEADS))
        layer.q_proj.weight.zero_()
        q, k, v = projected(layer, states)
        expected = layer.o_proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        close(run_layers([layer], states, make_context(9))[0].output, expected, 1e-12)


def test_planes_are_saved_and_seeded():
    one, other = build_layers(PLAIN, 2)
    assert "planes" in one.state_dict() and not torch.equal(one.planes, other.planes)
    assert torch.equal(one.planes, build_layers(PLAIN)[0].planes)
    assert not torch.equal(one.planes, build_layers({**PLAIN, "hash_seed": 1})[0].planes)
    (flat,) = build_layers({**PLAIN, "hash_bias": False})
    assert (flat.planes[:, -1] == 0).all() and (flat.planes[:, :-1] != 0).all()
