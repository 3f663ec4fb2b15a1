"""What the tests of engines share: random inputs, and those of each form that linear attention has."""

from __future__ import annotations

import torch

FORMS = ["plain", "rotated", "weighted", "rotated weighted", "unnormalized", "eps"]


def draw(*shape, dtype=torch.float64, positive=False):
    x = torch.randn(*shape, dtype=dtype)
    return (x.abs() + 0.01 if positive else x).requires_grad_()


def numbers(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def inputs_of(form, heads, queries, keys, features, values, weight=4.0):
    """All tensors, features of queries and keys and values first, and the options, for `heads` [B, H]. weight: how
    much logarithms of weights vary."""
    inputs = [draw(*heads, n, features, positive=True) for n in (queries, keys)] + [draw(*heads, keys, values)]
    options = {}
    if "rotated" in form:
        options.update(rotated_query=draw(*heads, queries, features), rotated_key=draw(*heads, keys, features))
    if "weighted" in form:
        options["log_weight"] = (weight * torch.randn(*heads, keys, dtype=torch.float64)).requires_grad_()
    options.update({"unnormalized": {"normalize": False}, "eps": {"eps": 0.5}}.get(form, {}))
    return inputs + [x for x in options.values() if isinstance(x, torch.Tensor)], options


def assert_same(actual, expected, tolerance=1e-12):
    assert torch.isfinite(actual).all()
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def assert_same_with_gradients(ours, theirs, inputs, tolerance=1e-11):
    assert_same(ours, theirs)
    above = torch.randn_like(theirs)
    for own, other in zip(torch.autograd.grad(ours, inputs, above), torch.autograd.grad(theirs, inputs, above)):
        assert_same(own, other, tolerance)
