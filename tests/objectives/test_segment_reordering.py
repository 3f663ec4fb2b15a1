"""Segment reordering: numbers of orders by enumeration, shuffled rows that can be put back, what is refused."""

import itertools

import pytest
import torch

from hf_xformers import XFormerConfig
from hf_xformers.modeling.reordering import XFormerForSegmentReordering, count_orders
from hf_xformers.objectives import build_objective
from hf_xformers.objectives.segment_reordering import OrderNoise, apply_noise, order_number, sample_noise
from hf_xformers.training.building import check_objective
from hf_xformers.variants import config_class


def test_every_order_has_a_number():
    orders = [list(order) for parts in (1, 2, 3) for order in itertools.permutations(range(parts))]
    assert [order_number(order) for order in orders] == list(range(9)) and count_orders(3) == 9
    assert count_orders(4) == 33


def test_parts_are_moved_whole():
    values = torch.arange(10)
    assert apply_noise(values, OrderNoise([0, 3, 4, 10], [2, 0, 1])).tolist() == [4, 5, 6, 7, 8, 9, 0, 1, 2, 3]
    seen = set()
    for seed in range(200):
        noise = sample_noise(10, 3, torch.Generator().manual_seed(seed))
        assert noise.bounds == sorted(set(noise.bounds)) and noise.bounds[0] == 0 and noise.bounds[-1] == 10
        assert sorted(apply_noise(values, noise).tolist()) == values.tolist()
        seen.add(order_number(noise.order))
    assert seen == set(range(9))
    assert sample_noise(1, 3, torch.Generator()).bounds == [0, 1]


@pytest.mark.parametrize("side", ["right", "left"])
def test_batches(bert_tokenizer, side):
    """Unmasked, the text between the special tokens is the row's in another order, and the label says which."""
    bert_tokenizer.padding_side = side
    rows = [[2, *range(5, 17), 3], [2, 30, 31, 3], [2, 3]]
    collate = build_objective({"type": "segment_reordering", "mask_prob": 0.2}).collator(bert_tokenizer)
    for epoch in range(20):
        collate.set_epoch(epoch)
        batch = collate([{"input_ids": row} for row in rows])
        whole = torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])
        for row, found, mask, label in zip(rows, whole, batch["attention_mask"], batch["reordering_labels"]):
            text = found[mask.bool()].tolist()
            assert (text[0], text[-1]) == (2, 3) and sorted(text) == sorted(row)
            # Places where a token is not followed by the next one are where parts begin.
            breaks = [at for at in range(1, len(text) - 2) if text[at + 1] != text[at] + 1]
            assert len(breaks) <= 2 and (label > 0 or not breaks)
        assert 0 <= int(batch["reordering_labels"].max()) < 9 and batch["reordering_labels"][2] == 0
    bert_tokenizer.padding_side = "right"


def test_refusals():
    with pytest.raises(ValueError, match="segment_reordering.*SegmentReordering"):
        check_objective(config_class("xf_bert"), "segment_reordering")
    with pytest.raises(ValueError, match="Use xf_ernie_doc"):
        XFormerForSegmentReordering(XFormerConfig(num_hidden_layers=1, hidden_size=12))
