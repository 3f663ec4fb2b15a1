"""Plain patterns as attention components, against their sets of keys written as loops."""

import copy
import functools

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerForMaskedLM
from hf_xformers.core.cache import make_cache
from hf_xformers.core.components import build_spec
from hf_xformers.position.t5_relative_bias import T5RelativeBias, T5RelativeBiasSpec
from tests.attention.pattern_helpers import allowed_by, by_hand, check_against_loops
from tests.attention.score_helpers import (
    GEOMETRY,
    HEADS,
    build_layers,
    check_compile,
    check_contract,
    make_context,
    mixes,
    run_layers,
    vectors,
)
from tests.helpers import close, make_strong, tokens

BAND = {"type": "band_attention", "window_size": 3}
GLOBAL = {"type": "global_attention", "window_size": 2, "num_global_tokens": 2}
DILATED = {"type": "dilated_attention", "window_size": 2, "dilation": 3}
GAPS = {"type": "dilated_attention", "window_size": 2, "dilation": (1, (1, 1, 2, 4), 2)}
STRIDED = {"type": "dilated_attention", "dilation": 4, "strided": True}
RANDOM = {"type": "random_attention", "block_size": 2, "num_random_blocks": 2, "random_seed": 3}
LOCAL = {"type": "block_local_attention", "block_size": 4}
NEAR = {"type": "block_local_attention", "block_size": 3, "blocks_before": 1}

# By name: spec, the keys j that token i reads (head, number of tokens) in an encoder, and in a decoder beside j <= i.
CASES = {
    "band": (BAND, lambda i, j, h, n: abs(i - j) <= 3, lambda i, j, h, n: i - j < 3),
    "global": (
        GLOBAL,
        lambda i, j, h, n: abs(i - j) <= 2 or i < 2 or j < 2,
        lambda i, j, h, n: i - j < 2 or j < 2,
    ),
    "dilated": (
        DILATED,
        lambda i, j, h, n: j in [i + 3 * t for t in (-2, -1, 0, 1, 2)],
        lambda i, j, h, n: j in (i - 3, i),
    ),
    "gaps": (
        GAPS,
        lambda i, j, h, n: j in [i + (1, 1, 2, 4)[h] * t for t in (-2, -1, 0, 1, 2)],
        lambda i, j, h, n: j in (i - (1, 1, 2, 4)[h], i),
    ),
    "strided": (STRIDED, lambda i, j, h, n: (i - j) % 4 == 0, lambda i, j, h, n: (i - j) % 4 == 0),
    "local": (LOCAL, lambda i, j, h, n: i // 4 == j // 4, lambda i, j, h, n: i // 4 == j // 4),
    "near": (NEAR, lambda i, j, h, n: 0 <= i // 3 - j // 3 <= 1, lambda i, j, h, n: 0 <= i // 3 - j // 3 <= 1),
}
BY_LAYER = [RANDOM, BAND, GLOBAL, DILATED, NEAR]


def layer_of(name, causal, **fields):
    return build_layers(CASES[name][0], 2, causal, **fields)[1]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_sets_of_keys(name, causal):
    for length in (13, 1):
        check_against_loops(layer_of(name, causal), CASES[name][1 + causal], length, causal, real=min(9, length))


@pytest.mark.parametrize("causal", [False, True])
def test_random_blocks(causal):
    """The drawn blocks, read from the pattern's own table, and what is promised about them."""
    first, second = build_layers(RANDOM, 2, causal)
    drawn = {}

    def draws(layer, count):
        atom = next(part for part in layer.pattern.children() if hasattr(part, "drawn")).bind(2 * count)
        return [torch.stack(atom.for_head(head).drawn(torch.arange(count)), 1).tolist() for head in range(HEADS)]

    for number, layer in enumerate((first, second)):
        for count in (5, 9, 12):  # texts of every length have as many
            drawn[number] = draws(layer, count)
            for table in drawn[number]:
                for row, blocks in enumerate(table):
                    real = [block for block in blocks if block >= 0]
                    assert len(set(real)) == len(real) == min(2, row if causal else count - 1)
                    assert all(block < row if causal else block != row and 0 <= block < count for block in real)
    assert drawn[0] != drawn[1] and drawn[0][0] != drawn[0][1]  # anew in every layer and head
    again = build_layers(RANDOM, 1, causal)[0]
    assert again.pattern == first.pattern and copy.deepcopy(first).pattern == first.pattern
    other = build_layers({**RANDOM, "random_seed": 4}, 1, causal)[0]
    assert other.pattern != first.pattern

    def reads(i, j, head, n):
        count = -(-n // 2)
        return i // 2 == j // 2 or j // 2 in tables(count)[head][i // 2]

    tables = functools.cache(lambda count: draws(second, count))
    check_against_loops(second, reads, 17, causal, real=10)


def test_one_layer_or_one_head_decides_its_own():
    config = XFormerConfig(**GEOMETRY, attention=GAPS)
    patterns = [config.attention.build(config, layer_idx=layer).pattern for layer in range(3)]
    assert len(set(patterns)) == 3
    assert build_layers({"type": "dilated_attention", "dilation": 1, "window_size": 3})[0].pattern == (
        build_layers(BAND)[0].pattern
    )


@pytest.mark.parametrize("causal", [False, True])
def test_wide_patterns_are_dense_attention(causal):
    states = vectors(2, 9)
    (dense,) = build_layers("dense", causal=causal)
    expected = run_layers([dense], states, make_context(9, causal))[0].output
    for spec in (
        {"type": "band_attention", "window_size": 9},
        {"type": "global_attention", "num_global_tokens": 9, "window_size": 1},
        {"type": "dilated_attention", "dilation": 1, "strided": True},
        {"type": "block_local_attention", "block_size": 16},
        {"type": "random_attention", "block_size": 3, "num_random_blocks": 9},
    ):
        (layer,) = build_layers(spec, causal=causal)
        layer.load_state_dict(dense.state_dict())
        close(run_layers([layer], states, make_context(9, causal))[0].output, expected)


@pytest.mark.parametrize("spec", [BAND, GLOBAL, RANDOM, NEAR], ids=lambda spec: spec["type"])
@pytest.mark.parametrize("causal", [False, True])
def test_score_bias(spec, causal):
    """A learned bias by distance, on both paths, with its gradient; several queries and one."""
    config = XFormerConfig(**{**GEOMETRY, "is_decoder": causal})
    (layer,) = build_layers(spec, causal=causal)
    for length in (1, 11):
        position = T5RelativeBias(config, T5RelativeBiasSpec(num_buckets=8, max_distance=9)).double()
        states, found = vectors(2, length), {}
        mask = torch.ones(2, length, dtype=torch.bool)
        mask[1, : length // 3] = False
        for implementation in ("eager", "sdpa"):
            context = make_context(length, causal, padding_mask=mask, implementation=implementation)
            context.shared["score_bias"] = position
            output = run_layers([layer], states, context)[0].output[mask]
            (gradient,) = torch.autograd.grad(output.sin().sum(), position.table.weight)
            found[implementation] = output.detach(), gradient
        close(found["sdpa"][0], found["eager"][0])
        close(found["sdpa"][1], found["eager"][1])
        pairs = {}
        for i in range(length):
            for j in range(length):
                pairs[i, j] = layer.pattern.bind(length).for_head(0).allows(torch.tensor(i), torch.tensor(j)).item()
        if spec is not RANDOM:  # whose heads differ
            allowed = allowed_by(lambda i, j, h, n, pairs=pairs: pairs[i, j], length, HEADS, causal, mask)
            bias = position.block(torch.arange(length), torch.arange(length)).detach()
            close(found["eager"][0], by_hand(layer, states, allowed, bias)[0][mask])


def test_packed_documents():
    """A window does not look into the neighbouring document."""
    (layer,) = build_layers(BAND, causal=True)
    states = vectors(1, 11)
    segments = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2]])
    for implementation in ("eager", "sdpa"):
        context = make_context(11, True, segment_ids=segments, implementation=implementation)
        output = run_layers([layer], states, context)[0].output
        for part in (slice(0, 4), slice(4, 9), slice(9, 11)):
            alone = states[:, part]
            close(output[:, part], run_layers([layer], alone, make_context(alone.shape[1], True))[0].output)


@pytest.mark.parametrize("layers", [1, 3])
def test_receptive_field(layers):
    """Perturbing a token reaches exactly the tokens within layers * window."""
    torch.manual_seed(0)
    config = XFormerConfig(**{**GEOMETRY, "num_hidden_layers": layers}, attention=BAND)
    model = make_strong(XFormerForMaskedLM(config).double().eval(), amount=0.3)
    embeds = model.get_input_embeddings()(tokens(1, 24, high=50)).detach()
    changed = embeds.clone()
    changed[0, 12] += 1.0
    with torch.no_grad():
        difference = (model(inputs_embeds=changed).logits - model(inputs_embeds=embeds).logits).abs().amax(-1)[0]
    assert (difference > 0).nonzero().flatten().tolist() == [t for t in range(24) if abs(t - 12) <= 3 * layers]


def test_decoding_past_the_window():
    """Token by token far beyond the window equals one pass, left padding included."""
    for spec in BY_LAYER:
        torch.manual_seed(0)
        model = XFormerForCausalLM(XFormerConfig(**GEOMETRY, attention=spec)).double().eval()
        make_strong(model, amount=0.3)
        ids, mask = tokens(2, 20, high=50), torch.ones(2, 20, dtype=torch.long)
        mask[1, :3] = 0
        with torch.no_grad():
            expected = model(ids, attention_mask=mask).logits
            cache, found, begin = make_cache(model.config), [], 0
            for count in (5, 1, 1, 7, 1, 1, 1, 1, 1, 1):
                end = begin + count
                given = {"attention_mask": mask[:, :end], "past_key_values": cache, "use_cache": True}
                found.append(model(ids[:, begin:end], **given).logits)
                begin = end
        close(torch.cat(found, 1)[mask.bool()], expected[mask.bool()])
        kept = [layer.keys.shape[2] for layer in cache.layers]
        assert kept == [{"band_attention": 2, "dilated_attention": 3}.get(spec["type"], 20)] * 3


@pytest.mark.parametrize(
    "spec, changes, message",
    [
        ({"type": "band_attention", "window_size": 0}, {}, "`window_size` >= 1, got 0"),
        ({"type": "band_attention", "window_size": (4, 4)}, {}, "2 entries in `window_size` for 3 layers"),
        ({"type": "global_attention", "num_global_tokens": 0}, {}, "`num_global_tokens` >= 1"),
        ({"type": "dilated_attention", "dilation": (1, 0, 1)}, {}, "`dilation` >= 1"),
        ({"type": "dilated_attention", "dilation": (1, (1, 2), 1)}, {}, "2 gaps for a layer of 4 heads"),
        ({"type": "random_attention", "num_random_blocks": -1}, {}, "`num_random_blocks` >= 0"),
        ({"type": "block_local_attention", "blocks_after": 1}, {"is_decoder": True}, "`blocks_after` 1"),
    ],
)
def test_refusals(spec, changes, message):
    with pytest.raises(ValueError, match=message):
        XFormerConfig(**GEOMETRY, attention=spec, **changes)


def test_saved_specs_come_back():
    for spec in (BAND, GAPS, RANDOM):
        built = build_spec("attention", spec)
        assert build_spec("attention", built.to_dict()) == built


CONTRACT = mixes(
    {
        "band_rotary": {"attention": {**BAND, "window_size": [3, 5]}, "position": "rotary", "num_key_value_heads": 2},
        "random_bias": {"attention": RANDOM, "position": {"type": "t5_relative_bias", "num_buckets": 8}},
        "global_rotary": {"attention": GLOBAL, "position": "rotary"},
        "gaps": {"attention": {**GAPS, "dilation": [1, [1, 1, 2, 4]]}, "residual": "pre_ln"},
    }
)


@pytest.mark.parametrize("case", CONTRACT, ids=str)
def test_contract(case):
    check_contract(case)


@pytest.mark.parametrize("case", [CONTRACT[0], CONTRACT[5]], ids=str)
def test_compile(case):
    check_compile(case)


@pytest.mark.parametrize("causal", [False, True])
def test_prepared_masks(causal):
    """A 4-D mask of padding and order says the same as the padding itself, also about where a text begins."""
    states, mask = vectors(2, 11), torch.ones(2, 11, dtype=torch.bool)
    mask[0, :4], mask[1, 8:] = False, False
    pairs = mask[:, None, None, :].expand(-1, 1, 11, -1)
    pairs = pairs & torch.ones(11, 11).tril().bool() if causal else pairs
    for spec in BY_LAYER:
        (layer,) = build_layers(spec, causal=causal)
        expected = run_layers([layer], states, make_context(11, causal, padding_mask=mask))[0].output
        found = run_layers([layer], states, make_context(11, causal, explicit_mask=pairs))[0].output
        close(found[mask], expected[mask])
