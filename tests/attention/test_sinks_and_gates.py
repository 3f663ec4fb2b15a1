"""Learned sinks and output gates in every mechanism that has a place for them."""

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerForMaskedLM, XFormerForSeq2SeqLM
from hf_xformers.core.components import SLOTS
from tests.attention.score_helpers import GEOMETRY
from tests.helpers import close, make_strong, tokens

KINDS = {name: SLOTS["attention"].get(name) for name in SLOTS["attention"]}


@pytest.mark.parametrize(
    ("name", "field"),
    [(name, "output_gate") for name, kind in KINDS.items() if "parts" in kind.head_options]
    + [(name, "learned_sinks") for name, kind in KINDS.items() if "sink" in kind.head_options],
)
def test_every_mechanism_that_says_so(name, field):
    """Gates and sinks learn, and decoding token by token gives what the whole text does."""
    kind, value = KINDS[name], {"output_gate": "head", "learned_sinks": True}[field]
    causal = "causal" not in kind.why_not and name != "axial_transformer"  # whose decoder is another stack
    config = XFormerConfig(**{**GEOMETRY, "position": "none"}, attention={"type": name, field: value})
    model = make_strong((XFormerForCausalLM if causal else XFormerForMaskedLM)(config).double())
    ids = tokens(2, 9, high=50)
    model(ids, labels=ids).loss.backward()
    for layer in model.model.trunk.layers:
        own = layer.attention.sinks if field == "learned_sinks" else layer.attention.gate_proj.weight
        assert own.grad.abs().sum() > 0
    if causal:
        model.eval()
        with torch.no_grad():
            whole = model(ids).logits
            past = model(ids[:, :6], use_cache=True).past_key_values
            later = [model(ids[:, [i]], past_key_values=past).logits for i in range(6, 9)]
        close(torch.cat(later, 1), whole[:, 6:], 1e-6)


def test_in_cross_attention_and_not_divided():
    spec = {"type": "dense", "learned_sinks": True, "output_gate": "element"}
    config = XFormerConfig(**GEOMETRY, is_encoder_decoder=True, attention=spec, cross_attention=spec)
    assert "context_parallel" in SLOTS["attention"].get("dense")().supports - config.attention.supports
    model, ids = make_strong(XFormerForSeq2SeqLM(config)), tokens(2, 5, high=50)
    model(ids, labels=ids).loss.backward()
    layer = model.model.decoder.layers[0].cross_attention
    assert layer.sinks.grad.abs().sum() > 0 and layer.gate_proj.weight.grad.abs().sum() > 0
