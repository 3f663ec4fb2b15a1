"""The Multi-Scale Transformer: which heads have which window."""

import torch

from hf_xformers import XFormerConfig, XFormerForMaskedLM
from hf_xformers.attention.multi_scale_transformer import heads_of_scales
from hf_xformers.variants.multi_scale_transformer import (
    XFMultiScaleTransformerConfig,
)
from tests.attention.score_helpers import GEOMETRY
from tests.helpers import close, make_strong, pad, tokens


def spec(**fields):
    return {"type": "multi_scale_transformer", **fields}


def softmax_of_scales(layer, layers, heads, scales, alpha):
    """z^l_K = 0, z^l_k = z^l_(k+1) + alpha / l below the last layer, from the definition's recursion."""
    z = [0.0]
    for _ in range(scales - 1):
        z.insert(0, z[0] + (alpha / layer if layer < layers else 0.0))
    return (torch.tensor(z, dtype=torch.float64).softmax(0) * heads).tolist()


def test_heads_of_scales():
    """Whole numbers that sum to the heads, each less than one from its share of the softmax."""
    assert heads_of_scales(0, 3, 10, 5, 0.5) == (4, 3, 1, 1, 1)  # of 4.3, 2.6, 1.6, 1.0 and 0.6
    assert heads_of_scales(2, 3, 10, 5, 0.5) == (2, 2, 2, 2, 2)
    for layers in (1, 2, 5):
        for heads in (1, 4, 10, 12):
            for scales in (1, 3, 5):
                for alpha in (0.0, 0.5, 4.0):
                    for layer in range(layers):
                        counts = heads_of_scales(layer, layers, heads, scales, alpha)
                        shares = softmax_of_scales(layer + 1, layers, heads, scales, alpha)
                        assert sum(counts) == heads
                        assert all(abs(count - share) < 1 for count, share in zip(counts, shares, strict=True))


def test_default_heads():
    config = XFMultiScaleTransformerConfig()
    counts = [config.attention.counts(config, layer) for layer in range(3)]
    assert all(sum(each) == 10 for each in counts) and counts[2] == (2,) * 5
    assert counts[0][0] > counts[1][0] > counts[2][0]


@torch.no_grad()
def test_rows_whose_heads_are_alike_in_other_ways():
    """Parts of a short text are equal windows for several heads, and of a long one they are not: with score terms,
    which go through the pattern in tiles, each row of a padded batch gets what it gets alone."""
    made = XFormerConfig(**{**GEOMETRY, "attention": spec(), "position": "shaw_relative", "pad_token_id": 0})
    torch.manual_seed(0)
    model = make_strong(XFormerForMaskedLM(made).double().eval())
    rows = [tokens(length, seed=length, high=made.vocab_size) for length in (40, 17, 6)]
    for side in ("left", "right"):
        ids, mask = pad(rows, 43, side, seed=1)
        found = model(ids % made.vocab_size, attention_mask=mask).logits
        for index, row in enumerate(rows):
            close(found[index][mask[index].bool()], model(row[None]).logits[0])
