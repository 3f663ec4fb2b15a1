"""All-attention against the softmax over text and memory written out, and its limits."""

import pytest
import torch
from transformers.cache_utils import DynamicCache

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


def by_hand(layer, x, allowed):
    """One query, one head at a time. allowed [B, T, S]."""
    heads, width = layer.num_heads, layer.head_dim
    q, k, v = (p(x).view(*x.shape[:2], -1, width) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    groups = heads // layer.num_key_value_heads
    output = torch.zeros(*x.shape[:2], heads, width, dtype=x.dtype)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            for h in range(heads):
                seen, g = allowed[b, t].nonzero().flatten(), h // groups
                keys = torch.cat([k[b, seen, g], layer.memory_keys[g] * width**0.5])
                values = torch.cat([v[b, seen, g], layer.memory_values[g] * layer.slots**0.5])
                output[b, t, h] = torch.softmax(keys @ q[b, t, h] / width**0.5, -1) @ values
    return layer.o_proj(output.flatten(2))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kv_heads", [None, 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 5])
def test_formula(implementation, kv_heads, causal, length):
    cls = XFormerForCausalLM if causal else XFormerModel
    net = model(cls, implementation, num_key_value_heads=kv_heads)
    tower = net.model.trunk if causal else net.trunk
    heard = []
    tower.layers[1].attention.register_forward_hook(lambda _, inputs, output: heard.append((inputs[0], output.output)))
    ids, mask = ids_of(3, length), torch.ones(3, length, dtype=torch.long)
    mask[0, :2], mask[1, 3:], mask[2] = 0, 0, 0
    for given in (None, mask):
        net(ids, attention_mask=given)
        x, output = heard.pop()
        real = torch.ones(3, length, dtype=torch.bool) if given is None else given.bool()
        allowed = real[:, None, :].expand(3, length, length)
        if causal:
            allowed = allowed & torch.ones(length, length, dtype=torch.bool).tril()
        close(output, by_hand(tower.layers[1].attention, x, allowed))


def test_slots_have_no_order():
    net, ids = model(), ids_of(2, 5)
    before, order = net(ids).logits, torch.tensor([3, 0, 5, 1, 2, 4])
    with torch.no_grad():
        for layer in net.model.trunk.layers:
            layer.attention.memory_keys.copy_(layer.attention.memory_keys[:, order])
            layer.attention.memory_values.copy_(layer.attention.memory_values[:, order])
    close(net(ids).logits, before)


def test_far_slots_leave_plain_attention():
    """Slots that no query is near to: dense attention with the same projections."""
    net, heard = model(XFormerModel), []
    layer = net.trunk.layers[0].attention
    with torch.no_grad():
        layer.q_proj.bias.fill_(30.0)
        layer.memory_keys.fill_(-30.0)
    layer.register_forward_hook(lambda _, inputs, output: heard.append((*inputs, output.output)))
    net(ids_of(2, 5))
    x, context, output = heard[0]
    plain = XFormerModel(XFormerConfig(**{**SIZES, "block": "vanilla", "attention": "dense"})).double().eval()
    plain = plain.trunk.layers[0].attention
    plain.load_state_dict({name: value for name, value in layer.state_dict().items() if "memory" not in name})
    plain.prepare(context, None)
    close(output, plain(x, context).output)


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


def test_generation():
    net, ids = model(), ids_of(2, 8)
    whole, cache = net(ids).logits, DynamicCache()
    parts = [net(piece, past_key_values=cache, use_cache=True).logits for piece in ids.split([3, 1, 4], 1)]
    close(torch.cat(parts, 1), whole)
    assert cache.layers[0].keys.shape[2] == 8  # the memory is not cached


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


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"attention": {"type": "all_attention", "memory_size": 0}}, "memory_size"),
        ({"position": "rotary"}, "all_attention"),
        ({"cross_attention": "all_attention"}, "all_attention"),
        ({"attention": "dense"}, "no_ffn"),
    ],
)
def test_refusals(wrong, said):
    with pytest.raises(ValueError, match=said):
        XFormerConfig(**{**SIZES, **wrong})
