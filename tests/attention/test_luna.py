"""Luna against its equations, loops over tokens, other shapes of the same sums, and the path of its memory."""

import pytest
import torch

from hf_xformers import XFLunaConfig, XFLunaForCausalLM, XFLunaForMaskedLM, XFLunaForSeq2SeqLM, XFormerConfig
from hf_xformers.attention.luna import PackedMemory
from tests.attention.score_helpers import GEOMETRY, HEADS, WIDTH, build_layers, make_context, run_layers, vectors
from tests.helpers import close

D, L = WIDTH // HEADS, 4
SPEC = {"type": "luna", "projected_length": L, "chunk_size": 4}


def test_where_the_memory_goes():
    """An encoder packs in every layer; a decoder's memory is one parameter that no text changes; in an encoder-decoder
    the decoder's memory is changed by cross-attention, hence by the encoder's text."""
    fields = {**GEOMETRY, "attention": SPEC, "cross_attention": SPEC}

    def names(model):
        return [name for name, _ in model.named_parameters() if name.endswith((".memory", "memory_norm.weight"))]

    encoder = XFLunaForMaskedLM(XFLunaConfig(**fields))
    layer = "model.trunk.layers.{}.attention."
    assert names(encoder) == [layer.format(0) + "memory", *(layer.format(i) + "memory_norm.weight" for i in (0, 1))]
    assert names(XFLunaForCausalLM(XFLunaConfig(**fields))) == [layer.format(0) + "memory"]
    both = names(XFLunaForSeq2SeqLM(XFLunaConfig(**fields, is_encoder_decoder=True)))
    layer = "model.decoder.layers.{}."
    assert [name for name in both if name.startswith("model.decoder")] == [
        layer.format(0) + "attention.memory",
        *(layer.format(i) + "cross_attention.memory_norm.weight" for i in (0, 1)),
    ]


def test_dropout_of_an_encoder():
    (layer,) = build_layers(SPEC, attention_probs_dropout_prob=0.3)
    states = vectors(1, 6)
    with torch.no_grad():
        draws = [run_layers([layer.train()], states, make_context(6))[0].output for _ in range(2)]
    assert (draws[0] - draws[1]).abs().max() > 1e-3


def test_dropout_of_the_memory():
    """It falls on what is added to the memory, not on what tokens read; in evaluation on nothing."""
    handed = {}
    for rate in (None, 0.0, 0.5):
        spec = {**SPEC, "memory_dropout": rate}
        layer = build_layers(spec, 2, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.5)[0].train()
        results = [run_layers([layer], vectors(1, 6), make_context(6))[0] for _ in range(2)]
        close(results[0].output, results[1].output)
        first, second = (result.states[PackedMemory, None].states for result in results)
        assert torch.equal(first, second) == (rate == 0.0)
        layer.eval()
        handed[rate] = run_layers([layer], vectors(1, 6), make_context(6))[0].states[PackedMemory, None].states
    close(handed[None], handed[0.5])
    with pytest.raises(ValueError, match="`memory_dropout` in"):
        XFormerConfig(**GEOMETRY, attention={**SPEC, "memory_dropout": 1.0})
