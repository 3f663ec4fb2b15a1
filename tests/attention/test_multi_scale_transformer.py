"""The Multi-Scale Transformer: which heads have which window, and what they read, against the paper's equations."""

import math

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForMaskedLM
from hf_xformers.attention.multi_scale_transformer import heads_of_scales
from hf_xformers.core.cache import make_cache
from hf_xformers.variants.multi_scale_transformer import (
    XFMultiScaleTransformerConfig,
    XFMultiScaleTransformerForCausalLM,
)
from tests.attention.pattern_helpers import check_against_loops
from tests.attention.score_helpers import (
    GEOMETRY,
    build_layers,
    check_contract,
    make_context,
    mixes,
    run_layers,
    vectors,
)
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


@pytest.mark.parametrize("causal", [False, True])
def test_sets_of_keys(causal):
    """Radii by head; parts of the text are parts of a row's real tokens, in a decoder of the longest text."""
    scales = (0, 1, 0.125, 0.25)
    layer = build_layers(spec(scales=scales, heads_per_scale=((1, 1, 1, 1),)), 1, causal, num_hidden_layers=1)[0]

    def reads(i, j, head, n):
        whole = GEOMETRY["max_position_embeddings"] if causal else n
        radius = (0, 1, math.ceil(whole / 8), math.ceil(whole / 4))[head]
        return abs(i - j) <= radius

    for length, real in ((17, 6), (13, 9), (1, 1)):
        check_against_loops(layer, reads, length, causal, real=real)


def test_default_heads():
    config = XFMultiScaleTransformerConfig()
    counts = [config.attention.counts(config, layer) for layer in range(3)]
    assert all(sum(each) == 10 for each in counts) and counts[2] == (2,) * 5
    assert counts[0][0] > counts[1][0] > counts[2][0]


def test_wide_scales_are_dense_attention_and_zero_is_the_token_itself():
    states = vectors(2, 9)
    (dense,) = build_layers("dense")
    expected = run_layers([dense], states, make_context(9))[0].output
    for scales in ((9,), (9, 30, 0.99), (0,)):
        (layer,) = build_layers(spec(scales=scales))
        layer.load_state_dict(dense.state_dict())
        found = run_layers([layer], states, make_context(9))[0].output
        close(found, layer.o_proj(layer.v_proj(states)) if scales == (0,) else expected)


@pytest.mark.parametrize("layers", [1, 3])
def test_receptive_field(layers):
    """The sum of the widest windows, exactly."""
    torch.manual_seed(0)
    given = {"scales": (0, 2), "heads_per_scale": ((3, 1),) * layers}
    config = XFormerConfig(**{**GEOMETRY, "num_hidden_layers": layers}, attention=spec(**given))
    model = make_strong(XFormerForMaskedLM(config).double().eval(), amount=0.3)
    embeds = model.get_input_embeddings()(tokens(1, 24, high=50)).detach()
    changed = embeds.clone()
    changed[0, 12] += 1.0
    with torch.no_grad():
        difference = (model(inputs_embeds=changed).logits - model(inputs_embeds=embeds).logits).abs().amax(-1)[0]
    assert (difference > 1e-12).nonzero().flatten().tolist() == [t for t in range(24) if abs(t - 12) <= 2 * layers]


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


def test_caches_keep_what_a_layer_reads():
    torch.manual_seed(0)
    attention = spec(scales=(1, 3, 0.25), heads_per_scale=((4, 0, 0), (3, 1, 0), (2, 1, 1)))
    config = XFMultiScaleTransformerConfig(
        **GEOMETRY, bos_token_id=1, eos_token_id=2, is_decoder=True, attention=attention
    )
    model = make_strong(XFMultiScaleTransformerForCausalLM(config).double().eval(), amount=0.3)
    ids, cache, found = tokens(2, 20, high=50), make_cache(config), []
    with torch.no_grad():
        expected = model(ids).logits
        for begin, end in [(0, 9), *((at, at + 1) for at in range(9, 20))]:
            found.append(model(ids[:, begin:end], past_key_values=cache, use_cache=True).logits)
    close(torch.cat(found, 1), expected)
    assert [layer.keys.shape[2] for layer in cache.layers] == [1, 3, 6]  # a quarter of 24 positions


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"scales": ()}, "at least one of `scales`"),
        ({"scales": (1, -1)}, "a scale of -1"),
        ({"scales": (1.5,)}, "a scale of 1.5"),
        ({"scales": (0.0,)}, "a scale of 0.0"),
        ({"heads_per_scale": ((1, 1, 1, 1, 0),)}, "1 entries in `heads_per_scale` for 3 layers"),
        ({"heads_per_scale": ((1, 1, 1, 1, 1),) * 3}, "4 heads of a layer as"),
        ({"heads_per_scale": ((4,),) * 3}, "each of the 5 scales"),
    ],
)
def test_refusals(fields, message):
    with pytest.raises(ValueError, match=message):
        XFormerConfig(**GEOMETRY, attention=spec(**fields))


CONTRACT = mixes(
    {
        "parts_rotary": {"attention": spec(scales=[1, 0.25]), "position": "rotary", "num_key_value_heads": 2},
        "three_bias": {
            "attention": spec(scales=[0, 2, 0.125]),
            "position": {"type": "t5_relative_bias", "num_buckets": 8},
            "residual": "pre_ln",
        },
    }
)[:3]


@pytest.mark.parametrize("case", CONTRACT, ids=str)
def test_contract(case):
    check_contract(case)
