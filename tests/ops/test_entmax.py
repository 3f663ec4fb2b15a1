"""alpha-entmax against PyPI's `entmax`, its own definition, and finite differences."""

import pytest
import torch

from hf_xformers.ops import entmax_attention as tiled
from hf_xformers.ops.entmax import _WORTH_SAMPLING, entmax, entmax_reference
from tests.helpers import close

ALPHAS = (1.01, 1.2, 1.5, 1.8, 2.0)
MASK = torch.tensor([[1, 1, 0, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0]]).bool()


def scores(rows, count, scale=1.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, count, generator=generator, dtype=torch.float64).mul(scale).to(dtype)


@pytest.mark.parametrize("scale", [0.1, 3.0, 100.0])
@pytest.mark.parametrize("count", [1, 2, 9, 700])
def test_the_packages_functions(count, scale):
    package = pytest.importorskip("entmax")
    s = scores(5, count, scale)
    close(entmax(s, 1.5), package.entmax15(s, dim=-1))
    close(entmax(s, 2.0), package.sparsemax(s, dim=-1))
    alphas = torch.tensor(ALPHAS, dtype=torch.float64)[:, None]
    expected = package.entmax_bisect(s, alphas, dim=-1, n_iter=80)
    for function in (entmax, entmax_reference):
        close(function(s, alphas), expected)


def test_the_packages_derivatives():
    package = pytest.importorskip("entmax")
    found = []
    for function in (entmax, entmax_reference, lambda s, a: package.entmax_bisect(s, a, dim=-1, n_iter=80)):
        s = scores(5, 9).requires_grad_()
        alphas = torch.tensor(ALPHAS, dtype=torch.float64)[:, None].requires_grad_()
        weighted = function(s, alphas) * scores(1, 9, 2.0)
        found.append(torch.autograd.grad(weighted.sum(), (s, alphas)))
    for own in found[:2]:
        for one, other in zip(own, found[2]):
            close(one, other, 1e-8)


@pytest.mark.parametrize("alpha", [1.0, 1.25, 1.5, 2.0, "learned"])
def test_finite_differences(alpha):
    s = scores(3, 7).requires_grad_()
    if alpha == "learned":
        learned = torch.tensor([[1.2], [1.5], [1.9]], dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda s, a: entmax(s, a, MASK), (s, learned))
    else:
        assert torch.autograd.gradcheck(lambda s: entmax(s, alpha, MASK), (s,))


@pytest.mark.parametrize("alpha", ALPHAS)
def test_one_threshold_for_all_that_have_weight(alpha):
    """(alpha - 1) s - p^(alpha - 1) is the same for them, and nowhere smaller for the others (KKT)."""
    s = scores(4, 300, 2.0)
    weights = entmax(s, torch.full((1, 1), alpha, dtype=torch.float64))
    close(weights.sum(-1), torch.ones(4, dtype=torch.float64))
    for row, p in zip(s, weights):
        thresholds = (alpha - 1) * row - p ** (alpha - 1)
        own = thresholds[p > 0]
        assert (own - own[0]).abs().max() < 1e-8 and (thresholds[p == 0] <= own[0] + 1e-12).all()


@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0])
def test_what_is_hidden_has_no_weight(alpha):
    """As if it were not there; a row that sees nothing is zero, in the gradient as well."""
    for function in (entmax, entmax_reference):
        s = scores(3, 7).requires_grad_()
        weights = function(s, alpha, MASK)
        assert (weights[~MASK] == 0).all() and weights[2, 1] == 1
        close(weights[0, MASK[0]], function(s[:1, MASK[0]], alpha)[0])
        (gradient,) = torch.autograd.grad((weights * scores(1, 7)).sum(), s)
        assert (gradient[~MASK] == 0).all() and gradient.isfinite().all() and gradient[0].any()


def test_precision_and_range():
    """Half precision is computed in float32, where scores may be as large as they like."""
    for dtype, limit in ((torch.float32, 2e-6), (torch.bfloat16, 2e-6)):
        s = scores(4, 500, 30.0, dtype)
        alphas = torch.tensor(ALPHAS[:4])[:, None]
        for alpha in (alphas, 1.5, 2.0):
            close(entmax(s, alpha).double(), entmax(s.double(), alpha), limit)
    huge = torch.tensor([[1e30, -1e30, 1e30]])
    for alpha in (1.0, 1.5, 2.0, torch.full((1, 1), 1.2)):
        close(entmax(huge, alpha), torch.tensor([[0.5, 0.0, 0.5]]), 1e-6)
    with pytest.raises(ValueError, match=r"between 1 \(softmax\) and 2 \(sparsemax\), got 2.5"):
        entmax(huge, 2.5)


@pytest.mark.parametrize("scale", [0.01, 3.0, 300.0])
@pytest.mark.parametrize("count", [_WORTH_SAMPLING, 2501])
def test_a_start_from_some_of_the_scores(count, scale):
    """Where scores are many, the first steps are those of every eighth one."""
    s = scores(len(ALPHAS), count, scale)
    alphas = torch.tensor(ALPHAS, dtype=torch.float64)[:, None]
    close(entmax(s, alphas), entmax_reference(s, alphas))
    for alpha in (1.5, 2.0):
        close(entmax(s, alpha), entmax_reference(s, alpha))


@pytest.mark.parametrize("sought", [1, 40])
def test_attention_in_several_tiles(sought, monkeypatch):
    """Outputs and all gradients against the weights of all pairs, with queries that see nothing."""
    monkeypatch.setattr(tiled, "LEAST_ROWS", 4)
    monkeypatch.setattr(tiled, "TILE_SCORES", 4 * 11)
    monkeypatch.setattr(tiled, "SEARCH_SCORES", sought)
    length, generator = 11, torch.Generator().manual_seed(1)
    query, key, value, upstream = torch.randn(4, 2, 3, length, 5, generator=generator, dtype=torch.float64)
    seen = torch.ones(length, length, dtype=torch.bool).tril() & (torch.arange(length) != 4)
    seen = seen.expand(2, 1, -1, -1).clone()
    seen[1, 0, :6] = False
    found = []
    for fast in (True, False):
        given = [x.clone().requires_grad_() for x in (query, key, value)]
        alpha = torch.tensor([1.2, 1.5, 1.9], dtype=torch.float64, requires_grad=True)
        if fast:
            output = tiled.entmax_attention(
                *given, alpha, lambda rows, keys: seen[:, :, rows, keys], lambda rows: rows
            ).transpose(1, 2)
        else:
            weights = entmax_reference(given[0] @ given[1].mT, alpha[:, None, None], seen)
            output = weights @ given[2]
        found.append((output, *torch.autograd.grad((output * upstream).sum(), (*given, alpha))))
    for one, other in zip(*found):
        close(one, other, 1e-8)
