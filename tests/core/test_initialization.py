"""How parameters start: standard deviations by initializer, measured on matrices large enough to tell."""

import math

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerForMaskedLM, XFormerForSeq2SeqLM
from hf_xformers.variants import config_class, family
from tests.common.cases import TEXT_TYPES, defaults
from tests.helpers import close, tiny_fields, tokens

WIDTH, INNER, LAYERS = 64, 128, 3
SIZES = dict(
    vocab_size=300, hidden_size=WIDTH, num_attention_heads=4, num_hidden_layers=LAYERS, intermediate_size=INNER
)


def build(model_class=XFormerForMaskedLM, **fields):
    torch.manual_seed(0)
    return model_class(XFormerConfig(**{**SIZES, **fields}))


def spread(parameter):
    return float(parameter.detach().std())


def near(parameter, expected):
    """Within five standard errors of the standard deviation of that many numbers."""
    assert abs(spread(parameter) / expected - 1) < 5 / math.sqrt(2 * parameter.numel()), (spread(parameter), expected)


def sublayers(model):
    return [(layer.attention, layer.feedforward) for layer in model.model.trunk.layers]


@pytest.mark.parametrize("deviation", [0.02, 0.1])
def test_normal(deviation):
    model = build(initializer_range=deviation)
    for attention, feedforward in sublayers(model):
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            near(getattr(attention, part).weight, deviation)
        near(feedforward.up_proj.weight, deviation)
        near(feedforward.down_proj.weight, deviation)
    near(model.model.trunk.embedding.tokens.weight, deviation)
    near(model.model.trunk.position.table.weight, deviation)


def test_scaled_residual():
    """What writes to the residual stream is divided by sqrt(2 layers) (GPT-2)."""
    model = build(XFormerForCausalLM, initializer="scaled_residual", feedforward="swiglu")
    small = 0.02 / math.sqrt(2 * LAYERS)
    for attention, feedforward in sublayers(model):
        for weight in (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight):
            near(weight, 0.02)
        near(attention.o_proj.weight, small)
        near(feedforward.up_proj.weight, 0.02)
        near(feedforward.gate_proj.weight, 0.02)
        near(feedforward.down_proj.weight, small)


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_xavier(factor):
    """Uniform with variance 2 / (fan in + fan out); token vectors have variance 1 / D."""
    model = build(XFormerForSeq2SeqLM, initializer="xavier", initializer_factor=factor)
    for tower in (model.model.trunk, model.model.decoder):
        for layer in tower.layers:
            near(layer.attention.q_proj.weight, factor * math.sqrt(2 / (2 * WIDTH)))
            near(layer.feedforward.up_proj.weight, factor * math.sqrt(2 / (WIDTH + INNER)))
            bound = factor * math.sqrt(6 / (WIDTH + INNER))
            assert bound * 0.98 < float(layer.feedforward.down_proj.weight.detach().abs().max()) <= bound * (1 + 1e-6)
    near(model.model.trunk.embedding.tokens.weight, factor / math.sqrt(WIDTH))


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_t5(factor):
    """1 / sqrt(fan in); queries also carry the 1 / sqrt(d) that the scores lack; N(0, 1) tokens."""
    model = build(
        XFormerForSeq2SeqLM,
        initializer="t5",
        initializer_factor=factor,
        position="t5_relative_bias",
        feedforward="geglu",
    )
    attentions = [(attention, feedforward) for attention, feedforward in sublayers(model)]
    attentions += [(layer.cross_attention, layer.feedforward) for layer in model.model.decoder.layers]
    for attention, feedforward in attentions:
        near(attention.q_proj.weight, factor / math.sqrt(WIDTH * WIDTH / 4))
        for part in (attention.k_proj, attention.v_proj, attention.o_proj, feedforward.up_proj, feedforward.gate_proj):
            near(part.weight, factor / math.sqrt(WIDTH))
        near(feedforward.down_proj.weight, factor / math.sqrt(INNER))
    near(model.model.trunk.embedding.tokens.weight, factor)
    near(model.model.trunk.position.table.weight, factor / math.sqrt(WIDTH))


def test_small():
    """Nguyen and Salazar 2019: normal of variance 2 / (5 D) for square maps, as of a head's, and 2 / (D + 4 D)."""
    model = build(initializer="small")
    for attention, feedforward in sublayers(model):
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            near(getattr(attention, part).weight, math.sqrt(2 / (5 * WIDTH)))
        near(feedforward.up_proj.weight, math.sqrt(2 / (WIDTH + INNER)))
        near(feedforward.down_proj.weight, math.sqrt(2 / (WIDTH + INNER)))


@pytest.mark.parametrize("initializer", ["normal", "scaled_residual", "xavier", "small", "t5"])
def test_biases_and_norms(initializer):
    for normalization in ("layer_norm", "rms_norm"):
        model = build(initializer=initializer, normalization=normalization, head="transform")
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                assert (parameter == 0).all(), name
            elif "norm" in name:
                assert (parameter == 1).all(), name


def test_vanilla_inputs_have_unit_variance():
    """sqrt(D) E[w] with Var E = 1 / D (Vaswani et al. 2017, section 3.4)."""
    model = build(
        initializer="xavier", embedding={"type": "token", "scale": True}, position="none", num_hidden_layers=1
    ).eval()
    states = model.model(tokens(1, 300, high=300), output_hidden_states=True).hidden_states[0]
    close(states.std(), torch.tensor(1.0), 0.05)


def test_loading_does_not_start_again(tmp_path):
    """Parameters that a component starts by itself come from the file."""
    for initializer in ("scaled_residual", "t5"):
        model = build(initializer=initializer)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.25)
        model.save_pretrained(tmp_path)
        loaded = XFormerForMaskedLM.from_pretrained(tmp_path)
        assert all((parameter == 0.25).all() for parameter in loaded.parameters())


def starts():
    """One family for each way in which the states of the first layer are made."""
    fields = ("embedding", "position", "normalization", "stack")
    numbers = ("initializer", "initializer_range", "initializer_factor")
    made = {name: defaults(name).to_dict() for name in TEXT_TYPES}
    return list({str([made[name][field] for field in fields + numbers]): name for name in TEXT_TYPES}.values())


@pytest.mark.parametrize("name", starts())
def test_tokens_are_heard_beside_positions(name):
    """What the first layer reads varies with the token, not with the place alone: small vectors beside large positions
    take hundreds of steps to be told apart, whatever the mechanism."""
    made = config_class(name)
    kind = "encoder" if "ForMaskedLM" in made.heads else "decoder" if "ForCausalLM" in made.heads else "seq2seq"
    torch.manual_seed(0)
    model = family(name)["Model"](made(**tiny_fields(made, kind, hidden_size=64))).eval()
    model = model.get_encoder() if kind == "seq2seq" else model
    seen = []
    layer = next(module for path, module in model.named_modules() if path.endswith("layers.0"))
    layer.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((*args, *kwargs.values())[0]), with_kwargs=True
    )
    with torch.no_grad():
        model(input_ids=tokens(16, 8))
    given = (torch.cat(seen, dim=1) if seen[0].shape[1] == 1 else seen[0]).double()  # [rows, places, width]
    by_token, by_place = given.var(0).mean(), given.mean(0).var(0).mean()
    assert by_token > 0.1 * by_place, (by_token, by_place)
