"""Differential attention against transformers' DiffLlama and the authors' layout, and what the difference is for."""

import pytest
import torch
from transformers import DiffLlamaConfig
from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention

from hf_xformers import XFormerConfig
from hf_xformers.position.base import Turns
from hf_xformers.position.rotary import RotaryPosition, RotarySpec
from tests.attention.score_helpers import GEOMETRY, HEADS, WIDTH, build_layers, make_context, run_layers, vectors
from tests.helpers import close, make_strong

DIFF_LLAMA = {"type": "differential_attention", "pairing": "halves", "norm_weight": False}
LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


@pytest.mark.parametrize("key_heads", [4, 2])
@torch.no_grad()
def test_diff_llama(key_heads):
    """Outputs and weights, with rotations that are the same in both."""
    config = DiffLlamaConfig(hidden_size=WIDTH, num_attention_heads=HEADS, num_key_value_heads=key_heads)
    config.head_dim, config.rms_norm_eps, config._attn_implementation = WIDTH // HEADS, 1e-5, "eager"
    torch.manual_seed(0)
    theirs = make_strong(DiffLlamaAttention(config, 2).double(), amount=0.4).eval()
    ours = build_layers(DIFF_LLAMA, 3, True, num_key_value_heads=key_heads)[2]
    ours.load_state_dict(theirs.state_dict())
    states, length = vectors(2, 9), 9
    tables = RotaryPosition(WIDTH // HEADS, RotarySpec()).rotation(torch.arange(length)[None], states)
    angles = tables.cos[:, 0], tables.sin[:, 0] * torch.tensor([-1.0] * 2 + [1.0] * 2)  # ours has the signs in it
    order = torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    expected, weights = theirs(states, angles, order)
    for implementation in ("eager", "sdpa"):
        context = make_context(length, True, implementation=implementation)
        context.keep(Turns(tables, tables), "global")
        found = run_layers([ours], states, context)[0]
        close(found.output, expected, 2e-6)  # its lambda is rounded to float32, and then comes a norm
        if implementation == "eager":
            close(found.weights, weights, 1e-6)  # its softmax is in float32


@torch.no_grad()
def test_neighbors_are_halves_in_another_order():
    """The two layouts are one equation: heads of projections in another order give the same."""
    (halves,) = build_layers({**DIFF_LLAMA, "norm_weight": True}, 1, True)
    (neighbors,) = build_layers("differential_attention", 1, True)
    neighbors.load_state_dict(halves.state_dict())
    order = torch.arange(HEADS).view(2, -1).T.flatten()  # 0, H/2, 1, H/2 + 1, ...
    for name in "qkv":
        projection = getattr(neighbors, f"{name}_proj")
        projection.weight.copy_(projection.weight.unflatten(0, (HEADS, -1))[order].flatten(0, 1))
    states, context = vectors(2, 7), make_context(7, True)
    close(*(run_layers([layer], states, context)[0].output for layer in (neighbors, halves)))


@torch.no_grad()
def test_equal_softmaxes_cancel():
    """A pair whose two softmaxes are alike, with lambda 1, reads nothing: the norm of zeros."""
    (layer,) = build_layers("differential_attention")
    for name in "qk":
        projection = getattr(layer, f"{name}_proj").weight.unflatten(0, (HEADS, -1))
        projection[1::2] = projection[0::2]
    for name in LAMBDAS:
        getattr(layer, name).zero_()
    layer.lambda_start = 1.0
    assert run_layers([layer], vectors(1, 6), make_context(6))[0].output.abs().max() < 1e-12


def test_start():
    """The vectors are random, of the given size; lambda starts near 0.8 - 0.6 exp(-0.3 l) for layers from 0 on."""
    for index, expected in ((0, 0.2), (3, 0.8 - 0.6 * 0.40656965974059917)):
        layer = build_layers({"type": "differential_attention", "lambda_std": 1e-4}, index + 1)[index]
        layer.initialize(layer.config, torch.nn.init)
        assert all(0 < getattr(layer, name).abs().max() < 1e-3 for name in LAMBDAS)
        assert abs(layer.subtracted().item() - expected) < 1e-6


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_key_value_heads": 1}, "even number.*got `num_key_value_heads` 1"),
        ({"attention": {"type": "differential_attention", "output_gate": "head"}}, "`output_gate` 'head'"),
        ({"attention": {"type": "differential_attention", "pairing": "all"}}, "pairing"),
    ],
)
def test_refusals(fields, words):
    with pytest.raises((TypeError, ValueError), match=words):
        XFormerConfig(**{**GEOMETRY, "attention": "differential_attention", **fields})
