"""What a family does with its own defaults at ordinary lengths: the keys that its queries read, and the pairs it
computes.

Pairs are counted by the matrix products of one narrow layer beyond its projections, a pair being one score and one
weighted value. Families that are dense by nature, or whose stack bounds what a layer sees, have nothing to count.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig
from transformers import initialization as init

import hf_xformers  # noqa: F401  (registers the families)
from hf_xformers.core.components import SLOTS
from hf_xformers.ops.block_sparse import op as block_sparse_op
from hf_xformers.ops.bucketed import cluster_op as _cluster_op
from hf_xformers.ops.bucketed import op as _bucketed_op
from tests.attention.group_helpers import context

LENGTHS = (128, 512, 2048)
HEADS, WIDTH = 2, 16


def layer_of(name, causal, length, longest=None):
    """Layer 0 of a family's own config, but narrow, for texts of up to `longest` tokens (`None`: as the family
    says); or of a free mix with the attention `name`."""
    attention = {}
    if name in SLOTS["attention"]:
        name, attention = "xformer", {"attention": name}
    given = AutoConfig.for_model(name)
    sizes = {"vocab_size": 50, "hidden_size": HEADS * WIDTH, "num_attention_heads": HEADS, "intermediate_size": 8}
    config = AutoConfig.for_model(
        name,
        **sizes,
        num_hidden_layers=2,
        max_position_embeddings=longest or max(given.max_position_embeddings, length),
        is_decoder=causal,
        use_cache=False,
        attention_probs_dropout_prob=0.0,
        **attention,
    )
    torch.manual_seed(0)
    made = config.attention.build(config, layer_idx=0)
    made.initialize(config, init)
    return made.eval()


def states(length):
    return torch.randn(1, length, HEADS * WIDTH, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def run(layer, causal, length, implementation="sdpa"):
    seen = context(length, causal, implementation=implementation)
    layer.prepare(seen, None)
    return layer(states(length), seen)


def inside(implementation):
    """What one of our operators multiplies, by running its own code once more."""

    def formula(*args, out_val=None, **kwargs):
        with FlopCounterMode(display=False, custom_mapping=formulas()) as counter:
            implementation(*args, **kwargs)
        return counter.get_total_flops()

    formula._get_raw = True
    return formula


def formulas():
    """Of operators that torch's counter does not know."""
    aten, own = torch.ops.aten, torch.ops.hf_xformers

    def sdpa(query, key, value, *args, out_shape=None, **kwargs):
        pairs = query[0] * query[1] * query[2] * key[-2]
        causal = any(argument is True for argument in args) or kwargs.get("is_causal", False)
        return 4 * pairs * query[3] // (2 if causal else 1)

    def added(target, one, other, *args, out_shape=None, **kwargs):
        return 2 * torch.Size(one).numel() * other[-1]

    return {
        aten.addmm_: added,
        aten.baddbmm_: added,
        aten._scaled_dot_product_flash_attention_for_cpu: sdpa,
        own.block_sparse: inside(block_sparse_op._forward),
        own.bucketed: inside(_bucketed_op._forward),
        own.clusters: inside(_cluster_op._forward),
    }


def pairs(name, causal, length, longest=None):
    """Pairs that each query's share of the computation comes to."""
    layer, projections = layer_of(name, causal, length, longest), []
    for part in layer.modules():
        if isinstance(part, torch.nn.Linear):  # some of them project a few vectors, not all tokens
            part.register_forward_hook(
                lambda part, given, made: projections.append(2 * part.in_features * made.numel())
            )
    with FlopCounterMode(display=False, custom_mapping=formulas()) as counter:
        run(layer, causal, length)
    return (counter.get_total_flops() - sum(projections)) / length / (4 * HEADS * WIDTH)


# Families, and by how much the work may grow when a text doubles: 2 where it is linear, 2.83 where it is T sqrt(T),
# and what whole blocks add. The last is the number of pairs that one query may take beside those of dense attention at
# 128 and 512 tokens, where blocks, rounds of hashing and features are not yet fewer than tokens (`None`: not of this
# kind).
LINEAR, ROOT = 2.3, 2.95
GROWING = ("xf_sparse_transformer", "xf_axial_transformer")
CASES = [
    ("xf_bigbird", False, LINEAR, 4 * 64),  # blocks of global tokens are computed for rows and for columns
    ("xf_longformer", False, LINEAR, 64),
    ("xf_longformer", True, LINEAR, 64),
    ("xf_reformer", False, LINEAR, 4 * 128),  # four rounds of two chunks, and the hashes
    ("xf_reformer", True, 2.5, 4 * 128),  # a doubling that begins a stage computes what is before it anew
    ("xf_routing_transformer", False, ROOT, 16),
    ("xf_routing_transformer", True, ROOT, 64),
    ("xf_sparse_transformer", False, ROOT, 64),
    ("xf_sparse_transformer", True, ROOT, 64),
    ("xf_adaptive_span", True, LINEAR, 64),
    ("xf_poolingformer", False, LINEAR, 2 * 128),  # a quarter of the tokens, pooled, in blocks
    ("xf_poolingformer", True, LINEAR, 2 * 128),
    ("xf_transformer_on_a_diet", False, LINEAR, 64),
    ("xf_transformer_on_a_diet", True, LINEAR, 64),
    ("xf_luna", False, LINEAR, None),
    ("xf_luna", True, LINEAR, None),
    ("xf_nystromformer", False, LINEAR, None),
    ("xf_csalr", False, LINEAR, None),
    ("xf_memory_compressed_attention", False, LINEAR, 256),  # layer 0 is local: half of its blocks' pairs are masked
    ("xf_memory_compressed_attention", True, LINEAR, 64),
    ("xf_set_transformer", False, LINEAR, None),
    ("xf_clustered_attention", False, LINEAR, None),
    ("xf_improved_clustered_attention", False, LINEAR, None),
    ("xf_performer", False, LINEAR, None),
    ("xf_performer", True, LINEAR, None),
    ("xf_linear_transformer", False, LINEAR, None),
    ("xf_linear_transformer", True, LINEAR, None),
    ("xf_delta_net", True, LINEAR, None),
    ("xf_axial_transformer", False, ROOT, 64),
    ("xf_etc", False, LINEAR, 128),
    ("xf_bp_transformer", False, LINEAR, 256),  # a block of 64 tokens shares the nodes that it reads
    ("xf_bp_transformer", True, LINEAR, 256),
    ("xf_image_transformer", False, LINEAR, 512),
    ("xf_image_transformer", True, LINEAR, 256),
    ("xf_hard_coded_gaussian", False, LINEAR, 64),
    ("xf_hard_coded_gaussian", True, LINEAR, 64),
    ("sliding_window", False, LINEAR, 64),
    ("sliding_window", True, LINEAR, 64),
    ("transient_global", False, 3.0, None),  # a sixteenth of all pairs, which grow with the square
    ("hedgehog", False, LINEAR, None),
    ("hedgehog", True, LINEAR, None),
    ("t2r", False, LINEAR, None),
    ("t2r", True, LINEAR, None),
    ("xf_sinkhorn_transformer", False, ROOT, 128),
    ("xf_sinkhorn_transformer", True, ROOT, 128),
    ("lolcats", False, LINEAR, None),
    ("lolcats", True, LINEAR, None),
    ("xf_informer", False, 2.4, None),  # T ln T, and ln T in whole steps
    *((name, causal, LINEAR, None) for name in ("xf_performer_v1", "xf_rfa") for causal in (False, True)),
    *((name, causal, LINEAR, None) for name in ("xf_arccos_attention", "xf_dpfp") for causal in (False, True)),
]


@pytest.mark.parametrize(("name", "causal", "growth", "beside"), CASES, ids=lambda value: str(value))
def test_pairs_computed(name, causal, growth, beside):
    # One stride serves all texts of a Sparse Transformer, and one number of columns those of an Axial one, so what
    # grows is the model that is made for a text.
    longest = {length: length if name in GROWING else None for length in LENGTHS}
    found = {length: pairs(name, causal, length, longest[length]) for length in LENGTHS}
    if beside is not None:
        for length in (128, 512):
            assert found[length] <= length + beside, found
        assert found[2048] < 2048 / 2, found
    for short, long in itertools.pairwise(LENGTHS):
        # What starts dense becomes sparse at some length, before which it may grow as dense attention does.
        if beside is None or found[short] < short / 2:
            total = found[long] * long / (found[short] * short)
            assert total**0.5 <= growth, found  # by a doubling


# ------------------------------------------------------------------------------------------- keys


def queries(length):
    return torch.arange(7, length, length // 32)


def keys_of_pattern(layer, causal, length):
    """Of patterns: [heads, queries]; what is global is read as well."""
    at, keys = queries(length)[:, None], torch.arange(length)[None]
    read = torch.stack([layer.pattern.bind(length).for_head(head).allows(at, keys) for head in range(HEADS)])
    if causal:
        read = read & (keys <= at)
    chosen = layer.global_tokens(context(length, causal))[0]
    return (read if chosen is None else read | chosen | chosen[0, at[:, 0]][:, None]).sum(-1)


def keys_of_reformer(layer, causal, length):
    """Same bucket; own and previous chunk of the order, or the 64 before."""
    key = layer.keys(layer.heads(layer.q_proj(states(length))))
    labels, at, place = layer.hash(key)[0], queries(length), torch.arange(length)
    read = torch.zeros(HEADS, len(at), length, dtype=torch.bool)
    for number in range(4):
        if causal:
            stage = torch.tensor([sum(i >= other.begin for other in layer.stages[1:]) for i in range(length)])[at]
            own = labels.unflatten(1, (-1, 4))[:, :, number]
            own = own[:, stage]  # [heads, queries, keys]
            mates = (own == own.gather(2, at[None, :, None].expand(HEADS, -1, 1))) & (place < at[:, None])
            read |= mates & (mates.flip(-1).cumsum(-1).flip(-1) <= 64)
            continue
        own = labels[:, number].long()
        rank = (own * length + place).argsort(-1).argsort(-1) // 64
        behind = rank[:, at, None] - rank[:, None]
        read |= (own[:, at, None] == own[:, None]) & (behind >= 0) & (behind <= 1)
    return read.sum(-1)


def keys_of_routing(layer, causal, length):
    """Of the routed head: the clusters that chose the query, or the most recent of its own."""
    heads = layer.heads(layer.q_proj(states(length)))[:, layer.local :]
    query = torch.nn.functional.layer_norm(heads, (WIDTH,))
    key = None
    if not layer.shared:
        heads = layer.heads(layer.k_proj(states(length)))[:, layer.local :]
        key = torch.nn.functional.layer_norm(heads, (WIDTH,))
    routes, at, place = layer.route(query, key, None), queries(length), torch.arange(length)
    if not causal:
        asks, answers = routes.query_places[0][0, 0], routes.key_places[0][0, 0]
        member = torch.zeros(len(asks), length).scatter(1, asks, 1.0)
        return ((member.T[at] @ torch.zeros(len(asks), length).scatter(1, answers, 1.0)) > 0).sum(-1)[None]
    stage = torch.tensor([sum(i >= other.begin for other in layer.stages[1:]) for i in range(length)])[at]
    own = routes.stage_labels[0, 0][stage]
    mates = (own == own.gather(1, at[:, None])) & (place <= at[:, None])
    windows = torch.tensor([layer.stages[number].window + 1 for number in stage.tolist()])[:, None]
    return (mates & (mates.flip(-1).cumsum(-1).flip(-1) <= windows)).sum(-1)[None]


# A family, how its keys are counted, and how many a query reads in the mean, at least, at the three lengths.
KEYS = [
    ("xf_bigbird", False, keys_of_pattern, (128, 448, 512)),  # eight blocks of 64 where there are so many
    ("xf_longformer", False, keys_of_pattern, (128, 350, 450)),
    ("xf_sparse_transformer", True, keys_of_pattern, (50, 64, 110)),
    ("xf_reformer", False, keys_of_reformer, (64, 64, 96)),  # one bucket has 32, four rounds find more
    ("xf_reformer", True, keys_of_reformer, (24, 48, 64)),
    ("xf_routing_transformer", False, keys_of_routing, (8, 16, 32)),  # sqrt(T): 11, 23, 45
    ("xf_routing_transformer", True, keys_of_routing, (5, 10, 20)),
]


@pytest.mark.parametrize(
    ("name", "causal", "count", "least"), KEYS, ids=lambda value: getattr(value, "__name__", str(value))
)
@torch.no_grad()
def test_keys_read(name, causal, count, least):
    means = [count(layer_of(name, causal, length), causal, length).double().mean().item() for length in LENGTHS]
    assert all(mean >= bound for mean, bound in zip(means, least, strict=True)), means
    assert means[-1] <= 2048 / 3, means
