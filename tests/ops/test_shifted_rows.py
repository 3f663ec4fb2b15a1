"""Shared takes of rows and shifted rows against plain slices, with their derivatives."""

import pytest
import torch

from hf_xformers.ops.common.shifted_rows import SharedRows, shift_rows


@pytest.mark.parametrize("bounds", [[(0, 2), (0, 5), (0, 7)], [(0, 3), (2, 6), (5, 7)], [(0, 7)] * 3])
def test_gradients_of_all_takes_reach_the_tensor(bounds):
    x = torch.randn(2, 3, 7, 4, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn(2, 3, stop - start, 4, dtype=torch.float64) for start, stop in bounds]
    expected = torch.zeros_like(x)
    for (start, stop), weight in zip(bounds, weights, strict=True):
        expected[:, :, start:stop] += weight
    rows = SharedRows(x, len(bounds))
    taken = [rows.take(*bound) for bound in bounds]
    for (start, stop), part in zip(bounds, taken, strict=True):
        assert torch.equal(part, x[:, :, start:stop])
    total = sum((part * weight).sum() for part, weight in zip(taken, weights, strict=True))
    for _ in range(2):  # a second pass begins with an empty sum
        (found,) = torch.autograd.grad(total, x, retain_graph=True)
        torch.testing.assert_close(found, expected)


def test_takes_by_place():
    """Places may repeat, within a take and between takes."""
    x = torch.randn(1, 1, 6, 3, dtype=torch.float64, requires_grad=True)
    places = [torch.tensor([[0, 5], [2, 2]]), torch.tensor([2, 4, 5])]

    def cubes(x, shared):
        rows = SharedRows(x, len(places))
        taken = [rows.take_at(at) if shared else x[0, 0][at] for at in places]
        return sum((part**3 * (1 + number)).sum() for number, part in enumerate(taken))

    total = cubes(x, True)
    assert torch.equal(total, cubes(x, False))
    (expected,) = torch.autograd.grad(cubes(x, False), x)
    for _ in range(2):
        (found,) = torch.autograd.grad(total, x, retain_graph=True)
        torch.testing.assert_close(found, expected)
    assert torch.autograd.gradgradcheck(lambda x: cubes(x, True), (x,))


@pytest.mark.parametrize(("rows", "width", "step"), [(1, 3, 1), (3, 4, 1), (4, 1, 1), (2, 5, 2), (3, 3, 2)])
@pytest.mark.parametrize("spare", [0, 2])
def test_shift(rows, width, step, spare):
    columns = width + step * (rows - 1) + spare
    x = torch.randn(2, 1, rows, columns, dtype=torch.float64, requires_grad=True)
    shifted = shift_rows(x, width, step)
    for row in range(rows):
        begin = step * (rows - 1 - row)
        assert torch.equal(shifted[..., row, :], x[..., row, begin : begin + width])
    assert torch.autograd.gradcheck(lambda x: shift_rows(x, width, step), (x,))
    assert torch.autograd.gradgradcheck(lambda x: shift_rows(x, width, step), (x,))
    strided = torch.randn(2, 1, columns, rows, dtype=torch.float64).transpose(-1, -2)
    assert torch.equal(shift_rows(strided, width, step), shift_rows(strided.contiguous(), width, step))
