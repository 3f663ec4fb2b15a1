import math

import pytest
import torch

from hf_xformers import XFormerConfig
from hf_xformers.training.building import language_objectives
from hf_xformers.training.evaluation import perplexity, scored_beside, summarise, token_statistics
from hf_xformers.training.scoring import choose_objective


def literal(logits, labels, shift):
    """The sums of each row by loops in float64: -log softmax at the label, and whether the label is the largest."""
    rows = []
    for row, targets in zip(logits.double(), labels):
        nll = count = right = 0.0
        for t in range(len(targets) - shift):
            label = int(targets[t + shift])
            if label == -100:
                continue
            scores = row[t].tolist()
            nll += math.log(sum(math.exp(s) for s in scores)) - scores[label]
            count += 1
            right += max(range(len(scores)), key=scores.__getitem__) == label
        rows.append([nll, count, right])
    return torch.tensor(rows)


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 7, 11, generator=generator)
    labels = torch.randint(0, 11, (5, 7), generator=generator)
    labels[torch.rand(5, 7, generator=generator) < 0.4] = -100
    labels[3] = -100  # a row without any target
    labels[0, 2] = int(logits[0, 2].argmax())
    labels[1, 4] = int(logits[1, 3].argmax())
    return logits, labels


@pytest.mark.parametrize("next_token", [False, True])
def test_sums_are_those_of_the_equation(batch, next_token):
    logits, labels = batch
    found = token_statistics(logits, labels, next_token=next_token)
    expected = literal(logits, labels, int(next_token))
    assert expected[:, 2].sum() > 0
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-6, atol=1e-6)


def test_no_target_at_all():
    found = token_statistics(torch.randn(2, 3, 5), torch.full((2, 3), -100), next_token=False)
    assert found.tolist() == [[0.0, 0.0, 0.0]] * 2
    assert summarise(found)["loss"] == 0.0


def test_a_length_of_one_has_no_next_token():
    assert token_statistics(torch.randn(1, 1, 5), torch.ones(1, 1).long(), next_token=True).tolist() == [[0.0] * 3]


def test_what_is_predicted_beside_tokens_counts_where_it_is_labelled():
    """Of rows, of parts of rows and as log odds: sums over labels, none from what has no label."""
    generator = torch.Generator().manual_seed(1)
    pair, parts = torch.randn(4, 3, generator=generator), torch.randn(4, 2, 5, generator=generator)
    odds = torch.randn(4, 2, generator=generator)
    kinds = {"pair": ("pair_label", "pair_logits"), "part": ("part_label", "part_logits"), "odds": ("yes", "odds")}
    outputs = {"pair_logits": pair, "part_logits": parts, "odds": odds, "part_label": torch.tensor([[0, -100]] * 4)}
    inputs = {"pair_label": torch.tensor([[2], [-100], [0], [1]]), "yes": torch.tensor([[1, 0], [-100, -100]] * 2)}
    found = scored_beside(kinds, outputs, inputs)
    labels = {"pair": inputs["pair_label"], "part": outputs["part_label"], "odds": inputs["yes"]}
    scores = {"pair": pair[:, None], "part": parts, "odds": torch.stack([torch.zeros_like(odds), odds], dim=-1)}
    main = torch.tensor([[1.0, 2, 1]] * 4)
    beside = [token_statistics(*found[kind], next_token=False) for kind in kinds]
    figures = summarise(torch.cat([main, *beside, torch.full((4, 1), 0.25)], dim=1), ("aux_x",), tuple(kinds))
    assert figures["loss"] == 0.5 and figures["accuracy"] == 0.5 and figures["aux_x"] == 0.25
    for kind in kinds:
        nll, count, right = literal(scores[kind], labels[kind], 0).sum(0).tolist()
        assert count == {"pair": 3, "part": 4, "odds": 4}[kind]
        assert figures[f"{kind}_loss"] == pytest.approx(nll / count)
        assert figures[f"{kind}_accuracy"] == pytest.approx(right / count)
    assert scored_beside(kinds, {"odds": odds}, {}) == {}


def test_half_precision_is_summed_in_float32():
    torch.manual_seed(0)
    logits = torch.randn(1, 9, 13, dtype=torch.bfloat16)
    labels = torch.randint(0, 13, (1, 9))
    found = token_statistics(logits, labels, next_token=False)
    torch.testing.assert_close(found.double(), literal(logits, labels, 0).double(), rtol=1e-5, atol=1e-5)


def test_perplexity_of_a_broken_model_is_a_number():
    assert math.isfinite(perplexity(1e9))


@pytest.mark.parametrize("trained", ["mlm", "clm", "span", "multilingual_clm"])
def test_what_was_trained_is_evaluated(trained):
    """Where the model's head is that of the run's objective, or unknown; else the first objective of that head."""
    own, other = ("MaskedLM", "CausalLM") if trained == "mlm" else (language_objectives()[trained].head, "MaskedLM")
    config = XFormerConfig()
    for head, expected in ((f"XFormerFor{own}", trained), (None, trained), (f"XFormerFor{other}", None)):
        config.architectures = [head] if head else None
        found = choose_objective(config, None, {}, {"objective": {"type": trained}}).type
        assert found == (expected or {"CausalLM": "clm", "MaskedLM": "mlm"}[other])
