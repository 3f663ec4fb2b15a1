"""Maps that know their own pullback against torch's differentiation of the plain maps."""

import pytest
import torch

from hf_xformers.ops.common.segments import features_of
from hf_xformers.ops.linear.feature_maps import dpfp_reference, elu_plus_one, positive_features, sum_normalize
from hf_xformers.ops.linear.feature_pullbacks import EluPlusOne, NormalizedDPFP, PositiveFeatures

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
