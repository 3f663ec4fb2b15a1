"""Patterns against their definitions in plain Python, and the promises that the engine builds on."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from hf_xformers.ops.block_sparse.pattern_base import pattern_from_key
from hf_xformers.ops.block_sparse.patterns import (
    Pattern,
    band,
    block_local,
    causal,
    dilated,
    full,
    global_,
    per_head,
    random_blocks,
    strided,
    summary_columns,
)

from .pattern_cases import CASES, RANDOM

EVERY = {**{name: pattern for name, (pattern, _) in CASES.items()}, **RANDOM}
LENGTH = 37


def literal(rule, length: int) -> torch.Tensor:
    return torch.tensor([[bool(rule(i, j, length)) for j in range(length)] for i in range(length)])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("length", [1, 3, LENGTH])
def test_mask_is_the_definition(name: str, length: int):
    pattern, rule = CASES[name]
    if length <= 7 and name == "longformer_fixed":
        pytest.skip("position 7 does not exist")
    assert torch.equal(pattern.mask(length, length), literal(rule, length))


@pytest.mark.parametrize("name", EVERY)
def test_tile_arithmetic_never_errs(name: str):
    """`may` = no means an empty tile, `covers` = yes a full one, over random tiles of all shapes; single pairs are
    exact."""
    pattern, mask = EVERY[name].bind(LENGTH), EVERY[name].mask(LENGTH, LENGTH)
    generator, widths, sure = torch.Generator().manual_seed(0), torch.tensor([0, 0, 1, 3, 7, 20]), 0
    for height in widths.unique().tolist():  # tiles of one height: of tall ones `may` does not ask for every row
        q_lo = torch.randint(LENGTH - height, (80,), generator=generator)
        k_lo = torch.randint(LENGTH, (80,), generator=generator)
        width = widths[torch.randint(6, (80,), generator=generator)]
        ends = q_lo, q_lo + height, k_lo, (k_lo + width).clamp(max=LENGTH - 1)
        may, covers = pattern.may(*ends), pattern.covers(*ends)
        tiles = [mask[q : q_end + 1, k : k_end + 1] for q, q_end, k, k_end in zip(*(end.tolist() for end in ends))]
        some, every = (torch.tensor([bool(test(tile)) for tile in tiles]) for test in (torch.any, torch.all))
        assert (may | ~some).all() and (every | ~covers).all()
        single = (ends[0] == ends[1]) & (ends[2] == ends[3])
        assert torch.equal(may[single], some[single]) and torch.equal(covers[single], some[single])
        sure += int((~may).sum() + covers.sum())
    assert sure > 0


@pytest.mark.parametrize(
    "pattern", [band(3, 2), band(None, 0), block_local(6, 1), summary_columns(5, 2), block_local(4)]
)
def test_tile_arithmetic_of_simple_patterns_is_exact(pattern: Pattern):
    mask = pattern.mask(24, 24)
    for q_lo in range(0, 24, 3):
        for k_lo in range(0, 24, 3):
            for size in (1, 2, 5):
                q_hi, k_hi = min(q_lo + size, 24) - 1, min(k_lo + size, 24) - 1
                ends = [torch.tensor(end) for end in (q_lo, q_hi, k_lo, k_hi)]
                tile = mask[q_lo : q_hi + 1, k_lo : k_hi + 1]
                assert bool(pattern.may(*ends)) == bool(tile.any())
                assert bool(pattern.covers(*ends)) == bool(tile.all())


@pytest.mark.parametrize("name", EVERY)
def test_hints_hold(name: str):
    """span, solid, columns, rows, period and gap are promises about the mask."""
    pattern, mask = EVERY[name].bind(LENGTH), EVERY[name].mask(LENGTH, LENGTH)
    for q_lo, q_hi in ((0, 0), (3, 9), (10, LENGTH - 1)):
        low, high = pattern.span(q_lo, q_hi)
        keys = mask[q_lo : q_hi + 1].any(0).nonzero().flatten()
        if len(keys):
            assert low is None or low <= keys[0]
            assert high is None or high >= keys[-1]
    if pattern.solid:
        for query in range(LENGTH):
            low, high = pattern.span(query, query)
            low, high = 0 if low is None else max(low, 0), LENGTH if high is None else max(high + 1, 0)
            assert bool(mask[query, low:high].all()) and int(mask[query].sum()) == max(min(high, LENGTH) - low, 0)
    for axis, listed in ((0, pattern.columns(LENGTH)), (1, pattern.rows(LENGTH))):
        if listed is not None:
            used = set(mask.any(axis).nonzero().flatten().tolist())
            assert used <= set(listed.tolist()) and listed.tolist() == sorted(set(listed.tolist()))
    pairs = mask.nonzero()
    assert bool(((pairs[:, 1] - pairs[:, 0]) % pattern.gap == 0).all())
    if pattern.period:
        q, k = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]
        for times in (1, 3):
            moved = pattern.allows(q + times * pattern.period, k + times * pattern.period)
            assert torch.equal(moved.expand_as(mask), mask)


@pytest.mark.parametrize("name", EVERY)
def test_terms_are_a_disjunctive_normal_form(name: str):
    pattern = EVERY[name].bind(LENGTH)
    total = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    for atoms in pattern.terms():
        term = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
        for atom in atoms:
            term &= atom.mask(LENGTH, LENGTH)
        total |= term
    assert torch.equal(total, pattern.mask(LENGTH, LENGTH))


def test_who_is_solid():
    """A single query reads all keys between the first and the last: bands, blocks and what they have in common."""
    near, block = band(2, 2), block_local(4)
    assert near.solid and block.solid and full().solid and (near & block & causal()).solid
    assert not any(each.solid for each in (near | block, ~near, dilated(2, 2, 3), strided(4), per_head(near, block)))


def test_algebra():
    a, b, c = band(2, 5), block_local(4), strided(3)

    def same(x: Pattern, y: Pattern) -> bool:
        return torch.equal(x.mask(20, 20), y.mask(20, 20))

    assert same(~(a | b), ~a & ~b) and same(~(a & b), ~a | ~b) and ~~a is a
    assert same(a & (b | c), (a & b) | (a & c)) and same((a | b) | c, a | (b | c))
    assert a | a == a and a & a == a and (a & full()) == a and (a | full()) == full()
    assert band(2, 5) == a and hash(band(2, 5)) == hash(a) and a != band(2, 4)
    assert dilated(3, 2, 1) == band(3, 2) and strided(1) == full() and band(None, None) == full()
    with pytest.raises(TypeError):
        a | 3


# ------------------------------------------------------------------------------------------------- random blocks


def draws(pattern: Pattern, rows: int) -> list[list[int]]:
    return pattern.key_blocks(torch.arange(rows), pattern.block)[:, :-1].tolist()


def test_random_draws_are_distinct_legal_and_complete():
    blocks, count = 12, 3
    pattern = random_blocks(count, 4, before=1, after=2, first=1, last=2, vary_heads=False).bind(4 * blocks)
    for row, drawn in enumerate(draws(pattern, blocks)):
        legal = [c for c in range(1, blocks - 2) if not row - 1 <= c <= row + 2]
        real = [entry for entry in drawn if entry >= 0]
        assert len(set(real)) == len(real) == min(count, len(legal)) and set(real) <= set(legal)


def test_random_draws_are_uniform():
    """Chi-square over seeds: every legal block equally often, and every pair of blocks too."""
    singles, pairs, seeds = torch.zeros(8), torch.zeros(8, 8), 3000
    for seed in range(seeds):
        drawn = draws(random_blocks(2, 1, seed=seed, vary_heads=False).bind(8), 6)[5]
        singles[drawn] += 1
        pairs[min(drawn), max(drawn)] += 1
    legal = [c for c in range(8) if c != 5]
    assert singles[5] == 0
    expected = seeds * 2 / 7
    assert float(((singles[legal] - expected) ** 2 / expected).sum()) < 24.3  # 6 degrees of freedom, p = 0.0005
    cells = torch.stack([pairs[a, b] for a in legal for b in legal if a < b])
    expected = seeds / 21
    assert float(((cells - expected) ** 2 / expected).sum()) < 46.0  # 20 degrees of freedom, p = 0.0008


def test_random_draws_follow_seed_layer_head_and_nothing_else():
    base = random_blocks(2, 4, seed=5)
    masks = [base.for_layer(layer).for_head(head).mask(64, 64) for layer in (0, 1) for head in (0, 1)]
    masks.append(random_blocks(2, 4, seed=6).for_head(0).mask(64, 64))
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == 5
    shared = random_blocks(2, 4, vary_heads=False)
    assert shared.for_head(0) == shared.for_head(3)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    again = random_blocks(2, 4, seed=5).for_layer(1).for_head(1).mask(64, 64)
    assert torch.equal(again, masks[3]) and torch.equal(before, torch.get_rng_state())


def test_random_draws_are_pinned():
    """A saved model must find its pattern again: these numbers may never change."""
    drawn = draws(random_blocks(3, 4, seed=7, vary_heads=False).bind(64), 4)
    assert drawn == [[7, 13, 2], [12, 8, 15], [9, 4, 8], [12, 9, 11]]


# --------------------------------------------------------------------------------------- heads, layers, objects


def test_per_head_inside_expressions():
    pattern = per_head(band(1, 1), band(5, 0)) | global_(first=1)
    assert pattern.for_head(1) == (band(5, 0) | global_(first=1))
    assert (~per_head(band(1, 1), band(2, 2))).for_head(0) == ~band(1, 1)
    with pytest.raises(ValueError, match="2 patterns for 3 heads"):
        pattern.check_heads(3)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: band(-1, 0), ValueError, "left=-1"),
        (lambda: band(1.5, 0), TypeError, "left must be an int"),
        (lambda: dilated(1, 1, 0), ValueError, "gap=0"),
        (lambda: strided(0), ValueError, "stride=0"),
        (lambda: block_local(0), ValueError, "block=0"),
        (lambda: summary_columns(4, 3, group=1), ValueError, "does not fit"),
        (lambda: global_(), ValueError, "names no position"),
        (lambda: global_(first=1, rows=False, columns=False), ValueError, "empty pattern"),
        (lambda: random_blocks(-1, 4), ValueError, "count=-1"),
        (lambda: random_blocks(1, 4, before=-1), ValueError, "both to -1"),
        (lambda: per_head(), ValueError, "got none"),
        (lambda: global_(last=2).allows(torch.tensor(0), torch.tensor(0)), ValueError, "bind"),
    ],
)
def test_refusals(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_patterns_copy_and_pickle():
    for pattern in EVERY.values():
        for other in (copy.deepcopy(pattern), pickle.loads(pickle.dumps(pattern))):
            assert other == pattern and other.key != pattern.key
            assert pattern_from_key(other.key) is other
            assert (other.period, other.gap, other.layout) == (pattern.period, pattern.gap, pattern.layout)
