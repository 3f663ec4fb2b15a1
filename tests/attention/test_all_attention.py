"""All-attention against the softmax over text and memory written out, and its limits."""

import torch

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerModel
from tests.helpers import NO_DROPOUT, close, make_strong

SIZES = dict(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=6,
    block="no_ffn",
    attention="all_attention",
    **NO_DROPOUT,
)


def model(cls=XFormerForCausalLM, implementation=None, **fields):
    torch.manual_seed(0)
    config = XFormerConfig(**{**SIZES, **fields})
    config._attn_implementation = implementation or "sdpa"
    return make_strong(cls(config).double().eval(), amount=0.3)


def ids_of(*shape, seed=0):
    return torch.randint(1, 40, shape, generator=torch.Generator().manual_seed(seed))


def test_memory_alone_is_a_softmax_network():
    """A text of padding alone: softmax(q U / sqrt(d)) V, the feed-forward that the paper starts from."""
    net, ids = model(XFormerModel), ids_of(1, 3)
    layer, heard = net.trunk.layers[0].attention, []
    layer.register_forward_hook(lambda _, inputs, output: heard.append((inputs[0], output.output)))
    net(ids, attention_mask=torch.zeros_like(ids))
    x, output = heard[0]
    q = layer.q_proj(x).view(3, 4, 4)
    weights = torch.softmax(torch.einsum("thd,hnd->thn", q, layer.memory_keys), -1)
    values = torch.einsum("thn,hnd->thd", weights, layer.memory_values * 6**0.5)
    close(output[0], layer.o_proj(values.flatten(1)))


def test_weights_and_parameters():
    net, ids = model(XFormerModel, "eager"), ids_of(2, 5)
    weights = net(ids, output_attentions=True).attentions[0]
    assert weights.shape == (2, 4, 5, 5) and (weights.sum(-1) < 1).all() and (weights > 0).all()
    sizes = {**SIZES, "intermediate_size": 24}

    def count(**fields):
        return sum(p.numel() for p in XFormerModel(XFormerConfig(**{**sizes, **fields})).parameters())

    plain = {"block": "vanilla", "attention": "dense", "feedforward": {"type": "relu", "bias": False}}
    assert count() == count(**plain) - 2 * 2 * 16  # the second norm of each layer


def test_start():
    """Entries in use have unit variance."""
    torch.manual_seed(0)
    layer = XFormerModel(XFormerConfig(**{**SIZES, "intermediate_size": 400})).trunk.layers[0].attention
    assert abs((layer.memory_keys * 2).std() - 1) < 0.05 and abs((layer.memory_values * 20).std() - 1) < 0.05
