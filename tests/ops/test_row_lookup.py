"""Rows by index and sums of rows at an index against loops, in the two ways that heads lie in memory."""

import pytest
import torch

from hf_xformers.ops.common.row_lookup import places_in_rows, rows_of_tokens, sum_rows, take_rows


def laid_out(shape, beside: bool) -> torch.Tensor:
    batch, heads, length, width = shape
    if beside:
        return torch.randn(batch, length, heads, width, dtype=torch.float64).transpose(1, 2)
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("beside", [False, True])
def test_rows_and_their_sums(beside):
    torch.manual_seed(0)
    x, at = laid_out((2, 3, 7, 4), beside).requires_grad_(), torch.randint(0, 5, (2, 3, 7))
    sums, taken = sum_rows(x, at, 5), take_rows(x, at)
    rows = rows_of_tokens(x)[places_in_rows(at, 7)]
    expected = torch.zeros(2, 3, 5, 4, dtype=torch.float64)
    for b, h, t in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(7)).tolist():
        expected[b, h, at[b, h, t]] += x.detach()[b, h, t]
        assert torch.equal(taken[b, h, t], x[b, h, at[b, h, t]])
        assert torch.equal(rows[b, t, h], x[b, h, at[b, h, t]])
    torch.testing.assert_close(sums, expected)
    assert torch.autograd.gradcheck(lambda x: sum_rows(x, at, 5), (x,))


@pytest.mark.parametrize("beside", [False, True])
def test_sums_keep_no_copy_of_the_rows(beside):
    x, kept = laid_out((1, 2, 6, 4), beside).requires_grad_(), []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        sum_rows(x, torch.zeros(1, 2, 6, dtype=torch.long), 3)
    assert all(each.data_ptr() == x.data_ptr() for each in kept if each.dtype == x.dtype)
