"""Positions inside attention: each equation by a loop over pairs, memory, and what is refused."""

import math

import pytest
import torch

from hf_xformers import XFormerConfig
from hf_xformers.attention.dense import DenseAttention
from hf_xformers.attention.shared import query_blocks
from hf_xformers.position.deberta import log_buckets
from hf_xformers.position.t5_relative_bias import relative_buckets
from tests.attention.score_helpers import (
    GEOMETRY,
    HEADS,
    saved_sizes,
    small_blocks,
    vectors,
)
from tests.helpers import close
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


# ------------------------------------------------------------------------------------------------- Music Transformer


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("reach", [4, 9, 20])
def test_music_by_the_formula(share, reach):
    def term(layer, module, h, i, j, q, k):
        table = layer.position_terms.table[0 if share else h]
        return q @ (k + table[i - j]) if 0 <= i - j < reach else q @ k

    position = {"type": "music_transformer", "max_distance": reach, "share_heads": share}
    check_scores(position, by_pairs(term), causal=True)


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
