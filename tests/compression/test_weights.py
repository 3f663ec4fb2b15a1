"""Masks: exact counts, the 2:4 pattern, what a masked layer computes, and the gradients that train it."""

import pytest
import torch
from torch import nn

from hf_xformers.compression.weights import (
    apply_masks,
    cubic,
    magnitude_masks,
    prunable_weights,
    put_masks,
    take_masks,
    top_mask,
    two_of_four,
)
from tests.compression.models import batch, tiny
from tests.helpers import close


@pytest.mark.parametrize("granularity", ["matrix", "model"])
@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.95])
def test_magnitude_takes_the_smallest_and_exactly_so_many(sparsity, granularity):
    generator = torch.Generator().manual_seed(0)
    weights = {"a": torch.randn(7, 12, generator=generator), "b": 5 * torch.randn(9, 4, generator=generator)}
    masks = magnitude_masks(weights, sparsity, granularity)
    groups = [["a"], ["b"]] if granularity == "matrix" else [["a", "b"]]
    for names in groups:
        left = torch.cat([weights[name][masks[name]].abs() for name in names])
        gone = torch.cat([weights[name][~masks[name]].abs() for name in names])
        assert len(gone) == int(sparsity * sum(weights[name].numel() for name in names))
        assert not len(gone) or gone.max() <= left.min()


def test_ties_are_counted_exactly():
    assert int(top_mask(torch.zeros(10), 0.3).sum()) == 7


def test_two_of_every_four_along_a_row():
    weight = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))
    mask = two_of_four(weight)
    for row in range(6):
        for start in range(0, 16, 4):
            largest = set(weight[row, start : start + 4].abs().argsort().tolist()[2:])
            assert set(mask[row, start : start + 4].nonzero().flatten().tolist()) == largest
    with pytest.raises(ValueError, match="multiple of 4"):
        two_of_four(torch.ones(3, 6))


def test_only_matrices_inside_layers_can_go():
    model = tiny()
    names = set(prunable_weights(model))
    parts = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj")
    expected = {f"model.trunk.layers.{layer}.{part}" for layer in range(3) for part in parts}
    assert expected < names and len(names) == 3 * 6
    assert not any("norm" in name or "embedding" in name or "head" in name for name in names)
    fewer = prunable_weights(model, ["o_proj", "layers.0."])
    assert len(fewer) == 2 * 5
    assert len(prunable_weights(model, ["attention", "o_proj"])) == 3 * 2  # all that the second names is out already
    with pytest.raises(ValueError, match="--exclude 'nowhere' is in no name"):
        prunable_weights(model, ["nowhere"])


def test_zeros_are_the_masked_product():
    model, inputs = tiny(), batch()
    weights = prunable_weights(model)
    values = {name: module.weight.detach().clone() for name, module in weights.items()}
    masks = magnitude_masks(values, 0.5)
    handles = [
        module.register_forward_hook(
            lambda m, args, out, keep=masks[name], w=values[name]: nn.functional.linear(args[0], w * keep, m.bias)
        )
        for name, module in weights.items()
    ]
    with torch.no_grad():
        expected = model(**inputs).logits
        [handle.remove() for handle in handles]
        apply_masks(weights, masks)
        close(model(**inputs).logits, expected, 1e-12)


@pytest.mark.parametrize("score", ["movement", "magnitude"])
def test_a_masked_weight_and_its_gradients(score):
    """Movement: dL/dS = dL/dW' W, dL/dW = dL/dW' M (Sanh et al. 2020, equations 2 and 3)."""
    torch.manual_seed(0)
    linear, x = nn.Linear(8, 5).double(), torch.randn(3, 8, dtype=torch.float64)
    start = linear.weight.detach().clone()
    (mask,) = put_masks({"it": linear}, score, "unstructured")
    mask.sparsity = 0.5
    scores = start.abs()
    if score == "movement":
        mask.scores.data.copy_(torch.randn(5, 8))
        scores = mask.scores.detach().clone()
    keep = top_mask(scores, 0.5)
    out = linear(x)
    close(out, x @ (start * keep).T + linear.bias, 1e-12)
    grad = torch.randn_like(out)
    (out * grad).sum().backward()
    full = grad.T @ x
    close(linear.parametrizations.weight.original.grad, full * keep, 1e-12)
    if score == "movement":
        close(mask.scores.grad, full * start, 1e-12)
    before = linear(x).detach()
    take_masks({"it": linear})
    assert type(linear) is nn.Linear and int((linear.weight == 0).sum()) == 20
    close(linear(x), before, 1e-12)


def test_the_schedule_is_cubic_between_its_ends():
    assert cubic(0, 100, 0.8) == cubic(10, 100, 0.8) == 0.0
    assert cubic(80, 100, 0.8) == cubic(100, 100, 0.8) == 0.8
    assert cubic(45, 100, 0.8) == pytest.approx(0.8 - 0.8 * 0.5**3)
    assert [cubic(step, 1, 0.5) for step in (0, 1)] == [0.0, 0.5]
