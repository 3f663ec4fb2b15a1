"""Macaron, Sandwich and parallel sublayers against hand-written blocks."""

from __future__ import annotations

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerForSeq2SeqLM, XFormerModel

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def model(seed=0, cls=XFormerModel, **fields):
    torch.manual_seed(seed)
    return cls(XFormerConfig(**{**SIZES, **fields})).double().eval()


def attention_by_hand(module, x):
    """Softmax attention of one layer's module, written out for float64 inputs [B, T, D]."""
    heads = [p(x).view(*x.shape[:2], 2, 8).transpose(1, 2) for p in (module.q_proj, module.k_proj, module.v_proj)]
    weights = torch.softmax(heads[0] @ heads[1].transpose(-1, -2) / 8**0.5, dim=-1)
    return module.o_proj((weights @ heads[2]).transpose(1, 2).reshape(x.shape))


def feedforward_by_hand(module, x):
    return module.down_proj(torch.nn.functional.gelu(module.up_proj(x)))


def test_macaron_equals_a_hand_written_block():
    net = model(block="macaron", num_hidden_layers=1)
    ids = torch.randint(0, 40, (2, 7))
    layer = net.trunk.layers[0]
    assert layer.feedforward.up_proj.out_features == layer.feedforward_2.up_proj.out_features == 16
    x = net.trunk.embedding.tokens(ids) + net.trunk.position.table.weight[:7]
    x = layer.feedforward_residual.norm(x + 0.5 * feedforward_by_hand(layer.feedforward, x))
    x = layer.attention_residual.norm(x + attention_by_hand(layer.attention, x))  # the scale is on feed-forwards only
    x = layer.feedforward_2_residual.norm(x + 0.5 * feedforward_by_hand(layer.feedforward_2, x))
    torch.testing.assert_close(net(ids).last_hidden_state, x)


@pytest.mark.parametrize(("coefficient", "order"), [(0, "sfsfsf"), (1, "ssfsff"), (2, "sssfff")])
def test_sandwich_order(coefficient, order):
    net = model(block={"type": "sandwich", "coefficient": coefficient})
    kinds = [entry.kind[0] for layer in net.trunk.layers for entry in layer.plan]
    assert "".join(kinds).replace("a", "s") == order
    shapes = sorted(tuple(p.shape) for p in net.parameters())
    assert shapes == sorted(tuple(p.shape) for p in model().parameters())


def test_sandwich_runs_sublayers_in_its_order():
    """With every feed-forward switched off, any k is the same stack of attentions."""
    ids = torch.randint(0, 40, (2, 7))
    outputs = []
    for coefficient in (0, 1, 2):
        net = model(block={"type": "sandwich", "coefficient": coefficient}, residual="pre_ln")
        source = model(residual="pre_ln")
        for layer, other in zip(net.trunk.layers, source.trunk.layers, strict=True):
            layer.attention.load_state_dict(other.attention.state_dict())
            for entry in layer.plan:
                if entry.kind == "feedforward":
                    torch.nn.init.zeros_(getattr(layer, entry.name).down_proj.weight)
        net.trunk.embedding.load_state_dict(source.trunk.embedding.state_dict())
        net.trunk.position.load_state_dict(source.trunk.position.state_dict())
        outputs.append(net(ids).last_hidden_state)
    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(outputs[0], outputs[2])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("residual", ["pre_ln", "rezero"])
def test_parallel_equals_a_hand_written_block(shared, residual):
    if shared and residual == "rezero":
        pytest.skip("refused: it has no norm to share")
    net = model(block={"type": "parallel", "shared_norm": shared}, residual=residual)
    ids = torch.randint(0, 40, (2, 7))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    x = net.trunk.embedding.tokens(ids) + net.trunk.position.table.weight[:7]
    for layer in net.trunk.layers:
        if residual == "rezero":
            alpha = layer.attention_residual.alpha
            x = x + alpha * (attention_by_hand(layer.attention, x) + feedforward_by_hand(layer.feedforward, x))
            continue
        first = layer.attention_residual.norm(x)
        second = first if shared else layer.feedforward_residual.norm(x)
        x = x + attention_by_hand(layer.attention, first) + feedforward_by_hand(layer.feedforward, second)
    torch.testing.assert_close(net(ids).last_hidden_state, x if residual == "rezero" else net.trunk.final_norm(x))


def test_parallel_cross_attention_stands_beside_the_others():
    block = {"type": "parallel", "shared_norm": True}
    net = model(cls=XFormerForSeq2SeqLM, block=block, residual="pre_ln", num_hidden_layers=1, position="none")
    ids, target = torch.randint(3, 40, (2, 7)), torch.randint(3, 40, (2, 5))
    output = net(input_ids=ids, decoder_input_ids=target)
    layer, x = net.model.decoder.layers[0], net.model.decoder.embedding.tokens(target)
    n = layer.attention_residual.norm(x)
    context_free = XFormerForCausalLM(net.config)  # its layer alone, for self-attention with a causal mask
    assert [entry.reads for entry in context_free.model.trunk.layers[0].plan] == ["stream", "same_input"]
    causal = torch.full((5, 5), float("-inf"), dtype=torch.float64).triu(1)

    def attend(module, queries, memory, mask):
        q, k, v = (
            p(y).unflatten(-1, (2, 8)).transpose(1, 2)
            for p, y in ((module.q_proj, queries), (module.k_proj, memory), (module.v_proj, memory))
        )
        weights = torch.softmax(q @ k.mT / 8**0.5 + mask, dim=-1)
        return module.o_proj((weights @ v).transpose(1, 2).flatten(2))

    own = attend(layer.attention, n, n, causal)
    read = attend(layer.cross_attention, n, output.encoder_last_hidden_state, 0.0)
    x = x + own + read + feedforward_by_hand(layer.feedforward, n)
    torch.testing.assert_close(output.logits, net.lm_head(net.model.decoder.final_norm(x)))
