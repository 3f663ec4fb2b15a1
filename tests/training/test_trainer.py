import collections
import copy
import json
import math

import pytest
import torch
from transformers import TrainerState

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerForMaskedLM
from hf_xformers.core.losses import step_share, with_aux_losses
from hf_xformers.training.callbacks import ExactSaves
from hf_xformers.training.readers import Readers
from hf_xformers.training.recipe import Recipe
from hf_xformers.training.trainer import XFormerTrainer
from tests.training.runs import plain_sgd, same_parameters, stacked, step_by_hand

VOCAB = 23


class Auxiliary(XFormerForMaskedLM):
    """Two auxiliary losses of the weights alone, so that their gradient is the same for every batch."""

    def forward(self, **inputs):
        outputs = super().forward(**inputs)
        table = self.get_input_embeddings().weight
        outputs.aux_losses = {"balance": 0.5 * table.pow(2).mean(), "ponder": 2.0 * table.pow(4).mean()}
        if outputs.loss is not None:
            share = step_share(inputs["labels"], inputs.get("num_items_in_batch"))
            outputs.loss = with_aux_losses(outputs.loss, outputs.aux_losses, share)
        return outputs


def config(**changes):
    fields = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return XFormerConfig(**{**fields, "intermediate_size": 16, "max_position_embeddings": 32, **changes})


def rows(count=8, length=9, seed=0, labelled=0.4):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCAB, (count, length), generator=generator)
    chosen = torch.rand(count, length, generator=generator) < labelled
    chosen[:, 1] = True
    return [{"input_ids": i, "labels": torch.where(c, i, -100)} for i, c in zip(ids, chosen)]


def train(model, folder, data=None, evaluation=None, callbacks=(), **settings):
    trainer = XFormerTrainer(
        model=model,
        args=plain_sgd(folder, **{"max_steps": 2, "per_device_train_batch_size": 4, **settings}),
        train_dataset=data or rows(),
        eval_dataset=evaluation,
        data_collator=stacked,
        callbacks=list(callbacks),
    )
    trainer.train()
    return trainer


def logged(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


# ------------------------------------------------------------------------------------------------ auxiliary losses


def make_auxiliary():
    torch.manual_seed(0)
    return Auxiliary(config(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def test_auxiliary_losses_are_logged_as_means_since_the_last_log(tmp_path):
    model = make_auxiliary()
    first = model.get_input_embeddings().weight.detach().double()
    single = train(model, tmp_path / "single", max_steps=4)
    values = logged(single, "aux_balance")
    assert values[0] == pytest.approx(0.5 * float(first.pow(2).mean()), rel=1e-5) != values[1]
    assert logged(single, "aux_ponder")[0] == pytest.approx(2.0 * float(first.pow(4).mean()), rel=1e-5)
    paired = train(make_auxiliary(), tmp_path / "paired", logging_steps=2, max_steps=4)
    assert logged(paired, "aux_balance") == pytest.approx(
        [(values[0] + values[1]) / 2, (values[2] + values[3]) / 2], rel=1e-5
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_accumulation_does_not_change_their_weight(tmp_path, smoothing):
    whole = make_auxiliary()
    parts = copy.deepcopy(whole)
    settings = {"max_steps": 1, "label_smoothing_factor": smoothing}
    train(whole, tmp_path / "whole", per_device_train_batch_size=8, **settings)
    settings |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    trainer = train(parts, tmp_path / "parts", **settings)
    same_parameters(whole, parts)
    assert len(logged(trainer, "aux_balance")) == 1


def test_the_step_is_the_gradient_of_mean_loss_plus_auxiliary_losses(tmp_path):
    model = make_auxiliary()
    twin = copy.deepcopy(model)
    train(model, tmp_path, max_steps=1, gradient_accumulation_steps=2)
    batch = stacked(rows())
    logits = twin(input_ids=batch["input_ids"]).logits
    table = twin.get_input_embeddings().weight
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    step_by_hand(twin, loss + 0.5 * table.pow(2).mean() + 2.0 * table.pow(4).mean())
    same_parameters(model, twin)


def test_evaluation_keeps_them_apart_from_the_loss(tmp_path):
    model = make_auxiliary()
    trainer = train(model, tmp_path, evaluation=rows(seed=3), learning_rate=0.0)
    metrics = trainer.evaluate()
    batch = stacked(rows(seed=3))
    with torch.no_grad():
        logits = model.eval()(input_ids=batch["input_ids"]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), batch["labels"].flatten())
    assert metrics["eval_loss"] == pytest.approx(float(expected), rel=1e-6)
    table = model.get_input_embeddings().weight.detach()
    assert metrics["eval_aux_balance"] == pytest.approx(0.5 * float(table.pow(2).mean()), rel=1e-5)


# ------------------------------------------------------------------------------------------------ evaluation


class Counting(XFormerForMaskedLM):
    """An auxiliary loss that is the mean of what is predicted, so that its figure is known."""

    def forward(self, **inputs):
        outputs = super().forward(**inputs)
        outputs.aux_losses = {"label": inputs["labels"][inputs["labels"] != -100].float().mean()}
        return outputs


def test_auxiliary_figures_weigh_batches_by_their_targets(tmp_path):
    data = [row for share in (0.0, 0.9) for row in rows(count=4, seed=int(10 * share), labelled=share)]
    trainer = train(Counting(config()), tmp_path, evaluation=data, per_device_eval_batch_size=3, max_steps=1)
    labels = stacked(data)["labels"]
    expected = float(labels[labels != -100].double().mean())
    assert trainer.evaluate()["eval_aux_label"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_metrics_do_not_depend_on_the_batch_size(tmp_path, causal):
    """Rows have very different numbers of targets: a mean of batch means would come out elsewhere."""
    torch.manual_seed(0)
    model = (XFormerForCausalLM if causal else XFormerForMaskedLM)(config())
    data = [row for share in (0.0, 0.9) for row in rows(count=5, seed=int(10 * share), labelled=share)]
    trainer = train(model, tmp_path, evaluation=data, per_device_eval_batch_size=3, learning_rate=0.0)
    metrics = trainer.evaluate()
    batch = stacked(data)
    with torch.no_grad():
        logits = model.eval()(input_ids=batch["input_ids"]).logits.double()
    labels = batch["labels"]
    if causal:
        logits, labels = logits[:, :-1], labels[:, 1:]
    target = labels != -100
    nll = -torch.log_softmax(logits[target], -1).gather(1, labels[target][:, None])
    assert metrics["eval_loss"] == pytest.approx(float(nll.mean()), rel=1e-6)
    assert metrics["eval_perplexity"] == pytest.approx(float(nll.mean().exp()), rel=1e-5)
    assert metrics["eval_accuracy"] == pytest.approx(float((logits.argmax(-1) == labels)[target].double().mean()))
    assert metrics["eval_tokens"] == int(target.sum())
    # What the targets' own frequencies give: the share of the most frequent, and the mean of -log of each one's share.
    targets = labels[target].tolist()
    share = {token: count / len(targets) for token, count in collections.Counter(targets).items()}
    assert metrics["eval_baseline_accuracy"] == pytest.approx(max(share.values()))
    assert metrics["eval_baseline_loss"] == pytest.approx(-sum(math.log(share[t]) for t in targets) / len(targets))


def test_evaluation_leaves_no_trace_in_training(tmp_path):
    torch.manual_seed(0)
    never = XFormerForMaskedLM(config(hidden_dropout_prob=0.3))
    often = copy.deepcopy(never)
    settings = {"max_steps": 5, "train_sampling_strategy": "random"}
    train(never, tmp_path / "never", **settings)
    settings |= {"evaluation": rows(seed=3), "eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}
    train(often, tmp_path / "often", **settings)
    same_parameters(never, often, 0, 0)


# ------------------------------------------------------------------------------------------------ loss


def causal_rows():
    return [{**row, "labels": row["input_ids"]} for row in rows()]


def causal_model():
    torch.manual_seed(0)
    return XFormerForCausalLM(config(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_causal_loss_is_about_the_next_token(tmp_path, smoothing):
    model = causal_model()
    settings = {"learning_rate": 0.0, "max_steps": 1, "label_smoothing_factor": smoothing}
    trainer = train(model, tmp_path, data=causal_rows(), **settings)
    batch = stacked(causal_rows()[:4])
    with torch.no_grad():
        logits = model.eval()(input_ids=batch["input_ids"]).logits.double()
    log = torch.log_softmax(logits[:, :-1], -1)
    nll = -log.gather(-1, batch["labels"][:, 1:, None]).mean()
    expected = (1 - smoothing) * nll - smoothing * log.mean()
    assert logged(trainer, "loss")[0] == pytest.approx(float(expected), rel=1e-5)


# ------------------------------------------------------------------------------------------------ saving


def test_saved_configs_keep_the_cache(tmp_path):
    trainer = train(causal_model(), tmp_path, data=causal_rows(), max_steps=2, save_strategy="steps", save_steps=1)
    assert trainer.model.config.use_cache is False
    assert json.loads((tmp_path / "checkpoint-1" / "config.json").read_text()).get("use_cache", True) is True
    trainer.save_model(str(tmp_path / "final"))
    assert XFormerConfig.from_pretrained(tmp_path / "final").use_cache is True


def test_a_checkpoint_that_is_written_over_is_incomplete_meanwhile(tmp_path, monkeypatch):
    settings = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    train(causal_model(), tmp_path, data=causal_rows(), **settings)
    state = tmp_path / "checkpoint-1" / "trainer_state.json"
    assert state.is_file()

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(XFormerTrainer, "_save_optimizer_and_scheduler", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(causal_model(), tmp_path, data=causal_rows(), **settings)
    assert not state.exists()


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_saved_step_has_its_figures_logged(tmp_path, evaluates):
    """Its loss; at the end of an epoch also the evaluation, for which the save waits."""
    settings = {"max_steps": 6, "logging_steps": 4, "save_strategy": "steps", "save_steps": 3}
    if evaluates:
        settings |= {"max_steps": 4, "save_steps": 2, "eval_strategy": "epoch", "evaluation": causal_rows()}
    trainer = train(causal_model(), tmp_path, data=causal_rows(), callbacks=[ExactSaves()], **settings)
    step = settings["save_steps"]
    state = json.loads((tmp_path / f"checkpoint-{step}" / "trainer_state.json").read_text())
    if evaluates:
        assert state["epoch"] == 1.0
        assert [entry["step"] for entry in state["log_history"] if "eval_loss" in entry] == [step]
    else:
        assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [3, 4, 6]
        assert [entry["step"] for entry in state["log_history"]] == [step]


# ------------------------------------------------------------------------------------------------ what is printed


def test_lines_for_people(tmp_path, capsys):
    from hf_xformers.training.callbacks import speak_plainly

    args = plain_sgd(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=2)
    data = dict.fromkeys(("train_dataset", "eval_dataset"), causal_rows())
    trainer = XFormerTrainer(model=causal_model(), args=args, data_collator=stacked, **data)
    speak_plainly(trainer)
    trainer.train()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 1/2, loss ") and lines[-1].startswith("step 2/2, done in ")
    (held_out,) = [line for line in lines if "held out" in line]
    metrics = trainer.evaluate()
    assert f"loss {metrics['eval_loss']:.3f} (baseline {metrics['eval_baseline_loss']:.3f})" in held_out
    assert f"accuracy {metrics['eval_accuracy']:.1%} (baseline {metrics['eval_baseline_accuracy']:.1%})" in held_out
    assert max(map(len, lines)) <= 80 and not any("{" in line for line in lines)


def test_lines_of_a_task():
    """A task has figures of its own, perhaps no loss; how fast the machine is stands in the log alone."""
    from hf_xformers.training.callbacks import log_line

    logs = {"eval_exact_match": 12.345678, "eval_f1": 0.5, "eval_accuracy": 0.25, "eval_runtime": 3.0, "epoch": 1.0}
    state = TrainerState(global_step=4, max_steps=9)
    assert log_line(logs, state) == "step 4/9, held out: accuracy 25.0%, exact match 12.35, f1 0.5"
    assert log_line(logs, state, {"f1": "macro f1"}).endswith("exact match 12.35, macro f1 0.5")
    assert log_line({"loss": 1.0, "grad_norm": 2.0, "epoch": 0.5}, state) == "step 4/9, loss 1.000, epoch 0.50"


def test_evaluation_collates_as_training_does_unless_told(tmp_path):
    for given in (None, lambda batch: stacked(batch)):
        trainer = XFormerTrainer(
            XFormerForMaskedLM(config()), plain_sgd(tmp_path), data_collator=stacked, eval_collator=given
        )
        assert trainer.eval_collator is (given or stacked) and trainer.data_collator is stacked


def test_rows_that_fill_up_the_last_batch_count_nowhere(tmp_path, monkeypatch):
    """Of 9 rows, two readers of batches of 4 have one and none left."""
    for reader, real in ((0, 1), (1, 0)):
        args = plain_sgd(tmp_path, per_device_train_batch_size=4)
        trainer = XFormerTrainer(XFormerForMaskedLM(config()), args, data_collator=stacked, train_dataset=rows(9))
        monkeypatch.setattr(XFormerTrainer, "_readers", Readers(2, reader, 1))
        state = type(trainer.accelerator.gradient_state)
        monkeypatch.setattr(state, "end_of_dataloader", True)
        batches = [stacked(rows(4)), stacked(rows(4))]
        trainer._leave_out_repeats(batches)
        assert (batches[0]["labels"] != -100).any(1).all()
        assert (batches[1]["labels"] != -100).any(1).tolist() == [row < real for row in range(4)]
        assert batches[1]["attention_mask"].all(1).tolist() == [row < real for row in range(4)]
    trainer.recipe, batches = Recipe(max_tokens=36), [stacked(rows(4))]
    trainer._leave_out_repeats(batches)  # batches by tokens have every row once
    assert (batches[0]["labels"] != -100).any(1).all()
