"""Phrases and entities as wholes: golden units, rates, stages, phrases found in text, the command, refusals."""

import json
import math

import pytest
import torch

import hf_xformers.cli
from hf_xformers.objectives import build_objective
from hf_xformers.objectives.base import read_row
from hf_xformers.objectives.entity_phrase_masking import EntityPhraseObjective
from hf_xformers.objectives.names import NameTable, find_phrases, words_of
from tests.training.runs import pretrain, summary

# [CLS] w1 w2 unbelievable w3 [SEP] w1 w2 [SEP]
ROW = {"input_ids": [2, 6, 7, 45, 46, 47, 8, 3, 6, 7, 3], "word_ids": [-1, 0, 1, 2, 2, 2, 3, -1, 4, 5, -1]}


def collator(tokenizer, **settings):
    return build_objective({"type": "entity_phrase_masking", **settings}).collator(tokenizer)


def whole(labels, units):
    return all(len(set((labels[units == unit] >= 0).tolist())) == 1 for unit in set(units.tolist()) - {-1})


def test_golden_units(bert_tokenizer):
    """Unit ids [-1,0,0,1,2,2,2,-1], chosen {0, 2} -> targets at 1, 2, 4, 5, 6."""
    collate = collator(bert_tokenizer, mask_prob=0.5)
    units = torch.tensor([-1, 0, 0, 1, 2, 2, 2, -1])
    feature = {"input_ids": [2, *range(5, 11), 3], "unit_ids": units}
    seen = set()
    for epoch in range(60):
        collate.set_epoch(epoch)
        labels = collate([feature])["labels"][0]
        assert whole(labels, units)
        seen.add(tuple((labels >= 0).nonzero().squeeze(1).tolist()))
    assert (1, 2, 4, 5, 6) in seen and len(seen) == 7


def test_phrases_are_found_in_rows(bert_tokenizer):
    """The longest phrase counts, pieces of a word stay together, and a separator ends what can be a phrase."""
    table = NameTable({"w1 w2": 1, "w1 w2 unbelievable": 2, "w3 w1": 3}, bert_tokenizer)
    words = words_of(ROW["input_ids"], ROW["word_ids"])
    assert words == [(1, 2), (2, 3), (3, 6), (6, 7), (8, 9), (9, 10)]
    assert list(table.find(ROW["input_ids"], words)) == [(0, 3, 2), (4, 6, 1)]
    collate = collator(bert_tokenizer, phrases=("w1 w2", "w1 w2 unbelievable"), mask_prob=0.4)
    units = torch.tensor([-1, 0, 0, 0, 0, 0, 1, -1, 2, 2, -1])
    for epoch in range(30):
        collate.set_epoch(epoch)
        assert whole(collate([ROW])["labels"][0], units)


def test_every_token_is_a_target_at_the_rate(bert_tokenizer):
    """One draw for each unit: .15 in expectation, whatever the length of units; 80/10/10 for every token."""
    spec, rows = EntityPhraseObjective(phrases=("w1 w2 unbelievable",)), 600
    collate = spec.collator(bert_tokenizer)
    feature = {"input_ids": ROW["input_ids"] * 4, "word_ids": ROW["word_ids"] * 4}
    masked = torch.zeros(len(feature["input_ids"]), dtype=torch.int64)
    inputs = 0
    for epoch in range(rows):
        collate.set_epoch(epoch)
        batch = collate([feature])
        chosen = batch["labels"][0] >= 0
        masked += chosen
        inputs += int((batch["input_ids"][0][chosen] == 4).sum())
    free = torch.tensor(feature["word_ids"]) >= 0
    guard = 0.85**16  # a row in which no unit is drawn takes one
    share = 0.15 + guard / 16
    assert ((masked[free] - share * rows).abs() < 4.5 * math.sqrt(rows * share * (1 - share))).all()
    assert not masked[~free].any()
    assert abs(inputs / int(masked.sum()) - 0.8) < 0.02


def test_stages(bert_tokenizer, tmp_path):
    (tmp_path / "names.txt").write_text("w2 unbelievable\n\nw2 unbelievable\n")
    entities = str(tmp_path / "names.txt")
    collate = collator(bert_tokenizer, unit="entity", stages=(1, 2), phrases=("w1 w2",), entities_file=entities)
    found = []
    for epoch in range(4):
        collate.set_epoch(epoch)
        assert collate.level == ("word", "phrase", "entity", "entity")[epoch]
        row = {"input_ids": ROW["input_ids"][:7], "word_ids": ROW["word_ids"][:7]}
        found.append(collate.units(read_row(row, collate.columns)).tolist())
    assert found[0] == [-1, 0, 1, 2, 2, 2, 3]
    assert found[1] == [-1, 0, 0, 1, 1, 1, 2]
    assert found[2] == found[3] == [-1, 0, 1, 1, 1, 1, 2]
    assert collate.as_static().level == "entity"


def test_phrases_of_a_text(bert_tokenizer):
    """Words that always stand together among others that mix freely."""
    tokenizer = bert_tokenizer

    class Letters:  # numbers are no words of phrases
        def decode(self, ids):
            return tokenizer.decode(ids).replace("w", "x").translate(str.maketrans("0123456789", "abcdefghij"))

    draw = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(80):
        ids = torch.randint(10, 40, (40,), generator=draw).tolist()
        ids[10:13], ids[30:32] = [5, 6, 7], [8, 9]
        rows.append({"input_ids": [2, *ids, 3], "word_ids": [-1, *range(40), -1]})
    found = find_phrases(rows, Letters())
    assert set(found) == {"xa xb", "xb xc", "xa xb xc", "xd xe"}
    assert find_phrases(rows[:2], Letters()) == []


def test_the_command_finds_phrases_and_evaluates(tmp_path):
    """The phrases are in the run's settings, from which `evaluate` takes them."""
    text = tmp_path / "text.txt"
    draw = torch.Generator().manual_seed(0)
    vocabulary = ["alpha", "beta", "gamma", "delta", "omega", "kappa", "sigma", "lambda"]
    lines = []
    for _ in range(150):
        line = [vocabulary[at] for at in torch.randint(8, (12,), generator=draw).tolist()]
        lines.append(" ".join([*line[:6], "snow white", *line[6:]]))
    text.write_text("\n".join(lines))
    options = {"variant": "bert", "objective": "entity_phrase_masking", "max_steps": 2}
    out = pretrain(text, tmp_path / "out", **options)
    assert summary(out)["objective"]["phrases"] == ["snow white"]
    assert hf_xformers.cli.main(["evaluate", "--model", str(out), "--data", str(text), "--json"]) == 0
    assert json.loads((out / "training_summary.json").read_text())["eval_tokens"] > 0


def test_refusals(bert_tokenizer, tmp_path):
    for settings, message in (
        ({"stages": (1,), "unit": "entity"}, "must be 2 ascending epochs"),
        ({"stages": (0,)}, "must be 1 ascending epochs above 0"),
        ({"whole_word": False}, "take the objective mlm"),
    ):
        with pytest.raises(ValueError, match=message):
            EntityPhraseObjective(**settings)
    with pytest.raises(ValueError, match="set entities_file"):
        EntityPhraseObjective(unit="entity").fitted([], bert_tokenizer)
    with pytest.raises(ValueError, match="give more text, or set phrases_file"):
        EntityPhraseObjective().fitted([ROW], bert_tokenizer)
    with pytest.raises(ValueError, match="no phrases are known"):
        EntityPhraseObjective().collator(bert_tokenizer)([ROW])
    with pytest.raises(ValueError, match="cannot be read"):
        EntityPhraseObjective(phrases_file=str(tmp_path / "none")).collator(bert_tokenizer)
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ValueError, match="has no name"):
        EntityPhraseObjective(unit="entity", entities_file=str(tmp_path / "empty")).collator(bert_tokenizer)
