import dataclasses
from typing import Any, Literal

import pytest
import torch

from hf_xformers.cli import main
from hf_xformers.cli.arguments import offered_fields, overlay, parse_command, split_dotted
from hf_xformers.cli.options_file import file_tokens
from hf_xformers.cli.pretrain import GROUPS, make_parser, model_options
from hf_xformers.cli.values import annotation, parse
from hf_xformers.core.components import SLOTS
from hf_xformers.objectives import build_objective
from hf_xformers.training.building import build_config, with_changes
from hf_xformers.variants import config_class


def options(*argv, file=None, tmp_path=None):
    """What a command line means: (model, data and training arguments, components, fields, objective settings)."""
    argv = list(argv)
    if file is not None:
        path = tmp_path / "config.yaml"
        path.write_text(file)
        argv.insert(0, str(path))
    parsed = parse_command(argv, GROUPS, make_parser)
    choice = parsed.dataclasses[0]
    model, text, _images, _recipe, _devices, training = parsed.dataclasses
    return model, text, training, model_options(config_class(choice.variant or "xformer"), parsed, choice)


# ------------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize(
    "text, hint, value",
    [
        ("3", float, 3.0),
        ("1e-4", float, 1e-4),
        (500000, float, 500000.0),
        ("3", float | int | None, 3),
        ("0.5", float | int, 0.5),
        ("none", int | None, None),
        ("null", float | None, None),
        ("", int | None, None),
        ("", str | None, None),
        (None, int | None, None),
        ("true", bool, True),
        ("no", bool, False),
        ("no", str, "no"),
        ("3", str, "3"),
        ("none", str | None, None),
        ("half", Literal["half", "pairs"], "half"),
        ("2", Literal[1, 2], 2),
        ("1,2,3", list[int], [1, 2, 3]),
        ("[1, 2]", tuple[int, ...], (1, 2)),
        ([1, 2], tuple[int, ...], (1, 2)),
        ("4", int | list[int], 4),
        ("4,8", int | list[int], [4, 8]),
        ('{"a": 1}', dict[str, Any] | None, {"a": 1}),
        ("3", Any, 3),
        ("word", Any, "word"),
    ],
)
def test_values(text, hint, value):
    found = parse(text, hint, "--x")
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "text, hint, words",
    [
        ("three", int, "a whole number"),
        ("3.5", int, "a whole number"),
        (3.5, int, "a whole number"),
        ("wide", float | int | None, "none or a whole number or a number"),
        ("maybe", bool, "true or false"),
        ("third", Literal["half", "pairs"], "'half' or 'pairs'"),
        ("1,b", list[int], "a list such as 1,2,3"),
    ],
)
def test_values_that_do_not_fit(text, hint, words):
    with pytest.raises(ValueError, match=f"argument --x: {text!r} is no valid value; it takes {words}"):
        parse(text, hint, "--x")


def test_every_component_field_has_a_readable_annotation():
    for slot, registry in SLOTS.items():
        for name in registry:
            spec_class = registry.get(name)
            for field in spec_class.__dataclass_fields__:
                assert annotation(spec_class, field) is not Any, (slot, name, field)


# ------------------------------------------------------------------------------------------------ dotted options


def test_dotted_options_are_taken_out():
    argv = "--a 1 --attention dense --attention.bias=false --attention.scale -0.5 --position.x --b".split()
    rest, found = split_dotted(argv, ["attention", "position"])
    assert rest == ["--a", "1", "--b"]
    attention = {"type": "dense", "bias": "false", "scale": "-0.5"}
    assert found == {"attention": attention, "position": {"x": "true"}}


def test_another_name_drops_the_fields_of_the_first():
    below = {"attention": {"type": "dense", "bias": "false"}, "position": {"theta": "5"}}
    other = {"type": "other"}
    assert overlay(below, {"attention": other}) == {"attention": other, "position": {"theta": "5"}}
    for above in ({"type": "dense", "scale": "1"}, {"scale": "1"}):
        whole = {"type": "dense", "bias": "false", "scale": "1"}
        assert overlay(below, {"attention": above})["attention"] == whole


def test_components_and_fields():
    choice, source, args, model = options(
        *"--output_dir out --variant bert --position rotary --position.theta 500 --attention.bias no".split(),
        *"--hidden_size 64 --num-hidden-layers 3 --hidden_dropout_prob 0 --learning-rate 0.5".split(),
        *"--objective mlm --objective.mask_prob 0.4 --objective.selection hf --data a.txt b.txt".split(),
    )
    assert choice.variant == "bert" and choice.objective == "mlm"
    assert source.data == ["a.txt", "b.txt"]
    assert args.learning_rate == 0.5
    assert model["components"] == {"position": {"type": "rotary", "theta": 500.0}, "attention": {"bias": False}}
    assert model["fields"] == {"hidden_size": 64, "num_hidden_layers": 3, "hidden_dropout_prob": 0}
    assert model["objective_fields"] == {"mask_prob": 0.4, "selection": "hf"}


@pytest.mark.parametrize("spelling", ["window", "attention_window"])
def test_one_word_for_kindred_fields_in_every_command(spelling):
    """`--attention.window` is Longformer's `attention_window`; `convert` has a test of its own."""
    from hf_xformers.cli import finetune
    from hf_xformers.cli.benchmark import read_entries

    argv = ["--output_dir", "out", "--variant", "longformer", f"--attention.{spelling}", "64"]
    *_, model = options(*argv)
    assert model["components"] == {"attention": {"attention_window": 64}}
    parsed = parse_command([*argv, "--task", "regression"], finetune.GROUPS, finetune.make_parser)
    tuned = finetune.model_options(parsed, parsed.dataclasses[0], parsed.dataclasses[3])
    assert tuned["components"] == model["components"]
    (entry,) = read_entries("longformer", [f"longformer.attention.{spelling}=64"])
    assert entry.components == model["components"]
    with pytest.raises(ValueError, match=rf"--attention\.{spelling}: 'wide' is no valid value"):
        options(*argv[:-1], "wide")


def test_the_command_line_wins_under_another_name_too(tmp_path):
    file = "variant: longformer\nattention: {type: longformer, attention_window: 32}"
    *_, model = options("--output_dir", "out", "--attention.window", "64", file=file, tmp_path=tmp_path)
    assert model["components"]["attention"] == {"type": "longformer", "attention_window": 64}


def test_every_slot_is_an_option():
    argv = [f"--{slot}={next(iter(SLOTS[slot]))}" for slot in SLOTS]
    *_, model = options("--output_dir", "out", *argv)
    assert {slot: entry["type"] for slot, entry in model["components"].items()} == {
        slot: next(iter(SLOTS[slot])) for slot in SLOTS
    }


def test_the_decoder_has_options_of_its_own():
    *_, model = options(
        *"--output_dir out --variant t5 --decoder.attention.bias true --decoder.hidden_dropout_prob 0.2".split(),
        *"--decoder.position rotary --decoder.position.theta 7".split(),
    )
    decoder = model["fields"]["decoder"]
    assert decoder["attention"] == {"bias": True}
    whole = with_changes(config_class("t5"), model["components"], model["fields"])["decoder"]
    assert whole["attention"].items() >= {"type": "dense", "bias": True, "scale": 1.0}.items()  # T5's, one changed
    assert decoder["position"]["type"] == "rotary" and decoder["position"]["theta"] == 7.0
    assert decoder["hidden_dropout_prob"] == 0.2


def test_sizes_set_the_defaults_of_training():
    for size, rate in (("tiny", 1e-3), ("large", 1e-4)):
        assert options("--output_dir", "out", "--size", size)[2].learning_rate == rate
    assert options("--output_dir", "out", "--size", "large", "--learning_rate", "3")[2].learning_rate == 3.0


def test_fields_of_a_variant_alone_are_options(monkeypatch):
    class Special(config_class("bert")):
        model_type = "xf_test_special"
        special_width: int = 3

    assert "special_width" in offered_fields(Special)
    assert "is_decoder" not in offered_fields(Special) and "attention" not in offered_fields(Special)


def test_resume_without_a_value():
    for argv in (["--resume_from_checkpoint"], ["--resume_from_checkpoint", "--seed", "1"]):
        assert options("--output_dir", "out", *argv)[2].resume_from_checkpoint == "True"
    assert options("--output_dir", "out", "--resume_from_checkpoint", "there")[2].resume_from_checkpoint == "there"


# ------------------------------------------------------------------------------------------------ YAML

FILE = """
variant: bert
data: [a.txt, b.txt]
output_dir: out
size: small
attention:
  type: dense
  bias: false
position:
  type: rotary
  theta: 500
objective:
  type: mlm
  mask_prob: 0.3
decoder:
  attention: {type: dense, scale: 0.5}
hidden_size: 64
head_dim: null
learning_rate: 1e-3
max_steps: 7
bf16: false
save_strategy: no
run_name: 2024-01-01
text_column: 12:30
lr_scheduler_kwargs: {num_cycles: 2}
per_layer_config:
  0: {hidden_dropout_prob: 0.0}
"""


def test_a_file_says_the_same_as_the_command_line(tmp_path):
    choice, source, args, model = options(file=FILE, tmp_path=tmp_path)
    assert (choice.variant, choice.size, choice.objective) == ("bert", "small", "mlm")
    assert source.data == ["a.txt", "b.txt"]
    assert (args.output_dir, args.learning_rate, args.max_steps, args.bf16) == ("out", 1e-3, 7, False)
    assert (args.save_strategy, args.run_name, source.text_column) == ("no", "2024-01-01", "12:30")  # as written
    assert args.lr_scheduler_kwargs == {"num_cycles": 2}
    assert args.per_device_train_batch_size == 16  # of the size that the file names
    assert model["components"] == {
        "attention": {"type": "dense", "bias": False},
        "position": {"type": "rotary", "theta": 500.0},
    }
    assert model["objective_fields"] == {"mask_prob": 0.3}
    assert model["fields"]["hidden_size"] == 64 and model["fields"]["head_dim"] is None
    assert model["fields"]["per_layer_config"] == {0: {"hidden_dropout_prob": 0.0}}
    assert model["fields"]["decoder"]["attention"]["scale"] == 0.5


def test_the_command_line_wins(tmp_path):
    choice, _, args, model = options(
        *"--max_steps 9 --position learned_absolute --attention.scale 2 --objective clm --variant gpt2".split(),
        file=FILE,
        tmp_path=tmp_path,
    )
    assert (choice.variant, choice.objective, args.max_steps) == ("gpt2", "clm", 9)
    assert model["components"]["position"] == {"type": "learned_absolute"}
    assert model["components"]["attention"] == {"type": "dense", "bias": False, "scale": 2}
    assert model["objective_fields"] == {}


def test_several_values_given_again_are_all_read(tmp_path):
    _, source, *_ = options(*"--data c.txt --data d.txt e.txt".split(), file=FILE, tmp_path=tmp_path)
    assert source.data == ["c.txt", "d.txt", "e.txt"]


def test_layers_of_their_own_are_built():
    layers = {1: {"attention": "linear_transformer"}}
    config = build_config(config_class("xf_gpt2"), "tiny", build_objective("clm"), fields={"per_layer_config": layers})
    assert [layer.attention.type for layer in config.layer_configs()][:3] == ["dense", "linear_transformer", "dense"]


def test_nested_names_become_dotted():
    tokens = file_tokens({"decoder": {"attention": {"type": "dense", "bias": True}, "head_dim": None}}, ["decoder"])
    assert tokens == ["--decoder.attention=dense", "--decoder.attention.bias=true", "--decoder.head_dim=none"]


# ------------------------------------------------------------------------------------------------ products on a GPU


@pytest.mark.parametrize("flags, precision", [([], "high"), (["--tf32", "false"], "highest")])
def test_commands_allow_tf32_on_a_gpu_unless_told_not_to(flags, precision, monkeypatch):
    chosen = ["highest"]
    monkeypatch.setattr(torch, "set_float32_matmul_precision", chosen.append)
    monkeypatch.setattr("transformers.training_args.enable_tf32", lambda enable: None, raising=False)
    options("--variant", "bert", "--output_dir", "out", "--use_cpu", *flags)
    assert chosen == ["highest"]  # no GPU, nothing to choose
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    options("--variant", "bert", "--output_dir", "out", "--use_cpu", *flags)
    assert chosen[-1] == precision


# ------------------------------------------------------------------------------------------------ hints


@pytest.mark.parametrize(
    "argv, hint",
    [
        (["pretrain", "--max_eval_rows", "5"], ""),
        (["distill", "--variant", "performer", "--teacher", "t"], ""),
        (["predict", "--max_rows", "5"], "Did you mean --max_eval_rows?"),
        (["pretrain", "--lerning_rate", "5"], "Did you mean --learning_rate?"),
        (["pretrain", "--window", "5"], "Did you mean --attention.window?"),
    ],
)
def test_only_near_names_are_hinted_at(argv, hint, capsys):
    assert main([*argv, "--output_dir" if argv[0] != "predict" else "--output", "o.jsonl", "--model", "m"]) == 2
    error = capsys.readouterr().err
    assert f"there is no option {argv[1]}." in error and (hint in error if hint else "Did you mean" not in error)


def test_rows_are_limited_by_one_name():
    from hf_xformers.compression.report import Measuring
    from hf_xformers.finetuning.options import TaskData
    from hf_xformers.finetuning.predicting import TaskEvaluation

    for options in (TaskEvaluation, TaskData, Measuring):
        named = {field.name for field in dataclasses.fields(options) if field.name.endswith("_rows")}
        assert named <= {"max_train_rows", "max_eval_rows"} and "max_eval_rows" in named
