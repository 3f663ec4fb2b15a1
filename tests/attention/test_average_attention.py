"""Average attention against its equations, token by token; its state; its precision."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hf_xformers.core.cache import XFormerCache
from hf_xformers.variants import config_class, family
from tests.attention.score_helpers import GEOMETRY, WIDTH, build_layers, make_context, run_layers, vectors
from tests.helpers import close, tokens


def build(**fields):
    return build_layers({"type": "average_attention", **fields}, 1, True)[0]


def test_state_of_constant_size():
    layer, states = build(), vectors(2, 20)
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[1, :6] = False
    expected = run_layers([layer], states, make_context(20, True, padding_mask=mask))[0].output
    cache, found, past = XFormerCache([layer.spec.cache_layer(None)]), [], 0
    for size in (1, 4, 1, 9, 5):
        context = make_context(size, True, past=past, padding_mask=mask[:, : past + size], output_attentions=size == 9)
        result = run_layers([layer], states[:, past : past + size], context, cache=cache)[0]
        found.append(result.output)
        past += size
        state = cache.layers[0].state
        assert {name: tuple(x.shape) for name, x in state.items()} == {"total": (2, WIDTH), "count": (2, 1)}
        if size == 9:  # asked for in the middle of a text, weights are those of the whole text
            whole = make_context(20, True, padding_mask=mask, output_attentions=True)
            close(result.weights[:, :, 1:7], run_layers([layer], states, whole)[0].weights[:, :, 7:13, :15])
    close(torch.cat(found, 1)[mask], expected[mask])
    assert state["count"].flatten().tolist() == [20, 14]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_long_texts(dtype):
    """A sum of 4096 numbers near 1 in half precision would stop growing, or be rounded to whole numbers."""
    layer = build(use_ffn=False, use_gate=False).to(dtype)
    states = (1 + 0.1 * vectors(1, 4096)).to(dtype)
    expected = states.double().cumsum(1) / torch.arange(1, 4097)[:, None]
    output = run_layers([layer], states, make_context(4096, True))[0].output
    assert (output.double() - expected).abs().max() < 2 * torch.finfo(dtype).eps


def test_encoder_of_the_family_is_dense():
    config = config_class("xf_average_attention")(**GEOMETRY, is_decoder=False, is_encoder_decoder=True)
    model = family("xf_average_attention")["ForSeq2SeqLM"](config)
    kinds = [type(tower.layers[0].attention).__name__ for tower in (model.model.trunk, model.model.decoder)]
    assert kinds == ["DenseAttention", "AverageAttention"]
    ids = tokens(1, 5, high=50)
    assert model(input_ids=ids, decoder_input_ids=ids).logits.shape == (1, 5, 50)


def test_time_is_linear():
    """Beyond its maps of single tokens it multiplies nothing."""
    layer = build().float()
    counts = []
    for length in (128, 512):
        states, context = torch.randn(1, length, WIDTH), make_context(length, True)
        with FlopCounterMode(display=False) as counter:
            run_layers([layer], states, context)
        counts.append(counter.get_total_flops() / length)
    maps = sum(p.numel() for name, p in layer.named_parameters() if name.endswith("weight"))
    assert counts == [2 * maps, 2 * maps]
