"""Clustered attention against its matrix for given clusters, its bounds and limits, and k-means token by token."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from hf_xformers import XFormerConfig
from hf_xformers.ops.bucketed.query_clusters import QueryClusters, cluster_blocks, hashed_clusters
from tests.attention.score_helpers import (
    GEOMETRY,
    HEADS,
    PADDING,
    WIDTH,
    build_layers,
    check_compile,
    check_contract,
    make_context,
    mixes,
    run_layers,
    saved_sizes,
    softmax_by_rows,
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


def clusters_by_hand(query, planes, most, steps):
    """One text and head [n, d]: Lloyd's k-means among sets of bits -> a cluster for each token."""
    bits = [[float(q @ p[:-1] + p[-1]) > 0 for p in planes] for q in query]
    used = min(most, len(query))
    centroids = [list(bits[c * len(query) // used]) for c in range(used)]

    def nearest(token):
        distances = [sum(a != b for a, b in zip(token, centroid)) for centroid in centroids]
        return distances.index(min(distances))

    for _ in range(steps):
        labels = [nearest(token) for token in bits]
        for c in range(used):
            for r in range(len(planes)):
                ones = sum(1 if bits[i][r] else -1 for i in range(len(bits)) if labels[i] == c)
                if ones:
                    centroids[c][r] = ones > 0
    return [nearest(token) for token in bits]


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


@torch.no_grad()
def by_hand(layer, states, mask=None, labels=None):
    """One text, head and token at a time, on real tokens alone -> outputs, weights, exact and shared weights."""
    q, k, v = projected(layer, states)
    weights, exact, shared = (torch.zeros(*q.shape[:3], q.shape[2], dtype=q.dtype) for _ in range(3))
    topk = getattr(layer.spec, "topk", 0)
    for b in range(states.shape[0]):
        places = (torch.ones(states.shape[1]) if mask is None else mask[b]).nonzero()[:, 0]
        for h in range(HEADS if len(places) else 0):
            qs, ks = q[b, h, places], k[b, h, places]
            spec = layer.spec
            own = clusters_by_hand(qs, layer.planes, spec.num_clusters, spec.lloyd_iterations)
            own = torch.tensor(own) if labels is None else labels[b, h, places]
            for i, place in enumerate(places):
                mean = qs[own == own[i]].mean(0)
                row = torch.softmax(ks @ mean / D**0.5, 0)
                shared[b, h, place, places] = row
                exact[b, h, place, places] = torch.softmax(ks @ qs[i] / D**0.5, 0)
                if topk:
                    best = (ks @ mean).topk(min(topk, len(places))).indices
                    row[best] = row[best].sum() * torch.softmax(ks[best] @ qs[i] / D**0.5, 0)
                weights[b, h, place, places] = row
    return layer.o_proj((weights @ v).transpose(1, 2).flatten(2)), weights, exact, shared


@each_path
@each_spec
def test_equation(implementation, spec):
    for fields in ({}, {"num_key_value_heads": 2}):
        (layer,) = build_layers(spec, **fields)
        for length, mask in ((6, None), (6, PADDING), (13, None), (1, None)):
            states = vectors(4, length)
            real = torch.ones(4, length).bool() if mask is None else mask
            context = make_context(length, padding_mask=mask, implementation=implementation)
            (result,) = run_layers([layer], states, context)
            output, weights, exact, shared = by_hand(layer, states, mask)
            close(result.output[real].detach(), output[real])
            close(result.output[3].detach(), output[3])
            if implementation == "eager":
                rows = real[:, None, :, None]
                close((result.weights * rows).detach(), weights * rows)
            if mask is None:
                close(weights.sum(-1), torch.ones_like(weights.sum(-1)))
            # Improved rows are never farther from softmax attention than shared ones.
            assert ((weights - exact).abs().sum(-1) <= (shared - exact).abs().sum(-1) + 1e-12).all()


@each_spec
def test_both_paths_have_the_same_gradients(spec):
    (layer,) = build_layers(spec)
    found = []
    for implementation in ("eager", "sdpa"):
        states = vectors(4, 6).requires_grad_()
        context = make_context(6, padding_mask=PADDING, implementation=implementation)
        output = run_layers([layer], states, context)[0].output
        found.append(
            torch.autograd.grad((output * vectors(4, 6, seed=3))[PADDING].sum(), [states, *layer.parameters()])
        )
    for one, other in zip(*found):
        close(one, other)


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
        close(output, by_hand(layer, states, labels=labels)[0])
        assert ((output - exact).abs().max() < 1e-12) == (clusters == 7)


@each_path
def test_all_keys_at_the_top_are_exact_attention(implementation):
    (layer,) = build_layers({**IMPROVED, "topk": 9})
    states = vectors(4, 6)
    for mask in (None, PADDING):
        real = torch.ones(4, 6).bool() if mask is None else mask
        q, k, v = projected(layer, states)
        weights = softmax_by_rows(q @ k.mT / D**0.5, real[:, None, None])
        expected = layer.o_proj((weights @ v).transpose(1, 2).flatten(2)).detach()
        context = make_context(6, padding_mask=mask, implementation=implementation)
        close(run_layers([layer], states, context)[0].output.detach()[real], expected[real], 1e-12)


def test_error_is_bounded_by_the_distance_from_the_mean():
    """|A^c - A_i| <= |q_i - Q^c| |K| / sqrt(d) in the spectral norm of K (proposition 1), rows of one cluster are the
    same bits, and equal queries are exact."""
    (layer,) = build_layers(PLAIN)
    states = vectors(2, 9)
    with torch.no_grad():
        q, k, _ = projected(layer, states)
        found = layer.cluster(q, None)
        weights = run_layers([layer], states, make_context(9, implementation="eager"))[0].weights
        exact = by_hand(layer, states)[2]
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


@each_spec
def test_rows_and_padding_decide_nothing(spec):
    (layer,) = build_layers(spec)
    states = vectors(3, 9)
    mask = torch.ones(3, 9).bool()
    mask[0, :4], mask[1, 6:] = False, False
    with torch.no_grad():
        together = run_layers([layer], states, make_context(9, padding_mask=mask))[0].output
        for b in range(3):
            alone = run_layers([layer], states[b : b + 1, mask[b]], make_context(int(mask[b].sum())))[0].output
            close(together[b, mask[b]], alone[0], 1e-12)


def test_planes_are_saved_and_seeded():
    one, other = build_layers(PLAIN, 2)
    assert "planes" in one.state_dict() and not torch.equal(one.planes, other.planes)
    assert torch.equal(one.planes, build_layers(PLAIN)[0].planes)
    assert not torch.equal(one.planes, build_layers({**PLAIN, "hash_seed": 1})[0].planes)
    (flat,) = build_layers({**PLAIN, "hash_bias": False})
    assert (flat.planes[:, -1] == 0).all() and (flat.planes[:, :-1] != 0).all()


@each_spec
def test_what_is_kept(spec):
    """No scores of the means, which are 16 numbers for each token and head."""
    (layer,) = build_layers({**spec, "num_clusters": 16})
    for length in (64, 256):
        sizes = saved_sizes(lambda: run_layers([layer], vectors(1, length), make_context(length)))
        assert sizes[0] <= 2 * length * WIDTH, sizes[:3]


def test_refusals():
    for spec, fields, message in (
        (PLAIN, {"num_clusters": 0}, "clustered_attention needs `num_clusters` >= 1, got 0"),
        (PLAIN, {"hash_bits": 0}, "`hash_bits` >= 1"),
        (PLAIN, {"lloyd_iterations": -1}, "`lloyd_iterations` >= 0"),
        (IMPROVED, {"topk": 0}, "improved_clustered_attention needs `topk` >= 1"),
    ):
        with pytest.raises(ValueError, match=message):
            XFormerConfig(**GEOMETRY, attention={**spec, **fields})
    for spec in (PLAIN, IMPROVED):
        with pytest.raises(ValueError, match="no causal form"):
            XFormerConfig(**GEOMETRY, attention=spec, is_decoder=True)
        with pytest.raises(ValueError, match="cannot read a memory"):
            XFormerConfig(**GEOMETRY, cross_attention=spec)


MIX = {"position": "rotary", "residual": "pre_ln", "num_key_value_heads": 2}
MIXES = {"plain": {"attention": PLAIN, **MIX}, "improved": {"attention": IMPROVED, **MIX}}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("case", mixes(MIXES, ("encoder",)), ids=str)
def test_contract(case):
    check_contract(case)


@pytest.mark.parametrize(
    "case", mixes({"improved": {**MIXES["improved"], "num_hidden_layers": 1}}, ("encoder",)), ids=str
)
def test_compile(case):
    check_compile(case)
