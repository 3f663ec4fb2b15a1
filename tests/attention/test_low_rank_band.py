"""Low-rank and band attention against both softmaxes written out, its limits, and its rank."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.attention.score_helpers import HEADS, WIDTH, build_layers, make_context, run_layers, split_heads, vectors
from tests.helpers import close

D, R = WIDTH // HEADS, 2
SPEC = {"type": "low_rank_band", "low_rank": R, "band_width": 1}
each_shape = pytest.mark.parametrize("causal", [False, True], ids=["encoder", "decoder"])


@each_shape
def test_either_part_alone_becomes_exact_attention(causal):
    """A band as wide as the text, or queries and keys of full rank, the other part having no values."""
    states = vectors(2, 6)
    for fields, names, other in (
        ({"band_width": 5}, ("q_proj", "k_proj", "v_proj"), "low_v_proj"),
        ({"low_rank": D}, ("low_q_proj", "low_k_proj", "low_v_proj"), "v_proj"),
    ):
        (layer,) = build_layers({**SPEC, **fields}, causal=causal)
        with torch.no_grad():
            for parameter in getattr(layer, other).parameters():
                parameter.zero_()
            q, k, v = (split_heads(getattr(layer, name)(states), D) for name in names)
            expected = scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)
            close(run_layers([layer], states, make_context(6, causal))[0].output, layer.o_proj(expected), 1e-12)
