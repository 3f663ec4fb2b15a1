"""Positions added before every layer."""

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerModel
from hf_xformers.position.sinusoidal_absolute import sinusoids
from tests.helpers import close, tokens

SIZES = dict(vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=4, intermediate_size=24)


def build(position, **fields):
    torch.manual_seed(0)
    given = {**SIZES, "max_position_embeddings": 12, "residual": {"type": "pre_ln", "final_norm": False}, **fields}
    return XFormerModel(XFormerConfig(**given, position=position)).double().eval()


@torch.no_grad()
def silenced(model):
    """Every sublayer gives zeros."""
    for layer in model.trunk.layers:
        for projection in (layer.attention.o_proj, layer.feedforward.down_proj):
            projection.weight.zero_()
            projection.bias.zero_()
    return model


def signals(model, source, depth, length):
    spec, position = model.config.position, model.trunk.position
    for step in range(3):  # each in float32, as the component makes it
        if source == "sinusoidal":
            signal = sinusoids(torch.arange(length), 16, spec.base, "interleaved")
            yield (
                signal + (sinusoids(torch.tensor([step + 1]), 16, spec.base, "interleaved") if depth else 0)
            ).double()
        else:
            yield position.tables[step if source == "learned_per_layer" else 0].weight[:length]


@pytest.mark.parametrize(
    ("source", "depth"),
    [("sinusoidal", False), ("sinusoidal", True), ("learned", False), ("learned_per_layer", False)],
)
def test_sum_over_layers(source, depth):
    """With sublayers that give nothing, x + sum over layers of P^l."""
    model, ids = silenced(build({"type": "per_layer_position", "source": source, "depth_signal": depth})), tokens(2, 7)
    ids = ids % 50
    with torch.no_grad():
        expected = model.trunk.embedding.tokens(ids) + sum(signals(model, source, depth, 7))
        close(model(ids).last_hidden_state, expected)


def test_parameters():
    counts = {
        source: sum(
            p.numel() for p in build({"type": "per_layer_position", "source": source}).trunk.position.parameters()
        )
        for source in ("sinusoidal", "learned", "learned_per_layer")
    }
    assert counts == {"sinusoidal": 0, "learned": 12 * 16, "learned_per_layer": 3 * 12 * 16}
