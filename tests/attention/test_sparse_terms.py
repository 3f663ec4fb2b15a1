"""Positions inside attention over some pairs: tiles of a pattern, buckets and clusters, against the matrix of all
pairs.

The matrix path shares nothing with the tiles but the parameters: it makes the terms as dense attention does, which the
tests of positions compare with each paper's formula, and hides what the mechanism does not read.
"""

import itertools

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerModel
from hf_xformers.attention import routing_transformer as routing
from hf_xformers.attention.shared import bucketed
from hf_xformers.ops.score_terms import tiles
from hf_xformers.ops.score_terms.terms import ScoreTerms
from hf_xformers.position import distances
from tests.helpers import close, make_strong, pad, tokens

LENGTH = 23
POSITIONS = {
    "shaw": {"type": "shaw_relative", "max_distance": 3},
    "shaw_keys": {"type": "shaw_relative", "max_distance": 3, "keys": True},
    "shaw_by_head": {"type": "shaw_relative", "max_distance": 5, "share_heads": False, "values": False},
    "music": {"type": "music_transformer", "max_distance": 7},
    "music_shared": {"type": "music_transformer", "share_heads": True},
    "indigo": {"type": "indigo"},
    "deberta": {"type": "deberta", "max_distance": 6},
    "deberta_v2": {"type": "deberta", "buckets": 4, "share_projections": True, "normalize": True},
    "deberta_p2c": {"type": "deberta", "terms": ("p2c",)},
    "tupe": {"type": "tupe"},
    "tupe_absolute": {"type": "tupe", "relative": False},
    "sinusoid": {"type": "learnable_sinusoidal_relative"},
    "floater": {"type": "floater"},
    "t5": {"type": "t5_relative_bias"},
    "forget": {"type": "forget_gate"},
}
ATTENTIONS = {
    "band": {"type": "band_attention", "window_size": 3},
    "global": {"type": "global_attention", "window_size": 2, "num_global_tokens": 2},
    "dilated": {"type": "dilated_attention", "window_size": 2, "dilation": ((1, 3),)},
    "random": {"type": "random_attention", "block_size": 4, "num_random_blocks": 1},
    "strided": {"type": "sparse_transformer", "kind": "strided", "stride": 4},
    "fixed": {"type": "sparse_transformer", "kind": "fixed", "stride": 4, "factorization": "heads"},
    "longformer": {"type": "longformer", "attention_window": 4},
    "longformer_shared": {
        "type": "longformer",
        "attention_window": 4,
        "attention_dilation": ((1, 2),),
        "separate_global_projections": False,
    },
    "bigbird": {"type": "bigbird", "block_size": 3, "num_random_blocks": 1},
    "reformer": {"type": "reformer", "num_hashes": 2, "num_buckets": 4, "chunk_length": 3},
    "reformer_multiset": {
        "type": "reformer",
        "num_hashes": 3,
        "num_buckets": 2,
        "chunk_length": 4,
        "deduplicate": False,
    },
    "reformer_released": {"type": "reformer", "num_hashes": 2, "num_buckets": 4, "chunk_length": 4, "sets": "chunk"},
    "routing": {"type": "routing_transformer", "num_clusters": 3, "window_size": 5, "block_size": 4},
}


SIZES = dict(vocab_size=99, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)


def build(position, attention, causal, **changes):
    """The model in float64 with strong weights; None where the config refuses the pair."""
    try:
        config = XFormerConfig(
            **SIZES,
            max_position_embeddings=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            position=POSITIONS[position],
            attention=ATTENTIONS[attention],
            is_decoder=causal,
            use_cache=False,
            **changes,
        )
    except ValueError:
        return None
    torch.manual_seed(0)
    return make_strong(XFormerModel(config).double().eval(), amount=0.4)


def outputs(model, literal, ids, mask, **inputs):
    model.set_attn_implementation("eager" if literal else "sdpa")
    found = model(input_ids=ids, attention_mask=mask, **inputs).last_hidden_state
    return found if mask is None else found * mask[..., None]


def compare(model, ids, mask, **inputs):
    """Outputs and gradients of all parameters, tiles against the matrix."""
    fast, slow = outputs(model, False, ids, mask, **inputs), outputs(model, True, ids, mask, **inputs)
    close(fast, slow)
    probe = torch.randn(fast.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    parameters = [p for p in model.parameters() if p.requires_grad]
    for one, other in zip(
        *(torch.autograd.grad((x * probe).sum(), parameters, allow_unused=True) for x in (fast, slow))
    ):
        assert (one is None) == (other is None)
        if one is not None:
            close(one, other)
    return fast


def refused(position, attention, causal):
    """What has no meaning together: directions without an order, and what asks for keys that are queries."""
    if position in ("music", "music_shared", "indigo") and not causal:
        return True
    if position == "forget" and (not causal or attention.startswith(("longformer", "bigbird", "reformer", "routing"))):
        return True  # it needs an order, and a place for a number of each token
    if attention.startswith("reformer") and position in ("deberta_v2", "floater"):
        return True
    if attention == "routing" and (position == "floater" or (position == "deberta_v2" and causal)):
        return True
    if attention == "reformer_released":
        return causal
    return attention == "bigbird" and causal


# An attention asks for tiles, a position makes them, and neither knows the other: all positions with one attention of
# each kind (patterns, buckets, clusters), and all attentions with one position of each kind (vectors by distance,
# projected distances, a bias of positions).
OF_EACH_KIND = ("band", "reformer", "routing"), ("shaw", "deberta", "tupe")
PAIRS = [
    pytest.param(position, attention, causal, id=f"{position}-{attention}-{'decoder' if causal else 'encoder'}")
    for position, attention, causal in itertools.product(POSITIONS, ATTENTIONS, (False, True))
    if (attention in OF_EACH_KIND[0] or position in (*OF_EACH_KIND[1], "forget"))
    and not refused(position, attention, causal)
]


@pytest.mark.parametrize("causal", [False, True], ids=["encoder", "decoder"])
def test_refused_pairs(causal):
    for position, attention in itertools.product(POSITIONS, ATTENTIONS):
        assert (build(position, attention, causal) is None) == refused(position, attention, causal)


@pytest.mark.parametrize(("position", "attention", "causal"), PAIRS)
def test_tiles_equal_the_matrix(position, attention, causal, monkeypatch):
    model = build(position, attention, causal)
    monkeypatch.setattr(tiles, "SCORES_AT_ONCE", 1)  # each head by itself
    monkeypatch.setattr(distances, "LEAST_VECTORS", 2)  # in parts
    ids = tokens(2, LENGTH)
    inputs = {}
    if position == "indigo":
        order = torch.Generator().manual_seed(3)
        inputs["insertion_positions"] = torch.stack([torch.randperm(LENGTH, generator=order) for _ in range(2)])
    if attention.startswith("longformer") and not causal:
        inputs["global_attention_mask"] = torch.zeros(2, LENGTH, dtype=torch.long)
        inputs["global_attention_mask"][0, [2, 17]] = inputs["global_attention_mask"][1, 20] = 1
    plain = compare(model, ids, None, **inputs)
    for side in ("left", "right"):
        padded, mask = pad([tokens(LENGTH), tokens(9, seed=1)], LENGTH, side, seed=2)
        compare(model, padded, mask, **inputs)
    # The position matters: without its terms the outputs are others.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "position" in name:
                parameter.mul_(0.0)
        assert not torch.allclose(outputs(model, False, ids, None, **inputs), plain, atol=1e-3)


@pytest.mark.parametrize("first", [
    {"num_attention_heads": 1, "head_dim": 16},
    {"attention": {"type": "longformer", "attention_window": 6}},
    {"attention": {"type": "sparse_transformer", "kind": "strided", "stride": 4, "factorization": "layers"}},
], ids=["heads", "global tokens", "cache"])  # fmt: skip
def test_layers_with_one_pattern_and_tiles_of_their_own(first):
    """A window below which stands the same one with other heads, with global tokens, or with all keys in its cache."""
    causal = "sparse" in str(first)
    band = {"type": "band_attention", "window_size": 4 if causal else 3}
    fields = {**SIZES, "num_hidden_layers": 2, "attention": band, "per_layer_config": {0: first}, "is_decoder": causal}
    torch.manual_seed(0)
    model = make_strong(XFormerModel(XFormerConfig(**fields, position=POSITIONS["shaw"])).double().eval(), amount=0.4)
    ids, chosen = tokens(2, LENGTH), torch.zeros(2, LENGTH, dtype=torch.long)
    chosen[:, 4] = 1
    whole = compare(model, ids, None, **({"global_attention_mask": chosen} if "longformer" in str(first) else {}))
    if causal:
        with torch.no_grad():
            model.set_attn_implementation("sdpa")
            cache = model(input_ids=ids[:, :12], use_cache=True).past_key_values
            close(model(input_ids=ids[:, 12:], past_key_values=cache).last_hidden_state, whole[:, 12:])


@pytest.mark.parametrize("position", ["shaw", "t5"])
@pytest.mark.parametrize("attention", ["longformer", "longformer_shared"])
def test_global_tokens_where_heads_share_keys(attention, position):
    model = build(position, attention, False, num_key_value_heads=1)
    padded, mask = pad([tokens(LENGTH), tokens(9, seed=1)], LENGTH, "left", seed=2)
    chosen = torch.zeros_like(mask)
    chosen[0, 2] = chosen[:, -3] = 1
    compare(model, padded, mask, global_attention_mask=chosen)


def test_missing_places_are_told():
    model = build("indigo", "band", True)
    with pytest.raises(ValueError, match=f"covers 9 tokens, but cached and new tokens make {LENGTH}; give the places"):
        model(input_ids=tokens(1, LENGTH), insertion_positions=torch.arange(9)[None])


@pytest.mark.parametrize("position", ["shaw", "deberta", "tupe", "t5"])
@pytest.mark.parametrize("attention", ["band", "global", "fixed"])
def test_packed_documents(position, attention):
    """Documents in one row do not see each other: the tiles know as well as the matrix."""
    model = build(position, attention, False)
    ids = tokens(1, LENGTH)
    places = torch.cat([torch.arange(10), torch.arange(LENGTH - 10)])[None]
    if "packed_rows" not in model.config.attention.supports:
        with pytest.raises(ValueError, match="position_ids"):
            model(input_ids=ids, position_ids=places)
        return
    compare(model, ids, None, position_ids=places)


@pytest.mark.parametrize("attention", ["band", "strided", "reformer", "routing"])
@pytest.mark.parametrize("position", ["shaw", "deberta", "tupe_absolute", "indigo", "t5", "sinusoid", "forget"])
def test_a_long_prompt_in_pieces(position, attention, monkeypatch):
    """More new tokens than a decoding step has, over a cache that forgets what is out of reach."""
    monkeypatch.setattr(bucketed, "FEW_QUERIES", 4)
    monkeypatch.setattr(routing, "FEW_QUERIES", 4)
    literal, from_matrix = [], ScoreTerms.from_matrix

    def told(self, reference, query, *rest):
        literal.append(query.shape[2])
        return from_matrix(self, reference, query, *rest)

    monkeypatch.setattr(ScoreTerms, "from_matrix", told)
    if refused(position, attention, True):
        return
    config = build(position, attention, True).config
    config.use_cache = True
    torch.manual_seed(0)
    model = make_strong(XFormerForCausalLM(config).double().eval(), amount=0.4)
    ids, mask = pad([tokens(LENGTH), tokens(17, seed=1)], LENGTH, "left", seed=2)
    with torch.no_grad():
        want = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        cache, found = None, []
        for begin, end in ((0, 7), (7, 16), (16, 17), (17, LENGTH)):
            step = model(
                input_ids=ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True
            )
            cache = step.past_key_values
            found.append(step.logits)
    close(torch.cat(found, dim=1)[mask.bool()], want[mask.bool()])
    if attention in ("reformer", "routing"):
        assert literal and set(literal) == {1}  # all pairs are made for a decoding step alone


@pytest.mark.parametrize("position", ["shaw", "deberta"])
@pytest.mark.parametrize("attention", ["band", "reformer", "routing"])
def test_dropout_trains(position, attention):
    """Dropout falls on weights: a pass with it differs, has finite gradients, and a mean of many comes near the one
    without."""
    model = build(position, attention, False)
    model.config.attention_probs_dropout_prob = 0.3
    for layer in model.modules():
        if getattr(layer, "position_terms", None) is not None:
            layer.dropout = 0.3
    ids = tokens(1, LENGTH)
    still = outputs(model, False, ids, None)
    for layer in model.modules():
        if getattr(layer, "position_terms", None) is not None:
            layer.train()
    torch.manual_seed(1)
    runs = torch.stack([outputs(model, False, ids, None) for _ in range(8)])
    assert not torch.allclose(runs[0], runs[1])
    runs.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert (runs.mean(0) - still).abs().mean() < (runs[0] - still).abs().mean()


def test_nothing_of_all_pairs_is_kept():
    """The largest tensor that a training pass makes grows with the length and not with its square."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for x in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(x, torch.Tensor):
                    self.size = max(self.size, x.numel())
            return result

    for position in ("shaw", "deberta", "tupe_absolute", "t5"):
        for attention in ("band", "strided", "reformer", "routing"):
            sizes = []
            for length in (512, 1024):
                spec = dict(ATTENTIONS[attention])
                spec.update({"window_size": 32} if "window_size" in spec else {})
                spec.update({"chunk_length": 32} if attention == "reformer" else {})
                spec.update({"stride": 32} if attention == "strided" else {})
                spec.update({"num_clusters": length // 32, "block_size": 32} if attention == "routing" else {})
                config = XFormerConfig(
                    **SIZES,
                    max_position_embeddings=length,
                    position={**POSITIONS[position], **({"max_distance": 16} if position == "deberta" else {})},
                    attention=spec,
                )
                model = XFormerModel(config)
                with Largest() as largest:
                    model(input_ids=tokens(1, length)).last_hidden_state.sum().backward()
                sizes.append(largest.size)
            assert sizes[1] <= 2.6 * sizes[0], (position, attention, sizes)
