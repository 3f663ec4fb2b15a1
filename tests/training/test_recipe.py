"""The recipe of the original Transformer: schedule, smoothing, batches by tokens, averaged checkpoints."""

import json
import math
import shutil

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from safetensors.torch import load_file
from transformers import TrainingArguments
from transformers.trainer_pt_utils import LabelSmoother

import hf_xformers.cli
from hf_xformers import XFormerConfig, XFormerForCausalLM
from hf_xformers.training.recipe import Recipe, row_lengths, smoothing_among_all, vaswani_rate, vaswani_schedule
from hf_xformers.training.trainer import XFormerTrainer
from tests.training.runs import pretrain, pretrain_flags, same_run, summary, weights


def test_golden_rates():
    """D = 512, warm-up 4000: counted from 1, the maximum at the end of the warm-up."""
    assert vaswani_rate(1, 512, 4000) == pytest.approx(1.746928e-7, rel=1e-6)
    assert vaswani_rate(4000, 512, 4000) == pytest.approx(6.987712e-4, rel=1e-6)
    assert vaswani_rate(100_000, 512, 4000) == pytest.approx(1.397542e-4, rel=1e-6)
    rates = [vaswani_rate(step, 64, 50) for step in range(1, 200)]
    assert max(rates) == rates[49]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    schedule = vaswani_schedule(optimizer, 64, 50, scale=2.0)
    for step in range(1, 60):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(2 * rates[step - 1], rel=1e-12)
        optimizer.step()
        schedule.step()


LOGITS = torch.tensor([[2.0, -1.0, 0.5, 0.0, 1.0]], dtype=torch.float64)


def smoothed(logits, target, epsilon, support):
    share = smoothing_among_all(epsilon, logits.shape[-1], support)
    return LabelSmoother(epsilon=share)({"logits": logits}, target)


@pytest.mark.parametrize("support, loss, least", [("all", 0.7244381, 0.389673), ("others", 0.7619380, 0.463712)])
def test_golden_smoothing(support, loss, least):
    """The loss of a row of logits, the least one that any logits reach, and padding that counts nowhere (transformers
    sums in float32)."""
    target = torch.tensor([0])
    assert smoothed(LOGITS, target, 0.1, support).item() == pytest.approx(loss, abs=3e-7)
    wrong = 0.1 / 5 if support == "all" else 0.1 / 4
    right = 1 - 4 * wrong
    best = torch.tensor([[right, wrong, wrong, wrong, wrong]], dtype=torch.float64).log()
    assert smoothed(best, target, 0.1, support).item() == pytest.approx(least, abs=1e-6)
    padded = torch.cat([LOGITS, 9 * LOGITS.flip(-1)])
    assert smoothed(padded, torch.tensor([0, -100]), 0.1, support).item() == pytest.approx(loss, abs=3e-7)
    assert smoothed(LOGITS, target, 0.0, support).item() == F.cross_entropy(LOGITS, target).item()


def test_a_run_with_the_recipe(text, tmp_path):
    """The logged rates are the formula's, the saved weights the mean of the last checkpoints, batches hold tokens."""
    options = {"variant": "gpt2", "max_steps": 6, "logging_steps": 1, "save_strategy": "steps", "save_steps": 1}
    options |= {
        "save_only_model": True,
        "save_total_limit": 3,
        "label_smoothing_factor": 0.1,
        "label_smoothing_support": "others",
    }
    options |= {"vaswani_lr_scale": 0.5, "warmup_steps": 4, "max_tokens": 64, "average_checkpoints": 3}
    output = pretrain(text, tmp_path / "run", **options)
    state = json.loads((output / "trainer_state.json").read_text())
    rates = [entry["learning_rate"] for entry in state["log_history"] if "learning_rate" in entry]
    assert rates == pytest.approx([vaswani_rate(step, 16, 4, 0.5) for step in range(1, 7)], rel=1e-6)
    made, own = summary(output), weights(output)
    assert made["averaged"] == ["checkpoint-4", "checkpoint-5", "checkpoint-6"]
    kept = [load_file(output / name / "model.safetensors") for name in made["averaged"]]
    for name, value in own.items():
        assert torch.allclose(value, sum(part[name].double() for part in kept).float() / 3, atol=1e-7), name
    assert made["recipe"]["max_tokens"] == 64 and not math.isnan(made["eval_loss"])


def test_batches_by_tokens_resume(text, tmp_path):
    """A whole epoch of rows of 16 tokens in batches of 80: five rows each; resumed after its end nothing changes."""
    options = {"variant": "gpt2", "max_steps": None, "num_train_epochs": 1, "max_tokens": 80, "logging_steps": 1}
    output = pretrain(text, tmp_path / "run", **options, save_strategy="steps", save_steps=1000)
    assert summary(output)["steps"] == math.ceil(summary(output)["train_rows"] / 5)
    shutil.copytree(output, tmp_path / "before")
    pretrain(text, output, "--resume_from_checkpoint", **options, save_strategy="steps", save_steps=1000)
    same_run(output, tmp_path / "before")
    more = {**options, "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 1000}
    pretrain(text, output, "--resume_from_checkpoint", **more)
    assert summary(output)["epochs"] == 2


def test_what_does_not_go_together(text, tmp_path, capsys):
    for options, message in (
        ({"vaswani_lr_scale": 1, "warmup_steps": 0.1}, "counts warm-up in steps"),
        ({"average_checkpoints": 3}, "needs as many checkpoints"),
        (
            {
                "average_checkpoints": 3,
                "save_total_limit": 9,
                "save_strategy": "steps",
                "save_steps": 4,
                "max_steps": 6,
            },
            "--save_steps 4 saves 2 in --max_steps 6",
        ),
        ({"average_checkpoints": 2, "metric_for_best_model": "loss"}, "besides the best one"),
        ({"label_smoothing_support": "others"}, "has no effect without --label_smoothing_factor"),
        (
            {"variant": "electra", "objective": "replaced_token_detection", "label_smoothing_factor": 0.1},
            "objective 'replaced_token_detection' has another one; leave it out",
        ),
        (
            {"variant": "bert", "objective": "info_word", "objective.mlm_weight": 0.5, "label_smoothing_factor": 0.1},
            "objective 'info_word' has another one; leave it out",
        ),
        *(
            ({"variant": v, "objective": name, "label_smoothing_factor": 0.1}, f"objective {name!r} has another one")
            for v, name in (("indigo", "insertion"), ("hibert", "sentence_masking"))
        ),
        ({"tokenizer": "t", "tokenizer_type": "wordpiece"}, "that is trained, and --tokenizer has one"),
        ({"max_tokens": 0}, "--max_tokens 0 must be above 0"),
    ):
        options = {"variant": "gpt2", **options}
        assert hf_xformers.cli.main(["pretrain", *pretrain_flags(text, tmp_path / "no", **options)])
        assert message in capsys.readouterr().err


def test_the_order_of_rows_may_be_drawn_by_zero(tmp_path):
    """As every other number does, it stands for an order of its own. A column that the model does not read is no part
    of a batch."""
    rows = [{"input_ids": [number] * 5, "labels": [number] * 5, "more": [0] * number} for number in range(1, 20)]
    data = Dataset.from_list(rows)
    torch.manual_seed(0)
    model = XFormerForCausalLM(XFormerConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    orders = []
    for seeds in ({"seed": 3, "data_seed": 0}, {"seed": 0}, {"seed": 3}):
        args = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True, **seeds)
        trainer = XFormerTrainer(model=model, args=args, train_dataset=data, recipe=Recipe(max_tokens=10))
        orders.append([batch["input_ids"][:, 0].tolist() for batch in trainer.get_train_dataloader()])
    assert orders[0] == orders[1] != orders[2]


def test_the_length_of_a_row_is_what_it_takes_in_a_batch():
    """Inputs or labels, whichever are more; all choices of a row are padded to the longest."""
    rows = Dataset.from_dict({"input_ids": [[1, 2], [1]], "labels": [[1], [1, 2, 3]]})
    assert row_lengths(rows) == [2, 3]
    choices = Dataset.from_dict({"input_ids": [[[1, 2, 3], [1]], [[1], [2]]], "labels": [0, 1]})
    assert row_lengths(choices) == [6, 2]
