"""Multi-head latent attention: the state that it promises, and what a step reads of it."""

import pytest
import torch

from hf_xformers.attention.multi_head_latent_attention import LatentAttention
from hf_xformers.core.cache import make_cache
from tests.attention.references.recent import LATENT
from tests.attention.score_helpers import (
    build_layers,
    in_pieces,
    make_context,
    run_layers,
    state_size,
    vectors,
)
from tests.helpers import close

SPEC = {"type": "multi_head_latent_attention", **LATENT}


def test_state_is_the_latents():
    """c + r numbers for each token, of whatever type the pieces were that it was read in."""
    (layer,) = build_layers(SPEC, 1, True)
    with torch.no_grad():
        for pieces in ((9,), (4, 1, 4)):
            _, cache = in_pieces([layer], vectors(2, 9), None, pieces)
            assert state_size(cache) == 2 * 9 * (LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"])


@pytest.mark.parametrize("padded", [False, True])
def test_steps_make_no_keys(padded, monkeypatch):
    """A step of decoding reads latents as they are, and gives what written-out keys and values give."""
    (layer,) = build_layers({**SPEC, "q_lora_rank": 6}, 1, True)
    mask = None
    if padded:
        mask = torch.ones(2, 9, dtype=torch.bool)
        mask[0, :3], mask[1, 2:4] = False, False
    expected, _ = in_pieces([layer], vectors(2, 9), mask, (5, 3, 1))  # with gradients keys are made
    monkeypatch.setattr(LatentAttention, "written_out", lambda *_: pytest.fail("keys and values were made"))
    with torch.no_grad():
        cache = make_cache(layer.config)
        cache.update(*(x[:, :, :5] for x in stored(layer, vectors(2, 9))), 0)
        for begin, end in ((5, 8), (8, 9)):
            context = make_context(end - begin, True, past=begin, padding_mask=None if mask is None else mask[:, :end])
            output = run_layers([layer], vectors(2, 9)[:, begin:end], context, cache=cache)[0].output
            close(output, expected[:, begin:end], 1e-12)


def stored(layer, states):
    """What a cache holds of a text, without rotation."""
    return layer.project_latent(states, make_context(states.shape[1], True), None, 0)[1:]


@torch.no_grad()
def test_adapters_are_called():
    """A projection that is more than its weight is called, and decoding is right with it."""
    (layer,) = build_layers(SPEC, 1, True)
    layer.k_proj.register_forward_hook(lambda module, inputs, output: 2 * output)
    whole = run_layers([layer], vectors(1, 6), make_context(6, True))[0].output
    close(in_pieces([layer], vectors(1, 6), None, (3, 1, 1, 1))[0], whole)
