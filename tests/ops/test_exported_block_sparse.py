"""The engine of exported graphs against the definitions of the patterns, and against the dense equation with all that
a call may add."""

import pytest
import torch

from hf_xformers.ops.block_sparse.exported import Hidden, exported_attention, traced_length, walk_of
from hf_xformers.ops.block_sparse.patterns import (
    band,
    block_local,
    block_ring,
    causal,
    dilated,
    global_,
    per_head,
    summary_columns,
)
from hf_xformers.ops.block_sparse.reference import block_sparse_reference

from .pattern_cases import CASES as SHARED
from .pattern_cases import RANDOM, near_before

# Keys that are listed twice, away from the window.
TWICE = {
    "ends_that_meet": (
        band(1, 1) | global_(first=40, last=40, rows=False),
        lambda i, j, t: abs(i - j) <= 1 or j < 40 or j >= t - 40,
    ),
    "columns_of_two_strides": (
        summary_columns(8, 2) | summary_columns(6, 1) | global_(first=12, rows=False) | band(1, 1),
        lambda i, j, t: j % 8 >= 6 or j % 6 == 5 or j < 12 or abs(i - j) <= 1,
    ),
    "blocks_of_two_rings": (
        block_ring(5, 0, 1) | block_ring(5, 2) | global_(first=3, rows=False),
        lambda i, j, t: near_before(j, i, t, 5, 1) or near_before(i, j, t, 5, 2) or j < 3,
    ),
}
CASES = SHARED | TWICE
# Keys at any distance, or in a plane: there the engine is not exported.
WITHOUT = {"full", "causal", "one_sided", "share", "strided", "strided_causal", "sparse_transformer", "overlapping"}
WITHOUT |= {"rows_only", "complement"}
PATTERNS = {name: pattern for name, (pattern, _) in CASES.items()} | RANDOM


def inputs(length, heads=4, keys=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (2, heads, length, 4), *((2, keys or heads, length, 4),) * 2
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def hidden(length, mask=None, lengths=None, **others):
    given = {"segment_ids": None, "side": (None, None, None), "score_bias": None, "cap": 0.0} | others
    return Hidden(length, key_mask=mask, lengths=lengths, **given)


def test_which_patterns_have_a_form():
    assert {name for name, pattern in PATTERNS.items() if walk_of(pattern.for_head(0)) is None} == WITHOUT


@pytest.mark.parametrize("name", [name for name in PATTERNS if name not in WITHOUT])
def test_equals_the_definition(name):
    """A token, less than a block, several blocks; rows of different lengths, and one of padding alone."""
    pattern = PATTERNS[name]
    for length in (1, 11, 70):
        query, key, value = inputs(length, heads=2)
        for lengths in ([length, length], [max(length - 6, 1), 0]):
            mask = torch.arange(length) < torch.tensor(lengths)[:, None]
            # As the engine counts it: a row without a token has as many as there are places.
            counted = torch.tensor([each or length for each in lengths]) if pattern.needs_length else None
            found, _ = exported_attention(query, key, value, pattern, (0, 0), 0.5, hidden(length, mask, counted))
            for row, real in enumerate(lengths):
                allowed = torch.zeros(2, length, length, dtype=torch.bool)
                if name in CASES and real:
                    rule = CASES[name][1]
                    pairs = [[rule(i, j, real) for j in range(real)] for i in range(real)]
                    allowed[:, :real, :real] = torch.tensor(pairs)
                elif real:
                    allowed[:, :real, :real] = torch.stack([pattern.for_head(h).mask(real, real) for h in range(2)])
                scores = (query[row] @ key[row].mT * 0.5).masked_fill(~allowed, -torch.inf)
                expected = scores.softmax(-1).nan_to_num(0.0) @ value[row]
                torch.testing.assert_close(found[row, :, :real], expected[:, :real], atol=1e-10, rtol=1e-10)
                assert real or not found[row].any()


@pytest.mark.parametrize("length", [3, 41])
def test_what_a_call_adds(length):
    """Grouped keys, documents, side keys of some queries, a bias, a cap, patterns by head, the denominators."""
    query, key, value = inputs(length, keys=2)
    patterns = per_head(band(2, 2), dilated(3, 1, 2), band(2, 2) | global_(first=2, last=1), block_local(4, 1, 0))
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(2, length, generator=generator) < 0.8
    side_key, side_value = (torch.randn(2, 2, 3, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    side_mask = torch.rand(2, length, 3, generator=generator) < 0.5
    documents = torch.arange(length).expand(2, -1) // 17

    def bias(q, k):
        distance = (k.unsqueeze(-2) - q.unsqueeze(-1)).unsqueeze(-3)
        return (torch.arange(4)[:, None, None] * distance).double() / 10

    added = {"segment_ids": documents, "side": (side_key, side_value, side_mask), "score_bias": bias, "cap": 1.5}
    whole = torch.full((2,), length)
    found, norm = exported_attention(
        query, key, value, patterns & causal(), (0, 0), 0.5, hidden(length, mask, whole, **added)
    )
    # The reference counts positions from the first real token; here the first slot is the first position.
    expected = []
    for row in range(2):
        allowed = torch.stack([(patterns & causal()).for_head(h).mask(length, length) for h in range(4)])
        allowed = allowed & mask[row] & (documents[row][:, None] == documents[row])
        places = torch.arange(length)
        keys = torch.cat([key[row], side_key[row]], 1).repeat_interleave(2, 0)
        values = torch.cat([value[row], side_value[row]], 1).repeat_interleave(2, 0)
        scores = 1.5 * torch.tanh(query[row] @ keys.mT * 0.5 / 1.5)
        scores[..., :length] += bias(places, places)
        seen = torch.cat([allowed, side_mask[row].expand(4, -1, -1)], -1)
        scores = scores.masked_fill(~seen, -torch.inf)
        expected.append((scores.softmax(-1).nan_to_num(0.0) @ values, scores.logsumexp(-1)))
    torch.testing.assert_close(found, torch.stack([out for out, _ in expected]), atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(norm, torch.stack([lse for _, lse in expected]), atol=1e-10, rtol=1e-10)


def test_a_few_queries_after_others():
    """A step of a decoder: the last of 30 positions, of which a cache holds those from 19 on."""
    query, key, value = inputs(11)
    found, _ = exported_attention(query[:, :, -1:], key, value, band(6, 0) | block_local(8), (29, 19), 0.5, hidden(11))
    expected, _ = block_sparse_reference(
        query[:, :, -1:], key, value, band(6, 0) | block_local(8), query_offset=29, key_offset=19, scale=0.5
    )
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)


def test_no_tensor_grows_with_the_square():
    """Every tensor that is made, of texts of 512 and 2,048 tokens."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor):
                self.numbers = max(self.numbers, made.numel())
            return made

    for pattern in (band(20, 20) | global_(first=1, last=1), dilated(10, 10, 3), block_local(16, 1, 1)):
        largest = []
        for length in (512, 2048):
            with Largest() as mode:
                exported_attention(*inputs(length, heads=1), pattern, (0, 0), 0.5, hidden(length))
            largest.append(mode.numbers)
        assert largest[1] < 4.5 * largest[0] and largest[1] < 2048**2 / 4


def test_a_text_to_trace_has_more_than_a_block():
    walk = walk_of(dilated(8, 8, 5))
    assert walk is not None and traced_length(dilated(8, 8, 5), 1) == 5 * walk.size + 1
    assert traced_length(per_head(band(2, 2), dilated(8, 8, 5)), 2) == 5 * walk.size + 1
