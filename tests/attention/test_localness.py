"""Localness against its equations, text by text; limits; the fold into queries and keys; strictness."""

import pytest
import torch
from torch.nn import functional as F

from tests.attention.references.softmax import localness_windows
from tests.attention.score_helpers import build_layers, make_context, run_layers, split_heads, vectors
from tests.helpers import close


def build(causal=False, cross=False, config=None, count=1, **fields):
    more = {**({"is_encoder_decoder": True} if cross else {}), **(config or {})}
    layers = build_layers({"type": "localness", "layers": 1, **fields}, count, causal, cross, **more)
    return layers if count > 1 else layers[0]


@pytest.mark.parametrize("causal", [False, True])
def test_fold(causal):
    """-(j - P)^2 c = -c j^2 + 2 c P j and a number of the row: two further columns of queries and keys."""
    layer, states = build(causal), vectors(1, 9)
    windows = localness_windows(layer, states, None, causal)
    q, k, v = (split_heads(p(states), layer.head_dim) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    place = torch.arange(1.0, 10.0).double()
    columns = torch.zeros(1, layer.num_heads, 9, 2).double()
    for (h, i), (centre, width, _) in windows.items():
        sharpness = 0.5 / max(width / 2, 0.5) ** 2
        columns[0, h, i] = torch.tensor([-sharpness, 2 * sharpness * centre], dtype=torch.float64)
    of_keys = torch.stack((place**2, place), -1).expand(1, layer.num_heads, -1, -1)
    query = torch.cat((q / layer.head_dim**0.5, columns), -1)
    mixed = F.scaled_dot_product_attention(query, torch.cat((k, of_keys), -1), v, is_causal=causal, scale=1.0)
    close(
        run_layers([layer], states, make_context(9, causal))[0].output, layer.o_proj(mixed.transpose(1, 2).flatten(2))
    )


def test_upper_layers_are_dense():
    layers = build(count=3, layers=None)  # two of three
    assert [layer.is_local for layer in layers] == [True, True, False]
    assert {name for name, _ in layers[2].named_parameters()} == {
        f"{part}_proj.{kind}" for part in "qkvo" for kind in ("weight", "bias")
    }
    (dense,), states = build_layers("dense"), vectors(2, 6)
    dense.load_state_dict(layers[2].state_dict())
    close(
        run_layers(layers[2:], states, make_context(6))[0].output,
        run_layers([dense], states, make_context(6))[0].output,
    )
