"""Shuffled trigrams and three kinds of pairs: the golden row, frequencies, and BERT as the limit."""

import math

import pytest
import torch

from hf_xformers.objectives import build_objective
from hf_xformers.objectives.base import keyed_generator
from hf_xformers.objectives.masked_lm import MaskNoise, apply_noise
from hf_xformers.objectives.sentence_pairs import sample_noise
from hf_xformers.objectives.struct_bert import apply_shuffle, sample_shuffle

IDS = torch.tensor([2, 10, 11, 12, 13, 3])


def test_golden_row():
    shuffled, inside = apply_shuffle(IDS, torch.tensor([1]), torch.tensor([[1, 2, 0]]))
    assert shuffled.tolist() == [2, 11, 12, 10, 13, 3]
    assert torch.where(inside, IDS, -100).tolist() == [-100, 10, 11, 12, -100, -100]
    with pytest.raises(ValueError, match="overlap"):
        apply_shuffle(IDS, torch.tensor([1, 2]), torch.tensor([[1, 2, 0], [0, 2, 1]]))
    nothing = MaskNoise(torch.zeros(6).bool(), torch.zeros(6).to(torch.int8), torch.zeros(6).long())
    assert apply_noise(IDS, nothing, 4)[0].tolist() == IDS.tolist()


@pytest.mark.parametrize("spans, candidates", [("disjoint", 60), ("all", 178)])
def test_spans_are_of_the_text_and_unmasked(spans, candidates):
    """Two stretches of 90 tokens between special ones: 5 % of their spans, none with a masked token, none twice; every
    order of a span is as likely as another, the identity too."""
    objective, draws = build_objective({"type": "struct_bert", "spans": spans, "shuffle_ratio": 0.05}), 1500
    special = torch.zeros(183, dtype=torch.bool)
    special[[0, 91, 182]] = True
    selected = torch.zeros_like(special)
    selected[[5, 50, 100]] = True
    generator = torch.Generator().manual_seed(0)
    total, orders = 0, {}
    for _ in range(draws):
        starts, permutations = sample_shuffle(special, selected, objective, generator)
        places = (starts[:, None] + torch.arange(3)).flatten()
        assert not (special | selected)[places].any() and len(places.unique()) == len(places)
        total += len(starts)
        for order in permutations.tolist():
            orders[tuple(order)] = orders.get(tuple(order), 0) + 1
    candidates = {"disjoint": 60, "all": 2 * 88}[spans]
    mean, fraction = 0.05 * candidates, 0.05 * candidates % 1
    assert abs(total / draws - mean) <= 4 * math.sqrt(fraction * (1 - fraction) / draws) + 1e-9
    assert len(orders) == 6
    for count in orders.values():
        assert abs(count / total - 1 / 6) <= 4 * math.sqrt(5 / 36 / total)


def lengths_of(documents):
    return lambda number: documents[number]


def test_a_third_of_the_pairs_each():
    """Labels 0, 1, 2 equally often; next and previous are the same halves in one and the other order."""
    objective = build_objective({"type": "struct_bert", "max_seq_length": 20, "short_seq_prob": 0})
    documents = [[4] * 40, [5] * 40, [3] * 40]
    seen = [0, 0, 0]
    for epoch in range(200):
        for number in range(3):
            generator = keyed_generator(0, epoch, torch.tensor([number]))
            for plan in sample_noise(number, lengths_of(documents), 3, objective, generator):
                seen[plan.label] += 1
                a, b = plan.a, plan.b
                assert (plan.label == 1) == (a.document != b.document)
                if plan.label == 0:
                    assert a.stop == b.start
                if plan.label == 2:
                    assert b.stop == a.start
    total = sum(seen)
    for count in seen:
        assert abs(count / total - 1 / 3) <= 4 * math.sqrt(2 / 9 / total)
    single = [[4], [5]]
    generator = torch.Generator().manual_seed(0)
    assert not sample_noise(0, lengths_of(single), 2, objective, generator)


def features(bert_tokenizer):
    rows = []
    for number in range(4):
        a, b = list(range(6, 18 + number)), list(range(20, 32))
        types = [0] * (len(a) + 2) + [1] * (len(b) + 1)
        ids = [2, *a, 3, *b, 3]
        rows.append({"input_ids": ids, "token_type_ids": types, "next_sentence_label": number % 3})
    return rows


def test_without_shuffling_and_two_classes_it_is_bert(bert_tokenizer):
    plain = build_objective({"type": "struct_bert", "shuffle_ratio": 0, "sentence_classes": 2})
    bert = build_objective({"type": "nsp", "mlm": "mlm"})
    first, second = (spec.collator(bert_tokenizer, seed=5)(features(bert_tokenizer)) for spec in (plain, bert))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    documents = [[4, 5, 6, 7] * 8, [5] * 40]
    plans = [
        sample_noise(0, lengths_of(documents), 2, spec, torch.Generator().manual_seed(1)) for spec in (plain, bert)
    ]
    assert plans[0] == plans[1]


def test_batches(bert_tokenizer):
    """Labels are what stood at masked and shuffled places; the rest is untouched; rows do not depend on neighbours."""
    objective = build_objective({"type": "struct_bert", "shuffle_ratio": 0.5})
    collator, rows = objective.collator(bert_tokenizer, seed=1), features(bert_tokenizer)
    batch = collator(rows)
    moved = 0
    for number, row in enumerate(rows):
        size = len(row["input_ids"])
        ids, labels = torch.tensor(row["input_ids"]), batch["labels"][number]
        inputs = batch["input_ids"][number, :size]
        target = labels[:size] != -100
        assert torch.equal(inputs[~target], ids[~target]) and torch.equal(labels[:size][target], ids[target])
        assert (labels[size:] == -100).all() and not target[ids == 3].any()
        moved += int((inputs[target] != ids[target]).sum())
        alone = collator([row])
        assert all(torch.equal(alone[name][0], batch[name][number][: alone[name][0].numel()])
                   for name in ("input_ids", "labels"))  # fmt: skip
    assert moved > 20 and batch["next_sentence_label"].tolist() == [0, 1, 2, 0]
    collator.set_epoch(1)
    assert not torch.equal(collator(rows)["labels"], batch["labels"])
    static = collator.as_static()
    assert torch.equal(static(rows)["labels"], batch["labels"])


def test_settings():
    spec = build_objective("struct_bert")
    assert spec.head == "PreTraining" and spec.config_fields() == {"pretraining": {"sentence_pairs": {"classes": 3}}}
    assert build_objective(spec.to_dict()) == spec
    with pytest.raises(ValueError, match="mlm must be"):
        build_objective({"type": "struct_bert", "mlm": None})
