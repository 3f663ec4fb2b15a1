"""What the tests of mechanisms with a recurrent state share."""

from __future__ import annotations

import math

import torch

from hf_xformers.core.cache import make_cache
from tests.attention.score_helpers import make_context, run_layers
from tests.helpers import close


def in_pieces(layer, states, pieces, mask=None):
    """The outputs of a text read in pieces with a cache, and that cache."""
    cache, done, found = make_cache(layer.config), 0, []
    for length in pieces:
        seen = None if mask is None else mask[:, : done + length]
        context = make_context(length, True, past=done, padding_mask=seen)
        found.append(run_layers([layer], states[:, done : done + length], context, cache=cache)[0].output)
        done += length
    assert done == states.shape[1] and cache.get_seq_length() == done
    return torch.cat(found, 1), cache


def turned(x, theta):
    """x [B, H, T, d] with each pair of channels (i, i + d/2) at place t turned by t * theta^(-2i/d)."""
    found, half = torch.zeros_like(x), x.shape[-1] // 2
    for t in range(x.shape[2]):
        for i in range(half):
            angle = t * theta ** (-i / half)
            a, b = x[:, :, t, i], x[:, :, t, i + half]
            found[:, :, t, i] = a * math.cos(angle) - b * math.sin(angle)
            found[:, :, t, i + half] = b * math.cos(angle) + a * math.sin(angle)
    return found


def check_no_future(layer, states, training=False):
    """Outputs before a changed token are the same to the last bit, in training (with the same random numbers) as
    well."""
    layer = layer.train(training)
    length = states.shape[1]

    def run(x):
        torch.manual_seed(0)
        return run_layers([layer], x, make_context(length, True))[0].output.detach()

    expected = run(states)
    for place in (1, length // 2, length - 1):
        changed = states.clone()
        changed[:, place:] = 30 * torch.randn(changed[:, place:].shape, dtype=changed.dtype)
        found = run(changed)
        close(found[:, :place], expected[:, :place], 1e-12)
        assert (found[:, place:] - expected[:, place:]).abs().max() > 1e-6


def state_sizes(layer, states, lengths):
    """Numbers in the cache after texts of these lengths."""
    sizes = []
    for length in lengths:
        _, cache = in_pieces(layer, states[:, :length], (length,))
        sizes.append(sum(tensor.numel() for tensor in cache.layers[0].state.values()))
    return sizes
