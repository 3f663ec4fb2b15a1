"""Feature maps against the kernels they stand for: exact means, exact variances and closed forms."""

import math

import pytest
import torch

from hf_xformers.ops.linear.attention import kernel_attention
from hf_xformers.ops.linear.feature_maps import (
    dpfp,
    elu_plus_one,
    hyperbolic_features,
    positive_features,
    random_features_reference,
    random_matrix,
    relu_features,
    sum_normalize,
    trigonometric_features,
)

MAPS = {"positive": positive_features, "hyperbolic": hyperbolic_features, "trigonometric": trigonometric_features}
DIM = 8


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def pair(seed=1, norm=1.0):
    x, y = torch.randn(2, DIM, generator=generator(seed), dtype=torch.float64)
    return norm * x / x.norm(), norm * y / y.norm()


def unscaled(features):
    return features.phi * features.log_scale.exp()[..., None]


def draws(count, orthogonal):
    """`count` independent square projections: blocks of one long matrix."""
    options = {"orthogonal": orthogonal, "generator": generator(7), "dtype": torch.float64}
    return random_matrix(count * DIM, DIM, **options).view(count, DIM, DIM)


def estimates(name, x, y, matrices):
    return (random_features_reference(x, matrices, name) * random_features_reference(y, matrices, name)).sum(-1)


@pytest.mark.parametrize("name", MAPS)
def test_scaled_features_are_the_literal_ones(name):
    x = torch.randn(3, 4, DIM, generator=generator(), dtype=torch.float64)
    projection = random_matrix(20, DIM, generator=generator(), dtype=torch.float64)
    features = MAPS[name](x, projection)
    torch.testing.assert_close(unscaled(features), random_features_reference(x, projection, name))
    if name != "trigonometric":
        assert (features.phi > 0).all() and (features.phi.amax(-1) == 1).all()


@pytest.mark.parametrize("name", MAPS)
def test_scaled_features_have_the_gradient_of_the_literal_ones(name):
    x = torch.randn(4, DIM, generator=generator(), dtype=torch.float64).requires_grad_()
    projection = random_matrix(20, DIM, generator=generator(), dtype=torch.float64).requires_grad_()
    ours = unscaled(MAPS[name](x, projection)).square().sum()
    theirs = random_features_reference(x, projection, name).square().sum()
    for a, b in zip(torch.autograd.grad(ours, (x, projection)), torch.autograd.grad(theirs, (x, projection))):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("orthogonal", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_products_are_unbiased_estimates_of_the_softmax_kernel(name, orthogonal):
    matrices = draws(4000, orthogonal)
    for x, y in (pair(1), pair(2, norm=0.7), (pair(3)[0], -0.5 * pair(3)[0])):
        ratio = estimates(name, x, y, matrices) / (x @ y).exp()
        error = ratio.std() / math.sqrt(len(ratio))
        assert abs(ratio.mean() - 1) < 4 * error


def test_variances_of_independent_rows_are_the_published_ones():
    x, y = pair(1, norm=0.6)
    m, count = 4, 200_000
    matrices = torch.randn(count, m, DIM, generator=generator(), dtype=torch.float64)
    kernel, total, difference = (x @ y).exp(), (x + y).square().sum(), (x - y).square().sum()
    positive = total.exp() * kernel**2 * (1 - (-total).exp()) / m
    expected = {
        "positive": positive,
        "hyperbolic": positive * (1 - (-total).exp()) / 2,
        "trigonometric": total.exp() / kernel**2 * (1 - (-difference).exp()) ** 2 / (2 * m),
    }
    for name, variance in expected.items():
        assert estimates(name, x, y, matrices).var() == pytest.approx(variance.item(), rel=0.05), name


@pytest.mark.parametrize("rows", [1, DIM, DIM + 3, 4 * DIM])
def test_random_matrix_blocks_are_orthogonal(rows):
    matrix = random_matrix(rows, DIM, generator=generator(), dtype=torch.float64)
    assert matrix.shape == (rows, DIM)
    for start in range(0, rows, DIM):
        gram = matrix[start : start + DIM] @ matrix[start : start + DIM].mT
        torch.testing.assert_close(gram, gram.diagonal().diag(), atol=1e-12, rtol=0)
    even = random_matrix(rows, DIM, scaling=1, generator=generator(), dtype=torch.float64)
    torch.testing.assert_close(even.norm(dim=-1), torch.full((rows,), math.sqrt(DIM), dtype=torch.float64))
    again = random_matrix(rows, DIM, generator=generator(), dtype=torch.float64)
    assert torch.equal(matrix, again)


def test_attention_error_falls_with_the_square_root_of_the_number_of_features():
    rng = generator(5)
    q, k, v = (torch.randn(1, 4, 32, 16, generator=rng, dtype=torch.float64) for _ in range(3))
    q, k = 0.3 * q, 0.3 * k
    exact = torch.softmax(q @ k.mT / 4, dim=-1) @ v
    sizes, errors = (64, 256, 1024), []
    for size in sizes:
        total = 0.0
        for _ in range(6):
            projection = random_matrix(size, 16, generator=rng, dtype=torch.float64)
            out = kernel_attention(q / 2, k / 2, v, positive_features, projection, causal=False)
            total += (out - exact).square().mean().sqrt().item()
        errors.append(total / 6)
    slope = math.log(errors[-1] / errors[0]) / math.log(sizes[-1] / sizes[0])
    assert -0.6 < slope < -0.4
    assert errors[-1] < 0.02


def test_relu_features_estimate_the_arc_cosine_kernel():
    matrices = draws(4000, True)
    for x, y in (pair(1), pair(2, norm=2.0)):
        product = (relu_features(x, matrices[0]) * relu_features(y, matrices[0])).sum(-1)
        direct = torch.stack([(relu_features(x, w) * relu_features(y, w)).sum() for w in matrices])
        assert direct[0] == product
        angle = torch.acos(x @ y / (x.norm() * y.norm()))
        kernel = x.norm() * y.norm() / math.pi * (angle.sin() + (math.pi - angle) * angle.cos())
        error = direct.std() / math.sqrt(len(direct))
        assert abs(direct.mean() - kernel / 2) < 4 * error


def test_sum_normalized_features():
    x = torch.randn(7, 5, generator=generator(), dtype=torch.float64, requires_grad=True)
    phi = sum_normalize(dpfp(x))
    torch.testing.assert_close(phi.sum(-1), torch.ones(7, dtype=torch.float64))
    torch.testing.assert_close(sum_normalize(dpfp(4.0 * x)), phi)
    zero = torch.zeros(2, 5, dtype=torch.float64, requires_grad=True)
    phi = sum_normalize(dpfp(zero))
    assert (phi == 0).all()
    (gradient,) = torch.autograd.grad(phi.sum(), zero)
    assert torch.isfinite(gradient).all()


def test_random_features_stay_in_float32_for_low_precision_inputs():
    x = torch.randn(4, DIM, generator=generator()).bfloat16()
    projection = random_matrix(16, DIM, generator=generator())
    for map_ in MAPS.values():
        features = map_(x, projection)
        assert features.phi.dtype == features.log_scale.dtype == torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            again = map_(x.float(), projection)
        assert torch.equal(features.phi, again.phi)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dpfp(torch.ones(3), 6), "nu must be between 1 and"),
        (lambda: dpfp(torch.ones(3), 0), "got 0"),
        (lambda: random_matrix(0, 4), "at least one row"),
        (lambda: random_matrix(4, 4, scaling=2), "scaling"),
    ],
)
def test_refuses_what_cannot_work(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_elu_plus_one_without_a_gradient(dtype):
    """Another way to the same numbers: e^min(x, 0) + max(x, 0)."""
    x = torch.linspace(-30, 30, 2001, dtype=dtype)
    expected = torch.where(x > 0, x.double() + 1, x.double().exp())
    found = elu_plus_one(x)
    torch.testing.assert_close(found.double(), expected, rtol=40 * torch.finfo(dtype).eps, atol=0)
    torch.testing.assert_close(
        elu_plus_one(x.clone().requires_grad_()).detach(), found, rtol=0, atol=4 * torch.finfo(dtype).eps * 31
    )
