"""The short convolution against its sum, token by token: padding anywhere, documents, pieces."""

import pytest
import torch
from torch.nn.functional import silu

from hf_xformers.ops.convolution.short import short_convolution
from tests.ops.linear_forms import draw

B, T, C = 3, 17, 5


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def literal(inputs, weight, bias, window, mask=None, documents=None):
    """Outputs at real tokens (zeros elsewhere) and the last inputs, row by row."""
    taps, outputs, windows = weight.shape[1], [], []
    for row in range(len(inputs)):
        seen = [(x, None if documents is None else documents[row, 0]) for x in window[row]]
        out = []
        for t in range(inputs.shape[1]):
            if mask is not None and not mask[row, t]:
                out.append(torch.zeros_like(inputs[row, t]))
                continue
            own = None if documents is None else documents[row, t]
            seen.append((inputs[row, t], own))
            total = torch.zeros_like(bias) + bias
            for j, (x, document) in enumerate(seen[-taps:]):
                total = total + weight[:, j] * x * (document == own)
            out.append(silu(total))
        outputs.append(torch.stack(out))
        windows.append(torch.stack([x for x, _ in seen[len(seen) - taps + 1 :]]) if taps > 1 else inputs[row, :0])
    return torch.stack(outputs), torch.stack(windows)


@pytest.mark.parametrize("taps", [1, 3, 4])
@pytest.mark.parametrize("length", [1, 2, T])
@pytest.mark.parametrize("how", ["whole", "padded", "packed", "both"])
def test_sum_and_gradients(taps, length, how):
    inputs, weight, bias, window = draw(B, length, C), draw(C, taps), draw(C), draw(B, taps - 1, C)
    mask = (torch.rand(B, length) < 0.5) | (torch.arange(B) == 1)[:, None] if how in ("padded", "both") else None
    documents = (torch.arange(length) // 6).expand(B, -1) if how in ("packed", "both") else None
    options = {"padding_mask": mask, "segment_ids": documents}
    out, after = short_convolution(inputs, weight, bias, window=window, **options)
    expected, expected_after = literal(inputs, weight, bias, window, mask, documents)
    real = torch.ones(B, length, dtype=torch.bool) if mask is None else mask
    grads = torch.randn_like(expected) * real[..., None], torch.randn_like(expected_after)
    torch.testing.assert_close(out[real], expected[real], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(after, expected_after, rtol=0, atol=0)
    given = (inputs, weight, bias, *([window] if taps > 1 else []))
    ours, theirs = (
        torch.autograd.grad(found, given, grads, allow_unused=True)
        for found in ((out, after), (expected, expected_after))
    )
    for found, wanted in zip(ours, theirs, strict=True):
        wanted = torch.zeros_like(found) if wanted is None else wanted
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_pieces():
    inputs, weight = draw(B, T, C), draw(C, 4)
    expected, end = short_convolution(inputs, weight)
    window, found, start = None, [], 0
    for size in (1, 1, 9, 2, 4):
        out, window = short_convolution(inputs[:, start : start + size], weight, window=window)
        found.append(out)
        start += size
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(window, end, rtol=0, atol=0)
