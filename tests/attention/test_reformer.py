"""LSH attention: buckets by the length of a text, rotations, caches, and the gradient of its keys."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, StaticCache

from hf_xformers import XFormerConfig, XFormerForCausalLM
from hf_xformers.attention.shared.bucketed import BucketLayer
from tests.attention.group_helpers import (
    SIZES,
    build_layer,
    check_any_cache,
    check_numbers_of_each_row,
    check_numbers_of_each_stage,
    context,
    states,
)

SMALL = {"type": "reformer", "chunk_length": 4, "num_hashes": 3, "num_buckets": 4}


def module(decoder=False, dtype=torch.float64, layer_idx=0, **fields):
    return build_layer({**SMALL, **fields}, decoder, layer_idx).to(dtype).eval()


# ------------------------------------------------------------------------------------------- the equation


def test_buckets_and_factors():
    def factors(length, **fields):
        config = XFormerConfig(
            **{**SIZES, "max_position_embeddings": length}, attention={"type": "reformer", **fields}
        )
        return config.attention.bucket_factors(config)

    assert factors(512) == (16,)  # 2 * 512 / 64
    assert factors(65536) == (32, 64)  # 2048
    assert factors(64) == (2,)
    assert factors(64, num_buckets=6) == (6,)
    attention = module(num_buckets=(2, 6))
    labels = attention.hash(torch.randn(1, 2, 4000, 8, dtype=torch.float64))
    assert sorted(labels.unique().tolist()) == list(range(12))


# ------------------------------------------------------------------------------------------- promises


def test_half_precision_with_equal_buckets(monkeypatch):
    x = states(17)
    for decoder in (False, True):
        wide, narrow = module(decoder), module(decoder, torch.bfloat16)
        labels = wide.hash(wide.keys(wide.heads(wide.q_proj(x))))
        expected = wide(x, context(17, decoder)).output
        monkeypatch.setattr(narrow, "hash", lambda keys, valid=None, labels=labels: labels)
        for implementation in ("sdpa", "eager"):
            out = narrow(x.bfloat16(), context(17, decoder, implementation=implementation)).output
            assert out.dtype == torch.bfloat16
            assert (out.double() - expected).abs().mean() < 0.02 * expected.std()


def test_rotations_are_seeded():
    """By layer and round, whatever the global generator does; more rounds keep the first ones; another seed
    differs."""
    one, again, more = module(), module(), module(num_hashes=5)
    assert torch.equal(one.rotations, again.rotations) and torch.equal(one.rotations, more.rotations[:3])
    assert not torch.equal(one.rotations, module(layer_idx=1).rotations)
    assert not torch.equal(one.rotations, module(hash_seed=1).rotations)
    assert one.rotations.std() == pytest.approx(1.0, abs=0.2)


def test_shared_rotations_are_those_of_the_seed():
    """Every layer has what one draw of a generator with this seed gives, as in transformers."""
    torch.manual_seed(5)
    drawn = torch.randn(2, 8, 3, 2).permute(2, 0, 1, 3)
    for layer in (0, 1):
        attention = module(layer_idx=layer, dtype=torch.float32, hash_seed=5, share_rotations=True)
        assert torch.equal(attention.rotations, drawn)


# ------------------------------------------------------------------------------------------- buckets by length

LENGTHS = {"num_buckets": None, "chunk_length": 2, "num_hashes": 2}


def with_buckets(attention, buckets):
    """The layer with so many buckets, given in the config; their rotations are the other's first columns."""
    found = module(attention.is_causal, **{**LENGTHS, "num_buckets": buckets})
    weights = dict(attention.state_dict())
    weights["rotations"] = weights["rotations"][..., : buckets // 2]
    found.load_state_dict(weights)
    return found


def test_as_many_buckets_as_the_text_needs():
    """2 T / chunk_length of each row, whatever it is padded to: the same as a config with that number."""
    attention = module(**LENGTHS)  # for up to 64 tokens: 64 buckets, one hash
    assert attention.num_buckets == 64
    lengths = (1, 2), (2, 2), (3, 4), (4, 4), (5, 8), (16, 16), (17, 32), (40, 64)
    check_numbers_of_each_row(attention, lambda buckets: with_buckets(attention, buckets), lengths)


def test_a_causal_text_takes_the_buckets_of_what_it_has_so_far():
    attention = module(True, **LENGTHS)
    assert [stage.begin for stage in attention.stages] == [0, 4, 16] and attention.stage_powers == [2, 4, 6]
    layers = [with_buckets(attention, buckets) for buckets in (4, 16, 64)]
    check_numbers_of_each_stage(attention, layers, (0, 4, 16))


def test_many_stages_with_a_cache_and_with_score_terms():
    """Tokens one by one, several at once, and at a stroke; the literal path too."""
    ids = torch.randint(5, 40, (2, 44))
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    for position in (
        "sinusoidal_absolute",
        {"type": "t5_relative_bias", "num_buckets": 8, "max_distance": 12},
        "shaw_relative",
    ):
        torch.manual_seed(0)
        config = XFormerConfig(**SIZES, attention={**SMALL, **LENGTHS}, position=position)
        net = XFormerForCausalLM(config).double().eval()
        with torch.no_grad():
            expected = net(ids, attention_mask=mask, use_cache=False).logits
            cache, done, found = None, 0, []
            for size in (2, 1, 1, 1, 20, 1, 17, 1):
                given = {"attention_mask": mask[:, : done + size], "past_key_values": cache, "use_cache": True}
                out = net(ids[:, done : done + size], **given)
                cache, done = out.past_key_values, done + size
                found.append(out.logits)
            real = mask.bool()
            torch.testing.assert_close(torch.cat(found, dim=1)[real], expected[real], rtol=1e-8, atol=1e-8)
            net.set_attn_implementation("eager")
            literal = net(ids, attention_mask=mask, use_cache=False).logits
            torch.testing.assert_close(literal[real], expected[real], rtol=1e-8, atol=1e-8)
            cut = net(ids[:, :30], attention_mask=mask[:, :30], use_cache=False).logits
            torch.testing.assert_close(cut[real[:, :30]], expected[:, :30][real[:, :30]], rtol=1e-8, atol=1e-8)


# ------------------------------------------------------------------------------------------- generation


def language_model(**fields):
    torch.manual_seed(0)
    config = XFormerConfig(**SIZES, attention={**SMALL, **fields}, position="sinusoidal_absolute")
    return XFormerForCausalLM(config).double().eval()


def test_any_cache_gives_the_same():
    """18 tokens at once run the engine; after that, few queries meet all keys."""
    net = language_model()
    caches = None, DynamicCache(), StaticCache(config=net.config, max_cache_len=32)
    check_any_cache(net, torch.randint(5, 40, (2, 30)), (18, 1, 1, 9, 1), caches)


def test_many_new_tokens_on_a_cache():
    """More than a few: the whole sequence runs again, without the cached queries."""
    net, ids = language_model(), torch.randint(5, 40, (2, 60))
    with torch.no_grad():
        first = net(ids[:, :20], use_cache=True)
        second = net(ids[:, 20:], past_key_values=first.past_key_values, use_cache=True)
        expected = net(ids, use_cache=False).logits
    torch.testing.assert_close(second.logits, expected[:, 20:], rtol=1e-9, atol=1e-9)


def test_labels_follow_the_cache():
    net, ids = language_model(), torch.randint(5, 40, (3, 9))
    with torch.no_grad():
        cache = net(ids, use_cache=True).past_key_values
    layer = cache.layers[1]
    assert isinstance(layer, BucketLayer) and layer.labels.shape == (3, 2, 3, 9)
    labels = layer.labels.clone()
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    assert torch.equal(layer.labels, labels[[2, 0, 0]])
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 4]))
    assert torch.equal(layer.labels, labels[[2, 0]])
    cache.crop(-4)
    assert torch.equal(layer.labels, labels[[2, 0], ..., :5]) and cache.get_seq_length() == 5
    cache.reset()
    assert layer.labels is None and cache.get_seq_length() == 0


def test_keys_of_length_one_and_their_gradient():
    """Against the formula written out, and numerical derivatives, of a key that is zero but for rounding too."""
    attention = module().double()
    query = torch.randn(2, 3, 4, attention.head_dim, dtype=torch.float64)
    query[0, 0, 0] *= 1e-3
    query.requires_grad_()
    found = attention.keys(query)
    expected = query / (query.square().sum(-1, keepdim=True) + 1e-6 * attention.head_dim).sqrt()
    torch.testing.assert_close(found, expected)
    probe = torch.randn_like(found)
    ours, theirs = (torch.autograd.grad((x * probe).sum(), query)[0] for x in (found, expected))
    torch.testing.assert_close(ours, theirs)
    assert torch.autograd.gradgradcheck(attention.keys, (query[:1, :1, 1:2].detach().requires_grad_(),))
