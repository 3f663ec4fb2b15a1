"""FlexAttention's form of the block-sparse engine, uncompiled, against the literal equation."""

from __future__ import annotations

import pytest
import torch

from hf_xformers.ops import chosen_blocks
from hf_xformers.ops.block_sparse import attention, flex, patterns
from hf_xformers.ops.block_sparse.reference import block_sparse_reference
from tests.pretend_cuda import OnGPU, pretend_cuda

LENGTH = 300  # more than two blocks of the kernel, and no multiple of them
PATTERNS = {
    "band": patterns.band(40, 20),
    "dilated": patterns.dilated(10, 10, 3),
    "fixed": patterns.fixed(32, 4),
    "global and random": patterns.global_(2) | patterns.band(16, 16) | patterns.random_blocks(2, 16),
    "per head": patterns.per_head(patterns.band(9, 9), patterns.strided(7)),
    "per head and random": patterns.per_head(
        patterns.band(16, 16) | patterns.random_blocks(2, 16), patterns.strided(7) | patterns.random_blocks(1, 16)
    ),
}


def inputs(queries=LENGTH):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 2, queries, 16), (2, 1, LENGTH, 16), (2, 1, LENGTH, 16)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]


def padding(side):
    mask = torch.arange(LENGTH) < torch.tensor([[LENGTH], [190]])
    return {"none": None, "right": mask, "left": mask.flip(1)}[side]


@pytest.fixture(autouse=True)
def chosen(monkeypatch):
    """The engine takes the kernel's way as on CUDA, and the kernel its own reference."""
    calls = []

    def run(*arguments, **options):
        calls.append(options)
        return flex.flex_block_sparse(*arguments, **options, compiled=False)

    # It refuses gradients on a processor for its kernel's sake, where its reference has them.
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    monkeypatch.setattr(attention, "flex_applies", lambda *tensors: True)
    monkeypatch.setattr(attention, "flex_block_sparse", run)
    return calls


def compare(pattern, queries=LENGTH, more=(), **options):
    q, k, v = inputs(queries)
    given = [q, k, v, *more]
    expected = block_sparse_reference(
        q, k, v, pattern, **{key: x for key, x in options.items() if key != "max_globals"}
    )
    found = attention.block_sparse_attention(q, k, v, pattern, **options)
    mask = options.get("key_padding_mask")
    real = torch.ones(2, queries, dtype=torch.bool) if mask is None else mask[:, -queries:]
    found, expected = (x.transpose(1, 2)[real] for x in (found, expected[0]))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    weight = torch.randn_like(expected)
    gradients = [torch.autograd.grad((x * weight).sum(), given, retain_graph=True) for x in (found, expected)]
    for ours, theirs in zip(*gradients):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(name, side, chosen):
    causal = (list(PATTERNS).index(name) + len(side)) % 2 == 0  # each pattern and each side with both
    compare(PATTERNS[name], causal=causal, key_padding_mask=padding(side))
    assert bool(chosen) == (side == "none" or not PATTERNS[name].needs_length)  # one pattern for all rows


@pytest.mark.parametrize("side", ["none", "left"])
def test_documents(side, chosen):
    segments = torch.arange(LENGTH).expand(2, -1) // 70
    compare(PATTERNS["band"], causal=True, segment_ids=segments, key_padding_mask=padding(side))
    assert chosen


def test_cap(chosen):
    torch.compiler.reset()  # the cap is a constant of a graph, and uncompiled calls share theirs
    compare(PATTERNS["band"], causal=True, score_cap=2.0)
    assert chosen


@pytest.mark.parametrize("causal, queries", [(False, LENGTH), (False, 7), (True, LENGTH), (True, 7)])
def test_dense_attention_of_an_accelerator_needs_no_pattern(causal, queries, monkeypatch):
    """Queries of the end of a text, too, where its causal order is not that of the kernel."""
    monkeypatch.setattr(attention, "flex_applies", lambda *tensors: False)  # else tiles, here
    q, k, v = (x.detach() for x in inputs(queries))
    options = {"causal": causal, "query_offset": LENGTH - queries}
    expected = block_sparse_reference(q, k, v, patterns.full(), **options)[0]
    taken, plain = [], attention._takes_sdpa
    monkeypatch.setattr(attention, "_takes_sdpa", lambda *given: taken.append(plain(*given)) or taken[-1])
    with pretend_cuda(monkeypatch):
        found = attention.block_sparse_attention(*map(OnGPU, (q, k, v)), patterns.full(), **options).inner
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert taken == [not causal or queries == LENGTH]


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("heads", [1, 2])
def test_bias_by_distance(heads, side, chosen):
    torch.compiler.reset()
    table = torch.randn(heads, 2 * LENGTH - 1, dtype=torch.float64, requires_grad=True)

    def bias(q_at, k_at):
        return table[:, k_at.unsqueeze(-2) - q_at.unsqueeze(-1) + LENGTH - 1].movedim(0, -3)

    options = {"score_bias": bias, "bias_is_relative": True, "key_padding_mask": padding(side)}
    compare(PATTERNS["band"], more=(table,), causal=True, **options)
    assert chosen


def test_a_kernel_that_does_not_fit_leaves_the_call_to_tiles(monkeypatch):
    """Said once, and tried once."""
    tried = []

    def compiled(kind):
        def fail(*inputs, **options):
            tried.append(kind)
            raise RuntimeError("No valid triton configs. OutOfMemoryError: out of resource")

        return fail

    monkeypatch.setattr(flex, "_compiled", compiled)
    monkeypatch.setattr(flex, "_too_large", set())
    monkeypatch.setattr(attention, "flex_block_sparse", flex.flex_block_sparse)
    with pytest.warns(UserWarning, match="does not fit"):
        compare(PATTERNS["band"], causal=True)
    compare(PATTERNS["band"], causal=True)
    assert len(tried) == 1


def test_heads_with_tables_are_one_predicate():
    drawn = patterns.band(16, 16) | patterns.random_blocks(2, 16)
    tabled, which, _ = flex._block_map(drawn.bind(300), 4, (300, 300), (0, 0), True, torch.device("cpu"))
    assert len(tabled) == 1 and which.tolist() == [0, 1, 2, 3]


def test_queries_behind_cached_keys(chosen):
    compare(PATTERNS["band"], queries=77, query_offset=LENGTH - 77, causal=True)
    assert chosen


def test_dropout_says_what_it_costs(chosen):
    attention._say_what_dropout_costs.cache_clear()
    with pytest.warns(UserWarning, match="train with `attention_probs_dropout_prob=0`"):
        attention.block_sparse_attention(*inputs(), PATTERNS["band"], dropout=0.5)
    assert not chosen
    attention.block_sparse_attention(*inputs(), PATTERNS["band"])


def blocks_of(counts, lists, head):
    """{(block of queries, block of keys)} of one head."""
    if counts is None:
        return set()
    counts, lists = counts[0, head % counts.shape[1]], lists[0, head % lists.shape[1]]
    return {(row, int(key)) for row, count in enumerate(counts) for key in lists[row, :count]}


@pytest.mark.parametrize("has_full", [True, False])
@pytest.mark.parametrize("name", [*PATTERNS, "wide", "wide and narrow"])
def test_lists_of_blocks(name, has_full, chosen):
    """The uncompiled form does not read them: a block with an allowed pair is listed once, and as a whole one only if
    all of its pairs are allowed."""
    wide, offset = patterns.band(300, 300), 64
    pattern = {"wide": wide, "wide and narrow": patterns.per_head(wide, patterns.band(9, 9)), **PATTERNS}[name].bind(
        700
    )
    _, _, mask = flex._block_map(pattern, 2, (600, 700), (offset, 0), has_full, torch.device("cpu"))
    q_at, k_at, size = torch.arange(600)[:, None] + offset, torch.arange(700)[None], flex.BLOCK
    whole_blocks = 0
    for head in range(2):
        allowed = pattern.for_head(head).allows(q_at, k_at)
        part = blocks_of(mask.kv_num_blocks, mask.kv_indices, head)
        full = blocks_of(mask.full_kv_num_blocks, mask.full_kv_indices, head)
        assert not part & full
        for row, rows in enumerate(allowed.split(size)):
            for key, pairs in enumerate(rows.split(size, dim=1)):
                assert not pairs.any() or (row, key) in part | full
                assert (row, key) not in full or pairs.all()
        whole_blocks += len(full)
    assert bool(whole_blocks) == (has_full and name.startswith("wide"))


@pytest.mark.parametrize(
    "options", [{}, {"key_padding_mask": padding("left")}, {"segment_ids": torch.zeros(2, LENGTH)}]
)
def test_whole_blocks_skip_no_padding_and_no_documents(options, monkeypatch, chosen):
    asked, make = [], flex._block_map
    monkeypatch.setattr(flex, "_block_map", lambda *given: asked.append(given[4]) or make(*given))
    attention.block_sparse_attention(*inputs(), PATTERNS["band"], **options)
    assert asked == [not options]


@pytest.mark.parametrize("block", [5, 120, 200])
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_chosen_blocks(block, side, monkeypatch, chosen):
    """Outputs and gradients of masked dense attention, and every pair that is seen is in a block that is listed."""
    causal = (block + len(side)) % 2 == 0  # each block and each side with both
    torch.compiler.reset()
    q, _, _ = inputs()
    k, v = (torch.randn_like(q).requires_grad_() for _ in range(2))
    mask, index, masks = padding(side), torch.arange(LENGTH), []
    places = chosen_blocks.Places.of(index, index, mask)
    blocks = -(-LENGTH // block)
    scores = torch.randn(2, 2, 3, blocks).repeat_interleave(flex.BLOCK, dim=2)[:, :, :LENGTH]  # near ones alike
    scores = scores.masked_fill(torch.rand(2, 2, LENGTH, 1) < 0.1, -torch.inf)
    choices = chosen_blocks.best_blocks(scores, torch.ones(1, 1, LENGTH, blocks, dtype=torch.bool), 1)

    def run(*arguments):
        return flex.flex_chosen_blocks(*arguments, compiled=False)

    make = flex.BlockMask.from_kv_blocks
    monkeypatch.setattr(flex.BlockMask, "from_kv_blocks", lambda *a, **b: masks.append(make(*a, **b)) or masks[-1])
    monkeypatch.setattr(chosen_blocks, "flex_applies", lambda *tensors: True)
    monkeypatch.setattr(chosen_blocks, "flex_chosen_blocks", run)
    rows = places.in_order(k), places.in_order(v)
    found = chosen_blocks.chosen_block_attention(q, *rows, choices, places, block, causal, 0.3)
    seen = chosen_blocks.chosen_block_mask(choices, places, block, causal)
    weights = (0.3 * q @ k.mT).masked_fill(~seen, -1e9).softmax(-1).masked_fill(~seen, 0.0)
    real = torch.ones(2, LENGTH, dtype=torch.bool) if mask is None else mask
    found, expected = (x.transpose(1, 2)[real] for x in (found, weights @ v))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    gradients = [torch.autograd.grad(x.sin().sum(), (q, k, v), retain_graph=True) for x in (found, expected)]
    for ours, theirs in zip(*gradients):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    in_order = seen if places.order is None else seen.gather(3, places.order[:, None, None].expand_as(seen))
    for row in range(2):
        for head in range(2):
            counts, lists = masks[0].kv_num_blocks[row, head], masks[0].kv_indices[row, head]
            listed = {(at, int(key)) for at, count in enumerate(counts) for key in lists[at, :count]}
            queries, keys = (in_order[row, head] & real[row, :, None]).nonzero(as_tuple=True)
            pairs = set(zip((queries // flex.BLOCK).tolist(), (keys // flex.BLOCK).tolist()))
            assert pairs <= listed and len(listed) <= 9
