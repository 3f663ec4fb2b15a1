"""What tests of mechanisms share that group tokens by content: one small geometry, one layer, its context and
states."""

from __future__ import annotations

import torch
from transformers import initialization as init

from hf_xformers import XFormerConfig
from hf_xformers.core.call import Call
from tests.helpers import close

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "residual": "pre_ln",
    "initializer_range": 0.3,
}


def build_layer(attention, decoder=False, layer_idx=0, **fields):
    """One layer of `attention` in double precision, the same at every call."""
    config = XFormerConfig(**SIZES, is_decoder=decoder, use_cache=False, attention=attention, **fields)
    torch.manual_seed(1)
    made = config.attention.build(config, layer_idx=layer_idx)
    made.initialize(config, init)
    return made.double()


def context(length, decoder=False, mask=None, implementation="sdpa"):
    slots = torch.arange(length)
    return Call(mask, slots[None], slots, slots, decoder, True, implementation=implementation)


@torch.no_grad()
def check_any_cache(net, ids, sizes, caches):
    """In pieces with each cache what the whole text gives: an own one keeps labels, others find them again."""
    expected = net(ids, use_cache=False).logits
    for cache in caches:
        found, done = [], 0
        for size in sizes:
            out = net(ids[:, done : done + size], past_key_values=cache, use_cache=True)
            cache, done = out.past_key_values, done + size
            found.append(out.logits)
        close(torch.cat(found, dim=1), expected, 1e-8)


def check_numbers_of_each_row(attention, given, cases):
    """A text of each length, whatever it is padded to, gets what `given(*numbers)` gives, a layer whose config says
    these numbers."""
    for length, *numbers in cases:
        x = states(length)
        expected = given(*numbers)(x, context(length)).output
        close(attention(x, context(length)).output, expected)
        for real in (slice(0, length), slice(48 - length, 48)):
            mask, padded = torch.ones(2, 48, dtype=torch.bool), states(48, seed=4)
            mask[1] = False
            mask[1, real], padded[1, real] = True, x[1]
            for implementation in ("sdpa", "eager"):
                found = attention(padded, context(48, False, mask, implementation)).output[1, real]
                close(found, expected[1])


def check_numbers_of_each_stage(attention, given, begins):
    """Each token of a causal text of 50 gets what a layer with the numbers of its stage gives, beside padding, too,
    and its gradient. given: the layer of each stage, which begin at `begins`."""
    x, ends = states(50).requires_grad_(), [*begins[1:], 50]
    parts = [layer(x, context(50, True)).output for layer in given]
    expected = torch.cat([part[:, start:end] for part, start, end in zip(parts, begins, ends, strict=True)], dim=1)
    slope = torch.randn_like(expected)
    (wanted,) = torch.autograd.grad(expected, x, slope)
    mask, padded = torch.ones(2, 61, dtype=torch.bool), states(61, seed=4)
    mask[0, :11], mask[1, 50:] = False, False
    padded[0, 11:], padded[1, :50] = x[0].detach(), x[1].detach()
    for implementation in ("sdpa", "eager"):
        found = attention(x, context(50, True, implementation=implementation)).output
        close(found, expected)
        close(torch.autograd.grad(found, x, slope)[0], wanted)
        found = attention(padded, context(61, True, mask, implementation)).output
        close(torch.stack([found[0, 11:], found[1, :50]]), expected)


def states(length, batch=2, seed=0):
    return torch.randn(batch, length, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
