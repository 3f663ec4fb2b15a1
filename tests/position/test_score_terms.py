"""Positions inside attention: each equation by a loop over pairs, memory, what is refused, and the contract."""

import math

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForCausalLM
from hf_xformers.attention.dense import DenseAttention
from hf_xformers.attention.shared import query_blocks
from hf_xformers.position.deberta import log_buckets
from hf_xformers.position.t5_relative_bias import relative_buckets
from tests.attention.score_helpers import (
    GEOMETRY,
    HEADS,
    WIDTH,
    check_compile,
    check_contract,
    mixes,
    saved_sizes,
    small_blocks,
    vectors,
)
from tests.helpers import close, tokens
from tests.position.term_helpers import D_HEAD, build, check_scores, run

BOTH = pytest.mark.parametrize("causal", [False, True])


def by_pairs(term, length=9, scale=D_HEAD**-0.5):
    """Scores [B, H, T, T] by a loop over pairs: `term(b, h, i, j, q_i, k_j)` is all of a score before the scale."""

    def scores(layer, module, query, key):
        rows = [
            [
                [
                    torch.stack([term(layer, module, h, i, j, query[b, h, i], key[b, h, j]) for j in range(length)])
                    for i in range(length)
                ]
                for h in range(HEADS)
            ]
            for b in range(query.shape[0])
        ]
        return torch.stack([torch.stack([torch.stack(head) for head in row]) for row in rows]) * scale

    return scores


# ------------------------------------------------------------------------------------------------------------- Shaw


@BOTH
@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("share", [True, False])
def test_shaw_by_the_formula(causal, share, keys):
    """The vectors a_ij written out, as the paper has them: eqs. 3 and 4; and keys multiplied with them."""
    k = 3
    pairs = torch.tensor([[max(-k, min(j - i, k)) + k for j in range(9)] for i in range(9)])

    def scores(layer, module, query, key):
        vectors = layer.position_terms.key_table[:, pairs]  # [1 or H, T, T, d]
        found = torch.einsum("bhid,bhijd->bhij", query, key[:, :, None] + vectors)
        if keys:
            found = found + torch.einsum("bhjd,bhijd->bhij", key, vectors.expand(2, HEADS, -1, -1, -1))
        return found * D_HEAD**-0.5

    def values(layer, weights):
        return torch.einsum(
            "bhij,bhijd->bhid",
            weights,
            layer.position_terms.value_table[:, pairs].expand(2, -1, -1, -1, -1)
            if not share
            else layer.position_terms.value_table[:, pairs].expand(2, HEADS, -1, -1, -1),
        )

    position = {"type": "shaw_relative", "max_distance": k, "share_heads": share, "keys": keys}
    check_scores(position, scores, causal, values=values)


def test_shaw_without_distances():
    """k = 0: one vector for all pairs changes no weight and adds the same to every output."""
    layer, module, _ = build({"type": "shaw_relative", "max_distance": 0})
    plain, none, _ = build("none")
    plain.load_state_dict(layer.state_dict(), strict=False)
    states = vectors(2, 7)
    added = layer.o_proj.weight @ layer.position_terms.value_table[0, 0].repeat(HEADS)
    close(run(layer, module, states)[0], run(plain, none, states)[0] + added)


def test_shaw_zero_tables_and_reach():
    layer, module, _ = build({"type": "shaw_relative", "max_distance": 2, "values": False})
    states = vectors(1, 7)
    before = run(layer, module, states, literal=True)[1]
    with torch.no_grad():
        layer.position_terms.key_table[:, 4] += 1.0  # distance 2 and beyond
    after = run(layer, module, states, literal=True)[1]
    ratio = (after / before).log()
    for i in range(7):
        near = [j for j in range(7) if j - i < 2]
        assert ratio[0, :, i, near].std(-1).max() < 1e-9  # only the normalisation changed
        for j in range(i + 2, 7):
            assert (ratio[0, :, i, j] - ratio[0, :, i, 0]).abs().min() > 1e-6
    with torch.no_grad():
        layer.position_terms.key_table.zero_()
    plain, none, _ = build("none")
    plain.load_state_dict(layer.state_dict(), strict=False)
    close(run(layer, module, states)[0], run(plain, none, states)[0])


# ------------------------------------------------------------------------------------------------- Music Transformer


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("reach", [4, 9, 20])
def test_music_by_the_formula(share, reach):
    def term(layer, module, h, i, j, q, k):
        table = layer.position_terms.table[0 if share else h]
        return q @ (k + table[i - j]) if 0 <= i - j < reach else q @ k

    position = {"type": "music_transformer", "max_distance": reach, "share_heads": share}
    check_scores(position, by_pairs(term), causal=True)


def test_music_is_shaw_with_a_long_reach():
    music, module, _ = build({"type": "music_transformer", "max_distance": 9, "share_heads": True}, causal=True)
    shaw, other, _ = build({"type": "shaw_relative", "max_distance": 8, "values": False}, causal=True)
    shaw.load_state_dict({name: x for name, x in music.state_dict().items() if "terms" not in name}, strict=False)
    with torch.no_grad():
        shaw.position_terms.key_table[0, :9] = music.position_terms.table[0].flip(0)
    states = vectors(2, 9)
    close(run(music, module, states, causal=True)[0], run(shaw, other, states, causal=True)[0])


# ----------------------------------------------------------------------------------------------------------- DeBERTa


def bucket(distance, buckets, far):
    """The second version's bucket of one distance."""
    exact = buckets // 2
    if abs(distance) <= exact:
        return distance
    share = math.log(abs(distance) / exact) / math.log((far - 1) / exact)
    return int(math.copysign(math.ceil(share * (exact - 1) - 1e-9) + exact, distance))


def deberta_term(spec, terms, span, far):
    def term(layer, module, h, i, j, q, k):
        table, parts = module.vectors(), layer.position_terms
        own = slice(h * D_HEAD, (h + 1) * D_HEAD)
        distance = bucket(i - j, spec["buckets"], far) if spec.get("buckets") else i - j
        row = table[max(0, min(distance + span, 2 * span - 1))]
        score = q @ k
        if "c2p" in terms:
            score = score + q @ (parts.key_proj or layer.k_proj)(row)[own]
        if "p2c" in terms:
            score = score + k @ (parts.query_proj or layer.q_proj)(row)[own]
        return score

    return term


@BOTH
@pytest.mark.parametrize("terms", [("c2p", "p2c"), ("c2p",), ("p2c",)])
def test_deberta_first_version(causal, terms):
    spec = {"type": "deberta", "max_distance": 4, "terms": terms}
    scale = (D_HEAD * (1 + len(terms))) ** -0.5
    check_scores(spec, by_pairs(deberta_term(spec, terms, 4, None), scale=scale), causal)


@BOTH
def test_deberta_second_version(causal):
    spec = {"type": "deberta", "max_distance": 9, "buckets": 4, "share_projections": True, "normalize": True}
    both = ("c2p", "p2c")
    check_scores(spec, by_pairs(deberta_term(spec, both, 4, 9), scale=(3 * D_HEAD) ** -0.5), causal)


@pytest.mark.parametrize(("buckets", "far"), [(8, 20), (256, 512), (4, 9)])
def test_deberta_buckets(buckets, far):
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

    distances = torch.arange(-700, 701)
    found = log_buckets(distances, buckets, far)
    assert found.tolist() == make_log_bucket_position(distances, buckets, far).long().tolist()
    inner = [d for d in range(-far, far) if abs(math.log(max(abs(d), 1))) < 10]
    assert [int(found[d + 700]) for d in inner] == [bucket(d, buckets, far) for d in inner]


def test_deberta_ties_far_distances():
    layer, module, _ = build({"type": "deberta", "max_distance": 2})
    states = vectors(1, 1).expand(1, 8, -1)  # equal tokens: weights differ by position alone
    weights = run(layer, module, states, literal=True)[1]
    close(weights[0, :, 6, 0], weights[0, :, 6, 4])  # i - j = 6 and 2 would be 2: clipped to 1
    assert (weights[0, :, 6, 4] - weights[0, :, 6, 6]).abs().min() > 1e-9


# -------------------------------------------------------------------------------------------------------------- TUPE


def tupe_scores(relative, resets, positions=None):
    """The whole matrix of position terms as the released code makes it, then plain content."""

    def scores(layer, module, query, key):
        length = query.shape[2]
        vectors = module.norm(module.table.weight)
        pq = module.query_proj(vectors).view(-1, HEADS, D_HEAD)
        pk = module.key_proj(vectors).view(-1, HEADS, D_HEAD)
        matrix = torch.einsum("ihd,jhd->hij", pq, pk) * (2 * D_HEAD) ** -0.5
        first, second = matrix[:, 0, 0], matrix[:, 1, 1]
        if resets:
            matrix = matrix[:, 1:, 1:]
        matrix = matrix[:, :length, :length].clone()
        if resets:
            matrix[:, :, 0] = second[:, None]
            matrix[:, 0, :] = first[:, None]
        if relative:
            distance = torch.arange(length)[None] - torch.arange(length)[:, None]
            buckets = relative_buckets(
                distance, bidirectional=layer.position_terms.bidirectional, num_buckets=8, max_distance=12
            )
            if resets:
                buckets[:, 0] = 8
                buckets[0, :] = 4
            matrix = matrix + module.bias(buckets).permute(2, 0, 1)
        content = query @ key.transpose(-1, -2) * (2 * D_HEAD) ** -0.5
        return content + (
            matrix if positions is None else matrix[:, positions[:, :, None], positions[:, None]].transpose(0, 1)
        )

    return scores


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize(("resets", "causal"), [(True, False), (False, False), (False, True)])
def test_tupe_by_the_released_code(relative, resets, causal):
    spec = {"type": "tupe", "relative": relative, "untie_cls": resets, "num_buckets": 8, "max_distance": 12}
    check_scores(spec, tupe_scores(relative, resets), causal)


def test_tupe_left_padding_moves_cls():
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1, 1]]).bool()
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    spec = {"type": "tupe", "num_buckets": 8, "max_distance": 12}
    check_scores(spec, tupe_scores(True, True, positions), mask=mask)


def test_tupe_without_terms_is_scaled_attention():
    layer, module, _ = build({"type": "tupe", "relative": False, "untie_cls": False})
    with torch.no_grad():
        for parameter in module.query_proj.parameters():
            parameter.zero_()
    plain, none, _ = build("none", attention={"type": "dense", "scale": (2 * D_HEAD) ** -0.5})
    plain.load_state_dict(layer.state_dict(), strict=False)
    states = vectors(2, 7)
    close(run(layer, module, states)[0], run(plain, none, states)[0])


def test_tupe_refusals():
    assert XFormerConfig(position="tupe").position.resets(XFormerConfig())
    assert not XFormerConfig(position="tupe").position.resets(XFormerConfig(is_decoder=True))


# ----------------------------------------------------------------------------------------------- a bias of each layer


@BOTH
def test_bias_of_the_layer_by_the_formula(causal):
    """q_i k_j / sqrt(d) + b[bucket(j - i), h], one pair at a time, with the layer's own table."""
    spec = {"type": "t5_bias_per_layer", "num_buckets": 8, "max_distance": 12}

    def term(layer, module, h, i, j, q, k):
        number = relative_buckets(torch.tensor(j - i), bidirectional=not causal, num_buckets=8, max_distance=12)
        return q @ k + layer.position_terms.table.weight[number, h] / D_HEAD**-0.5

    check_scores(spec, by_pairs(term), causal)


def test_equal_biases_of_layers_are_the_shared_one():
    sizes = dict(vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)
    own, shared = (
        XFormerForCausalLM(XFormerConfig(**sizes, position=name)).double().eval()
        for name in ("t5_bias_per_layer", "t5_relative_bias")
    )
    found = shared.load_state_dict(own.state_dict(), strict=False)
    assert found.missing_keys == ["model.trunk.position.table.weight"]
    tables = [layer.attention.position_terms.table.weight for layer in own.model.trunk.layers]
    ids = tokens(2, 9, high=30)
    with torch.no_grad():
        tables[1].copy_(tables[0])
        shared.model.trunk.position.table.weight.copy_(tables[0])
        close(own(ids).logits, shared(ids).logits)
        tables[1].add_(torch.randn_like(tables[1]))
        assert (own(ids).logits - shared(ids).logits).abs().max() > 1e-4


# ------------------------------------------------------------------------------------------------ relative sinusoids


@BOTH
def test_relative_sinusoids_by_the_formula(causal):
    def term(layer, module, h, i, j, q, k):
        angles = module.frequency * (i - j)
        return q @ (k + torch.cat([angles.sin(), angles.cos()]))

    check_scores("learnable_sinusoidal_relative", by_pairs(term), causal)


# ------------------------------------------------------------------------------------------------------ all of them

TERMS = {
    "shaw": {"type": "shaw_relative", "max_distance": 3},
    "shaw_keys": {"type": "shaw_relative", "max_distance": 3, "keys": True},
    "deberta": {"type": "deberta", "max_distance": 5},
    "deberta_v2": {"type": "deberta", "buckets": 4, "max_distance": 10, "share_projections": True, "normalize": True},
    "tupe": {"type": "tupe", "num_buckets": 8, "max_distance": 12},
    "sinusoids": "learnable_sinusoidal_relative",
}
CASES = mixes({f"terms_{name}": {"position": spec} for name, spec in TERMS.items() if name != "shaw"})
CASES += mixes({"terms_grouped": {"position": TERMS["shaw"], "num_key_value_heads": 2}}, ("decoder",))


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_contract_in_blocks(case):
    with small_blocks(3):
        check_contract(case)


# A decoder's graph has the same operations under another mask: one of the terms is traced in a decoder.
@pytest.mark.parametrize("case", CASES[::4], ids=str)
def test_compile(case):
    check_compile(case)


@pytest.mark.parametrize("name", [*TERMS, "music"])
def test_memory(name):
    """Nothing with an axis of pairs is kept for the backward pass once texts have several blocks."""
    spec = "deberta" if name == "deberta" else TERMS.get(name, "music_transformer")
    layer, module, _ = build(spec, causal=True, max_position_embeddings=64)
    length, rows = 40, 4
    states = vectors(1, length).requires_grad_()
    with small_blocks(rows):
        sizes = saved_sizes(lambda: run(layer, module, states, causal=True))
    assert sizes[0] < HEADS * length * length / 2, sizes[:4]


@pytest.mark.parametrize("name", [*TERMS, "music"])
def test_loss_of_a_position_is_noticed(name):
    """The terms matter: two equal tokens at different places differ."""
    spec = TERMS.get(name, "music_transformer")
    layer, module, _ = build(spec, causal=True)
    states = vectors(1, 3)[:, [0, 1, 1, 2]]
    weights = run(layer, module, states, causal=True, literal=True)[1]
    assert (weights[0, :, 3, 1] - weights[0, :, 3, 2]).abs().min() > 1e-6


def test_gradients_reach_shared_tables_under_checkpointing():
    config = XFormerConfig(
        vocab_size=99,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        intermediate_size=16,
        position="tupe",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    found = []
    for reentrant in (None, False, True):
        torch.manual_seed(0)
        model = XFormerForCausalLM(config).double().train()
        if reentrant is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        ids = tokens(2, 6)
        model(ids, labels=ids).loss.backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for other in found[1:]:
        for name, gradient in found[0].items():
            close(other[name], gradient)
    assert found[0]["model.trunk.position.table.weight"].abs().max() > 0


@pytest.mark.parametrize("position", ["shaw_relative", "learnable_sinusoidal_relative"])
def test_a_mask_for_each_head(position, monkeypatch):
    """A mask that the caller prepared may differ by head, also where few heads are taken at a time."""
    monkeypatch.setattr(query_blocks, "SCORES_AT_ONCE", 16)
    monkeypatch.setattr(query_blocks, "LEAST_ROWS", 3)
    layer, module, _ = build(position)
    generator = torch.Generator().manual_seed(7)
    mask = (torch.rand(2, HEADS, 9, 9, generator=generator) < 0.5) | torch.eye(9, dtype=torch.bool)
    given = {"explicit_mask": mask}
    literal, weights = run(layer, module, vectors(2, 9), literal=True, **given)
    assert weights is not None and not weights[~mask].any()
    close(run(layer, module, vectors(2, 9), **given)[0], literal)


def test_every_attention_builds_the_terms_but_those_that_read_a_memory():
    """A mechanism needs no class of its own for them, and its tensors keep their names."""
    for attention in ("dense", "band_attention", "longformer", "bigbird", "reformer", "routing_transformer"):
        config = XFormerConfig(**{**GEOMETRY, "position": "shaw_relative", "attention": attention})
        layer = config.attention.build(config, layer_idx=0)
        names = {name for name, _ in layer.named_parameters() if name.startswith("position_terms")}
        assert names == {"position_terms.key_table", "position_terms.value_table"}
        assert not layer.takes_unpadded
    config = XFormerConfig(**{**GEOMETRY, "position": "shaw_relative"})
    assert config.attention.build(config, layer_idx=0, cross=True).position_terms is None


def test_an_attention_with_its_own_forward_reads_the_padded_batch():
    """Also where the class that it derives from takes real tokens alone."""

    class Own(DenseAttention):
        def forward(self, hidden_states, context, **given):
            return super().forward(hidden_states, context, **given)

    class Plain(DenseAttention):
        pass

    config = XFormerConfig(**GEOMETRY)
    assert Plain(config, config.attention, layer_idx=0).takes_unpadded
    assert not Own(config, config.attention, layer_idx=0).takes_unpadded
    assert not Plain(config, config.attention, layer_idx=0, cross=True).takes_unpadded
