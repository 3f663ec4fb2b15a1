"""Average attention against its equations, token by token; its state; its precision."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hf_xformers import XFormerConfig
from hf_xformers.core.cache import XFormerCache
from hf_xformers.variants import config_class, family
from tests.attention.score_helpers import (
    GEOMETRY,
    HEADS,
    PADDING,
    WIDTH,
    build_layers,
    check_contract,
    make_context,
    mixes,
    run_layers,
    vectors,
)
from tests.helpers import close, tokens

FORMS = [{}, {"ffn_size": 5}, {"use_ffn": False}, {"use_gate": False}, {"use_ffn": False, "use_gate": False}]


def build(**fields):
    return build_layers({"type": "average_attention", **fields}, 1, True)[0]


@torch.no_grad()
def step_by_step(layer, row):
    """One text [T, D], a token at a time, with a running sum."""
    total, outputs = torch.zeros(row.shape[1]).double(), []
    for number, y in enumerate(row, start=1):
        total = total + y
        g = total / number
        if layer.spec.use_ffn:
            inner = (layer.up_proj.weight @ g + layer.up_proj.bias).clamp(min=0)
            g = layer.down_proj.weight @ inner + layer.down_proj.bias
        if not layer.spec.use_gate:
            outputs.append(g)
            continue
        gates = 1 / (1 + torch.exp(-(layer.gate_proj.weight @ torch.cat((y, g)) + layer.gate_proj.bias)))
        outputs.append(gates[:WIDTH] * y + gates[WIDTH:] * g)
    return torch.stack(outputs)


@pytest.mark.parametrize("path", ["eager", "sdpa"])
@pytest.mark.parametrize("fields", FORMS, ids=str)
def test_definition(fields, path):
    layer, states = build(**fields), vectors(4, 6)
    for mask in (None, PADDING):
        context = make_context(6, True, padding_mask=mask, implementation=path)
        output = run_layers([layer], states, context)[0].output.detach()
        for row in range(4):
            own = torch.ones(6, dtype=torch.bool) if mask is None else mask[row]
            if own.any():
                close(output[row][own], step_by_step(layer, states[row][own]))
        assert output.isfinite().all()


def test_weights_are_uniform_over_what_came_before():
    layer, states = build(), vectors(2, 5)
    weights = run_layers([layer], states, make_context(5, True, output_attentions=True))[0].weights
    assert weights.shape == (2, HEADS, 5, 5)
    expected = [[1 / (i + 1) if j <= i else 0.0 for j in range(5)] for i in range(5)]
    close(weights[1, 2], torch.tensor(expected, dtype=torch.float64))
    plain = build(use_ffn=False, use_gate=False)
    close(run_layers([plain], states, make_context(5, True))[0].output, weights[:, 0] @ states)


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


def test_constant_text():
    layer = build()
    output = run_layers([layer], vectors(1, 1).expand(1, 9, -1), make_context(9, True))[0].output[0]
    close(output, output[:1].expand(9, -1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_long_texts(dtype):
    """A sum of 4096 numbers near 1 in half precision would stop growing, or be rounded to whole numbers."""
    layer = build(use_ffn=False, use_gate=False).to(dtype)
    states = (1 + 0.1 * vectors(1, 4096)).to(dtype)
    expected = states.double().cumsum(1) / torch.arange(1, 4097)[:, None]
    output = run_layers([layer], states, make_context(4096, True))[0].output
    assert (output.double() - expected).abs().max() < 2 * torch.finfo(dtype).eps


def test_encoder_is_refused():
    with pytest.raises(ValueError, match="'average_attention' is causal only and cannot stand in an encoder"):
        XFormerConfig(**GEOMETRY, attention="average_attention")


def test_encoder_of_the_family_is_dense():
    config = config_class("xf_average_attention")(**GEOMETRY, is_decoder=False, is_encoder_decoder=True)
    model = family("xf_average_attention")["ForSeq2SeqLM"](config)
    kinds = [type(tower.layers[0].attention).__name__ for tower in (model.model.trunk, model.model.decoder)]
    assert kinds == ["DenseAttention", "AverageAttention"]
    ids = tokens(1, 5, high=50)
    assert model(input_ids=ids, decoder_input_ids=ids).logits.shape == (1, 5, 50)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ffn_size": 0}, "`ffn_size` >= 1"),
        ({"ffn_size": 4, "use_ffn": False}, "leave one of them out"),
        ({"scale": 0.5}, "no scores to scale"),
    ],
)
def test_refusals(fields, message):
    with pytest.raises(ValueError, match=message):
        XFormerConfig(**GEOMETRY, is_decoder=True, attention={"type": "average_attention", **fields})


MIXES = {"ungated": {"attention": {"type": "average_attention", "use_gate": False}, "residual": "pre_ln"}}


@pytest.mark.parametrize("case", mixes(MIXES, ("decoder",)), ids=str)
def test_contract(case):
    check_contract(case)


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
