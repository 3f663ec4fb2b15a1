"""The binary partitioning tree: what leaves read covers the text once, and both kinds of nodes against loops."""

import inspect

import pytest
import torch

from hf_xformers.ops import binary_partition
from hf_xformers.ops.binary_partition import (
    few_leaves,
    finished_spans,
    leaf_tiles,
    leaves_in_blocks,
    picks,
    spans_by_level,
)

CLIP = 3


def spans(leaves, causal):
    """Every span's leaves, in the order of their list, from the definition."""
    found, width = [], 2
    while width // 2 < leaves:
        found += [range(first, first + width) for first in range(0, leaves, width)]
        width *= 2
    if causal:  # complete ones, in the order of their last leaf, small ones first
        return sorted((span for span in found if span.stop <= leaves), key=lambda span: (span.stop, len(span)))
    return [range(span.start, min(span.stop, leaves)) for span in found]


def cover(number, leaves, listed):
    return range(number, number + 1) if number < leaves else listed[number - leaves]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_what_a_leaf_reads_is_a_partition(count, causal):
    """Of the text, or of what stands before the leaf and itself: every token once, none of the future."""
    for leaves in (*range(1, 34), 64, 127, 129):
        nodes, _ = picks(torch.arange(leaves), leaves, count, CLIP, causal)
        listed = spans(leaves, causal)
        for leaf, row in enumerate(nodes.tolist()):
            read = [token for node in row if node >= 0 for token in cover(node, leaves, listed)]
            assert sorted(read) == list(range(leaf + 1 if causal else leaves))


def test_finished_spans_are_counted():
    counts = [sum(leaves // 2**level for level in range(1, 12)) for leaves in range(200)]
    assert [finished_spans(leaves) for leaves in range(200)] == counts
    assert finished_spans(torch.arange(200)).tolist() == counts
    assert [len(spans(leaves, True)) for leaves in range(1, 60)] == counts[1:60]


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(binary_partition, "BLOCK", 8)
    monkeypatch.setattr(binary_partition, "leaf_tiles", inspect.unwrap(leaf_tiles))  # nothing is kept


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_attention_equals_loops(count, causal, small_blocks):
    generator = torch.Generator().manual_seed(0)
    for leaves in (1, 5, 21):
        listed, labels = spans(leaves, causal), (2 * count + 1) * (CLIP + 1)
        total = leaves + len(listed)
        q, k, v = (torch.randn(2, 2, total, 4, generator=generator, dtype=torch.float64) for _ in range(3))
        table = torch.randn(labels, 4, generator=generator, dtype=torch.float64)
        texts = (leaves, max(leaves - 3, 1))
        real = torch.tensor([[cover(node, leaves, listed)[0] < text for node in range(total)] for text in texts])
        shape = {"count": count, "clip": CLIP, "causal": causal}
        found = leaves_in_blocks(q[:, :, :leaves], k, v, real, table, **shape, scale=0.5)
        read = picks(torch.arange(leaves)[None], leaves, **shape)
        torch.testing.assert_close(few_leaves(q[:, :, :leaves], k, v, real, table, read, 0.5), found)
        for row, text in enumerate(texts):
            for leaf in range(text):
                pairs = zip(read[0][0, leaf].tolist(), read[1][0, leaf].tolist(), strict=True)
                keys = [(node, label) for node, label in pairs if node >= 0 and real[row, node]]
                for head in range(2):
                    scores = torch.stack([q[row, head, leaf] @ (k[row, head, node] + table[at]) for node, at in keys])
                    expected = (scores * 0.5).softmax(0) @ v[row, head, [node for node, _ in keys]]
                    torch.testing.assert_close(found[row, head, leaf], expected)
        of_leaves = (k[:, :, :leaves], v[:, :, :leaves], real[:, :leaves])
        summaries = spans_by_level(q[:, :, leaves:], *of_leaves, causal, 0.5)
        for row, text in enumerate(texts):
            for number, span in enumerate(listed):
                inside = [token for token in span if token < text]
                if inside:
                    weights = torch.einsum("hd,htd->ht", q[row, :, leaves + number], k[row, :, inside]) * 0.5
                    expected = torch.einsum("ht,htd->hd", weights.softmax(-1), v[row, :, inside])
                    torch.testing.assert_close(summaries[row, :, number], expected)
