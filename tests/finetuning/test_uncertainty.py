"""Sampling by uncertainty: entropies by hand, candidates of every task, the rows that a step trains on."""

import math

import pytest
import torch

from hf_xformers.finetuning.uncertainty import CandidateSampler, most_uncertain, rows_of, uncertainty


def entropy(probabilities):
    return -sum(p * math.log(p) for p in probabilities if p)


def test_entropies_by_hand():
    rows = torch.tensor([[0.7, 0.2, 0.1], [1 / 3, 1 / 3, 1 / 3], [1.0, 0.0, 0.0]], dtype=torch.float64)
    logits = rows.clamp(min=1e-300).log()
    expected = [entropy(row) / math.log(3) for row in rows.tolist()]
    found = uncertainty("SequenceClassification", {"logits": logits}, {})
    assert found.tolist() == pytest.approx(expected) and expected[1] == pytest.approx(1) and expected[2] == 0
    assert uncertainty("MultipleChoice", {"logits": logits}, {}).tolist() == pytest.approx(expected)
    # Words: the mean over those that have labels.
    labels = torch.tensor([[1, -100, 2], [-100, -100, -100]])
    tags = torch.stack([logits, logits])
    found = uncertainty("TokenClassification", {"logits": tags}, {"labels": labels})
    assert found.tolist() == pytest.approx([(expected[0] + expected[2]) / 2, 0])
    # Labels that are true or false one by one.
    true = torch.tensor([[0.5, 0.9]], dtype=torch.float64)
    found = uncertainty("SequenceClassification", {"logits": torch.logit(true)}, {}, several=True)
    assert found.item() == pytest.approx((1 + entropy([0.9, 0.1]) / math.log(2)) / 2)
    # Ends of a span: padding is no choice.
    mask = torch.tensor([[1, 1, 0]])
    start, end = torch.tensor([[0.0, 0.0, 9.0]]), torch.tensor([[math.log(3), 0.0, 9.0]])
    found = uncertainty("QuestionAnswering", {"start_logits": start, "end_logits": end}, {"attention_mask": mask})
    assert found.item() == pytest.approx((1 + entropy([0.75, 0.25]) / math.log(2)) / 2)


def test_the_least_certain_rows_of_all_tasks():
    chosen = most_uncertain(
        {"a": torch.tensor([0.1, 0.9, 0.5]), "b": torch.tensor([0.5, 0.2]), "c": torch.zeros(3)}, 3
    )
    assert {name: rows.tolist() for name, rows in chosen.items()} == {"a": [1, 2], "b": [0]}
    batch = {"input_ids": torch.arange(6).reshape(3, 2), "note": "x"}
    assert rows_of(batch, torch.tensor([2]))["input_ids"].tolist() == [[4, 5]]


def test_candidates_of_every_task():
    sampler = CandidateSampler([10, 3], 4, seed=1)
    steps = list(sampler)
    assert len(steps) == len(sampler) == 3 + 1 and list(sampler) == steps
    for step in steps:
        assert len([row for row in step if row < 10]) == 4 and sorted(row for row in step if row >= 10) == [10, 11, 12]
        assert len(set(step)) == 7
    assert len({row for step in steps[:2] for row in step if row < 10}) == 8
    sampler.set_epoch(1)
    assert list(sampler) != steps
