"""A sliding window with the first tokens in sight: a cache of constant size."""

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerModel
from hf_xformers.attention.sliding_window import SinkWindowLayer
from tests.helpers import close, make_strong, tokens
from tests.pretend_cuda import OnGPU, on_gpu, pretend_cuda


def config(causal=True, **attention):
    spec = {"type": "sliding_window", "window_size": 3, "sinks": 2, **attention}
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


@pytest.mark.parametrize("fields", [{}, {"query_key_norm": "head", "window_size": 1}, {"sinks": 7}], ids=str)
@pytest.mark.parametrize("start", [1, 8])
def test_cache_of_constant_size(start, fields):
    """Token by token as the whole text at once, with padding in front; the state holds a window and the sinks."""
    model = make_strong(XFormerForCausalLM(config(**fields))).eval()
    ids = tokens(2, 20, high=50)
    mask = torch.ones_like(ids)
    mask[1, : start - 1] = 0
    with torch.no_grad():
        whole = model(ids, attention_mask=mask).logits
        output = model(ids[:, :start], attention_mask=mask[:, :start], use_cache=True)
        past, found = output.past_key_values, [output.logits[:, -1:]]
        for end in range(start + 1, 21):
            step = model(ids[:, end - 1 : end], attention_mask=mask[:, :end], past_key_values=past)
            found.append(step.logits)
    close(torch.cat(found, dim=1), whole[:, start - 1 :], 2e-5)
    spec = model.config.attention
    for layer in past.layers:
        assert isinstance(layer, SinkWindowLayer) and layer.get_seq_length() == 20
        assert layer.keys.shape[2] == max(spec.window_size, 2) - 1 and layer.sinks[0].shape[2] == spec.sinks


@pytest.mark.parametrize("causal", [True, False])
def test_accelerator_takes_window_and_sinks_as_one_pattern(causal, monkeypatch):
    model = make_strong(XFormerModel(config(causal))).eval()
    ids, mask = tokens(2, 20, high=50), torch.ones(2, 20, dtype=torch.long)
    mask[1, :6] = 0
    expected = model(ids, attention_mask=mask, use_cache=False).last_hidden_state
    with pretend_cuda(monkeypatch):
        found = on_gpu(model)(OnGPU(ids), attention_mask=OnGPU(mask), use_cache=False).last_hidden_state.inner
    close(found[mask.bool()], expected[mask.bool()], 2e-5)
