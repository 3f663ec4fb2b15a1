"""A sliding window with the first tokens in sight, where an accelerator takes both as one pattern."""

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerModel
from tests.helpers import close, make_strong, tokens
from tests.pretend_cuda import OnGPU, on_gpu, pretend_cuda


def config(causal):
    spec = {"type": "sliding_window", "window_size": 3, "sinks": 2}
    return XFormerConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=40,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        position="rotary",
        normalization="rms_norm",
        is_decoder=causal,
        attention=spec,
    )


@pytest.mark.parametrize("causal", [True, False])
def test_accelerator_takes_window_and_sinks_as_one_pattern(causal, monkeypatch):
    model = make_strong(XFormerModel(config(causal))).eval()
    ids, mask = tokens(2, 20, high=50), torch.ones(2, 20, dtype=torch.long)
    mask[1, :6] = 0
    expected = model(ids, attention_mask=mask, use_cache=False).last_hidden_state
    with pretend_cuda(monkeypatch):
        found = on_gpu(model)(OnGPU(ids), attention_mask=OnGPU(mask), use_cache=False).last_hidden_state.inner
    close(found[mask.bool()], expected[mask.bool()], 2e-5)
