"""Every kind of Synthesizer against its definition, place by place."""

import math

import pytest
import torch
from transformers.cache_utils import DynamicCache, StaticCache

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerForMaskedLM
from tests.attention.score_helpers import (
    GEOMETRY,
    HEADS,
    PADDING,
    WIDTH,
    build_layers,
    check_compile,
    check_contract,
    make_context,
    mixes,
    run_layers,
    saved_sizes,
    small_blocks,
    split_heads,
    vectors,
)
from tests.helpers import close, make_strong, tokens

LENGTH = 24  # places of GEOMETRY
KINDS = ("dense", "random", "fixed_random", "factorized_dense", "factorized_random")
MIXTURES = (
    "random+dot",
    "dense+dot",
    "dense+factorized_random",
    "dot+factorized_dense+fixed_random+random",
    "random+fixed_random",
)
PATHS = ("literal", "fast")


@pytest.fixture
def path(request):
    if request.param == "literal":
        yield {"implementation": "eager"}
    else:
        with small_blocks():
            yield {"implementation": "sdpa"}


each_path = pytest.mark.parametrize("path", PATHS, indirect=True)


def build(kind, count=1, causal=False, config=None, **fields):
    layers = build_layers({"type": "synthesizer", "kind": kind, **fields}, count, causal, **(config or {}))
    for layer in layers:
        if "fixed_random" in kind:
            torch.manual_seed(5)
            layer.fixed_table.normal_()
    return layers


@torch.no_grad()
def scores_of(layer, member, states):
    """B [H, T, L] of one row of tokens [T, D], or [H, T, T] of dot, by the definition."""
    heads, d, length = layer.num_heads, layer.head_dim, states.shape[0]
    own = torch.arange(heads) if not layer.spec.share_heads else torch.zeros(heads, dtype=torch.long)
    result = torch.zeros(heads, length, layer.length, dtype=torch.float64)
    for h in range(heads):
        part = slice(h * d, (h + 1) * d)
        for i in range(length):
            if member == "dense":
                hidden = layer.hidden_proj.weight[part] @ states[i]
                hidden = (hidden if layer.hidden_proj.bias is None else hidden + layer.hidden_proj.bias[part]).clamp(
                    min=0
                )
                result[h, i] = layer.dense_table[own[h]] @ hidden
                if layer.dense_bias is not None:
                    result[h, i] += layer.dense_bias[own[h]]
            elif member == "random":
                result[h, i] = layer.random_table[own[h], i]
            elif member == "fixed_random":
                result[h, i] = layer.fixed_table[own[h], i]
            elif member == "factorized_random":
                for j in range(layer.length):
                    result[h, i, j] = layer.query_table[own[h], i] @ layer.key_table[own[h], j]
            elif member == "factorized_dense":
                a, b = (proj.out_features // heads for proj in (layer.row_proj, layer.column_proj))
                u, w = layer.row_proj(states[i]), layer.column_proj(states[i])
                for p in range(a):
                    for r in range(b):
                        result[h, i, p * b + r] = u[h * a + p] * w[h * b + r]
            else:
                q, k = layer.q_proj(states), layer.k_proj(states)
                group = slice(h // layer.num_key_value_groups * d, (h // layer.num_key_value_groups + 1) * d)
                result[h, i, :length] = k[:, group] @ q[i, part] / math.sqrt(d)
    return result[:, :, :length]


@torch.no_grad()
def by_hand(layer, states, causal, mask=None, shares=None):
    """Each row's real tokens on their own, as if there were no padding; zeros elsewhere."""
    output = torch.zeros(*states.shape[:2], layer.num_heads * layer.head_dim, dtype=torch.float64)
    for b in range(states.shape[0]):
        real = torch.arange(states.shape[1]) if mask is None else mask[b].nonzero().flatten()
        if len(real) == 0:
            continue
        tokens_ = states[b, real]
        logits = sum(
            (1.0 if shares is None else shares[member]) * scores_of(layer, member, tokens_) for member in layer.members
        )
        if causal:
            logits = logits.masked_fill(torch.ones(len(real), len(real)).triu(1).bool(), -math.inf)
        v = split_heads(layer.v_proj(tokens_)[None], layer.head_dim)[0].repeat_interleave(
            layer.num_key_value_groups, 0
        )
        output[b, real] = (torch.softmax(logits, -1) @ v).transpose(0, 1).flatten(1)
    return layer.o_proj(output)


def softmax_shares(layer):
    if layer.mixture is None:
        return None
    return dict(zip(layer.members, torch.softmax(layer.mixture.detach(), 0).tolist()))


@each_path
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", KINDS + MIXTURES)
def test_equation(path, kind, causal):
    """Without padding and with padding on either side, which takes no place in a table."""
    (layer,) = build(kind, causal=causal)
    states = vectors(4, 6)
    for mask in (None, PADDING):
        found = run_layers([layer], states, make_context(6, causal, padding_mask=mask, **path))[0].output.detach()
        expected = by_hand(layer, states, causal, mask, softmax_shares(layer))
        if mask is None:
            close(found, expected)
        else:
            close(found[mask], expected[mask])
            close(found[3], expected[3])  # a row of padding alone: zeros, and the output's bias


@each_path
@pytest.mark.parametrize("kind", ["dense", "random", "factorized_random+random+dot"])
@pytest.mark.parametrize(
    "fields",
    [
        {"share_heads": True},
        {"bias": False},
        {"max_length": 7},
        {"config": {"num_key_value_heads": 2}},
        {"config": {"head_dim": 5}},
    ],
    ids=["shared", "no_bias", "length", "grouped", "width"],
)
def test_options(path, kind, fields):
    (layer,) = build(kind, **fields)
    states = vectors(4, 6)
    found = run_layers([layer], states, make_context(6, padding_mask=PADDING, **path))[0].output.detach()
    close(found[PADDING], by_hand(layer, states, False, PADDING, softmax_shares(layer))[PADDING])


@each_path
def test_scores_of_places_do_not_depend_on_tokens(path):
    """With random tables the weights are the same whatever is read."""
    for kind in ("random", "fixed_random", "factorized_random"):
        (layer,) = build(kind)
        first, second = (
            run_layers([layer], vectors(2, 6, seed=seed), make_context(6, output_attentions=True))[0].weights
            for seed in (0, 1)
        )
        close(first, second)


@pytest.mark.parametrize("kind", ["dense", "factorized_dense"])
def test_scores_of_a_token_depend_on_it_alone(kind):
    (layer,) = build(kind)
    states = vectors(1, 6)
    changed = states.clone()
    changed[0, 2] += 1.0
    first, second = (
        run_layers([layer], one, make_context(6, output_attentions=True))[0].weights[0] for one in (states, changed)
    )
    others = [0, 1, 3, 4, 5]
    close(first[:, others], second[:, others])
    assert (first[:, 2] - second[:, 2]).abs().max() > 1e-3


def test_products_are_distinct():
    """Every place has a product of its own, which tiling both factors alike would not give."""
    (layer,) = build("factorized_dense", factor=4)
    assert layer.row_proj.out_features == 4 * HEADS and layer.column_proj.out_features == 6 * HEADS
    scores = scores_of(layer, "factorized_dense", vectors(1, LENGTH)[0])
    assert all(len(scores[h, i].unique()) == LENGTH for h in range(HEADS) for i in range(3))


def test_factorized_random_is_dense_attention_over_tables():
    (layer,) = build("factorized_random")
    states = vectors(2, 9)
    with torch.no_grad():
        q, k = layer.query_table[None, :, :9].expand(2, -1, -1, -1), layer.key_table[None, :, :9].expand(2, -1, -1, -1)
        v = split_heads(layer.v_proj(states), layer.head_dim)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=1.0)
        expected = layer.o_proj(mixed.transpose(1, 2).flatten(2))
    close(run_layers([layer], states, make_context(9))[0].output.detach(), expected)


@each_path
def test_mixtures(path):
    """A one-hot mixture is its member; a sigmoid of zero is the average with dot; the sum is the sum."""
    states = vectors(2, 6)

    def output(layer):
        return run_layers([layer], states, make_context(6, **path))[0].output.detach()

    (layer,) = build("dense+random+dot")
    for number, member in enumerate(layer.members):
        with torch.no_grad():
            layer.mixture.copy_(torch.eye(3, dtype=torch.float64)[number] * 1e4)
        shares = dict.fromkeys(layer.members, 0.0) | {member: 1.0}
        close(output(layer), by_hand(layer, states, False, shares=shares))
    (layer,) = build("random+dot", mixture="sigmoid")
    for number, share in ((0.0, 0.5), (1.3, 1 / (1 + math.exp(-1.3)))):
        with torch.no_grad():
            layer.mixture.fill_(number)
        close(output(layer), by_hand(layer, states, False, shares={"random": share, "dot": 1 - share}))
    (layer,) = build("random+dot", mixture="sum")
    assert layer.mixture is None
    close(output(layer), by_hand(layer, states, False))


def test_equal_shares_at_the_start():
    (layer,) = build("random+dot+dense")
    layer.initialize(layer.config, torch.nn.init)
    close(torch.stack(list(layer._shares().values())), torch.full((3,), 1 / 3, dtype=torch.float64))
    bound = (6 / (2 * LENGTH)) ** 0.5
    assert 0.9 * bound < layer.random_table.abs().max() <= bound and (layer.dense_bias == 0).all()


def test_fixed_tables_stay(tmp_path):
    """Never trained, the same for the same seed, and saved with the model."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        config = XFormerConfig(**GEOMETRY, attention={"type": "synthesizer", "kind": "fixed_random"})
        models.append(XFormerForMaskedLM(config))
    model, ids = models[0], tokens(2, 6, high=50)
    table = model.model.trunk.layers[0].attention.fixed_table
    before = table.clone()
    assert torch.equal(before, models[1].model.trunk.layers[0].attention.fixed_table) and before.std() > 0.1
    assert not any("fixed_table" in name for name, _ in model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    assert torch.equal(table, before)
    model.save_pretrained(tmp_path)
    torch.manual_seed(9)
    loaded = XFormerForMaskedLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.model.trunk.layers[0].attention.fixed_table, before)


@pytest.mark.parametrize("kind", ["dense", "random", "factorized_random", "random+dot"])
@pytest.mark.parametrize("cache_kind", ["growing", "static"])
def test_caches(kind, cache_kind):
    (layer,) = build(kind, causal=True)
    states = vectors(4, 6)
    for mask in (None, PADDING):
        expected = by_hand(layer, states, True, mask, softmax_shares(layer))
        cache = DynamicCache() if cache_kind == "growing" else StaticCache(layer.config, max_cache_len=30)
        found, done = [], 0
        for length in (3, 1, 2):
            padding = None if mask is None else mask[:, : done + length]
            more = {}
            if cache_kind == "static":
                more = {"key_index": torch.arange(30), "fresh": False, "static": True}
                padding = None if mask is None else torch.nn.functional.pad(padding, (0, 30 - done - length))
            context = make_context(length, True, past=done, padding_mask=padding, **more)
            with small_blocks(2):
                found.append(run_layers([layer], states[:, done : done + length], context, cache=cache)[0].output)
            done += length
        found, real = torch.cat(found, 1).detach(), torch.ones(4, 6).bool() if mask is None else mask
        close(found[real], expected[real])


@pytest.mark.parametrize("kind", ["dense", "random", "factorized_dense+dot"])
def test_as_long_as_the_tables(kind):
    config = XFormerConfig(**GEOMETRY, position="none", attention={"type": "synthesizer", "kind": kind})
    torch.manual_seed(0)
    model = make_strong(XFormerForMaskedLM(config).double().eval())
    ids = tokens(2, LENGTH, high=50)
    with torch.no_grad(), small_blocks(7):
        expected = model(input_ids=ids).logits
        with pytest.raises(ValueError, match="25 tokens, but this synthesizer's tables have 24 places"):
            model(input_ids=tokens(2, LENGTH + 1, high=50))
        for side in ("left", "right"):  # padding takes no place
            padding = (3, 0) if side == "left" else (0, 3)
            padded, mask = (torch.nn.functional.pad(x, padding) for x in (ids, torch.ones_like(ids)))
            close(model(input_ids=padded, attention_mask=mask).logits[mask.bool()], expected.flatten(0, 1))
    config = XFormerConfig(**GEOMETRY, position="none", attention={"type": "synthesizer", "kind": kind})
    model = XFormerForCausalLM(config).eval()
    cache = model(input_ids=ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="25 tokens"):
        model(input_ids=ids[:, :1], past_key_values=cache)


def test_what_is_kept():
    """Kinds that are products keep nothing of T x T; the others keep it for one block of queries."""
    for kind in ("dense", "factorized_random", "dense+dot"):
        (layer,) = build(kind, max_length=400)
        for length in (100, 400):
            assert (
                saved_sizes(lambda: run_layers([layer], vectors(1, length), make_context(length)))[0]
                <= length * 4 * WIDTH
            )
    (layer,) = build("factorized_dense+dot", max_length=400)
    with small_blocks(8):
        assert saved_sizes(lambda: run_layers([layer], vectors(1, 400), make_context(400)))[0] <= 400 * 4 * WIDTH


def test_tables_do_not_grow_with_the_batch():
    """Scores of places have no batch axis: what is kept for them is the same for one row and for eight."""
    (layer,) = build("random", max_length=60)
    for batch in (1, 8):
        assert saved_sizes(lambda: run_layers([layer], vectors(batch, 60), make_context(60)))[0] == HEADS * 60 * 60


def test_refusals():
    for fields, message in (
        ({"kind": "sparse"}, "takes dot, dense, random"),
        ({"kind": "dot"}, "use attention 'dense'"),
        ({"kind": "random+random"}, "must name different kinds"),
        ({"kind": "random+dense", "mixture": "sigmoid"}, "mixes dot and one other kind"),
        ({"kind": "random+dense+dot", "mixture": "sigmoid"}, "mixes dot and one other kind"),
        ({"kind": "factorized_dense", "factor": 5}, "`factor` that divides its 24 places, got 5"),
        ({"rank": 0}, "`rank` >= 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            XFormerConfig(**GEOMETRY, attention={"type": "synthesizer", **fields})
    with pytest.raises(ValueError, match="rotates queries and keys, which synthesizer of kind 'random' lacks"):
        XFormerConfig(**GEOMETRY, position="rotary", attention={"type": "synthesizer", "kind": "random"})
    with pytest.raises(ValueError, match="cannot read a memory"):
        XFormerConfig(**GEOMETRY, is_encoder_decoder=True, cross_attention="synthesizer")


MIXES = {
    "random": {"attention": {"type": "synthesizer", "kind": "random"}},
    "factorized_dense": {"attention": {"type": "synthesizer", "kind": "factorized_dense"}},
    "everything": {
        "attention": {
            "type": "synthesizer",
            "kind": "dense+random+fixed_random+factorized_dense+factorized_random+dot",
        },
        "num_key_value_heads": 2,
    },
    "products": {"attention": {"type": "synthesizer", "kind": "factorized_random+dot"}, "position": "rotary"},
}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("case", mixes(MIXES), ids=str)
def test_contract(case):
    with small_blocks():
        check_contract(case)


COMPILED = [
    *mixes({"everything": MIXES["everything"]}, ("decoder",)),
    *mixes({"products": MIXES["products"]}, ("encoder",)),
]


@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_compile(case):
    with small_blocks(5):
        check_compile(case)


@each_path
@pytest.mark.parametrize("kind", ["dense", "random"])
def test_dropout_acts_on_weights(path, kind):
    """In each row of the batch on its own."""
    (layer,) = build(kind, config={"attention_probs_dropout_prob": 0.5})
    states = vectors(1, 6).expand(2, -1, -1)
    expected = run_layers([layer], states, make_context(6, **path))[0].output.detach()
    torch.manual_seed(0)
    with torch.no_grad():
        draws = torch.stack(
            [run_layers([layer.train()], states, make_context(6, **path))[0].output for _ in range(300)]
        )
    assert (draws[0, 0] - draws[0, 1]).abs().max() > 1e-3
    assert ((draws.mean(0) - expected).abs() < 5 * draws.std(0) / 300**0.5 + 1e-12).all()


@pytest.mark.parametrize("kind", ["dense", "random", "factorized_dense+dot"])
def test_static_cache_of_generation(kind):
    """`generate` with a static cache prepares masks of its own, in which left padding still takes no place."""
    config = XFormerConfig(**GEOMETRY, is_decoder=True, attention={"type": "synthesizer", "kind": kind})
    torch.manual_seed(0)
    model = make_strong(XFormerForCausalLM(config).double().eval())
    ids, mask = tokens(2, 5, high=50), torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "attention_mask": mask}
    settings.update(output_scores=True, return_dict_in_generate=True)
    expected = model.generate(input_ids=ids, **settings)
    output = model.generate(input_ids=ids, cache_implementation="static", disable_compile=True, **settings)
    assert torch.equal(output.sequences, expected.sequences)
    for one, other in zip(output.scores, expected.scores, strict=True):
        close(one, other)
