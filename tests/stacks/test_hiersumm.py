"""HierSumm against the paper's equations written out paragraph by paragraph."""

from __future__ import annotations

import math

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForSeq2SeqLM
from hf_xformers.blocks.hiersumm import InterParagraphAttention
from tests.helpers import NO_DROPOUT, close, gradients, make_strong, pad, tokens
from tests.stacks.layer_equations import linear, norm

WIDTH, SIZE, HEADS = 4, 16, 2
FIELDS = {
    "vocab_size": 99,
    "hidden_size": SIZE,
    "num_hidden_layers": 2,
    "num_decoder_layers": 1,
    "num_attention_heads": HEADS,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
    "position": "none",
    "residual": "pre_ln",
    "feedforward": "relu",
    "is_encoder_decoder": True,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "decoder": {"stack": "plain", "block": "vanilla", "position": "sinusoidal_absolute"},
    **NO_DROPOUT,
}


def build(global_layers=1, graph_heads=0, width=WIDTH, stack=None, **more):
    block = {"type": "hiersumm", "global_layers": global_layers, "graph_heads": graph_heads}
    stack = {"type": "hiersumm", "segment_length": width, **(stack or {})}
    torch.manual_seed(0)
    config = XFormerConfig(**{**FIELDS, "block": block, "stack": stack, **more})
    return make_strong(XFormerForSeq2SeqLM(config).double().eval(), amount=0.3)


def feedforward(layer, x):
    inner = linear(layer.feedforward.up_proj, norm(layer.feedforward_residual.norm, x)).relu()
    return x + linear(layer.feedforward.down_proj, inner)


def local(layer, x):
    """x [W, D] of one paragraph."""
    read, heads = norm(layer.attention_residual.norm, x), []
    for head in range(HEADS):
        part = slice(head * SIZE // HEADS, (head + 1) * SIZE // HEADS)
        q, k, v = (linear(getattr(layer.attention, f"{n}_proj"), read)[:, part] for n in "qkv")
        heads.append((q @ k.T / (SIZE // HEADS) ** 0.5).softmax(-1) @ v)
    return feedforward(layer, x + linear(layer.attention.o_proj, torch.cat(heads, -1)))


def across(layer, paragraphs, graph=None, graph_heads=0):
    """The paragraphs [W_p, D] of one text."""
    f, size, told = layer.global_attention, SIZE // HEADS, []
    read = [norm(layer.global_attention_residual.norm, x) for x in paragraphs]
    for head in range(HEADS):
        part, vectors = slice(head * size, (head + 1) * size), []
        for x in read:
            a = linear(f.weight_proj, x)[:, head].softmax(0)
            assert abs(float(a.sum()) - 1) < 1e-12
            vectors.append(norm(f.head_norm, sum(a[i] * linear(f.content_proj, x[i])[part] for i in range(len(x)))))
        h = torch.stack(vectors)
        weights = (linear(f.q_proj, h) @ linear(f.k_proj, h).T / size**0.5).softmax(-1)
        if graph is not None and head < graph_heads:
            weights = graph / graph.sum(-1, keepdim=True)
        told.append(weights @ linear(f.v_proj, h))
    told = linear(f.o_proj, torch.cat(told, -1))
    return [feedforward(layer, x + told[index]) for index, x in enumerate(paragraphs)]


def start(trunk, paragraphs):
    found = []
    for p, ids in enumerate(paragraphs):
        rows = []
        for i, token in enumerate(ids):
            waves = [10000.0 ** (-2 * k / (SIZE // 2)) for k in range(SIZE // 4)]
            halves = [g(n * w) for n in (i, p) for g in (math.sin, math.cos) for w in waves]
            rows.append(trunk.embedding.tokens.weight[token] + torch.tensor(halves, dtype=torch.float64))
        found.append(torch.stack(rows))
    return found


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("graph_heads", [0, 1])
def test_against_the_equations_by_hand(side, graph_heads):
    net = build(graph_heads=graph_heads)
    trunk, lengths = net.model.trunk, ((4, 1, 3), (2, 4))
    rows = [tokens(sum(counts), seed=index) for index, counts in enumerate(lengths)]
    numbers = [torch.arange(len(c)).repeat_interleave(torch.tensor(c)) for c in lengths]
    ids, mask = pad(rows, 9, side, seed=5)
    graph = torch.rand(2, 3, 3, dtype=torch.float64) + 0.1
    with torch.no_grad():
        states = trunk(
            input_ids=ids, attention_mask=mask, sentence_ids=pad(numbers, 9, side)[0], paragraph_graph=graph
        ).last_hidden_state
        for row, counts in enumerate(lengths):
            paragraphs = [local(trunk.layers[0], x) for x in start(trunk, rows[row].split(list(counts)))]
            given = graph[row, : len(counts), : len(counts)]
            paragraphs = across(trunk.layers[1], paragraphs, given, graph_heads)
            # sinusoids are made in float32
            close(states[row][mask[row].bool()], norm(trunk.final_norm, torch.cat(paragraphs)), 1e-5)


def test_a_row_of_padding_and_a_graph_without_edges_are_finite():
    net, ids = build(graph_heads=2), tokens(2, 6)
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1] = 0
    states = net.model.trunk(input_ids=ids, attention_mask=mask, paragraph_graph=torch.zeros(2, 2, 2))
    found = gradients(net, states.last_hidden_state)
    assert all(gradient.isfinite().all() for gradient in found.values())
    alone = net.model.trunk(input_ids=ids[:1], paragraph_graph=torch.zeros(1, 2, 2)).last_hidden_state
    close(states.last_hidden_state[:1], alone)
    weights = InterParagraphAttention.shares_of_graph(torch.zeros(1, 2, 2), torch.ones(1, 1, 1, 2, dtype=torch.bool))
    assert not weights.any()


def test_wrong_inputs_are_refused():
    net = build(stack={"max_sentences": 2})
    with pytest.raises(ValueError, match="has 3 paragraphs of at most 4 tokens, but stack 'hiersumm' has positions"):
        net.model.trunk(input_ids=tokens(1, 9))
    with pytest.raises(ValueError, match=r"`paragraph_graph` \[1, 3, 3\] is not of the 2 paragraphs of this batch"):
        net.model.trunk(input_ids=tokens(1, 8), paragraph_graph=torch.ones(1, 3, 3))
