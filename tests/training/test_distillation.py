"""A teacher beside the objective: its terms against sums written out, and their weight in a step."""

import copy

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerForMaskedLM, XFormerForSeq2SeqLM
from hf_xformers.training.distillation import (
    Distillation,
    DistillationTrainer,
    open_teacher,
    state_error,
)
from tests.training.runs import plain_sgd, same_parameters, stacked, step_by_hand

VOCAB = 19


def config(**changes):
    fields = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return XFormerConfig(**{**fields, **rates, "intermediate_size": 16, "max_position_embeddings": 32, **changes})


def make(cls, seed, **changes):
    torch.manual_seed(seed)
    model = cls(config(**changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def rows(count=8, length=9):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, VOCAB, (count, length), generator=generator)
    chosen = torch.rand(count, length, generator=generator) < 0.4
    chosen[:, 1] = True
    real = torch.arange(length) < torch.randint(4, length + 1, (count, 1), generator=generator)
    labels = ids.masked_fill(~(chosen & real), -100)
    return [{"input_ids": i, "labels": c, "attention_mask": m} for i, c, m in zip(ids, labels, real.long())]


def train(model, teacher, folder, settings, data=None, **arguments):
    trainer = DistillationTrainer(
        model=model,
        teacher=teacher,
        distillation=settings,
        args=plain_sgd(folder, **{"max_steps": 1, **arguments}),
        train_dataset=data or rows(),
        data_collator=stacked,
    )
    trainer.train()
    return trainer


def test_state_error():
    torch.manual_seed(0)
    states = [[torch.randn(2, 5, 4) for _ in range(3)] for _ in range(2)]
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    expected = 0.0
    for own, other in zip(*states):
        real = mask.bool()
        expected += float(((own - other)[real] ** 2).sum() / (other[real] ** 2).sum()) / 3
    found = state_error({"hidden_states": states[0]}, {"hidden_states": states[1]}, {"attention_mask": mask})
    assert float(found) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("cls", [XFormerForMaskedLM, XFormerForCausalLM, XFormerForSeq2SeqLM])
def test_the_step_is_the_gradient_of_all_terms(tmp_path, cls):
    model, teacher = make(cls, 0), make(cls, 1).eval()
    before = copy.deepcopy(teacher.state_dict())
    twin = copy.deepcopy(model)
    settings = Distillation(teacher="it", logit_weight=0.7, temperature=2.0, hidden_weight=0.4)
    trainer = train(model, teacher, tmp_path, settings)
    batch = {**stacked(rows()), "output_hidden_states": True}
    own, taught = twin(**batch), teacher(**batch)
    shift = int(cls is XFormerForCausalLM)
    chosen = batch["labels"][:, shift:] != -100
    length = batch["labels"].shape[1] - shift
    p, q = (torch.log_softmax(o.logits[:, :length][chosen] / 2.0, -1) for o in (taught, own))
    logits = 0.7 * 4.0 * (p.exp() * (p - q)).sum(-1).mean()
    states = 0.4 * state_error(own, taught, batch)
    step_by_hand(twin, own.loss + logits + states)
    same_parameters(model, twin, rtol=1e-4)
    assert all(torch.equal(before[name], tensor) for name, tensor in teacher.state_dict().items())
    logged = {key: value for entry in trainer.state.log_history for key, value in entry.items() if "distill" in key}
    assert logged["distill_logits"] == pytest.approx(float(logits.detach()), rel=1e-4)
    assert logged["distill_states"] == pytest.approx(float(states.detach()), rel=1e-4)


@pytest.mark.parametrize("hidden_weight", [0.0, 2.0])
def test_accumulation_does_not_change_the_weight(tmp_path, hidden_weight):
    whole, teacher = make(XFormerForMaskedLM, 0), make(XFormerForMaskedLM, 1).eval()
    parts = copy.deepcopy(whole)
    settings = Distillation(teacher="it", logit_weight=1.5, hidden_weight=hidden_weight)
    data = rows(1) * 8 if hidden_weight else rows()  # the state error is relative, in each micro-batch
    one = train(whole, teacher, tmp_path / "whole", settings, data)
    split = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    other = train(parts, teacher, tmp_path / "parts", settings, data, **split)
    same_parameters(whole, parts, rtol=1e-4)
    values = [next(e["distill_logits"] for e in t.state.log_history if "distill_logits" in e) for t in (one, other)]
    assert values[0] == pytest.approx(values[1], rel=1e-4)


REFUSED = {
    "vocabulary": ({}, {"vocab_size": VOCAB + 1}, 8, "predicts 19 tokens and the student 20"),
    "length": ({}, {}, 40, "--block_size 40 are too long for the teacher .* reads 32 tokens"),
    "width": ({"hidden_weight": 1.0}, {"hidden_size": 8}, 8, "has hidden size 16 and the student 8; leave it at 0"),
    "layers": ({"hidden_weight": 1.0}, {"num_hidden_layers": 1}, 8, r"has layers \[2\] and the student \[1\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_teachers_that_do_not_fit(tmp_path, name):
    settings, student, block_size, message = REFUSED[name]
    make(XFormerForMaskedLM, 0).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        open_teacher(Distillation(teacher=str(tmp_path), **settings), config(**student), "ForMaskedLM", block_size)
    for head in ("ForPreTraining", "ForReplacedTokenPreTraining"):
        with pytest.raises(ValueError, match=f"for which {head} is not made"):
            open_teacher(Distillation(teacher=str(tmp_path)), config(), head, 8)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"logit_weight": -1.0}, "--logit_weight must not be negative, got -1.0"),
        ({"temperature": 0.0}, "--temperature must be above 0, got 0.0"),
        ({"teacher": "x", "logit_weight": 0.0}, "teaches nothing; leave it out"),
        ({"hidden_weight": 1.0}, "--hidden_weight 1.0 has no effect without --teacher"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        Distillation(**settings).check()
