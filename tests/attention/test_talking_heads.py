"""Talking heads against DeBERTa's, and how they start."""

import pytest
import torch
from transformers import DebertaConfig
from transformers.models.deberta.modeling_deberta import DisentangledSelfAttention

from hf_xformers.attention.talking_heads import DYNAMIC
from tests.attention.score_helpers import (
    HEADS,
    PADDING,
    WIDTH,
    build_layers,
    make_context,
    run_layers,
    small_blocks,
    vectors,
)
from tests.helpers import close

ALL_DYNAMIC = {"type": "talking_heads", "num_key_heads": 2, "num_value_heads": 3, "dynamic": DYNAMIC}


@pytest.mark.parametrize("padded", [False, True])
def test_deberta(padded):
    """Weight-copy parity with transformers' DeBERTa without its relative positions."""
    config = DebertaConfig(hidden_size=WIDTH, num_attention_heads=HEADS, talking_head=True, relative_attention=False)
    torch.manual_seed(0)
    theirs = DisentangledSelfAttention(config).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.4)
    (ours,) = build_layers("talking_heads")
    with torch.no_grad():
        q, k, v = theirs.in_proj.weight.view(HEADS, 3, WIDTH // HEADS, WIDTH).unbind(1)
        for own, weight in ((ours.q_proj, q), (ours.k_proj, k), (ours.v_proj, v)):
            own.weight.copy_(weight.reshape(WIDTH, WIDTH))
        ours.q_proj.bias.copy_(theirs.q_bias)
        ours.k_proj.bias.zero_()
        ours.v_proj.bias.copy_(theirs.v_bias)
        ours.o_proj.weight.copy_(torch.eye(WIDTH))
        ours.o_proj.bias.zero_()
        ours.score_mixing.copy_(theirs.head_logits_proj.weight.t())
        ours.weight_mixing.copy_(theirs.head_weights_proj.weight.t())
    states = vectors(3, 6)
    mask = PADDING[:3] if padded else torch.ones(3, 6).bool()
    pairs = mask[:, None, None, :] & mask[:, None, :, None]
    with torch.no_grad():
        expected = theirs(states, pairs)[0]
        for implementation in ("eager", "sdpa"):
            with small_blocks():
                context = make_context(6, padding_mask=mask if padded else None, implementation=implementation)
                found = run_layers([ours], states, context)[0].output
            close(found[mask], expected[mask])


def test_start():
    (layer,) = build_layers(ALL_DYNAMIC, hidden_size=256, num_attention_heads=HEADS)
    layer.initialize(layer.config, torch.nn.init)
    for name, projection in layer.dynamic.items():
        assert 0.08 < projection.weight.std() * 256**0.5 < 0.12, name
        assert (projection.bias == 0).all()
    for mixing in (layer.score_mixing, layer.weight_mixing):
        bound = (6 / sum(mixing.shape)) ** 0.5
        assert 0.5 * bound < mixing.abs().max() <= bound
