"""Which of torch's kernels a masked product is given."""

import pytest
import torch
from torch.nn import functional as F

from hf_xformers.ops.common.fused import fused_attention
from tests.pretend_cuda import OnGPU, pretend_cuda


@pytest.mark.parametrize("keys, masked, off", [(192, True, True), (256, True, False), (192, False, False)])
def test_cudnn_is_left_out(keys, masked, off, monkeypatch):
    used, plain = [], F.scaled_dot_product_attention

    def watched(*inputs, **options):
        used.append(torch.backends.cuda.cudnn_sdp_enabled())
        return plain(*inputs, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    query, key, mask = torch.randn(1, 1, 4, 8), torch.randn(1, 1, keys, 8), torch.rand(1, 1, 4, keys) < 0.5
    expected = fused_attention(query, key, key, mask if masked else None)
    with pretend_cuda(monkeypatch):
        moved = OnGPU(query), OnGPU(key), OnGPU(key), OnGPU(mask) if masked else None
        torch.testing.assert_close(fused_attention(*moved).inner, expected)
    assert used == [True, not off]
