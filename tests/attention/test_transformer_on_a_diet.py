"""Transformer on a Diet: its sets of keys as loops over the paper's definition, layer by layer."""

import pytest
import torch

from hf_xformers import XFormerConfig
from hf_xformers.core.cache import make_cache
from hf_xformers.ops.block_sparse.attention import block_sparse_attention, block_sparse_reference
from hf_xformers.ops.block_sparse.patterns import dilated
from hf_xformers.variants.transformer_on_a_diet import XFTransformerOnADietConfig, XFTransformerOnADietForCausalLM
from tests.attention.pattern_helpers import check_against_loops
from tests.attention.score_helpers import GEOMETRY, build_layers, check_contract, mixes
from tests.helpers import close, make_strong, tokens


def spec(**fields):
    return {"type": "transformer_on_a_diet", **fields}


def steps(kind, layer, size=3, base=2, first=4, factor=2):
    """The distances i - j >= 0 that a layer reads, of texts of up to 40 tokens."""
    if kind == "full":
        return set(range(40))
    if kind == "cascade":
        return set(range(first * factor**layer))
    layers = range(layer + 1) if kind == "dilated_mem" else [layer]
    return {t * base**at for at in layers for t in range(size)}


CASES = {
    "full": ({}, {}),
    "dilated": ({}, {}),
    "dilated_mem": ({}, {}),
    "cascade": ({}, {}),
    "dilated-4-3": ({"kernel_size": 4, "d_base": 3}, {"size": 4, "base": 3}),
    "dilated_mem-2-1": ({"kernel_size": 2, "d_base": 1}, {"size": 2, "base": 1}),
    "cascade-2-3": ({"first_window_size": 2, "window_size_multiplier": 3}, {"first": 2, "factor": 3}),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_sets_of_keys(name, causal):
    fields, given = CASES[name]
    kind = name.split("-")[0]
    layers = build_layers(spec(diet_type=kind, **fields), 3, causal)
    for number, layer in enumerate(layers):
        read = steps(kind, number, **given)
        for length in (17, 1) if number == 1 else (17,):
            check_against_loops(layer, lambda i, j, h, n: abs(i - j) in read, length, causal, real=min(12, length))


@pytest.mark.parametrize("kind, layers, reach", [("dilated", 3, 15), ("dilated_mem", 3, 15), ("cascade", 2, 11)])
def test_receptive_field(kind, layers, reach):
    """1 + (K - 1) (B^n - 1) / (B - 1) tokens for dilated sets, the windows' sum for a cascade: a token changes exactly
    those that it can reach."""
    torch.manual_seed(0)
    fields = {
        **GEOMETRY,
        "num_hidden_layers": layers,
        "hidden_dropout_prob": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = XFTransformerOnADietConfig(**fields, attention=spec(diet_type=kind))
    model = make_strong(XFTransformerOnADietForCausalLM(config).double().eval(), amount=0.3)
    embeds = model.get_input_embeddings()(tokens(1, 24, high=50)).detach()
    changed = embeds.clone()
    changed[0, 3] *= -1.0  # a norm takes a shift of all channels away
    with torch.no_grad():
        difference = (model(inputs_embeds=changed).logits - model(inputs_embeds=embeds).logits).abs().amax(-1)[0]
    assert (difference > 1e-12).nonzero().flatten().tolist() == list(range(3, 3 + reach))


def test_wider_windows_are_full_attention():
    full, wide = (
        build_layers(spec(**fields), 1, True)[0].pattern.mask(20, 20)
        for fields in ({"diet_type": "full"}, {"first_window_size": 20})
    )
    order = torch.ones(20, 20).tril().bool()
    assert torch.equal(full & order, wide)


def test_caches_keep_what_a_layer_reads():
    for kind, kept in (
        ("cascade", [3, 7, 15]),
        ("dilated", [2, 4, 8]),
        ("dilated_mem", [2, 4, 8]),
        ("full", [20] * 3),
    ):
        torch.manual_seed(0)
        config = XFTransformerOnADietConfig(
            **GEOMETRY, bos_token_id=1, eos_token_id=2, is_decoder=True, attention=spec(diet_type=kind)
        )
        model = make_strong(XFTransformerOnADietForCausalLM(config).double().eval(), amount=0.3)
        ids, mask = tokens(2, 20, high=50), torch.ones(2, 20, dtype=torch.long)
        mask[1, :3] = 0
        cache, found = make_cache(config), []
        with torch.no_grad():
            expected = model(ids, attention_mask=mask).logits
            for begin, end in [(0, 9), *((at, at + 1) for at in range(9, 20))]:
                given = {"attention_mask": mask[:, :end], "past_key_values": cache, "use_cache": True}
                found.append(model(ids[:, begin:end], **given).logits)
        close(torch.cat(found, 1)[mask.bool()], expected[mask.bool()])
        assert [layer.keys.shape[2] for layer in cache.layers] == kept


@pytest.mark.parametrize("gap", [3, 40, 70, 2**39])
def test_gaps_near_and_beyond_the_text(gap):
    """Classes of tokens are as many as the text has, however large the gap is."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 80, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    for lengths in ((80, 0), (7, 73)):
        queries, offset = lengths
        found = block_sparse_attention(q[:, :, :queries], k, v, dilated(30, 0, gap), query_offset=offset)
        expected = block_sparse_reference(q[:, :, :queries], k, v, dilated(30, 0, gap), query_offset=offset)[0]
        close(found, expected)


def test_deep_models_are_built():
    config = XFormerConfig(**{**GEOMETRY, "num_hidden_layers": 70}, attention=spec(diet_type="dilated"))
    assert config.attention.pattern(config, 69).allows(torch.tensor(5), torch.arange(9)).nonzero().item() == 5


@pytest.mark.parametrize("field", ["kernel_size", "d_base", "first_window_size", "window_size_multiplier"])
def test_refusals(field):
    with pytest.raises(ValueError, match=f"`{field}` >= 1, got 0"):
        XFormerConfig(**GEOMETRY, attention=spec(**{field: 0}))


CONTRACT = mixes(
    {
        "dilated_rotary": {"attention": spec(diet_type="dilated"), "position": "rotary", "num_key_value_heads": 2},
        "memory_bias": {
            "attention": spec(diet_type="dilated_mem"),
            "position": {"type": "t5_relative_bias", "num_buckets": 8},
            "residual": "pre_ln",
        },
    }
)


@pytest.mark.parametrize("case", CONTRACT, ids=str)
def test_contract(case):
    check_contract(case)
