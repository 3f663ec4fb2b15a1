"""One copy of what a student has not changed of its teacher, and what is said of memory before a run."""

import copy
from collections import namedtuple
from types import SimpleNamespace

import torch
from torch import nn

from hf_xformers import XFormerForCausalLM
from hf_xformers.training import memory
from hf_xformers.training.distillation import Distillation, DistillationTrainer
from hf_xformers.training.memory import memory_line
from hf_xformers.training.partial_checkpoints import TrainedAlone, share_frozen
from tests.training.runs import quiet, stacked
from tests.training.test_distillation import config, rows


def test_frozen_weights_are_the_teachers():
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    student = copy.deepcopy(teacher)
    student[0].requires_grad_(False)
    student[1].requires_grad_(False)
    with torch.no_grad():
        student[1].weight[0, 0] += 1  # has learned something before
    assert share_frozen(student, teacher) == 4 * (16 + 4 + 4)
    same = {name: own.data_ptr() == there.data_ptr()
            for (name, own), there in zip(student.named_parameters(), teacher.parameters())}  # fmt: skip
    assert [name for name, shared in same.items() if shared] == ["0.weight", "0.bias", "1.bias"]
    assert student[1].weight[0, 0] != teacher[1].weight[0, 0]


def test_training_leaves_the_teacher(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(memory, "_WORTH_A_LINE", 0)
    torch.manual_seed(0)
    teacher = XFormerForCausalLM(config()).eval()
    student = copy.deepcopy(teacher).requires_grad_(False)
    student.model.trunk.layers[0].requires_grad_(True)
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    trainer = DistillationTrainer(
        model=student,
        teacher=teacher,
        distillation=Distillation("t"),
        args=quiet(tmp_path, max_steps=2, learning_rate=0.1, save_strategy="no"),
        train_dataset=rows(),
        data_collator=stacked,
    )
    trainer.train()
    changed = {name for name, tensor in student.state_dict().items() if not torch.equal(before[name], tensor)}
    assert changed and all(name.startswith("model.trunk.layers.0.") for name in changed)
    assert all(torch.equal(before[name], tensor) for name, tensor in teacher.state_dict().items())


def test_memory_is_counted_once(monkeypatch):
    assert memory_line(nn.Linear(4, 4), [], "adamw_torch") is None
    monkeypatch.setattr(memory, "_WORTH_A_LINE", 0)
    teacher = nn.Sequential(nn.Linear(1000, 1000, bias=False), nn.Linear(1000, 3000, bias=False))
    student = copy.deepcopy(teacher)
    text = memory_line(student, [teacher], "adamw_torch_fused")
    assert text == (
        "memory: weights with the teacher's 32 MB, gradients and Adam's states 48 MB; activations come on top"
    )
    student[1].requires_grad_(False)
    share_frozen(student, teacher)
    text = memory_line(student, [teacher], "adafactor")
    assert text == (
        "memory: weights with the teacher's 20 MB, gradients 4 MB; optimizer states and activations come on top"
    )
    assert memory_line(student, [], "adamw_torch").startswith("memory: weights 16 MB, ")


def test_what_a_checkpoint_leaves_out_is_not_missed():
    class Loads:
        def _issue_warnings_after_load(self, result):
            self.missed = result.missing_keys

    class Part(TrainedAlone, Loads):
        model = nn.Linear(2, 2)
        accelerator = SimpleNamespace(unwrap_model=lambda model: model)

    part = Part()
    part.model.weight.requires_grad_(False)
    part._issue_warnings_after_load(namedtuple("Result", "missing_keys")(["weight", "bias"]))
    assert part.missed == ["bias"]
