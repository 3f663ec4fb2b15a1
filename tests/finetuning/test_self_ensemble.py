"""Self-ensemble and self-distillation: the window against a literal mean, the teacher's part of the loss, what a run
saves, resuming, refusals."""

import json

import pytest
import torch

import hf_xformers.cli
from hf_xformers.finetuning.options import RunOptions
from hf_xformers.finetuning.self_ensemble import SelfEnsemble
from hf_xformers.variants import config_class, family
from tests.finetuning.task_data import BARE, classification, command, finetune, tagging
from tests.training.runs import SHAPE, cut_after, same_weights, weights

STILL = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
PLAIN = {**BARE, "learning_rate": 0.01, "logging_steps": 1}
SAVES = {"save_strategy": "steps", "save_total_limit": 9}
IDS = torch.arange(5, 23).reshape(2, 9)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return classification(tmp_path_factory.mktemp("classification"), count=32)


def model(**fields):
    torch.manual_seed(0)
    return family("bert")["ForSequenceClassification"](config_class("bert")(**SHAPE, **fields)).double()


def push_away(network, seed):
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype))


# ------------------------------------------------------------------------------------------------ the window


@pytest.mark.parametrize("mode", ["sda", "sdv"])
def test_the_teacher_is_the_mean_of_the_last_steps(mode):
    """Against models that are kept whole; the student has dropout, the teacher has none."""
    network = model().train()
    ensemble = SelfEnsemble(network, RunOptions(self_ensemble=mode, teacher_window=3))
    kept = []
    for step in range(5):
        push_away(network, step)
        kept.append({name: value.clone() for name, value in network.state_dict().items()})
        ensemble.push()
    other = model().eval()
    if mode == "sda":
        other.load_state_dict({name: sum(state[name] for state in kept[2:]) / 3 for name in kept[0]})
        wanted = other(IDS).logits
    else:
        every = []
        for state in kept[2:]:
            other.load_state_dict(state)
            every.append(other(IDS).logits)
        wanted = sum(every) / 3
    before = torch.get_rng_state()
    found = ensemble.logits({"input_ids": IDS, "labels": torch.tensor([0, 1])})
    torch.testing.assert_close(found, wanted.float(), rtol=1e-5, atol=1e-6)
    assert not found.requires_grad and torch.equal(torch.get_rng_state(), before)


def test_the_error_counts_what_has_a_label():
    network = model()
    ensemble = SelfEnsemble(network, RunOptions(self_ensemble="sda"))
    ensemble.logits = lambda inputs: torch.zeros(2, 4, 3)
    logits = torch.randn(2, 4, 3)
    labels = torch.tensor([[0, -100, 2, 1], [-100, -100, 0, -100]])
    terms = [logits[b, t].square().mean() for b in range(2) for t in range(4) if labels[b, t] >= 0]
    torch.testing.assert_close(ensemble.error(logits, labels, {}), sum(terms) / 4)
    ensemble.logits = lambda inputs: torch.zeros(1, 4, 3)
    parts = [ensemble.error(logits[b : b + 1], labels[b : b + 1], {}, 4) for b in range(2)]
    torch.testing.assert_close(sum(parts), sum(terms) / 4)  # micro-batches over the count of their step


# ------------------------------------------------------------------------------------------------ runs


def history(folder, name):
    entries = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry[name] for entry in entries if name in entry]


def test_the_first_teacher_is_the_model_itself(data, tmp_path):
    """Without dropout there is nothing to learn from it at the first step; later there is."""
    options = {**PLAIN, **STILL, "self_ensemble": "sda", "teacher_window": 1, "max_steps": 4, "warmup_steps": 0}
    finetune("text-classification", data, tmp_path / "run", **options)
    errors = history(tmp_path / "run", "aux_self_distillation")
    assert errors[0] == 0.0 and all(error > 0 for error in errors[1:]) and len(errors) == 4


def test_without_weight_it_is_plain(data, tmp_path):
    options = {**PLAIN, "max_steps": 5}
    finetune("text-classification", data, tmp_path / "plain", **options)
    finetune("text-classification", data, tmp_path / "sdv", self_ensemble="sdv", self_distillation_weight=0, **options)
    finetune("text-classification", data, tmp_path / "some", self_ensemble="sdv", **options)
    same_weights(tmp_path / "sdv", tmp_path / "plain")
    plain, some = (weights(tmp_path / name) for name in ("plain", "some"))
    assert not all(torch.equal(some[name], value) for name, value in plain.items())


def test_the_ensemble_is_what_is_saved(data, tmp_path):
    """The mean of the last three steps of a run that is plain otherwise; and of the best checkpoint's."""
    options = {**PLAIN, **SAVES, "max_steps": 5, "save_steps": 1}
    finetune("text-classification", data, tmp_path / "plain", **options)
    finetune("text-classification", data, tmp_path / "se", self_ensemble="se", teacher_window=3, **options)
    last = [weights(tmp_path / "plain" / f"checkpoint-{step}") for step in (3, 4, 5)]
    for name, value in weights(tmp_path / "se").items():
        mean = sum(state[name].double() for state in last) / 3
        torch.testing.assert_close(value, mean.float(), rtol=0, atol=1e-7)
    best = {**options, "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": "true"}
    best |= {"learning_rate": 0.1}  # too high: the best is not the last
    summary = finetune("text-classification", data, tmp_path / "best", self_ensemble="se", teacher_window=2, **best)
    scores = history(tmp_path / "best", "eval_accuracy")
    assert summary["eval_accuracy"] == pytest.approx(max(scores))


@pytest.mark.parametrize("mode, update", [("se", "step"), ("sda", "step"), ("sdv", "epoch")])
def test_a_resumed_run_ends_the_same(mode, update, tmp_path):
    data = tagging(tmp_path, count=32)
    options = {**PLAIN, **SAVES, "num_train_epochs": 3, "self_ensemble": mode, "teacher_window": 2}
    options |= {"teacher_update": update, "save_steps": 3}
    options |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    finetune("token-classification", data, tmp_path / "whole", **options)
    cut = cut_after(6, tmp_path / "whole", tmp_path / "cut")
    finetune("token-classification", data, cut, "--resume_from_checkpoint", **options)
    same_weights(cut, tmp_path / "whole")


REFUSED = [
    ("text-classification", {"self_ensemble": "sde"}, "--self_ensemble 'sde' is unknown; take one of se, sda, sdv"),
    ("text-classification", {"self_ensemble": "se", "teacher_window": 0}, "--teacher_window 0 must be at least 1"),
    ("text-classification", {"self_ensemble": "se", "teacher_update": "day"}, "take step or epoch"),
    ("text-classification", {"self_ensemble": "sda", "self_distillation_weight": -1}, "must be at least 0"),
    ("text-classification", {"self_ensemble": "sda", "variant": "pabee"}, "xf_pabee has a classifier"),
    ("language-modeling", {"self_ensemble": "sda"}, "language-modeling has none; take --self_ensemble se"),
]


@pytest.mark.parametrize("task, options, message", REFUSED)
def test_refusals(task, options, message, data, tmp_path, capsys):
    argv = command(task, data, tmp_path / "run", **options)
    assert hf_xformers.cli.main(["finetune", *argv]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()
