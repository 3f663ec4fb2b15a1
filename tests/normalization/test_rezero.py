"""ReZero: the identity at the start, and a plain residual net with open gates."""

from __future__ import annotations

import torch

from hf_xformers import XFormerConfig, XFormerForMaskedLM

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def model(**residual):
    torch.manual_seed(0)
    config = XFormerConfig(**SIZES, residual={"type": "rezero", **residual})
    return XFormerForMaskedLM(config).double()


def test_starts_as_the_identity():
    net, ids = model().eval(), torch.randint(0, 40, (2, 6))
    tower = net.model.trunk
    expected = tower.embedding.tokens(ids) + tower.position.table.weight[:6]
    torch.testing.assert_close(net.model(ids).last_hidden_state, expected)


def test_one_gate_a_layer_or_one_a_sublayer():
    gates = lambda net: sum(name.endswith("alpha") for name, _ in net.named_parameters())  # noqa: E731
    assert gates(model()) == 3 and gates(model(shared=False)) == 6


def test_open_gate_is_a_plain_residual_net():
    net, ids = model(init=1.0).eval(), torch.randint(0, 40, (2, 6))
    tower = net.model.trunk
    x = tower.embedding.tokens(ids) + tower.position.table.weight[:6]
    for layer in tower.layers:
        a = layer.attention
        q, k, v = (p(x).view(2, 6, 2, 8).transpose(1, 2) for p in (a.q_proj, a.k_proj, a.v_proj))
        x = x + a.o_proj((torch.softmax(q @ k.mT / 8**0.5, -1) @ v).transpose(1, 2).reshape(2, 6, 16))
        x = x + layer.feedforward.down_proj(torch.nn.functional.gelu(layer.feedforward.up_proj(x)))
    torch.testing.assert_close(net.model(ids).last_hidden_state, x)
