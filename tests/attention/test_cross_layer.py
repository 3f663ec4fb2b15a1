"""Keys and values that layers share: how many a cache holds, and documents of a packed row."""

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForCausalLM
from tests.attention.score_helpers import GEOMETRY, build_layers, make_context, run_layers, state_size, vectors
from tests.helpers import close, tokens

WINDOW = {"type": "sliding_window", "window_size": 4, "sinks": 0}


@pytest.mark.parametrize(
    ("fields", "owners"),
    [
        ({}, [0, 2, 4]),
        ({"sharing_factor": 3}, [0, 3]),
        ({"sharing_factor": None, "first_layer": 2}, [0, 1, 2]),
        ({"sharing_factor": 1}, [0, 1, 2, 3, 4]),
    ],
)
def test_cache_holds_one_copy(fields, owners):
    """After a prompt and steps, keys and values of 2 heads of width 4 of the layers that make them and no tensor more,
    which beams, a roll-back and a reset of the cache go through."""
    torch.manual_seed(0)
    spec = {"type": "cross_layer_attention", **fields}
    config = XFormerConfig(**GEOMETRY | {"num_hidden_layers": 5}, num_key_value_heads=2, attention=spec)
    model = XFormerForCausalLM(config).eval()
    with torch.no_grad():
        for kind in ("k_proj", "v_proj"):
            made = {name.split("layers.")[1][0] for name in model.state_dict() if kind in name and "weight" in name}
            assert made == {str(owner) for owner in owners}
        cache = model(tokens(3, 6) % 50, use_cache=True).past_key_values
        model(tokens(3, 1) % 50, past_key_values=cache)
        assert [layer.is_initialized for layer in cache.layers] == [number in owners for number in range(5)]
        assert state_size(cache) == 2 * len(owners) * 3 * 2 * 7 * 4
        cache.crop(-2)
        cache.reorder_cache(torch.tensor([2, 0]))
        assert state_size(cache) == 2 * len(owners) * 2 * 2 * 5 * 4 and cache.get_seq_length() == 5
        cache.reset()
        assert cache.get_seq_length() == 0


def test_lower_half_of_windows():
    """As in YOCO: windows below, one copy above, whatever the depth."""
    width = GEOMETRY["hidden_size"]
    for depth in (4, 8):
        half = depth // 2
        config = XFormerConfig(
            **GEOMETRY | {"num_hidden_layers": depth},
            attention={"type": "cross_layer_attention", "sharing_factor": None, "first_layer": half},
            per_layer_config={layer: {"attention": WINDOW} for layer in range(half)},
        )
        model = XFormerForCausalLM(config).eval()
        for length in (10, 20):
            with torch.no_grad():
                cache = model(tokens(1, length) % 50, use_cache=True).past_key_values
            held = [layer.keys.numel() + layer.values.numel() for layer in cache.layers if layer.is_initialized]
            assert held == [2 * 3 * width] * half + [2 * length * width]  # of a window, all but the next token


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@torch.no_grad()
def test_packed_documents(implementation):
    layers, states, lengths = build_layers("cross_layer_attention", 3, True), vectors(1, 9), (4, 5)
    segments = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths))[None]
    found = run_layers(layers, states, make_context(9, True, segment_ids=segments, implementation=implementation))
    apart = [run_layers(layers, part, make_context(part.shape[1], True)) for part in states.split(lengths, 1)]
    for number, result in enumerate(found):
        close(result.output, torch.cat([each[number].output for each in apart], 1), 1e-12)
