"""What a student starts from: copied layers, other sizes, other mechanisms, other families."""

import pytest
import torch

from hf_xformers import XFormerForMaskedLM, XFormerForSeq2SeqLM, XFormerForSequenceClassification
from hf_xformers.compression.students import StudentChoice, build_student
from tests.compression.test_methods import make, rows


def build(teacher, **choice):
    return build_student(teacher, StudentChoice(**choice), seed=0)


@pytest.mark.parametrize("copy_layers, kept", [("alternate", [0, 2]), ("last", [2, 3]), ("3,0", [3, 0])])
def test_layers_of_the_teacher(copy_layers, kept):
    """The student is the teacher with its other layers taken out."""
    teacher = make(seed=1, layers=4).float()
    made = build(teacher, copy_layers=copy_layers)
    layers = torch.nn.ModuleList([teacher.model.trunk.layers[index] for index in kept])
    expected = make(seed=5, layers=2).float()
    expected.load_state_dict({n: t for n, t in teacher.state_dict().items() if ".layers." not in n}, strict=False)
    expected.model.trunk.layers.load_state_dict(layers.state_dict())
    student = made.model
    assert torch.equal(student(**rows()).logits, expected(**rows()).logits)
    assert f"layers {kept[0]}, {kept[1]} of the teacher, 100%" in made.made and teacher.config.num_hidden_layers == 4


def test_layers_with_geometry_of_their_own():
    layers = {1: {"intermediate_size": 8}, 3: {"intermediate_size": 4}}
    teacher = make(layers=4, per_layer_config=layers)
    student = build(teacher, copy_layers="1,3").model
    widths = [layer.feedforward.up_proj.out_features for layer in student.model.trunk.layers]
    assert widths == [8, 4] and student.config.layer(0).intermediate_size == 8
    writer = make(XFormerForSeq2SeqLM, layers=4, is_encoder_decoder=True, decoder={"per_layer_config": layers})
    student = build(writer, copy_layers="0,3").model
    widths = [layer.feedforward.up_proj.out_features for layer in student.model.decoder.layers]
    assert widths == [12, 4] and student.model.trunk.layers[1].feedforward.up_proj.out_features == 12


def test_another_mechanism_and_another_width():
    teacher = make(layers=4)
    made = build(teacher, components={"attention": "performer"})
    assert made.model.config.attention.type == "performer" and made.model.config.num_hidden_layers == 2
    name = "model.trunk.layers.{}.attention.q_proj.weight"
    assert torch.equal(made.model.state_dict()[name.format(1)], teacher.state_dict()[name.format(2)].float())
    narrow = build(teacher, fields={"hidden_size": 4}).model
    assert narrow.config.intermediate_size == 8 and narrow(**rows()).logits.shape == (2, 3)
    fresh = build(teacher, start="scratch", components={"attention": "performer"}, fields={"num_hidden_layers": 3})
    assert fresh.model.config.num_hidden_layers == 3 and "random weights" in fresh.made
    again = build(teacher, start="scratch", components={"attention": "performer"}, fields={"num_hidden_layers": 3})
    one, other = fresh.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("cls", [XFormerForMaskedLM, XFormerForSequenceClassification])
def test_another_family(cls):
    teacher = make(cls, layers=4, id2label={0: "bad", 1: "good", 2: "so"}, label2id={"bad": 0, "good": 1, "so": 2})
    made = build(teacher, start="linformer", fields={"num_hidden_layers": 1})
    assert made.model.config.model_type == "xf_linformer" and made.model.config.vocab_size == teacher.config.vocab_size
    assert made.model.config.id2label == teacher.config.id2label
    small = build(teacher, start="bert", size="tiny").model
    assert small.config.hidden_size == 128 and small.config.vocab_size == teacher.config.vocab_size


def test_the_share_that_was_copied():
    """Of the parameters, of which the tied table is one."""
    teacher = make(XFormerForMaskedLM, layers=4)
    made = build(teacher, fields={"intermediate_size": 20})
    fresh = sum(p.numel() for name, p in made.model.named_parameters() if "_proj" in name and "feedforward" in name)
    fresh -= 2 * made.model.config.hidden_size  # biases on the way back have the same size
    share = 1 - fresh / made.model.num_parameters()
    assert f", {share:.0%} of the numbers copied" in made.made and share < 0.9


@pytest.mark.parametrize("start", ["teacher", "scratch", "bart"])
def test_it_generates_as_its_teacher_is_set(start):
    teacher = make(XFormerForSeq2SeqLM, is_encoder_decoder=True)
    teacher.generation_config.no_repeat_ngram_size = 3
    assert build(teacher, start=start).model.generation_config.no_repeat_ngram_size == 3


def test_a_saved_model(tmp_path):
    make(XFormerForMaskedLM, layers=1).save_pretrained(tmp_path)
    made = build(make(), start=str(tmp_path))
    assert type(made.model).__name__.endswith("ForSequenceClassification") and made.model.config.num_labels == 3
    with pytest.raises(ValueError, match="weights belong to its own shape"):
        build(make(), start=str(tmp_path), fields={"hidden_size": 4})


@pytest.mark.parametrize(
    "choice, message",
    [
        ({"start": "nowhere"}, "neither 'teacher', 'scratch', a folder, nor a variant"),
        ({"size": "tiny"}, "--size is of a student of another variant"),
        ({"fields": {"num_hidden_layers": 9}}, "cannot be copied from 4"),
        ({"copy_layers": "0,1", "fields": {"num_hidden_layers": 1}}, "names 2 layers for a student of 1"),
        ({"start": "scratch", "copy_layers": "last"}, "--copy_layers last names layers of the teacher, and --student"),
        ({"start": "linformer", "copy_layers": "frist"}, "--copy_layers frist names layers of the teacher"),
    ],
)
def test_refusals(choice, message):
    with pytest.raises(ValueError, match=message):
        build(make(layers=4), **choice)


def test_layers_that_share_their_weights():
    """They are all copied, and what names none of them is refused."""
    teacher = make(layers=4, stack="universal")
    assert build(teacher, copy_layers="last").model.config.num_hidden_layers == 2
    assert build(teacher, fields={"num_hidden_layers": 6}).model.config.num_hidden_layers == 6
    with pytest.raises(ValueError, match="not 'frist'; correct it"):
        build(teacher, copy_layers="frist")
