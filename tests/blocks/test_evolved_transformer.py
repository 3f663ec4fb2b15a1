"""The Evolved Transformer's cells: by hand, and their sizes."""

import pytest
import torch
from torch.nn import functional as F

from hf_xformers import XFormerConfig
from hf_xformers.variants import config_class
from tests.attention.score_helpers import make_context, vectors
from tests.helpers import close, randomized

SIZES = dict(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)
REAL = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0]]).bool()


def config(**fields):
    block = {"type": "evolved_transformer", "wide_heads": 4, **fields.pop("block", {})}
    given = {**SIZES, "position": "none", "residual": "pre_ln", "feedforward": "evolved_transformer", "block": block}
    return XFormerConfig(**{**given, **fields})


def layer_of(cross=False, **fields):
    made = config(**fields)
    view = made.tower("decoder") if cross else made
    return randomized(view.block.build(view, layer_idx=0, cross=cross))


def convolved(x, weight, real, before, bias=None):
    """A loop over tokens and taps: x [T, C], weight [C', C, k], or [C, 1, k] for each channel by itself."""
    length, taps = x.shape[0], weight.shape[-1]
    rows = []
    for t in range(length):
        total = torch.zeros(weight.shape[0], dtype=torch.float64) if bias is None else bias.clone()
        for j in range(taps):
            place = t + j - before
            if 0 <= place < length and real[place]:
                total = total + (weight[..., j] @ x[place] if weight.shape[1] > 1 else weight[:, 0, j] * x[place])
        rows.append(total)
    return torch.stack(rows)


def separable(module, x, real, before):
    return module.pointwise(convolved(x, module.depthwise.weight, real, before))


def plus(wide, narrow):
    return torch.cat([wide[:, : narrow.shape[1]] + narrow, wide[:, narrow.shape[1] :]], dim=1)


def attended(module, x, real, causal, memory=None):
    """Softmax attention of one row, head by head."""
    source, length = x if memory is None else memory, x.shape[0]
    query, key, value = module.q_proj(x), module.k_proj(source), module.v_proj(source)
    width, heads = query.shape[1] // module.num_heads, []
    allowed = real.expand(length, -1)
    if causal:
        allowed = allowed & torch.ones(length, length).tril().bool()
    for head in range(module.num_heads):
        own = slice(head * width, (head + 1) * width)
        scores = (query[:, own] @ key[:, own].T / width**0.5).masked_fill(~allowed, -torch.inf)
        heads.append(scores.softmax(-1).nan_to_num(0.0) @ value[:, own])
    return module.o_proj(torch.cat(heads, dim=1))


@torch.no_grad()
def test_encoder_cell_by_hand():
    layer, states = layer_of(), vectors(2, 12)
    context = make_context(12, padding_mask=REAL)
    layer.prepare(context, None)
    found = layer(states, context=context, step=0)[0]
    assert [entry.name for entry in layer.plan] == ["gated", "branches", "attention", "feedforward"]
    for b in range(2):
        x, real = states[b], REAL[b]
        n = layer.gated_residual.norm(x)
        x = x + layer.gated.up_proj(n) * torch.sigmoid(layer.gated.gate_proj(n))
        n, cell = layer.branches_residual.norm(x), layer.branches
        right = F.relu(convolved(n, cell.conv.weight, real, 1, cell.conv.bias))
        inner = cell.norm(plus(F.relu(cell.up_proj(n)), right))
        x = plus(x, separable(cell.separable, inner, real, 4))
        x = x + attended(layer.attention, layer.attention_residual.norm(x), real, causal=False)
        n = layer.feedforward_residual.norm(x)
        x = x + layer.feedforward.down_proj(F.relu(layer.feedforward.up_proj(n)))
        close(found[b][real], x[real])


@pytest.mark.parametrize("cross", [False, True])
@torch.no_grad()
def test_decoder_cell_by_hand(cross):
    """Two attentions of one normed input are added; the second half has both again."""
    fields = {"is_encoder_decoder": True} if cross else {"is_decoder": True}
    layer, states, memory = layer_of(cross, **fields), vectors(2, 12), vectors(2, 5, seed=4)
    known = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
    context = make_context(12, True, padding_mask=REAL, memory_padding_mask=known if cross else None)
    layer.prepare(context, None)
    found = layer(states, memory if cross else None, context=context, step=0)[0]
    assert (layer.wide_heads.num_heads, layer.attention.num_heads) == (4, 2)
    for b in range(2):
        x, real = states[b], REAL[b]
        n = layer.wide_heads_residual.norm(x)
        x = x + attended(layer.wide_heads, n, real, causal=True)
        if cross:
            x = x + attended(layer.cross_attention, n, known[b], causal=False, memory=memory[b])
        n, cell = layer.branches_residual.norm(x), layer.branches
        left, right = F.relu(separable(cell.left, n, real, 10)), separable(cell.right, n, real, 6)
        x = x + separable(cell.separable, cell.norm(plus(left, right)), real, 6)
        x = x + attended(layer.attention, layer.attention_residual.norm(x), real, causal=True)
        if cross:
            n = layer.memory_again_residual.norm(x)
            x = x + attended(layer.memory_again, n, known[b], causal=False, memory=memory[b])
        n, ff = layer.feedforward_residual.norm(x), layer.feedforward
        x = x + ff.down_proj(ff.norm(F.silu(ff.up_proj(n))))
        close(found[b][real], x[real])


def test_parameters_at_the_papers_size():
    """21.5 D^2 + 36 D in an encoder layer beside biases and norms; 16 heads first in a decoder."""
    made = config_class("xf_evolved_transformer")(vocab_size=50)
    with torch.device("meta"):
        layer = made.block.build(made, layer_idx=0)
    assert sum(x.numel() for x in layer.parameters() if x.ndim > 1) == 21.5 * 512**2 + 36 * 512
    made = config_class("xf_evolved_transformer")(vocab_size=50, is_decoder=True)
    with torch.device("meta"):
        layer = made.block.build(made, layer_idx=0)
    assert layer.wide_heads.num_heads == 16 and layer.wide_heads.head_dim == 32
