import os
import subprocess
import sys
from pathlib import Path

import pytest

import hf_xformers
import hf_xformers.cli
from hf_xformers.cli import COMMANDS, main

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_help_names_every_command(argv, capsys):
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


def test_help_after_an_import(monkeypatch, capsys):
    monkeypatch.setattr("hf_xformers.cli._import_modules", lambda arguments: arguments[2:])
    for rest in ([], ["--help"]):
        assert main(["--import", "my_parts", *rest]) == 0 and "usage: hf-xformers" in capsys.readouterr().out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hf-xformers {hf_xformers.__version__}\n"


def test_unknown_command(capsys):
    assert main(["pretrian"]) == 2
    assert (
        "there is no command 'pretrian'" in (error := capsys.readouterr().err) and "Did you mean 'pretrain'?" in error
    )


def explained(capsys, *argv, flag="--help"):
    with pytest.raises(SystemExit) as ended:
        main([*argv, flag])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command, columns", [*((command, 80) for command in COMMANDS), ("finetune", 120)])
def test_every_command_explains_itself(command, columns, capsys, monkeypatch):
    """Within the width of the terminal, and every option."""
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = explained(capsys, command).splitlines()
    assert lines[0].startswith(f"usage: hf-xformers {command}") and max(map(len, lines)) <= columns
    if command in ("pretrain", "uptrain"):
        assert len(lines) < 136
    for line, following in zip(lines, [*lines[1:], ""]):
        if line.startswith("  -") and "  " not in line.strip() and not line.endswith("\\"):
            assert following.startswith(" " * 20), line


EXAMPLES = {
    "predict": [
        'hf-xformers predict --model runs/reviews --text "a fine film"',
        "hf-xformers predict --model runs/reviews --data new.csv --output predictions.csv",
    ],
    "evaluate": ["hf-xformers evaluate --model runs/reviews --data test.csv --output predictions.jsonl"],
    "finetune": ["accelerate launch -m hf_xformers.cli finetune ..."],
    "benchmark": [
        "--variants narrow=longformer,wide=longformer,mix=xformer --set narrow.attention.window=128"
        " --set mix.attention=performer --set mix.num_key_value_heads=2"
    ],
}


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("command", EXAMPLES)
def test_examples_stand_on_lines_of_their_own(command, columns, capsys, monkeypatch):
    """They can be copied into a shell, which continues a line that ends in a backslash."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("hf_xformers.finetuning.trained.does_a_task", lambda name: True)
    text = explained(capsys, command, *(["--model", "runs"] if command == "evaluate" else []))
    assert all(len(line) <= columns for line in text.splitlines() if line.endswith("\\"))
    lines = [*(" ".join(line.split()) for line in text.replace("\\\n", " ").splitlines()), ""]
    for example in EXAMPLES[command]:
        place = lines.index(example)
        assert {lines[place - 1], lines[place + 1]} <= {"", *EXAMPLES[command]}


def test_pretrain_help_has_its_own_options_first_and_trainers_on_request(capsys):
    asked = ("pretrain", "--variant", "bert", "--size", "small")
    out = explained(capsys, *asked)
    assert out.index("--variant") < out.index("--data") < out.index("--attention NAME") < out.index("--learning_rate")
    assert "--gradient_accumulation_steps" not in out and "--hidden_size" in out and "--help-all" in out
    assert "--learning_rate (default 0.0005)" in " ".join(out.split())  # of the size
    full = explained(capsys, *asked, flag="--help-all")
    for option in ("--learning_rate", "--gradient_accumulation_steps", "--attention NAME", "--hidden_size VALUE"):
        assert option in full
    assert full.index("--data") < full.index("--gradient_accumulation_steps")


def test_help_names_no_option_that_is_refused(capsys):
    usual = " ".join(explained(capsys, "linearize").split()).split("the most usual: ")[1]
    assert "--learning_rate" in usual and "--max_steps" not in usual and "--num_train_epochs" not in usual
    assert "--num_train_epochs" not in explained(capsys, "linearize", flag="--help-all")


def test_finetune_help_is_one_screen_and_more_on_request(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = explained(capsys, "finetune")
    assert len(out.splitlines()) <= 52 and "--task" in out and "--help-all" in out and "--layer_decay" not in out
    full = explained(capsys, "finetune", flag="--help-all")
    assert "--layer_decay" in full and "--hidden_size" in full and "--gradient_accumulation_steps" in full


def test_evaluate_offers_what_it_reads(capsys):
    out = explained(capsys, "evaluate")
    assert "--per_device_eval_batch_size" in out and "--use_cpu" in out
    assert "--learning_rate" not in out and "--help-all" not in out
    assert main(["evaluate", "--model", "anything", "--learning_rate", "1"]) == 2
    assert "there is no option --learning_rate" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["flag", "variable"])
def test_debug_keeps_the_traceback(how, monkeypatch):
    argv = ["list", "nonsense"]
    if how == "variable":
        monkeypatch.setenv(hf_xformers.cli.DEBUG_VARIABLE, "1")
    else:
        argv = ["--debug", *argv]
    with pytest.raises(ValueError, match="nonsense"):
        main(argv)


@pytest.mark.parametrize("bug", [lambda argv: {}["a"], lambda argv: vars(None), lambda argv: int("x")])
def test_bugs_keep_theirs(bug, monkeypatch):
    monkeypatch.setattr("hf_xformers.cli.listing.run", bug)
    with pytest.raises((KeyError, TypeError, ValueError)):
        main(["list"])


def test_refusals_of_other_libraries_say_how_to_see_more(monkeypatch, capsys):
    def foreign(argv):
        raise ValueError("no such thing")

    monkeypatch.setattr("hf_xformers.cli.listing.run", foreign)
    assert main(["list"]) == 2
    assert "no such thing (hf-xformers --debug" in capsys.readouterr().err


def test_interruption(monkeypatch, capsys):
    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_xformers.cli.listing.run", interrupted)
    assert main(["list"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def python(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("module", ["hf_xformers", "hf_xformers.cli"])
def test_as_a_module_help_is_quick(module):
    """Without the libraries that take seconds to load."""
    done = python("-X", "importtime", "-m", module, "--help")
    assert done.returncode == 0 and "usage: hf-xformers" in done.stdout
    loaded = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time")}
    assert not loaded & {"torch", "transformers", "datasets", "numpy"}


def test_list_loads_neither_datasets_nor_trainer():
    code = (
        "import sys; from hf_xformers.cli import main; main(['list', '--json']); print(*sys.modules, file=sys.stderr)"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert not set(done.stderr.split()) & {"datasets", "transformers.trainer", "transformers.training_args"}
