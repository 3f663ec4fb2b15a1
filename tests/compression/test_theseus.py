"""Layers that replace blocks of a teacher's: at both ends of the probability, and on the way."""

import pytest
import torch

from hf_xformers.compression.methods import build_method
from hf_xformers.compression.theseus import Replacing
from tests.compression.test_methods import make, rows


def replaced(student, teacher, **fields):
    replacing = Replacing(build_method({"type": "theseus", **fields}), teacher)
    replacing.put(student)
    return replacing


def with_teachers_embedding(student, teacher):
    student.model.trunk.embedding.load_state_dict(teacher.model.trunk.embedding.state_dict())
    student.model.trunk.position.load_state_dict(teacher.model.trunk.position.state_dict())
    return student


@pytest.mark.parametrize("attention", ["dense", "performer"])
def test_at_probability_one_the_student_stands_alone(attention):
    """Bit by bit, dropout and all."""
    teacher = make(seed=2, layers=4)
    student, alone = (make(seed=1, attention=attention, hidden_dropout_prob=0.3) for _ in range(2))
    with_teachers_embedding(alone, teacher)
    replacing = replaced(student, teacher, replacing_rate=1.0)
    student.train(), alone.train()
    torch.manual_seed(5)
    found = student(**rows()).logits
    torch.manual_seed(5)
    assert torch.equal(found, alone(**rows()).logits) and replacing.drawn == [True, True]
    replacing.rate = 0.01
    student.eval(), alone.eval()
    assert torch.equal(student(**rows()).logits, alone(**rows()).logits)  # evaluation is the student's


@pytest.mark.parametrize("attention", ["dense", "performer"])
def test_near_zero_the_teacher_runs(attention):
    """With the teacher's head its outputs, and gradients reach the student's layers that did run."""
    teacher = make(seed=2, layers=4)
    student = make(seed=1, attention=attention)
    for part in ("classifier", "model.pooler"):
        source = dict(teacher.named_modules()).get(part)
        if source is not None:
            student.get_submodule(part).load_state_dict(source.state_dict())
    replacing = replaced(student, teacher)
    replacing.rate = 0.0
    student.train()
    torch.testing.assert_close(student(**rows()).logits, teacher(**rows()).logits, rtol=1e-12, atol=1e-12)
    assert replacing.drawn == [False, False]


def test_who_learns():
    teacher, student = make(seed=2, layers=4), make(seed=1)
    replacing = replaced(student, teacher)
    frozen = {name for name, parameter in student.named_parameters() if not parameter.requires_grad}
    assert frozen and all("embedding" in name or "position" in name for name in frozen)
    replacing.takes_own = lambda layer: layer is student.model.trunk.layers[0]
    student.train()
    student(**rows(), labels=torch.tensor([0, 1])).loss.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    layers = student.model.trunk.layers
    assert all(parameter.grad is not None for parameter in layers[0].parameters())
    assert all(parameter.grad is None for parameter in layers[1].parameters())
    names = set(student.state_dict())
    replacing.merge(student)
    assert set(student.state_dict()) == names and all(p.requires_grad for p in student.parameters())
    assert not any(name in vars(layer) for layer in layers for name in ("run", "prepare"))


def test_how_often():
    teacher, student = make(seed=2, layers=4), make(seed=1, layers=4)
    replacing = replaced(student, teacher)
    replacing.rate, count = 0.3, 0
    student.train()
    torch.manual_seed(0)
    for _ in range(150):
        student(**rows())
        count += sum(replacing.drawn)
    assert abs(count - 0.3 * 600) < 4 * (600 * 0.3 * 0.7) ** 0.5


def test_the_rate_rises():
    method = build_method({"type": "theseus", "replacing_rate": 0.4, "full_after": 0.5})
    assert [method.rate(x) for x in (0, 0.25, 0.5, 0.9)] == pytest.approx([0.4, 0.7, 1, 1])
    method = build_method({"type": "theseus", "replacing_rate": 0.4, "schedule": "constant"})
    assert [method.rate(x) for x in (0, 0.6, 0.7)] == pytest.approx([0.4, 0.4, 1])


@pytest.mark.parametrize(
    "own, theirs, message",
    [
        ({"layers": 3}, {"layers": 4}, "cannot be divided among 3"),
        ({"width": 16}, {}, "student has width 16"),
        ({"position": "rotary"}, {}, "keeps the teacher's position"),
        ({"stack": "universal"}, {}, "stack 'universal' of the student"),
    ],
)
def test_what_cannot_stand_in_anothers_place(own, theirs, message):
    with pytest.raises(ValueError, match=message):
        replaced(make(**own), make(**{"layers": 4, **theirs}))
