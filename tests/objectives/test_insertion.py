"""Orders of generation: golden rows, orders by hand, the search against all permutations, and a model that learns."""

import itertools
import math

import pytest
import torch

from hf_xformers.modeling.insertion import search_orders
from hf_xformers.objectives import InsertionObjective
from hf_xformers.objectives.insertion import generation_order
from hf_xformers.training.building import objectives_for, refuse_other_component
from hf_xformers.variants import config_class
from hf_xformers.variants.indigo import XFIndigoConfig, XFIndigoForCausalLM
from tests.helpers import close, make_strong

SIZES = dict(vocab_size=45, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24)
SIZES |= dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
ORDERS = {
    "left_to_right": [0, 1, 2, 3, 4, 5],
    "right_to_left": [5, 4, 3, 2, 1, 0],
    "odd_even": [0, 2, 4, 1, 3, 5],
    "tree": [3, 1, 5, 0, 2, 4],
    "common_first": [1, 3, 0, 4, 2, 5],
    "rare_first": [2, 5, 0, 4, 3, 1],
    "searched": [0, 1, 2, 3, 4, 5],
}


@pytest.mark.parametrize("kind", ORDERS)
def test_orders(kind):
    ids = torch.tensor([10, 6, 30, 7, 10, 30])
    found = generation_order(kind, ids, torch.Generator())
    assert found.tolist() == ORDERS[kind]
    assert generation_order(kind, ids[:0], torch.Generator()).numel() == 0


@pytest.mark.parametrize("side", ["left", "right"])
def test_golden_rows(bert_tokenizer, monkeypatch, side):
    """Boundaries (cls 2, sep 3), words in the order of generation, the end; special tokens of a row are its
    boundaries."""
    monkeypatch.setattr(bert_tokenizer, "padding_side", side)
    collator = InsertionObjective(order="right_to_left").collator(bert_tokenizer)
    batch = collator([{"input_ids": [2, 10, 11, 12, 3]}, {"input_ids": [20]}])
    before, after = (2, 0) if side == "left" else (0, 2)

    def row(values, nothing):
        return [nothing] * before + values + [nothing] * after

    assert batch["input_ids"].tolist() == [[2, 3, 12, 11, 10, 3], row([2, 3, 20, 3], 0)]
    assert batch["insertion_positions"].tolist() == [[0, 4, 3, 2, 1, -1], row([0, 2, 1, -1], -1)]
    assert batch["labels"].tolist() == [[-100, -100, 12, 11, 10, 3], row([-100, -100, 20, 3], -100)]
    assert batch["attention_mask"].tolist() == [[1] * 6, row([1] * 4, 0)]


def test_random_orders_are_keyed(bert_tokenizer):
    """By row and epoch, whatever the neighbours; each permutation is as frequent as another."""
    collator = InsertionObjective().collator(bert_tokenizer)
    row, other = {"input_ids": [10, 11, 12, 13]}, {"input_ids": [9, 8]}
    alone, beside = collator([row])["input_ids"], collator([other, row])["input_ids"]
    assert torch.equal(alone[0], beside[1])
    seen = []
    for epoch in range(600):
        collator.set_epoch(epoch)
        seen.append(tuple(collator([row])["input_ids"][0, 2:-1].tolist()))
    share = 600 / 24
    for order in itertools.permutations([10, 11, 12, 13]):
        assert abs(seen.count(order) - share) < 4 * math.sqrt(share)


def indigo(dtype=torch.float64):
    torch.manual_seed(0)
    return XFIndigoForCausalLM(XFIndigoConfig(**SIZES, eos_token_id=3, pad_token_id=0)).to(dtype)


def log_likelihood(model, words, order):
    """Of words and places in one order, by a whole pass."""
    ids = torch.tensor([[2, 3, *(words[index] for index in order)]])
    places = torch.tensor([[0, len(words) + 1, *(index + 1 for index in order)]])
    labels = ids.clone()
    labels[:, :2] = -100
    return -model(ids, labels=labels, insertion_positions=places).loss * len(words)


@torch.no_grad()
def test_search_finds_the_likeliest_orders():
    """With a beam as wide as there are orders: all of them, ranked by their likelihood. Rows of other lengths beside
    change nothing."""
    model, words = make_strong(indigo().eval(), amount=0.3), [10, 11, 12]
    beside = torch.tensor([[*words, 0], [20, 21, 22, 23]])
    orders, found = search_orders(model, beside, torch.tensor([3, 4]), torch.tensor([[2, 3]] * 2), 6)
    scores = {order: float(log_likelihood(model, words, order)) for order in itertools.permutations(range(3))}
    ranked = sorted(scores, key=lambda order: -scores[order])
    assert [tuple(order[:3]) for order in orders[0].tolist()] == ranked
    close(found[0], torch.tensor([scores[order] for order in ranked], dtype=torch.float64))
    for order, value in zip(orders[1].tolist(), found[1]):
        close(value, log_likelihood(model, [20, 21, 22, 23], order))
    _, few = search_orders(model, torch.tensor([[7]]), torch.tensor([1]), torch.tensor([[2, 3]]), 6)
    assert few.isfinite().sum() == 1


@pytest.mark.parametrize("side", ["left", "right"])
def test_batches_take_the_searched_order(bert_tokenizer, monkeypatch, side):
    """The likeliest order in evaluation, one of the beam in training; words keep their places and labels."""
    monkeypatch.setattr(bert_tokenizer, "padding_side", side)
    model = make_strong(indigo().eval(), amount=0.3)
    texts = [[10, 11, 12], [20, 21, 22, 23]]
    batch = InsertionObjective(order="searched", beam=6).collator(bert_tokenizer)([{"input_ids": x} for x in texts])
    given = {name: value.clone() for name, value in batch.items()}
    with torch.no_grad():
        scores = {order: float(log_likelihood(model, texts[0], order)) for order in itertools.permutations(range(3))}
    seen = set()
    for _ in range(12):
        found = model.prepare_batch(batch)
        assert model.prepare_batch(found) is found and "order_beam" not in found
        for row, text in enumerate(texts):
            real = found["attention_mask"][row].bool()
            ids, places, labels = (found[x][row][real] for x in ("input_ids", "insertion_positions", "labels"))
            assert ids[:2].tolist() == [2, 3] and ids[-1] == 3 and places[-1] == -1
            assert [text[place - 1] for place in places[2:-1].tolist()] == ids[2:-1].tolist()
            assert sorted(ids[2:-1].tolist()) == text and torch.equal(labels[2:], ids[2:])
            seen |= {tuple((places[2:-1] - 1).tolist())} if row == 0 else set()
        if not model.training:
            assert seen == {max(scores, key=lambda order: scores[order])}
        model.train()
    assert len(seen) > 2
    assert all(torch.equal(batch[name], value) for name, value in given.items())


def test_who_can_be_trained():
    assert "insertion" in objectives_for(config_class("xf_indigo"))
    assert "insertion" not in objectives_for(config_class("xf_gpt2"))
    with pytest.raises(ValueError, match="needs head 'insertion', and 'xf_gpt2' has 'linear'; take variant xf_indigo"):
        refuse_other_component(config_class("xf_gpt2")(**SIZES), InsertionObjective())
    with pytest.raises(ValueError, match="needs head 'insertion', and 'xf_indigo' has 'linear'"):
        refuse_other_component(XFIndigoConfig(**SIZES, head="linear"), InsertionObjective())
    with pytest.raises(ValueError, match="must hold two boundaries"):
        InsertionObjective().raw_block_size(3)


def test_one_call():
    """Padding on either side, rows alone and together; what cannot be a text is refused."""
    model = make_strong(indigo().eval(), amount=0.3)
    rows = [torch.tensor([2, 10, 11, 3]), torch.tensor([2, 3]), torch.tensor([2, 12, 3])]
    alone = [model.generate_by_insertion(row[None], max_new_tokens=4, eos_token_id=40)[0] for row in rows]
    expected = torch.nn.utils.rnn.pad_sequence(alone, True, 0)
    for side in ("left", "right"):
        ids = torch.nn.utils.rnn.pad_sequence(rows, True, 44, side)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], True, 0, side)
        assert torch.equal(model.generate_by_insertion(ids, mask, max_new_tokens=4, eos_token_id=[40, 41]), expected)
    for row, found in zip(rows, alone):
        kept = [int(token) for token in found if token in row]
        assert len(found) <= len(row) + 4 and kept[0] == 2 and kept[-1] == 3
    with pytest.raises(ValueError, match="a left and a right boundary"):
        model.generate_by_insertion(torch.tensor([[2, 0]]), torch.tensor([[1, 0]]))
    other = XFIndigoForCausalLM(XFIndigoConfig(**SIZES, head="linear"))
    with pytest.raises(ValueError, match="'linear' does not say where"):
        other.generate_by_insertion(torch.tensor([[2, 3]]))
