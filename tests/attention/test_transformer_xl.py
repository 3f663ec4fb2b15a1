"""Transformer-XL's attention: segments, memories, and distances."""

import pytest
import torch

from hf_xformers.attention.transformer_xl import (
    relative_sinusoids,
)
from hf_xformers.core.segment_memory import MemoryLayout, StepMemory, join_masks, slot_order
from tests.attention.references.softmax import four_terms, sinusoid
from tests.attention.score_helpers import (
    HEADS,
    PADDING,
    WIDTH,
    allowed_pairs,
    build_layers,
    make_context,
    run_layers,
    small_blocks,
    softmax_by_rows,
    split_heads,
    vectors,
)
from tests.helpers import close

D = WIDTH // HEADS


def literal(layer, tokens, count, allowed, biases, clamp=None):
    weights = softmax_by_rows(four_terms(layer, tokens, count, biases, clamp), allowed)
    value = split_heads(layer.v_proj(tokens), D)
    return layer.o_proj((weights @ value).transpose(1, 2).flatten(2)), weights


def biases_of(layer):
    return layer.content_bias, layer.position_bias


@pytest.mark.parametrize("joint", [None, 2])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_segments(joint, implementation):
    """The fifth term, pair by pair, and its gradients; types that are not given are all alike."""
    spec = {"type": "transformer_xl", "share_biases": False, "segments": True, "joint_type": joint}
    (layer,) = build_layers(spec, type_vocab_size=0)
    states, types = vectors(4, 6), torch.arange(24).view(4, 6) % 5 % 3
    scores = four_terms(layer, states, 6, biases_of(layer))
    query = split_heads(layer.q_proj(states), D)
    for b in range(4):
        for i in range(6):
            for j in range(6):
                same = types[b, i] == types[b, j] or joint in (int(types[b, i]), int(types[b, j]))
                vector = layer.segment_table[int(same)]
                scores[b, :, i, j] += ((query[b, :, i] + layer.segment_bias) * vector).sum(-1) / D**0.5
    weights = softmax_by_rows(scores, allowed_pairs(6, False, PADDING))
    value = split_heads(layer.v_proj(states), D)
    expected = layer.o_proj((weights @ value).transpose(1, 2).flatten(2))
    context = make_context(6, padding_mask=PADDING, implementation=implementation)
    context.inputs["token_type_ids"] = types
    with small_blocks():
        (result,) = run_layers([layer], states, context)
    close(result.output, expected, 1e-12)
    parameters = (layer.segment_bias, layer.segment_table, layer.q_proj.weight)
    for found, slope in zip(
        torch.autograd.grad(result.output.square().sum(), parameters),
        torch.autograd.grad(expected.square().sum(), parameters),
        strict=True,
    ):
        close(found, slope, 1e-10)
    alike = make_context(6, padding_mask=PADDING, implementation=implementation)
    plain = four_terms(layer, states, 6, biases_of(layer))  # a number for each query changes no weight
    weights = softmax_by_rows(plain, allowed_pairs(6, False, PADDING))
    close(
        run_layers([layer], states, alike)[0].output, layer.o_proj((weights @ value).transpose(1, 2).flatten(2)), 1e-12
    )


def with_memory(layer, states, memory, context, real=None):
    """The attention's output with a memory [B, M, D] that is real where `real` [B, M]."""
    order = None if context.padding_mask is None else slot_order(real, memory.shape[1], context.padding_mask)
    mask = join_masks(real, memory.shape[1], context.padding_mask, states)
    mask = mask if order is None or mask is None else mask.gather(1, order)
    context.keep(MemoryLayout(memory.shape[1], mask, order))
    context.start(StepMemory(memory))
    (result,) = run_layers([layer], states, context)
    return result


@pytest.mark.parametrize("slots", [1, 3, 9])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_memory_is_earlier_keys(slots, implementation):
    (layer,) = build_layers("transformer_xl", causal=True)
    both = vectors(2, slots + 5)
    allowed = allowed_pairs(slots + 5, True)[:, :, slots:]
    with small_blocks(2):
        result = with_memory(
            layer, both[:, slots:], both[:, :slots], make_context(5, True, implementation=implementation)
        )
    close(result.output, literal(layer, both, 5, allowed, biases_of(layer))[0], 1e-12)


def test_memory_and_padding():
    """A row's memory stands right before its first real token, on whichever side the row is padded."""
    (layer,) = build_layers("transformer_xl", causal=True)
    memory, states = vectors(4, 3), vectors(4, 6, seed=1)
    real = torch.tensor([[1, 1, 1], [0, 1, 1], [0, 0, 1], [0, 0, 0]]).bool()
    padding = PADDING.clone()
    padding[3] = torch.tensor([0, 1, 1, 1, 0, 0]).bool()
    result = with_memory(layer, states, memory, make_context(6, True, padding_mask=padding), real)
    for row in range(4):
        whole = torch.cat([memory[row][real[row]], states[row][padding[row]]])[None]
        count = int(padding[row].sum())
        allowed = allowed_pairs(whole.shape[1], True)[:, :, -count:]
        expected = literal(layer, whole, count, allowed, biases_of(layer))[0]
        close(result.output[row][padding[row]][None], expected, 1e-12)


@torch.no_grad()
def test_distances_of_other_layers():
    """A layer clamps its own distances, and has sinusoids of them next to one that has learned vectors."""
    own = [{"distances": "learned"}, {}, {"clamp": 1}]
    layers = [build_layers({"type": "transformer_xl", "share_biases": False, **fields})[0] for fields in own]
    found = run_layers(layers, vectors(1, 6), make_context(6), residual=False)
    for layer, result in zip(layers, found, strict=True):
        close(result.output, run_layers([layer], vectors(1, 6), make_context(6))[0].output)
    with pytest.raises(ValueError, match="have to be alike"):
        layers = {1: {"attention": {"type": "transformer_xl", "distances": "learned", "clamp": 1}}}
        build_layers({"type": "transformer_xl", "distances": "learned"}, per_layer_config=layers)


def test_sinusoids_of_large_distances():
    found = relative_sinusoids(torch.tensor([5000, 1, 0, -3]), WIDTH, torch.float64)
    close(found, torch.stack([sinusoid(d, WIDTH) for d in (5000, 1, 0, -3)]), 1e-12)
