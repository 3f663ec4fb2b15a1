"""e^x as 2^(x log2 e)."""

import pytest
import torch

from hf_xformers.ops.common.exponential import exp_


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exp_equals_that_of_torch(dtype):
    x = torch.cat(
        [torch.linspace(-120.0, 20.0, 4001, dtype=dtype), torch.tensor([-torch.inf, torch.inf, 0.0], dtype=dtype)]
    )
    exact = x.double().exp()
    found = exp_(x.clone())
    # The product x log2 e is rounded once, so the relative error grows with |x|.
    bound = (2 + x.double().abs()) * torch.finfo(dtype).eps
    normal = torch.isfinite(exact) & (exact > torch.finfo(dtype).tiny)
    assert ((found.double() - exact).abs() <= bound * exact)[normal].all()
    assert found[-3] == 0 and found[-2] == torch.inf and found[-1] == 1
    assert torch.isnan(exp_(torch.full((3,), torch.nan))).all()


def test_exp_is_in_place_and_differentiable():
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    y = x * 1.0
    assert exp_(y) is y
    y.sum().backward()
    torch.testing.assert_close(x.grad, x.detach().exp())
