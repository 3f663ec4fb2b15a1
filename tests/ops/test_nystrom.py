"""Nystrom attention against its dense factors and transformers' module."""

import pytest
import torch

from hf_xformers.ops.landmarks import segment_means
from hf_xformers.ops.nystrom import iterative_pinv, nystrom_attention, nystrom_attention_reference

B, H, D, DV = 2, 3, 8, 5


def case(length=40, keys=None, seed=0):
    torch.manual_seed(seed)
    keys = length if keys is None else keys
    shapes = (B, H, length, D), (B, H, keys, D), (B, H, keys, DV)
    return [torch.randn(*shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def attend(q, k, v, mask=None, **options):
    options = {"num_landmarks": 8, **options}
    return nystrom_attention(q, k, v, key_padding_mask=mask, query_padding_mask=mask, **options)


def assert_same(actual, expected, tolerance=1e-10):
    assert torch.isfinite(actual).all()
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("length", [9, 16, 37, 40, 63, 64, 65, 200])
@pytest.mark.parametrize("pinv_iterations", [6, 12, None])
def test_equals_the_three_dense_factors(length, pinv_iterations):
    given = case(length)
    out = attend(*given, pinv_iterations=pinv_iterations)
    expected = nystrom_attention_reference(*given, num_landmarks=8, pinv_iterations=pinv_iterations)
    assert_same(out, expected, 1e-8)
    grad = torch.randn_like(expected)
    for ours, theirs in zip(torch.autograd.grad(out, given, grad), torch.autograd.grad(expected, given, grad)):
        assert_same(ours / theirs.abs().max(), theirs / theirs.abs().max(), 1e-7)


def test_reference_landmarks_are_plain_means():
    q, k, v = (x.detach() for x in case(6))
    pairs = [(x[:, :, 0::2] + x[:, :, 1::2]) / 2 for x in (q, k)]
    root = D**0.25
    f1 = torch.softmax((q / root) @ (pairs[1] / root).mT, -1)
    m = torch.softmax((pairs[0] / root) @ (pairs[1] / root).mT, -1)
    f3 = torch.softmax((pairs[0] / root) @ (k / root).mT, -1)
    expected = f1 @ torch.linalg.inv(m) @ f3 @ v
    assert_same(nystrom_attention_reference(q, k, v, num_landmarks=3, pinv_iterations=None), expected)


class TestIterativeInverse:
    def matrix(self, *shape):
        torch.manual_seed(0)
        return torch.randn(*shape, 16, 16, dtype=torch.float64).softmax(-1)

    def test_converges_to_the_pseudo_inverse(self):
        matrix = self.matrix(2, 3)
        exact = torch.linalg.pinv(matrix)
        errors = [(iterative_pinv(matrix, n) - exact).abs().max().item() for n in (6, 12, 18, 30)]
        assert errors[0] > errors[1] > errors[3] and errors[3] < 1e-7

    def test_rank_deficient_and_zero_matrices(self):
        matrix = self.matrix(2)
        matrix = matrix.clone()
        matrix[0, :, 3], matrix[0, 5] = 0.0, 0.0
        matrix[1] = 0.0
        inverse = iterative_pinv(matrix, 40)
        assert (inverse[1] == 0).all() and (inverse[0, 3] == 0).all() and (inverse[0, :, 5] == 0).all()
        assert_same(inverse[0], torch.linalg.pinv(matrix[0]), 1e-6)

    def test_literal_iteration(self):
        m = self.matrix()
        z = m.T / (m.abs().sum(0).max() * m.abs().sum(1).max())
        one = torch.eye(16, dtype=torch.float64)
        for _ in range(6):
            z = 0.25 * z @ (13 * one - m @ z @ (15 * one - m @ z @ (7 * one - m @ z)))
        assert_same(iterative_pinv(m, 6), z)

    def test_only_the_global_start_depends_on_the_batch(self):
        matrix = self.matrix(4)
        alone = iterative_pinv(matrix[:1])
        assert_same(iterative_pinv(matrix)[:1], alone, 1e-14)
        difference = iterative_pinv(matrix, init="global")[:1] - iterative_pinv(matrix[:1], init="global")
        assert difference.abs().max() > 1e-6


@pytest.mark.parametrize("length", [1, 7, 8, 9, 24, 37])
@pytest.mark.parametrize("segments", [1, 4, 8, 50])
def test_segment_means_count_real_tokens_only(length, segments):
    torch.manual_seed(0)
    x = torch.randn(3, 2, length, 4, dtype=torch.float64)
    mask = torch.rand(3, length) < 0.6
    mask[2] = False
    means, count = segment_means(x, segments, mask)
    for b in range(3):
        real = [x[b, :, t] for t in range(length) if mask[b, t]]
        many = max(
            min(segments, len(real)), 1
        )  # as many segments for every length, none of two tokens beside one of four
        sizes = [len(real) // many + (number < len(real) % many) for number in range(many)] if real else []
        groups = [real[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes))]
        assert count[b].tolist() == [len(g) for g in groups] + [0] * (count.shape[1] - len(groups))
        for i, group in enumerate(groups):
            assert_same(means[b, :, i], torch.stack(group).mean(0))
        assert (means[b, :, len(groups) :] == 0).all()
    plain, none = segment_means(x, segments)
    full, count = segment_means(x, segments, torch.ones(3, length, dtype=torch.bool))
    assert none is None
    assert_same(full[:, :, : plain.shape[2]], plain)
    assert (count[:, plain.shape[2] :] == 0).all() and (count[:, : plain.shape[2]] > 0).all()


@pytest.mark.parametrize("length", [5, 8, 12, 37])
@pytest.mark.parametrize("side", ["left", "right", "holes"])
def test_padding_changes_nothing(length, side):
    q, k, v = case(length)
    total = length + 30
    generator = torch.Generator().manual_seed(3)
    places = {
        "right": torch.arange(length),
        "left": torch.arange(30, total),
        "holes": torch.randperm(total, generator=generator)[:length].sort().values,
    }[side]
    mask = torch.zeros(B, total, dtype=torch.bool)
    mask[:, places] = True
    padded = []
    for x in (q, k, v):
        wide = 20 * torch.randn(B, H, total, x.shape[-1], dtype=torch.float64, generator=generator)
        wide[:, :, places] = x.detach()
        padded.append(wide)
    out = attend(*padded, mask)
    assert torch.isfinite(out).all()
    assert_same(out[:, :, places], attend(q, k, v), 1e-8)


@pytest.mark.parametrize("length", [5, 40])
def test_row_of_padding_only_gives_zeros_and_zero_gradients(length):
    given = case(length)
    mask = torch.ones(B, length, dtype=torch.bool)
    mask[1] = False
    out = attend(*given, mask)
    assert (out[1] == 0).all() and (out[0] != 0).all()
    assert_same(out[:1], attend(*(x[:1] for x in given)), 1e-8)
    for gradient in torch.autograd.grad(out.square().sum(), given):
        assert torch.isfinite(gradient).all() and (gradient[1] == 0).all()


def test_parity_with_transformers():
    transformers = pytest.importorskip("transformers")
    module = pytest.importorskip("transformers.models.nystromformer.modeling_nystromformer")
    torch.manual_seed(0)
    config = transformers.NystromformerConfig(
        hidden_size=16, num_attention_heads=2, num_landmarks=8, segment_means_seq_len=32, conv_kernel_size=3
    )
    theirs = module.NystromformerSelfAttention(config).eval()
    torch.nn.init.zeros_(theirs.conv.weight)  # the convolution of V is not part of the product
    x = torch.randn(3, 32, 16)
    q, k, v = (f(x).view(3, 32, 2, 8).transpose(1, 2) for f in (theirs.query, theirs.key, theirs.value))
    ours = nystrom_attention(q, k, v, num_landmarks=8, pinv_init="global")
    torch.testing.assert_close(ours.transpose(1, 2).flatten(2), theirs(x)[0], rtol=1e-4, atol=1e-5)


def test_bfloat16():
    q, k, v = (x.detach() for x in case(64))
    exact = attend(q, k, v)
    low = attend(*(x.bfloat16() for x in (q, k, v)))
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.double(), exact, rtol=0.1, atol=0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(*(x.float() for x in (q, k, v)))
    assert torch.isfinite(out).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(num_landmarks=0), "num_landmarks"),
        (dict(pinv_iterations=0), "pinv_iterations"),
        (dict(pinv_init="original"), "original"),
        (dict(key_padding_mask=torch.ones(B, 1, 40, 40, dtype=torch.bool)), "boolean"),
    ],
)
def test_refuses_what_cannot_work(change, message):
    with pytest.raises(ValueError, match=message):
        nystrom_attention(*case(40), **{"num_landmarks": 8, **change})
