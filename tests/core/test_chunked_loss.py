"""Cross-entropy in pieces against torch's own over all logits in float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hf_xformers.core import chunked_loss
from hf_xformers.core.losses import next_token_cross_entropy, token_cross_entropy

VOCAB = 37


def given(*shape, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(*shape, VOCAB, generator=generator)).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, shape, generator=generator)
    labels[..., ::3] = -100
    return logits, labels


@pytest.mark.parametrize("numbers", [1, 4 * VOCAB, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(11,), (2, 11), (2, 3, 4)])
def test_equals_the_whole(shape, dtype, numbers, monkeypatch):
    monkeypatch.setitem(chunked_loss._NUMBERS_AT_ONCE, "cpu", numbers)
    logits, labels = given(*shape, dtype=dtype)
    wide = logits.detach().float().requires_grad_()
    found = token_cross_entropy(logits, labels)
    expected = F.cross_entropy(wide.reshape(-1, VOCAB), labels.reshape(-1))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    found.backward(), expected.backward()
    bound = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(logits.grad.float(), wide.grad, rtol=bound, atol=1e-7)


def test_gradients_are_rounded_once():
    """Equal logits of 16 tokens have gradients of 1/16 and -15/16, which bfloat16 holds; the count does not."""
    labels = torch.zeros(1, 1, dtype=torch.long)
    for count in range(3, 60):
        logits = torch.zeros(1, 1, 16, dtype=torch.bfloat16, requires_grad=True)
        token_cross_entropy(logits, labels, count).backward()
        expected = torch.tensor([-15 / 16] + 15 * [1 / 16]) / count
        assert torch.equal(logits.grad[0, 0], expected.bfloat16()), count


def test_next_tokens_without_a_copy_of_the_logits(monkeypatch):
    """The logits of all tokens but the last are no tensor in one piece; none of their size is made."""
    monkeypatch.setitem(chunked_loss._NUMBERS_AT_ONCE, "cpu", VOCAB)
    logits, labels = given(2, 11)
    reshaped = []
    monkeypatch.setattr(torch.Tensor, "float", _watch(torch.Tensor.float, reshaped))
    next_token_cross_entropy(logits, labels).backward()
    assert reshaped and max(reshaped) == VOCAB
    wide = logits.detach().float()[:, :-1].reshape(-1, VOCAB).requires_grad_()
    F.cross_entropy(wide, labels[:, 1:].reshape(-1)).backward()
    torch.testing.assert_close(logits.grad[:, :-1].reshape(-1, VOCAB).float(), wide.grad, rtol=0.02, atol=1e-7)
    assert not logits.grad[:, -1].any()


def _watch(function, sizes):
    def run(tensor):
        sizes.append(tensor.numel())
        return function(tensor)

    return run


@pytest.mark.parametrize("numbers", [1, 4 * VOCAB])
def test_many_logits_in_float32(numbers, monkeypatch):
    """They are their own float32 copy, and stay as they are."""
    monkeypatch.setitem(chunked_loss._NUMBERS_AT_ONCE, "cpu", numbers)
    logits, labels = given(2, 11, dtype=torch.float32)
    assert not chunked_loss.takes_chunks(logits)
    monkeypatch.setattr(chunked_loss, "_LARGE", 0)
    assert chunked_loss.takes_chunks(logits) and not chunked_loss.takes_chunks(logits.double())
    whole, before = logits.detach().clone().requires_grad_(), logits.detach().clone()
    found, expected = token_cross_entropy(logits, labels), F.cross_entropy(whole.flatten(0, 1), labels.flatten())
    (3 * found).backward(), (3 * expected).backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(logits.grad, whole.grad)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("numbers", [1, 4 * VOCAB, 1 << 20])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_divergence(temperature, numbers, monkeypatch):
    """Against torch's own, with its gradient, in double precision."""
    monkeypatch.setitem(chunked_loss._NUMBERS_AT_ONCE, "cpu", numbers)
    student, labels = given(2, 11, dtype=torch.float32)
    teacher, chosen = given(2, 11, dtype=torch.float32)[0].detach().flip(-1), labels != -100
    wide = student.detach().double().requires_grad_()
    own, taught = ((logits[chosen] / temperature).log_softmax(-1) for logits in (wide, teacher.double()))
    expected = F.kl_div(own, taught, log_target=True, reduction="sum")
    found = chunked_loss.ChunkedDivergence.apply(student, teacher, chosen, temperature)
    (3 * found).backward(), (3 * expected).backward()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(student.grad.double(), wide.grad, rtol=1e-4, atol=1e-6)
    assert not student.grad[~chosen].any()
