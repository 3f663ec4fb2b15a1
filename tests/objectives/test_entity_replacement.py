"""Entity replacement: a golden sentence, never two adjacent ones, boundaries, the head by hand, tables, refusals."""

import itertools
import json
import math

import pytest
import torch

from hf_xformers import XFBertConfig, XFBertForEntityReplacement
from hf_xformers.objectives import build_objective
from hf_xformers.objectives.entity_replacement import EntityReplacementObjective, apply_noise, sample_noise
from hf_xformers.objectives.entity_tables import read_table
from hf_xformers.training.building import check_objective
from hf_xformers.variants import config_class
from tests.helpers import close, make_strong

TABLE = {"city": ["w1", "w2 w3", "unbelievable"], "river": ["w10", "w11"]}


def written(folder, table):
    path = folder / "table.json"
    path.write_text(json.dumps(table) if isinstance(table, dict) else table)
    return str(path)


def test_golden_sentence():
    """[CLS] a X b Y c [SEP], X of one token becomes one of three: what is behind moves, the row keeps its length."""
    ids = [2, 11, 50, 12, 60, 13, 3]
    new, places = apply_noise(ids, [(2, 3), (4, 5)], [[51, 52, 53], None], 20, 1)
    assert new == [2, 11, 51, 52, 53, 12, 60, 13, 3] and places == [(2, 5), (6, 7)]
    new, places = apply_noise(ids, [(2, 3), (4, 5)], [[51, 52, 53], None], 7, 1)
    assert new == [2, 11, 51, 52, 53, 12, 3] and places == [(2, 5)]
    new, places = apply_noise(ids, [(2, 3), (4, 5)], [[51, 52], None], 7, 1)
    assert new == [2, 11, 51, 52, 12, 60, 3] and places == [(2, 4), (5, 6)]
    new, places = apply_noise(ids[:-1], [(2, 3), (4, 5)], [[51, 52], None], 6, 0)
    assert new == [2, 11, 51, 52, 12, 60] and places == [(2, 4)]
    new, places = apply_noise([2, 50, 51, 52, 9, 3], [(1, 4)], [[60]], 6, 1)
    assert new == [2, 60, 9, 3] and places == [(1, 2)]


def test_draws():
    """Another name of the same type, uniformly; never two in a row; a third of all with replace_prob = .5."""
    draw = torch.Generator().manual_seed(0)
    mentions = [("city", "w1"), ("river", "w11"), ("city", "unbelievable")] * 400
    chosen = sample_noise(mentions, TABLE, 0.5, draw)
    assert len(chosen) == len(mentions)
    for (kind, name), other in zip(mentions, chosen):
        assert other is None or (other in TABLE[kind] and other != name)
    assert not any(a and b for a, b in itertools.pairwise(chosen))
    replaced = [other for other in chosen if other is not None]
    assert abs(len(replaced) - 400) < 4 * math.sqrt(1200 * 2 / 9)
    first = [other for (_, name), other in zip(mentions, chosen) if name == "w1" and other]
    assert abs(first.count("w2 w3") - len(first) / 2) < 4 * math.sqrt(len(first) / 4)


@pytest.mark.parametrize("side", ["right", "left"])
def test_batches(bert_tokenizer, side, tmp_path):
    """Boundaries stand around the names, labels say which differ from the text, masks leave names alone."""
    bert_tokenizer.padding_side = side
    table = written(tmp_path, TABLE)
    collate = build_objective({"type": "entity_replacement", "entity_table": table}).collator(bert_tokenizer)
    texts = ["w20 w1 w21 w2 w3 w22 w10 w23", "w30 unbelievable w31", "w30 w31 w32"]
    rows = []
    for text in texts:
        encoded = bert_tokenizer(text)
        words = [-1 if word is None else word for word in encoded.word_ids()]
        rows.append({"input_ids": encoded["input_ids"], "word_ids": words})
    names = [["w1", "w2 w3", "w10"], ["unbelievable"], []]
    kinds = {name: kind for kind, entries in TABLE.items() for name in entries}
    seen = {0: 0, 1: 0}
    for epoch in range(40):
        collate.set_epoch(epoch)
        batch = collate(rows)
        for index, (true, row) in enumerate(zip(names, rows)):
            real = batch["attention_mask"][index].bool()
            assert int(real.sum()) <= len(row["input_ids"])
            marks = [mark for mark in batch["entity_labels"][index].tolist() if mark >= 0]
            assert len(marks) <= len(true)
            for number, mark in enumerate(marks):
                left, right = batch["entity_boundaries"][index, number].tolist()
                assert real[left] and real[right] and (batch["labels"][index, left + 1 : right] == -100).all()
                name = bert_tokenizer.decode(batch["input_ids"][index, left + 1 : right]).replace(" ##", "")
                assert (name != true[number]) == mark and kinds[name] == kinds[true[number]]
                seen[mark] += 1
            assert (batch["labels"][index] >= 0).sum() == 1
    assert seen[0] > 60 and seen[1] > 30
    bert_tokenizer.padding_side = "right"


@torch.no_grad()
def test_head_by_hand():
    torch.manual_seed(0)
    config = XFBertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24
    )
    model = make_strong(XFBertForEntityReplacement(config).double().eval())
    ids = torch.randint(5, 40, (2, 8), generator=torch.Generator().manual_seed(0))
    around, marks = torch.tensor([[[1, 4], [4, 6]], [[0, 2], [0, 0]]]), torch.tensor([[1, 0], [0, -100]])
    output = model(ids, labels=ids, entity_boundaries=around, entity_labels=marks)
    states, weight, bias = model.model(ids).last_hidden_state, *model.entity_classifier.parameters()
    total = 0.0
    for row, number in ((0, 0), (0, 1), (1, 0)):
        left, right = around[row, number].tolist()
        score = float(torch.cat([states[row, left], states[row, right]]) @ weight[0] + bias[0])
        close(output.entity_logits[row, number], torch.tensor(score, dtype=torch.float64))
        chance = 1 / (1 + math.exp(-score))
        total -= math.log(chance if marks[row, number] == 1 else 1 - chance) / 3
    close(output.aux_losses["entity_replacement"], torch.tensor(total, dtype=torch.float64))
    close(output.loss, model(ids, labels=ids).loss + total)


def test_tables(tmp_path):
    names = read_table("stdlib")
    assert set(names) == {"module", "exception", "function", "type"} and "ValueError" in names["exception"]
    assert read_table(written(tmp_path, {"a": ["x", "y", "z"], "b": ["z", "u", "v"]})) == {
        "a": ["x", "y"],
        "b": ["u", "v"],
    }
    for table, message in (
        ({"a": ["x"]}, "type 'a' has 1 names"),
        ({"a": []}, "type 'a' has 0 names"),
        ({"a": "xy"}, "must be a JSON object of types"),
        ({}, "must be a JSON object"),
        ("nothing", "is no JSON"),
    ):
        with pytest.raises(ValueError, match=message):
            read_table(written(tmp_path, table))
    with pytest.raises(ValueError, match="cannot be read"):
        read_table(str(tmp_path / "none.json"))


def test_refusals(bert_tokenizer, tmp_path):
    spec = EntityReplacementObjective(entity_table=written(tmp_path, TABLE))
    row = {"input_ids": [2, 20, 21, 3], "word_ids": [-1, 0, 1, -1]}
    with pytest.raises(ValueError, match="mentions no entity"):
        spec.fitted([row], bert_tokenizer)
    assert spec.fitted([row, {"input_ids": [2, 20, 6, 21, 3], "word_ids": [-1, 0, 1, 2, -1]}], bert_tokenizer) is spec
    with pytest.raises(ValueError, match="needs a ForEntityReplacement class"):
        check_objective(config_class("xf_roberta"), "entity_replacement")
