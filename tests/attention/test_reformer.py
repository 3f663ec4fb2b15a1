"""LSH attention against its equation, transformers' own, and its promises."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from transformers import DynamicCache, ReformerConfig, StaticCache
from transformers.models.reformer.modeling_reformer import LSHSelfAttention

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerForMaskedLM
from hf_xformers.attention.shared.bucketed import BucketLayer
from tests.attention.group_helpers import SIZES, build_layer, context, states

SMALL = {"type": "reformer", "chunk_length": 4, "num_hashes": 3, "num_buckets": 4}


def module(decoder=False, dtype=torch.float64, layer_idx=0, **fields):
    return build_layer({**SMALL, **fields}, decoder, layer_idx).to(dtype).eval()


# ------------------------------------------------------------------------------------------- the equation


def test_collisions_fall_with_the_angle():
    attention = module(num_hashes=64, num_buckets=8)
    torch.manual_seed(0)
    first = torch.nn.functional.normalize(torch.randn(2, 1, 8, dtype=torch.float64), dim=-1)
    other = torch.randn(2, 1, 8, dtype=torch.float64)
    other = torch.nn.functional.normalize(other - (other * first).sum(-1, keepdim=True) * first, dim=-1)
    shares = []
    for angle in (0.0, 0.3, 0.8, 1.5, math.pi):
        turned = math.cos(angle) * first + math.sin(angle) * other
        labels = attention.hash(torch.stack([first, turned], dim=2)[None, :, 0].view(1, 2, 2, 8))
        shares.append((labels[..., 0] == labels[..., 1]).double().mean().item())
    assert shares[0] == 1.0 and shares[-1] == 0.0
    assert all(one > other for one, other in itertools.pairwise(shares))
    long = torch.randn(1, 2, 30, 8, dtype=torch.float64)
    assert torch.equal(attention.hash(long), attention.hash(long * 7.5))  # only the direction counts


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


def test_approaches_full_attention():
    """More rounds, more of the keys: the error to full attention falls to nothing once all are met."""
    x = states(32, batch=1)
    full = module(num_buckets=2, num_hashes=1, chunk_length=16, sets="chunk", chunks_before=1)
    dense = full(x, context(32)).output
    errors = []
    for rounds in (1, 4, 16, 256):
        attention = module(num_buckets=4, num_hashes=rounds, chunk_length=8, chunks_after=1)
        attention.load_state_dict(full.state_dict() | {"rotations": attention.rotations})
        errors.append((attention(x, context(32)).output - dense).square().mean().item())
    assert errors[0] > errors[1] > errors[2] > errors[3] and errors[3] < 1e-20


# ------------------------------------------------------------------------------------------- transformers


@pytest.mark.parametrize("decoder", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("rounds", "buckets", "after"), [(1, 4, 0), (3, 4, 0), (2, (2, 4), 0), (2, 4, 1)])
def test_parity_with_transformers(decoder, masked, rounds, buckets, after):
    """Copied weights, and the rotations that its seed gives: output and gradients, all rounds in one ring."""
    if decoder and after:
        return
    theirs = ReformerConfig(
        hidden_size=16,
        num_attention_heads=2,
        attention_head_size=8,
        num_hashes=rounds,
        num_buckets=list(buckets) if isinstance(buckets, tuple) else buckets,
        lsh_attn_chunk_length=4,
        lsh_num_chunks_before=1,
        lsh_num_chunks_after=after,
        lsh_attention_probs_dropout_prob=0.0,
        hash_seed=7,
        is_decoder=decoder,
        axial_pos_embds=False,
        attn_layers=["lsh"],
    )
    torch.manual_seed(3)
    reference = LSHSelfAttention(theirs, layer_idx=0).double().eval()
    ours = module(
        decoder,
        num_hashes=rounds,
        num_buckets=buckets,
        chunks_after=after,
        causal_form="paper",
        sets="chunk",
        scale=1.0,  # the released code divides keys by sqrt(d) in place of the scores
    )
    with torch.no_grad():
        ours.q_proj.weight.copy_(reference.query_key.weight)
        ours.v_proj.weight.copy_(reference.value.weight)
        ours.o_proj.weight.copy_(torch.eye(16))
        torch.manual_seed(7)
        width = (sum(buckets) if isinstance(buckets, tuple) else buckets) // 2
        drawn = torch.randn(2, 8, rounds, width, dtype=torch.float64)
        ours.rotations.copy_(drawn.permute(2, 0, 1, 3))
    x = states(24).requires_grad_()
    mask = None
    if masked:
        mask = torch.ones(2, 24, dtype=torch.bool)
        mask[1, 17:] = False
    real = torch.ones(2, 24, dtype=torch.bool) if mask is None else mask
    out = ours(x, context(24, decoder, mask)).output[real]
    expected = reference(x, attention_mask=mask).hidden_states[real]
    torch.testing.assert_close(out, expected, rtol=1e-7, atol=1e-7)  # its epsilon is a float32
    slope = torch.randn_like(out)
    found = torch.autograd.grad(out, (x, ours.q_proj.weight, ours.v_proj.weight), slope)
    wanted = torch.autograd.grad(expected, (x, reference.query_key.weight, reference.value.weight), slope)
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


# ------------------------------------------------------------------------------------------- promises


def test_strict_causality_and_the_papers_leak():
    x = states(24)
    changed = torch.where((torch.arange(24) >= 15)[None, :, None], states(24, seed=1), x)
    changes = {}
    for form in ("strict", "paper"):
        attention = module(True, causal_form=form)
        before, after = (attention(given, context(24, True)).output[:, :15] for given in (x, changed))
        changes[form] = (before - after).abs().max().item()
    assert changes["strict"] < 1e-14 < 1e-2 < changes["paper"]


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


def test_rotations_come_back(tmp_path):
    net = XFormerForMaskedLM(XFormerConfig(**SIZES, attention={**SMALL, "hash_seed": 5}))
    with torch.no_grad():
        net.model.trunk.layers[0].attention.rotations.add_(0.5)  # as if another version had drawn them
    net.save_pretrained(tmp_path)
    again = XFormerForMaskedLM.from_pretrained(tmp_path)
    for one, other in zip(net.model.trunk.layers, again.model.trunk.layers):
        assert torch.equal(one.attention.rotations, other.attention.rotations)


# ------------------------------------------------------------------------------------------- buckets by length

LENGTHS = {"num_buckets": None, "chunk_length": 2, "num_hashes": 2}


def with_buckets(attention, buckets, first):
    """The layer with so many buckets, given in the config; their rotations are columns of the other's from `first`
    on."""
    found = module(attention.is_causal, **{**LENGTHS, "num_buckets": buckets})
    weights = dict(attention.state_dict())
    weights["rotations"] = weights["rotations"][..., first : first + buckets // 2]
    found.load_state_dict(weights)
    return found


def test_as_many_buckets_as_the_text_needs():
    """2 T / chunk_length of each row, whatever it is padded to: the same as a config with that number."""
    attention = module(**LENGTHS)  # for up to 64 tokens: 64 buckets, one hash
    assert attention.num_buckets == 64
    for length, buckets in ((1, 2), (2, 2), (3, 4), (4, 4), (5, 8), (16, 16), (17, 32), (40, 64)):
        x = states(length)
        expected = with_buckets(attention, buckets, 0)(x, context(length)).output
        torch.testing.assert_close(attention(x, context(length)).output, expected, rtol=1e-10, atol=1e-10)
        for side in ("left", "right"):
            mask = torch.ones(2, 48, dtype=torch.bool)
            real = slice(48 - length, 48) if side == "left" else slice(0, length)
            mask[1], padded = False, states(48, seed=4)
            mask[1, real], padded[1, real] = True, x[1]
            for implementation in ("sdpa", "eager"):
                found = attention(padded, context(48, False, mask, implementation)).output[1, real]
                torch.testing.assert_close(found, expected[1], rtol=1e-10, atol=1e-10)


def test_a_causal_text_takes_the_buckets_of_what_it_has_so_far():
    """Every token reads what it would with the number of buckets of its stage; padding changes nothing, nor do
    gradients."""
    attention, x = module(True, **LENGTHS), states(50)
    assert [stage.begin for stage in attention.stages] == [0, 4, 16] and attention.stage_powers == [2, 4, 6]
    x.requires_grad_()
    expected = [with_buckets(attention, buckets, 0)(x, context(50, True)).output for buckets in (4, 16, 64)]
    expected = torch.cat([expected[0][:, :4], expected[1][:, 4:16], expected[2][:, 16:]], dim=1)
    slope = torch.randn_like(expected)
    (wanted,) = torch.autograd.grad(expected, x, slope)
    for implementation in ("sdpa", "eager"):
        found = attention(x, context(50, True, implementation=implementation)).output
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(torch.autograd.grad(found, x, slope)[0], wanted, rtol=1e-9, atol=1e-9)
        mask = torch.ones(2, 61, dtype=torch.bool)
        mask[0, :11], mask[1, 50:] = False, False
        padded = states(61, seed=4)
        padded[0, 11:], padded[1, :50] = x[0], x[1]
        found = attention(padded, context(61, True, mask, implementation)).output
        torch.testing.assert_close(torch.stack([found[0, 11:], found[1, :50]]), expected, rtol=1e-10, atol=1e-10)


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
    """The own cache keeps labels; plain and static ones do not, and labels are found again."""
    net, ids = language_model(), torch.randint(5, 40, (2, 30))
    with torch.no_grad():
        expected = net(ids, use_cache=False).logits
        static = StaticCache(config=net.config, max_cache_len=32)
        for cache in (None, DynamicCache(), static):
            found, done = [], 0
            for size in (18, 1, 1, 9, 1):  # 18 at once run the engine; after that, few queries meet all keys
                out = net(ids[:, done : done + size], past_key_values=cache, use_cache=True)
                cache, done = out.past_key_values, done + size
                found.append(out.logits)
            torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=1e-9, atol=1e-9)


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


def test_assisted_generation_drops_tokens_again():
    net, helper = language_model(), language_model(hash_seed=9)
    ids = torch.randint(5, 40, (1, 6))
    settings = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(net.generate(ids, assistant_model=helper, **settings), net.generate(ids, **settings))


# ------------------------------------------------------------------------------------------- refusals


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
