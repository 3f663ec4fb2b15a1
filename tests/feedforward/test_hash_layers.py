"""Hash layers against a loop over tokens; the map is fixed, saved where it is a table, and balanced by frequency."""

import pytest
import torch
from transformers.cache_utils import Cache, DynamicLayer

from hf_xformers import XFormerConfig, XFormerForCausalLM, build_spec
from hf_xformers.feedforward.dense import DenseFeedForward
from hf_xformers.feedforward.hash_layers import HashExperts, balance, cluster
from hf_xformers.feedforward.token_maps import k_means
from hf_xformers.training.pretraining import prepare_modules
from tests.feedforward.expert_helpers import build, context, expert, make_config, vectors
from tests.helpers import close, make_strong

SPEC = {"type": "hash_layers", "num_experts": 4, "layers": (1,)}
SIZES = dict(vocab_size=30, hidden_size=12, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)


def ids_of(*shape, seed=0, high=30):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def before_by_hand(ids, mask=None, segments=None, nothing=1000):
    """A loop over tokens: the id of the real token before, in the same document."""
    found = torch.full_like(ids, nothing)
    for b in range(ids.shape[0]):
        for t in range(ids.shape[1]):
            earlier = [u for u in range(t) if mask is None or mask[b, u]]
            if earlier and (segments is None or segments[b, earlier[-1]] == segments[b, t]):
                found[b, t] = ids[b, earlier[-1]]
    return found


@pytest.mark.parametrize("kind", ["bigram", "previous"])
@pytest.mark.parametrize("case", ["whole", "left", "right", "holes", "packed"])
def test_the_token_before(kind, case):
    """h(w_{t-1}, w_t) against a loop, in padded and packed rows."""
    module, states, ids = build({**SPEC, "hash": kind}, vocab_size=1000), vectors(2, 6), ids_of(2, 6)
    rows = {
        "left": [[0, 0, 1, 1, 1, 1], [1] * 6],
        "right": [[1, 1, 1, 0, 0, 0], [1] * 6],
        "holes": [[0, 1, 0, 0, 1, 1]] * 2,
    }
    mask = torch.tensor(rows[case]).bool() if case in rows else None
    segments = torch.tensor([[0, 0, 1, 1, 1, 2], [0] * 6]) if case == "packed" else None
    call = context(2, 6, mask, segments, input_ids=ids)
    module.prepare(call, None)
    output = module(states, call).output
    before, ((factor, offset, factor_before),) = before_by_hand(ids, mask, segments), module.hashes
    for b in range(2):
        for t in range(6):
            if mask is not None and not mask[b, t]:
                continue
            w, u = int(ids[b, t]), int(before[b, t])
            mixed = factor * u if kind == "previous" else factor * w + factor_before * u
            close(output[b, t], expert(module.experts, (mixed + offset) % (2**31 - 1) % 4, states[b, t]))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["bigram", "previous"])
def test_the_token_before_while_decoding(kind):
    """A token moves itself and the next one at most; the state is the last id, also of padded rows and of beams."""
    spec = {"type": "hash_layers", "num_experts": 5, "hash": kind, "layers": (0, 1)}
    torch.manual_seed(0)
    model = make_strong(XFormerForCausalLM(XFormerConfig(**SIZES, is_decoder=True, feedforward=spec)).eval())
    experts = model.model.trunk.layers[0].feedforward
    ids = ids_of(2, 9)
    other = ids.clone()
    other[:, 4] = next(
        w for w in range(30) if all(experts.spread(torch.tensor(w)) != experts.spread(v) for v in ids[:, 4])
    )
    chosen = []
    experts.register_forward_pre_hook(lambda module, given: chosen.append(module.choose(given[1])))
    whole, moved = model(ids).logits, model(other).logits
    close(moved[:, :4], whole[:, :4], 1e-6)
    places = (chosen[0] != chosen[1]).any(0).nonzero()[:, 0].tolist()
    assert 5 in places and set(places) <= {4, 5}

    mask = torch.tensor([[0, 0, 0] + [1] * 6, [1] * 9])
    whole, cache, pieces = model(ids, attention_mask=mask).logits, None, []
    for begin, end in ((0, 5), (5, 6), (6, 9)):
        result = model(ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        pieces.append(result.logits)
    real = mask.bool()
    close(torch.cat(pieces, 1)[real], whole[real], 1e-5)
    alone = model(ids[:1, 3:]).logits
    close(whole[:1, 3:], alone, 1e-5)
    for settings in ({"num_beams": 3}, {"num_beams": 1}, {"num_beams": 1, "cache_implementation": "static"}):
        cached, plain = (
            model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=6,
                do_sample=False,
                use_cache=use,
                **(settings if use else {**settings, "cache_implementation": None}),
            )
            for use in (True, False)
        )
        assert torch.equal(cached, plain)


def test_the_token_before_has_conditions():
    net, ids = model(hash="bigram"), ids_of(1, 4)
    with pytest.raises(ValueError, match="hashes pairs of tokens, and the given Cache does not hold the last one"):
        net(ids, past_key_values=Cache(layer_class_to_replicate=DynamicLayer), use_cache=True)


@pytest.mark.parametrize("kind", ["random", "balanced", "position"])
def test_formula(kind):
    module, states, ids = build({**SPEC, "hash": kind, "bias": True}), vectors(2, 5), ids_of(2, 5)
    if kind == "balanced":
        module.table.copy_(torch.arange(module.table.shape[0]) % 3)
    output, ((factor, offset, _),) = module(states, context(2, 5, input_ids=ids)).output, module.hashes
    for b in range(2):
        for t in range(5):
            w = t if kind == "position" else int(ids[b, t])
            number = w % 3 if kind == "balanced" else (factor * w + offset) % (2**31 - 1) % 4
            close(output[b, t], expert(module.experts, number, states[b, t]))


def test_the_map():
    """The same in every process; another one for another seed or layer; no expert is left out or overrun."""
    config = make_config(num_hidden_layers=9)
    spec = build_spec("feedforward", {**SPEC, "num_experts": 8, "layers": (1, 2)})
    one, same, other = (spec.build(config, layer_idx=index) for index in (1, 1, 2))
    assert one.hashes[0][:2] == (1923856835, 1132483567)
    ids = torch.arange(8000)
    assert torch.equal(one.spread(ids), same.spread(ids)) and not torch.equal(one.spread(ids), other.spread(ids))
    seeded = build_spec("feedforward", {**SPEC, "num_experts": 8, "seed": 1}).build(config, layer_idx=1)
    assert not torch.equal(one.spread(ids), seeded.spread(ids))
    assert (torch.bincount(one.spread(ids), minlength=8) - 1000).abs().max() < 200


def test_layers():
    spec = build_spec("feedforward", "hash_layers")
    for count, chosen in ((1, 0), (2, 1), (8, 7), (12, 7)):
        config = make_config(num_hidden_layers=count)
        kinds = [type(spec.build(config, layer_idx=index)) for index in range(count)]
        assert [index for index, kind in enumerate(kinds) if kind is HashExperts] == [chosen]
        assert all(kind in (HashExperts, DenseFeedForward) for kind in kinds)


def model(**spec):
    torch.manual_seed(0)
    return make_strong(XFormerForCausalLM(XFormerConfig(**SIZES, feedforward={**SPEC, **spec})).double().eval())


def test_balance(tmp_path):
    """Loads differ by less than the most frequent token's count; the table is saved and loaded."""
    net = model(hash="balanced")
    counts = (1000 / (1 + torch.arange(30))).long()
    balance(net, counts)
    table = net.model.trunk.layers[1].feedforward.table
    loads = torch.zeros(4).long().scatter_add(0, table, counts)
    assert loads.max() - loads.min() <= counts.max() and sorted(loads.tolist())[1:] != [0, 0, 0]
    assert loads.max() - loads.min() < 500  # one expert has little beside the most frequent token
    net.save_pretrained(tmp_path)
    again = XFormerForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(again.model.trunk.layers[1].feedforward.table, table)
    ids = ids_of(2, 6)
    close(again(ids).logits, net(ids).logits)
    with pytest.raises(ValueError, match="counts"):
        balance(net, [1, 2])
    with pytest.raises(ValueError, match="balanced"):
        balance(model(), counts)


def test_needs_ids():
    net, ids = model(), ids_of(2, 6)
    assert net(ids).logits.isfinite().all()
    with pytest.raises(ValueError, match="input_ids"):
        net(inputs_embeds=net.get_input_embeddings()(ids))


@torch.no_grad()
def test_positions_choose_while_decoding():
    """The map of places goes on with a cache, and does not count padding."""
    spec = {"type": "hash_layers", "num_experts": 3, "hash": "position"}
    torch.manual_seed(0)
    model = make_strong(XFormerForCausalLM(XFormerConfig(**SIZES, is_decoder=True, feedforward=spec)).eval())
    ids = ids_of(1, 7)
    whole = model(input_ids=ids).logits
    first = model(input_ids=ids[:, :4], use_cache=True)
    rest = model(input_ids=ids[:, 4:], past_key_values=first.past_key_values).logits
    close(torch.cat([first.logits, rest], 1), whole, 1e-5)
    longer = torch.cat([ids_of(1, 2, seed=3), ids], 1)
    mask = torch.tensor([[0, 0] + [1] * 7])
    close(model(input_ids=longer, attention_mask=mask).logits[:, 2:], whole, 1e-5)


# ------------------------------------------------------------------------------------------------ maps from vectors


def blobs(count=30, kinds=4, width=5):
    """Vectors around far apart points, and the point of each."""
    drawn = torch.Generator().manual_seed(3)
    kind = torch.randint(0, kinds, (count,), generator=drawn)
    return 20 * torch.eye(kinds, width)[kind] + torch.randn(count, width, generator=drawn), kind


def table_of(net):
    return net.model.trunk.layers[1].feedforward.table


def test_k_means():
    """Far apart groups are found; elsewhere each vector is nearest to the mean of its own cluster, and none is
    empty."""
    vectors, kind = blobs()
    found = k_means(vectors, 4, torch.Generator().manual_seed(0))
    assert torch.equal(found[:, None] == found, kind[:, None] == kind)
    vectors = torch.randn(200, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = k_means(vectors, 16, torch.Generator().manual_seed(0))
    means = torch.stack([vectors[found == number].mean(0) for number in range(16)])
    assert torch.equal((vectors[:, None] - means).square().sum(-1).argmin(-1), found)
    twice = vectors[:3].repeat(5, 1)  # three different vectors make three clusters and no more
    assert len(k_means(twice, 3, torch.Generator().manual_seed(0)).unique()) == 3
    with pytest.raises(ValueError, match="4 clusters need .* only 3 are"):
        k_means(twice, 4, torch.Generator().manual_seed(0))


def test_clustered_map(tmp_path):
    """Near tokens share an expert; the map is the same every time, and comes back with the checkpoint."""
    net, (vectors, kind) = model(hash="clustered"), blobs()
    assert net.model.trunk.layers[1].feedforward.unfilled
    cluster(net, vectors)
    table = table_of(net).clone()
    assert torch.equal(table[:, None] == table, kind[:, None] == kind)
    cluster(net, vectors)
    assert torch.equal(table_of(net), table)
    net.save_pretrained(tmp_path)
    assert torch.equal(table_of(XFormerForCausalLM.from_pretrained(tmp_path)), table)
    baseline = XFormerForCausalLM(XFormerConfig(**SIZES | {"hidden_size": 6}))
    with torch.no_grad():
        baseline.get_input_embeddings().weight[:, :5] = vectors
    cluster(net, baseline)  # of a model
    assert torch.equal(table_of(net)[:, None] == table_of(net), kind[:, None] == kind)


@pytest.mark.parametrize("parts", [1, 2])
def test_dispersed_map(parts):
    """The tokens of each group are spread evenly, and so are all; several hashes spread them differently."""
    net, (vectors, kind) = model(hash="dispersed", multi_hash=parts), blobs()
    cluster(net, vectors)
    tables = table_of(net).view(parts, -1)
    for table in tables:
        for group in [kind == number for number in range(4)] + [kind >= 0]:
            loads = torch.bincount(table[group], minlength=4)
            assert loads.max() - loads.min() <= 1
    assert parts == 1 or not torch.equal(*tables)
    assert net(ids_of(2, 6)).logits.isfinite().all()


@pytest.mark.parametrize("parts", [1, 2])
def test_more_words(tmp_path, parts):
    """Words that come later are in the random map; the others stay, after loading too."""
    net = model(hash="dispersed", multi_hash=parts)
    cluster(net, blobs()[0])
    before = table_of(net).clone()
    net.resize_token_embeddings(37)
    assert torch.equal(table_of(net)[..., :30], before)
    assert torch.equal(table_of(net)[..., 30:], net.model.trunk.layers[1].feedforward.random_table()[..., 30:])
    net.save_pretrained(tmp_path)
    ids = torch.tensor([[1, 36, 7]])
    again = XFormerForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    close(again(ids).logits, net(ids).logits)
    net.resize_token_embeddings(20)
    assert torch.equal(table_of(net), before[..., :20])


def test_maps_that_cannot_be():
    with pytest.raises(ValueError, match="there are none"):
        cluster(model(hash="balanced"), blobs()[0])
    net = model(hash="dispersed")
    with pytest.raises(ValueError, match=r"\[7, 5\] numbers for a vocabulary of 30"):
        cluster(net, blobs()[0][:7])
    with pytest.raises(ValueError, match="finite"):
        cluster(net, blobs()[0] / 0)
    with pytest.raises(ValueError, match="makes its map from vectors.*cluster.*--init_from"):
        prepare_modules(net, lambda: torch.ones(30))
    cluster(net, blobs()[0])
    prepare_modules(net, None)  # there is one
    net = model(hash="balanced")
    with pytest.raises(ValueError, match="a stream does not allow"):
        prepare_modules(net, None)
    prepare_modules(net, lambda: torch.arange(30))
    assert not net.model.trunk.layers[1].feedforward.unfilled


# ------------------------------------------------------------------------------------------------ several hashes


@pytest.mark.parametrize("kind", ["random", "bigram", "position", "dispersed"])
@pytest.mark.parametrize("bias", [False, True])
def test_multi_hash(kind, bias):
    """Section 3.2 by a loop: v = relu([B_k1 x; B_k2 x]), y = [C_k1 v; C_k2 v]; padding gives zeros."""
    module = build({**SPEC, "hash": kind, "multi_hash": 2, "bias": bias}, vocab_size=40)
    states, ids = vectors(2, 6), ids_of(2, 6)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6]).bool()
    if kind == "dispersed":
        module.table.copy_(torch.randint(0, 4, (2, 40), generator=torch.Generator().manual_seed(5)))
    call = context(2, 6, mask, input_ids=ids)
    module.prepare(call, None)
    output, before = module(states, call).output, before_by_hand(ids, mask, nothing=40)
    net = module.experts
    up, down = net.up_proj.view(2, 4, 5, 6), net.down_proj.view(2, 4, 3, 10)
    up_bias = net.up_bias.view(2, 4, 5) if bias else torch.zeros(2, 4, 5)
    down_bias = net.down_bias.view(2, 4, 3) if bias else torch.zeros(2, 4, 3)
    different = 0
    for b in range(2):
        for t in range(6):
            if not mask[b, t]:
                assert (output[b, t] == 0).all()
                continue
            w, chosen = (t if kind == "position" else int(ids[b, t])), []
            for m, (factor, offset, factor_before) in enumerate(module.hashes):
                mixed = factor * w + offset + (factor_before * int(before[b, t]) if kind == "bigram" else 0)
                chosen.append(int(module.table[m, w]) if kind == "dispersed" else mixed % (2**31 - 1) % 4)
            inner = [up[m, k] @ states[b, t] + up_bias[m, k] for m, k in enumerate(chosen)]
            inner = torch.cat(inner).clamp(min=0)
            close(output[b, t], torch.cat([down[m, k] @ inner + down_bias[m, k] for m, k in enumerate(chosen)]))
            different += chosen[0] != chosen[1]
    assert different


@pytest.mark.parametrize(
    "fields",
    [
        {"stack": "axial_transformer", "attention": {"type": "axial_transformer", "columns": 4}},
        {"stack": {"type": "recurrent_windows", "window_size": 4}},
    ],
)
@torch.no_grad()
def test_ids_of_stacks_that_read_tokens_again_or_in_windows(fields):
    spec = {"type": "hash_layers", "num_experts": 4, "layers": (0, 1, 2)}
    torch.manual_seed(0)
    config = XFormerConfig(**{**SIZES, "num_hidden_layers": 3}, is_decoder=True, feedforward=spec, **fields)
    net, ids, mask = make_strong(XFormerForCausalLM(config).eval()), ids_of(2, 14), torch.ones(2, 14).long()
    mask[0, :3] = 0
    whole, cache, pieces = net(ids, attention_mask=mask, use_cache=False).logits, None, []
    for begin, end in ((0, 5), (5, 6), (6, 11), (11, 14)):
        result = net(ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        pieces.append(result.logits)
    close(torch.cat(pieces, 1)[mask.bool()], whole[mask.bool()], 1e-5)
