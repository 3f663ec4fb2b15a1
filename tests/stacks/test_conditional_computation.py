"""Conditional computation against a Transformer with split feed-forward written here."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_xformers import XFormerConfig, XFormerForMaskedLM, XFormerForSeq2SeqLM, XFormerModel
from hf_xformers.core.gates import GateNoise, Gates
from tests.attention.score_helpers import make_context
from tests.helpers import NO_DROPOUT, close, make_strong, pad, tokens
from tests.stacks.layer_equations import linear, norm

SIZES = {
    "vocab_size": 99,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "position": "sinusoidal_absolute",
    "attention": "conditional",
    "cross_attention": "conditional",
    "feedforward": "conditional",
    "residual": "bare",
    **NO_DROPOUT,
}
PARTS = 4


def build(cls=XFormerModel, dtype=torch.float64, seed=0, **more):
    fields = {key: more.pop(key) for key in list(more) if key in XFormerConfig.__dataclass_fields__}
    config = XFormerConfig(
        **{**SIZES, **fields, "stack": {"type": "conditional_computation", "gate_size": 8, "gate_bias": 0, **more}}
    )
    torch.manual_seed(seed)
    return make_strong(cls(config).to(dtype).eval(), amount=0.3)


def gates(net):
    return [module for module in net.modules() if isinstance(module, Gates)]


def opened(module, x):
    """1[W_2 relu(W_1 x) >= 0]."""
    return (linear(module.outer, linear(module.inner, x).relu()) >= 0).double()


def attend(module, x, g, causal):
    """Softmax attention of every head of x [T, D] over g * x, in a loop over heads."""
    q, s = norm(module.input_norm, x), norm(module.input_norm, x)
    s = s * g
    width = module.head_dim
    heads = []
    for head in range(module.num_heads):
        part = slice(head * width, (head + 1) * width)
        query, key, value = (
            y @ p.weight[part].T + p.bias[part]
            for y, p in ((q, module.q_proj), (s, module.k_proj), (s, module.v_proj))
        )
        scores = query @ key.T / width**0.5
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        heads.append(scores.softmax(-1) @ value)
    return norm(module.output_norm, linear(module.o_proj, torch.cat(heads, -1)))


def reference(net, ids, causal=False):
    """The whole trunk, one text at a time, gates as they decide in evaluation. Also all gates' values."""
    trunk, seen = net.trunk, []
    with torch.no_grad():
        x = trunk.embedding(trunk.embedding.lookup(ids[None]), None, torch.arange(len(ids))[None], trunk.position)[0]
        for layer in trunk.layers:
            y = norm(layer.attention.input_norm, x)
            ask, read = opened(layer.attention.query_gate, y), opened(layer.attention.source_gate, y)
            x = x + ask * attend(layer.attention, x, read, causal)
            parts = layer.feedforward.parts
            doors = opened(layer.feedforward.gate, norm(parts[-1].input_norm, x))
            total = 0
            for index, part in enumerate(parts):
                inner = linear(part.up_proj, norm(part.input_norm, x)).relu()
                total = total + doors[:, index, None] * norm(part.output_norm, linear(part.down_proj, inner))
            x = x + total
            seen += [ask.flatten(), read.flatten(), doors.flatten()]
        return norm(trunk.final_norm, x), torch.cat(seen)


@pytest.mark.parametrize("causal", [False, True])
def test_equals_literal(causal):
    net = build(is_decoder=causal)
    ids = tokens(3, 9)
    with torch.no_grad():
        output = net(input_ids=ids, use_cache=False).last_hidden_state
    shares = []
    for row, found in zip(ids, output):
        expected, values = reference(net, row, causal)
        close(found, expected)
        shares.append(values.mean())
    assert all(0.2 < share < 0.8 for share in shares)  # some gates open, some closed


def test_closed_parts_are_skipped():
    """A part sees as many tokens as its gate lets through; gathered and masked computation agree, gradients too."""
    net = build()
    module = net.trunk.layers[0].feedforward
    seen = []
    hooks = [
        part.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[:-1].numel()))
        for part in module.parts
    ]
    x = torch.randn(3, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    doors = opened(module.gate, norm(module.parts[-1].input_norm, x.detach()))
    output = module.transform(x, doors)
    assert seen == doors.flatten(0, 1).sum(0).tolist() and len(set(seen)) > 1 and sum(seen) < 24 * PARTS
    for hook in hooks:
        hook.remove()
    masked = sum(doors[..., index, None] * part(x) for index, part in enumerate(module.parts))
    close(output, masked)
    close(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (output, masked)))


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("fields", [{}, {"position": "rotary"}, {"is_decoder": True}])
def test_closed_queries_are_skipped(fields, side):
    """Those alone ask whose gate is open; the literal path, which computes all, gives the same."""
    net, asked = build(**fields), []
    for module in gates(net):
        if module.outer.out_features == 1:
            nn.init.normal_(module.outer.weight, std=3.0, generator=torch.Generator().manual_seed(len(asked)))
            nn.init.constant_(module.outer.bias, -1.0)
    ids, mask = pad([tokens(9)[:length] for length in (9, 6, 1, 0)], 9, side, seed=3)
    for layer in net.trunk.layers:
        layer.attention.o_proj.register_forward_pre_hook(lambda _, args: asked.append(args[0].shape[1]))
    with torch.no_grad():
        few = net(ids, attention_mask=mask, use_cache=False)[0]
        assert min(asked) < 9
        net.set_attn_implementation("eager")
        asked.clear()
        every = net(ids, attention_mask=mask, use_cache=False)[0]
        assert asked == [9, 9]
    close(few[mask.bool()], every[mask.bool()])


def test_soft_gates():
    """Training: sigmoid(G + alpha eps) from the generator's own eps; the noise of pass t is t / steps of its
    maximum."""
    net = build(noise_max=2.0, noise_steps=4)
    module, x = gates(net)[0], torch.randn(2, 5, 16, dtype=torch.float64)
    logits = module.outer(module.inner(x).clamp(min=0))
    module.train()
    context = make_context(x.shape[1])
    context.keep(GateNoise(torch.tensor(1.5)))
    torch.manual_seed(3)
    found = module(x, context)
    torch.manual_seed(3)
    close(found, 1 / (1 + (-(logits + 1.5 * torch.randn_like(logits))).exp()))
    net.train()
    alphas = []
    hook = module.register_forward_pre_hook(lambda _, args: alphas.append(args[1].prepared(GateNoise).alpha.item()))
    for _ in range(6):
        net(input_ids=tokens(1, 4))
    assert alphas == [0.0, 0.5, 1.0, 1.5, 2.0, 2.0]
    hook.remove()
    net.eval()(input_ids=tokens(1, 4))
    assert net.trunk.stack.passes == 6


def recorded(net, run):
    """The gates' values of one call and what each call of a gate network read."""
    found = []
    hooks = [
        module.register_forward_hook(lambda m, args, out: found.append((m, out.detach()))) for module in gates(net)
    ]
    output = run()
    for hook in hooks:
        hook.remove()
    return found, output


@pytest.mark.parametrize("side", ["right", "left"])
def test_budget_loss(side):
    """weight * |mean of all gates at real tokens - p|; padding does not count."""
    net = build(XFormerForMaskedLM, budget=0.3, budget_weight=2.0, noise_max=0.0).train()
    ids, mask = pad([tokens(9), tokens(4, seed=1)], 9, side)
    values, output = recorded(
        net, lambda: net(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
    )
    real = torch.cat([out[mask.bool()].flatten() for _, out in values])
    assert len(real) == mask.sum() * 2 * (2 + PARTS)
    expected = 2.0 * (real.mean() - 0.3).abs()
    close(output.aux_losses["budget"].detach(), expected)
    bare = net.lm_head(net.model(input_ids=ids, attention_mask=mask).last_hidden_state)
    task = nn.functional.cross_entropy(bare[mask.bool()], ids[mask.bool()])
    close(output.loss.detach(), (task + expected).detach())
    assert net.eval()(input_ids=ids).aux_losses is None


def test_budget_of_both_towers():
    """Each tower has its own; in the decoder, gates of the memory count at the memory's real tokens."""
    net = build(XFormerForSeq2SeqLM).train()
    source, source_mask = pad([tokens(6), tokens(3, seed=1)], 6, "right")
    target, target_mask = pad([tokens(4), tokens(5, seed=2)], 5, "right")
    values, output = recorded(
        net,
        lambda: net(
            input_ids=source, attention_mask=source_mask, decoder_input_ids=target, decoder_attention_mask=target_mask
        ),
    )
    for tower, name in ((net.model.trunk, "encoder"), (net.model.decoder, "decoder")):
        own = {id(module) for module in gates(tower)}
        memory = {id(layer.cross_attention.source_gate) for layer in tower.layers if hasattr(layer, "cross_attention")}
        real = torch.cat(
            [
                out[(source_mask if name == "encoder" or id(m) in memory else target_mask).bool()].flatten()
                for m, out in values
                if id(m) in own
            ]
        )
        close(output.aux_losses[f"{name}_budget"].detach(), (real.mean() - 0.5).abs())


def test_without_source_gate():
    net = build(attention={"type": "conditional", "gate_source": False})
    with torch.no_grad():
        assert net.trunk.layers[0].attention.source_gate is None
        net(input_ids=tokens(1, 3))
