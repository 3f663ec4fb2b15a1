"""Maps that know their own pullback against torch's differentiation of the plain maps."""

import pytest
import torch

from hf_xformers.ops.common.segments import features_of
from hf_xformers.ops.linear.feature_maps import (
    dpfp_reference,
    elu_plus_one,
    normalized_positive_features,
    positive_features,
    random_features_reference,
    relu_features,
    sum_normalize,
)
from hf_xformers.ops.linear.feature_pullbacks import (
    EluPlusOne,
    FourierFeatures,
    NormalizedDPFP,
    PositiveFeatures,
    ReluFeatures,
    Rescaled,
)

LEAD = torch.Size((2, 3))


def inputs(width: int, seed: int = 0) -> torch.Tensor:
    """Chunks [B H N, C, d] with a row of zeros and entries that are zero."""
    torch.manual_seed(seed)
    x = torch.randn(2 * 3 * 2, 5, width, dtype=torch.float64)
    x[0, 0] = 0.0
    x[1, 1, ::2] = 0.0
    return x


@pytest.mark.parametrize("nu", [1, 2, 3, 7])
def test_dpfp_equals_the_index_formula_and_its_gradient(nu):
    x = inputs(4)
    with torch.no_grad():
        phi, logs, pull = features_of(NormalizedDPFP(nu), (), x, LEAD, [])
    leaf = x.clone().requires_grad_()
    expected = sum_normalize(dpfp_reference(leaf, nu))
    torch.testing.assert_close(phi, expected.detach())
    assert logs is None
    weights = torch.randn_like(phi)
    (gradient,) = torch.autograd.grad((expected * weights).sum(), leaf)
    # At an entry of exactly zero the slope of relu is a choice: clamp in the reference lets one side through.
    smooth = x != 0
    torch.testing.assert_close(pull(weights, None)[0][smooth], gradient[smooth])
    assert pull(weights, None)[0].isfinite().all()


def test_elu_plus_one_and_its_gradient():
    x = inputs(4)
    with torch.no_grad():
        phi, logs, pull = features_of(EluPlusOne(), (), x, LEAD, [])
    leaf = x.clone().requires_grad_()
    expected = elu_plus_one(leaf)
    weights = torch.randn_like(phi)
    (gradient,) = torch.autograd.grad((expected * weights).sum(), leaf)
    torch.testing.assert_close(phi, expected.detach())
    torch.testing.assert_close(pull(weights, None)[0], gradient)
    assert logs is None and len(pull(weights, None)) == 1


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("active", [[], [0]])
def test_positive_features_and_their_gradients(per_head, active):
    x, scale = inputs(4), 0.7
    projection = torch.randn(*([3] if per_head else []), 6, 4, dtype=torch.float64)
    with torch.no_grad():
        phi, logs, pull = features_of(PositiveFeatures(scale), (projection,), x, LEAD, active)
    leaf, weight = x.clone().requires_grad_(), projection.clone().requires_grad_()
    expected = positive_features(leaf.view(2, 3, -1, 4) * scale, weight)
    torch.testing.assert_close(phi.view(expected.phi.shape), expected.phi.detach())
    torch.testing.assert_close(logs.reshape(expected.log_scale.shape), expected.log_scale.detach())
    to_phi, to_log = torch.randn_like(phi), torch.randn_like(logs)
    total = (expected.phi * to_phi.view(expected.phi.shape)).sum()
    total = total + (expected.log_scale * to_log.view(expected.log_scale.shape)).sum()
    gradients = torch.autograd.grad(total, [leaf, weight])
    found = pull(to_phi, to_log)
    assert len(found) == 1 + len(active)
    for ours, theirs in zip(found, gradients, strict=False):
        torch.testing.assert_close(ours, theirs)


def compare(own, plain, projection, active, x=None):
    """Features, log factors and gradients of a map that knows its pullback, and of what it stands for."""
    x = inputs(4) if x is None else x
    params = () if projection is None else (projection,)
    with torch.no_grad():
        phi, logs, pull = features_of(own, params, x, LEAD, active)
    leaf, *weights = (tensor.clone().requires_grad_() for tensor in (x, *params))
    expected = plain(leaf.view(2, 3, -1, x.shape[-1]), *weights)
    expected = expected if isinstance(expected, tuple) else (expected,)
    called = own(x.view(2, 3, -1, x.shape[-1]), *params)
    for other in (phi.view(expected[0].shape), called if isinstance(called, torch.Tensor) else called[0]):
        torch.testing.assert_close(other, expected[0].detach())
    to_phi, to_log = torch.randn_like(phi), None
    total = (expected[0] * to_phi.view(expected[0].shape)).sum()
    assert (logs is None) == (len(expected) == 1)
    if logs is not None:
        torch.testing.assert_close(logs.reshape(expected[1].shape), expected[1].detach())
        to_log = torch.randn_like(logs)
        total = total + (expected[1] * to_log.view(expected[1].shape)).sum()
    wanted = torch.autograd.grad(total, [leaf, *(weights[index] for index in active)])
    for ours, theirs in zip(pull(to_phi, to_log), wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("active", [[], [0]])
def test_maps_of_random_rows(per_head, active):
    scale, projection = 0.7, torch.randn(*([3] if per_head else []), 6, 4, dtype=torch.float64)

    def fourier(x, w):  # that of the Gaussian kernel has the factor taken out
        half = (x * x).sum(-1) * scale**2 / 2
        return random_features_reference(x * scale, w, "trigonometric") * (-half).exp()[..., None]

    def trigonometric(x, w):
        return fourier(x, w), (x * x).sum(-1) * scale**2 / 2

    def relu(x, w):
        return torch.relu(x * scale @ w.mT) / 6**0.5 + 0.01

    compare(FourierFeatures(scale), fourier, projection, active)
    compare(FourierFeatures(scale, norm=True), trigonometric, projection, active)
    compare(ReluFeatures(scale, 0.01), relu, projection, active)
    # The last channel multiplies the features of the others.
    more = torch.cat([inputs(4), torch.randn(12, 5, 1, dtype=torch.float64)], dim=-1)
    for inner, plain in ((FourierFeatures(scale), fourier), (normalized_positive_features,) * 2):
        compare(Rescaled(inner), lambda x, w, f=plain: f(x[..., :-1], w) * x[..., -1:], projection, active, more)


def test_maps_without_rows():
    x = torch.where(inputs(4) == 0, 0.3, inputs(4))
    compare(ReluFeatures(0.5, 0.1), lambda x: relu_features(0.5 * x, eps=0.1), None, [], x)
    compare(NormalizedDPFP(3, factor=0.3), lambda x: 0.3 * sum_normalize(dpfp_reference(x, 3)), None, [], x)


def test_normalized_positive_features():
    """The hyperbolic features divided by their sum."""
    x, w = torch.randn(5, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    plain = random_features_reference(x, w, "hyperbolic")
    torch.testing.assert_close(normalized_positive_features(x, w), plain / plain.sum(-1, keepdim=True))
