"""Who is nearest to a centroid, and how far clusters are, against definitions."""

import pytest
import torch

from hf_xformers.ops.bucketed import kmeans
from hf_xformers.ops.bucketed.kmeans import nearest_tokens, squared_distances, sums_of_clusters


def test_places_are_counted_or_sorted_out():
    """Two ways to the places that a cluster chose; the second one stands where scores are not numbers, or on other
    devices."""
    places = torch.rand(2, 3, 4, 20).topk(5).indices.sort(-1).values
    chosen = torch.zeros(2, 3, 4, 20, dtype=torch.bool).scatter(-1, places, True)
    assert torch.equal(kmeans._in_order(chosen, 5), places)
    chosen[0, 0, 0] = False
    found = kmeans._in_order(chosen, 5)
    assert torch.equal(found.flatten(0, 2)[1:], places.flatten(0, 2)[1:])
    assert found.max() < 20  # the empty cluster's places are meaningless, but places


@pytest.mark.parametrize("padded", [False, True])
def test_the_earlier_of_equal_tokens_are_chosen(padded):
    """Scores with few distinct values, against a stable sort of each cluster's."""
    valid = None
    affinity = torch.randint(0, 4, (2, 2, 20, 3), generator=torch.Generator().manual_seed(0)).float()
    if padded:
        valid = torch.ones(2, 20, dtype=torch.bool)
        valid[0, :6], valid[1, 3:] = False, False  # the second text is shorter than a cluster
    places, used = nearest_tokens(affinity, 5, valid)
    for b, h, c in torch.cartesian_prod(*(torch.arange(n) for n in (2, 2, 3))).tolist():
        real = [t for t in range(20) if valid is None or valid[b, t]]
        expected = sorted(sorted(real, key=lambda t: (-affinity[b, h, t, c].item(), t))[:5])
        found = places[b, h, c] if used is None else places[b, h, c][used[b, h, c]]
        assert found.tolist() == expected


@pytest.mark.parametrize("padded", [False, True])
def test_sums_and_distances(padded):
    """Vector by vector; the gradient of the distance is that of the sum of squares."""
    generator, valid = torch.Generator().manual_seed(0), None
    vectors = torch.randn(2, 3, 7, 4, generator=generator, dtype=torch.float64).requires_grad_()
    centroids = torch.randn(3, 5, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 5, (2, 3, 7), generator=generator)
    if padded:
        valid = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1, 1]]).bool()
    sums, counts, total = torch.zeros(3, 5, 4).double(), torch.zeros(3, 5), 0.0
    for b, h, t in torch.cartesian_prod(*(torch.arange(n) for n in (2, 3, 7))).tolist():
        if valid is None or valid[b, t]:
            sums[h, labels[b, h, t]] += vectors[b, h, t].detach()
            counts[h, labels[b, h, t]] += 1
            total = total + (vectors[b, h, t] - centroids[h, labels[b, h, t]]).square().sum()
    found = sums_of_clusters(vectors, labels, 5, valid)
    torch.testing.assert_close(found.sums, sums)
    assert torch.equal(found.counts.float(), counts)
    distance = squared_distances(found, centroids)
    torch.testing.assert_close(distance, total)
    (expected,) = torch.autograd.grad(total, vectors)
    torch.testing.assert_close(torch.autograd.grad(3 * distance, vectors)[0], 3 * expected)


def test_numbers_of_tokens_need_the_padding():
    with pytest.raises(ValueError, match="give `padding_mask`"):
        nearest_tokens(torch.zeros(1, 1, 4, 2), 2, None, torch.tensor([2]))
