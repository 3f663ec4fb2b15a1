"""A sliding window with the first tokens in sight: steps of generation, and accelerators."""

import itertools

import pytest
import torch
from transformers import DynamicCache

from hf_xformers import XFormerConfig, XFormerModel
from hf_xformers.core.cache import make_cache
from tests.helpers import close, make_strong, tokens
from tests.pretend_cuda import OnGPU, on_gpu, pretend_cuda


def config(causal, **options):
    spec = {"type": "sliding_window", "window_size": 3, "sinks": 2, **options}
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


@pytest.mark.parametrize("options", [{}, {"score_cap": 2.0}, {"learned_sinks": True}], ids=str)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("prompt", [1, 2, 9])
def test_steps_equal_the_equation_on_the_whole_text(options, padded, prompt):
    """Steps of one token and of three; the second row changes places with the first on the way."""
    model = make_strong(XFormerModel(config(True, **options))).eval()
    ids, mask = tokens(2, 20, high=50), torch.ones(2, 20, dtype=torch.long)
    mask[1, : 4 * padded] = 0
    model.set_attn_implementation("eager")
    expected = model(ids, attention_mask=mask, use_cache=False).last_hidden_state
    model.set_attn_implementation("sdpa")
    cache, rows = make_cache(model.config), torch.arange(2)
    borders = [0, prompt, *range(prompt + 1, 15), 17, 20]
    with torch.no_grad():
        for begin, end in itertools.pairwise(borders):
            given = {"attention_mask": mask[rows, :end], "past_key_values": cache}
            found = model(ids[rows, begin:end], **given).last_hidden_state
            real = mask[rows, begin:end].bool()
            close(found[real], expected[rows, begin:end][real], 2e-5)
            if end == 12:
                rows = torch.tensor([1, 0])
                cache.reorder_cache(rows)


@pytest.mark.parametrize("make", [lambda config: DynamicCache(), lambda config: DynamicCache(config=config)])
def test_steps_with_a_stock_cache(make):
    model = make_strong(XFormerModel(config(True))).eval()
    ids, cache = tokens(2, 12, high=50), make(model.config)
    with torch.no_grad():
        steps = [model(step, past_key_values=cache).last_hidden_state for step in ids.split(1, dim=1)]
        close(torch.cat(steps, dim=1), model(ids, use_cache=False).last_hidden_state, 2e-5)


def test_gradients_through_steps_whose_keys_have_none():
    """Frozen keys and values, as where an adapter changes queries alone: steps after a step keep what it has read."""
    model = make_strong(XFormerModel(config(True))).eval().double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0.attention.q_proj" in name)
    ids, cache = tokens(2, 16, high=50), make_cache(model.config)
    chosen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    pieces = (ids[:, :8], *ids[:, 8:].split(1, dim=1))
    whole = model(ids, use_cache=False).last_hidden_state
    parts = torch.cat([model(piece, past_key_values=cache).last_hidden_state for piece in pieces], dim=1)
    expected, found = (torch.autograd.grad(x.square().sum(), chosen) for x in (whole, parts))
    for one, other in zip(found, expected, strict=True):
        close(one, other, 1e-10)
