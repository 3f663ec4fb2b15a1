"""What the tests of mechanisms with scores of their own share."""

from __future__ import annotations

from contextlib import contextmanager

import torch

from hf_xformers import XFormerConfig
from hf_xformers.attention.shared import query_blocks
from hf_xformers.core.cache import make_cache
from hf_xformers.core.call import Call

WIDTH, HEADS = 16, 4
GEOMETRY = dict(
    vocab_size=50,
    hidden_size=WIDTH,
    num_attention_heads=HEADS,
    num_hidden_layers=3,
    intermediate_size=8,
    max_position_embeddings=24,
)
PADDING = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]]).bool()


def build_layers(attention, /, count=1, causal=False, cross=False, strong=0.3, **fields):
    """The attention modules of `count` layers, in float64."""
    given = {**GEOMETRY, "is_decoder": causal, "position": "none", **fields}
    slot = "cross_attention" if cross else "attention"
    config = XFormerConfig(**{**given, slot: attention})
    torch.manual_seed(0)
    layers = []
    for index in range(count):
        layer = getattr(config, slot).build(config, layer_idx=index, cross=cross).double().eval()
        with torch.no_grad():
            for parameter in layer.parameters():  # modules leave what their `initialize` sets uninitialised
                parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * strong)
        layers.append(layer)
    return layers


def make_context(length, causal=False, past=0, **fields):
    queries = torch.arange(past, past + length)
    given = dict(
        padding_mask=None,
        positions=queries[None],
        query_index=queries,
        key_index=torch.arange(past + length),
        causal=causal,
        fresh=past == 0,
    )
    return Call(**{**given, **fields})


def run_layers(layers, states, context, memory=None, cache=None, residual=True):
    """Each layer's output added to its input; the results of all layers."""
    for layer in layers:
        layer.prepare(context, cache)
    states_between, results = context.states, []
    for layer in layers:
        seen = context.passing(dict(states_between))
        results.append(layer(states, seen, memory=memory, past_key_values=cache, step=layer.layer_idx))
        states_between = {**seen.states, **(results[-1].states or {})}
        states = states + results[-1].output if residual else states
    return results


def positions_of(mask, past=0):
    """Places of the tokens behind `past` slots, where padding [B, S] does not count."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)[:, past:]


def in_pieces(layers, states, mask, pieces, cache=None):
    """The outputs of the last layer for a text read in pieces with a cache, and that cache."""
    cache, done, found = cache or make_cache(layers[0].config), 0, []
    for size in pieces:
        end = done + size
        context = make_context(
            size, True, past=done, padding_mask=None if mask is None else mask[:, :end],
            positions=torch.arange(done, end)[None] if mask is None else positions_of(mask[:, :end], done),
        )  # fmt: skip
        found.append(run_layers(layers, states[:, done:end], context, cache=cache)[-1].output)
        done = end
        held = [cache.layers[layer.layer_idx] for layer in layers]  # a layer may read the keys of another one
        assert all(layer.get_seq_length() == done for layer in held if layer.is_initialized) and held[0].is_initialized
    return torch.cat(found, 1), cache


def state_size(cache):
    """How many numbers a cache holds."""
    held = [value for layer in cache.layers for value in vars(layer).values()]
    held += [tensor for value in held if isinstance(value, dict) for tensor in value.values()]
    return sum(value.numel() for value in held if isinstance(value, torch.Tensor))


def vectors(batch, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, WIDTH, generator=generator, dtype=torch.float64)


def split_heads(x, width):
    """[B, T, heads * width] -> [B, heads, T, width]."""
    return x.view(*x.shape[:2], -1, width).transpose(1, 2)


def softmax_by_rows(scores, allowed):
    """Softmax over the allowed keys of each row, written as exponentials over their sum; zeros where there are
    none."""
    top = scores.masked_fill(~allowed.bool(), -torch.inf).amax(-1, keepdim=True)
    powers = torch.exp(scores - top.nan_to_num(neginf=0.0)).masked_fill(~allowed.bool(), 0.0) * allowed
    sums = powers.sum(-1, keepdim=True)
    return torch.where(sums > 0, powers / sums.clamp(min=1e-300), 0.0)


def allowed_pairs(length, causal, mask=None):
    """[B or 1, 1, T, T] boolean."""
    pairs = torch.ones(length, length).tril().bool() if causal else torch.ones(length, length).bool()
    return pairs[None, None] if mask is None else pairs[None, None] & mask[:, None, None, :]


@contextmanager
def small_blocks(rows=3):
    """Blocks of so few queries that short texts have several."""
    kept = query_blocks.SCORES_AT_ONCE, query_blocks.LEAST_ROWS
    query_blocks.SCORES_AT_ONCE, query_blocks.LEAST_ROWS = 1, rows
    try:
        yield
    finally:
        query_blocks.SCORES_AT_ONCE, query_blocks.LEAST_ROWS = kept


def saved_sizes(function):
    """Numbers of elements of all tensors that `function()` keeps for its backward pass, the largest first."""
    sizes = []

    def pack(tensor):
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return sorted(sizes, reverse=True)
