"""Input that cannot work: one paragraph that names the value and the remedy, exit code 2, no traceback."""

import json
import re
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from transformers import BertConfig

from hf_xformers.cli import file_errors
from tests.refused import refused
from tests.training.runs import SHAPE, flags, pretrain

ROOT = Path(__file__).resolve().parents[2]


CASES = {
    "unknown variant": (["--variant", "brt"], ["Unknown variant 'brt'", "Did you mean 'bert'"]),
    "unknown size": (["--size", "huge"], ["unknown size 'huge'", "tiny, small, base, large"]),
    "unknown objective": (["--objective", "rtd-x"], ["unknown objective 'rtd-x'", "mlm"]),
    "objective of another family": (
        ["--variant", "linformer", "--objective", "clm"],
        ["variant 'xf_linformer' cannot be trained with objective 'clm'", "objective 'mlm'", "xf_gpt2"],
    ),
    "unknown objective setting": (["--objective.mask_rate", "1"], ["Unknown field 'mask_rate'", "mask_prob"]),
    "ill-typed objective setting": (
        ["--objective.mask_prob", "often"],
        ["--objective.mask_prob: 'often'", "a number"],
    ),
    "objective setting out of range": (["--objective.mask_prob", "2"], ["mlm needs `mask_prob` in (0, 1), got 2"]),
    "unknown component": (["--attention", "dens"], ["Unknown attention component 'dens'", "Did you mean 'dense'"]),
    "unknown component field": (
        ["--attention.bais", "1"],
        ["Unknown field 'bais' of attention 'dense'", "Did you mean 'bias'"],
    ),
    "ill-typed component field": (["--attention.bias", "maybe"], ["--attention.bias: 'maybe'", "true or false"]),
    "component field out of range": (["--position.offset", "-1"], ["`offset` >= 0, got -1"]),
    "unknown slot": (["--atention.bias", "1"], ["no option --atention.bias", "Did you mean --attention.bias?"]),
    "ill-typed field": (["--hidden_size", "wide"], ["--hidden_size: 'wide'", "a whole number"]),
    "impossible geometry": (
        ["--hidden_size", "10", "--num_attention_heads", "4"],
        ["`hidden_size` 10 is not a multiple of `num_attention_heads` 4", "change one of them"],
    ),
    "impossible combination": (
        ["--position", "rotary", "--head_dim", "3"],
        ["rotary turns pairs of channels", "head width 3", "choose an even rotated width"],
    ),
    "rows longer than positions": (
        ["--block_size", "600", "--max_position_embeddings", "512"],
        ["--block_size 600", "covers only 512", "raise --max_position_embeddings to at least 600"],
    ),
    "no positions": (["--max_position_embeddings", "0"], ["`max_position_embeddings` >= 1, got 0"]),
    "missing file": (["--data", "nowhere.txt"], ["there is no file or folder 'nowhere.txt'", "give the path"]),
    "layers beyond the last": (
        ["--per_layer_config", '{"9": {"attention": "longformer"}}'],
        ["overrides layer 9, but there are", "raise `num_hidden_layers`"],
    ),
    "layers without numbers": (["--per_layer_config", '{"first": {}}'], ["--per_layer_config", "is keyed by layer"]),
    "unknown option": (
        ["--lerning_rate", "1"],
        ["there is no option --lerning_rate. Did you mean --learning_rate?"],
    ),
    "stray argument": (["stray"], ["there is no argument stray"]),
    "ill-typed flag": (["--max_steps", "ten"], ["--max_steps", "invalid int value: 'ten'"]),
    "no steps": (["--max_steps", "0"], ["--max_steps 0 trains nothing", "--num_train_epochs"]),
    "no epochs": (["--max_steps", "-1", "--num_train_epochs", "0"], ["--num_train_epochs 0 trains nothing"]),
    "upload of a run": (["--push_to_hub", "true"], ["--push_to_hub uploads", "push the result with `hf-xformers"]),
    "negative rate": (["--learning_rate", "-1"], ["--learning_rate -1 must be a number of at least 0"]),
    "empty batches": (
        ["--per_device_train_batch_size", "0"],
        ["--per_device_train_batch_size 0 must be at least 1"],
    ),
    "smoothing beyond 1": (["--label_smoothing_factor", "2"], ["--label_smoothing_factor 2 must be at least 0"]),
    "impossible flag": (["--save_strategy", "sometimes"], ["sometimes"]),
    "vocabulary too small": (["--vocab_size", "20"], ["vocab_size=20 is smaller than the required alphabet"]),
    "missing tokenizer": (["--tokenizer", "./nowhere"], ["no tokenizer could be loaded from './nowhere'"]),
    "missing start": (["--init_from", "nowhere"], ["'nowhere' holds no config.json"]),
    "nothing to resume": (
        ["--resume_from_checkpoint"],
        ["no complete checkpoint", "leave --resume_from_checkpoint out"],
    ),
    "missing checkpoint": (["--resume_from_checkpoint", "nowhere"], ["there is no checkpoint folder 'nowhere'"]),
}


@pytest.mark.parametrize("case", list(CASES))
def test_pretrain(case, text, tmp_path, capsys):
    argv, words = CASES[case]
    base = {} if case in ("no positions", "rows longer than positions") else {"block_size": 16}
    common = flags(**{**SHAPE, **base}, data=text, output_dir=tmp_path / "run", max_steps=1, disable_tqdm="true")
    message = refused(capsys, "pretrain", *common, *argv)
    for word in words:
        assert word in message
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_empty_file_and_empty_folder(tmp_path, text, capsys):
    assert "--output_dir" in refused(capsys, "pretrain", "--data", text)
    assert "configuration file 'nowhere.yaml' cannot be read" in refused(capsys, "pretrain", "nowhere.yaml")
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"data: caf\xe9")
    assert "latin.yaml' is not UTF-8" in refused(capsys, "pretrain", latin)
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    folder = tmp_path / "folder"
    folder.mkdir()
    blank = tmp_path / "blank.txt"
    blank.write_text("\n \n\n")
    for data, words in (
        (empty, "is empty (0 bytes)"),
        (folder, "holds no file with a known suffix"),
        (blank, "blank.txt"),
    ):
        message = refused(capsys, "pretrain", "--data", data, "--output_dir", tmp_path / "run")
        assert words in message


@pytest.mark.parametrize(
    "content, words",
    [
        ("a: [", "is no valid YAML"),
        ("- a\n- b", "must hold `option: value` lines, not a list"),
        ("lerning_rate: 1", "Did you mean --learning_rate?"),
        ("max_steps: 1.5", "argument --max_steps: invalid int value: '1.5'"),
        ("attention: {type: dense, bias: 3}", "--attention.bias: '3'"),
        ("attention: {type: dense, window: 3}", "Unknown field 'window' of attention 'dense'"),
        ("hidden_size: [1]", "--hidden_size: '[1]'"),
    ],
)
def test_files(content, words, text, tmp_path, capsys):
    path = tmp_path / "config.yaml"
    path.write_text(content)
    message = refused(capsys, "pretrain", path, "--data", text, "--output_dir", tmp_path / "run")
    assert words in message


# ------------------------------------------------------------------------------------------------ with a saved model


@pytest.fixture(scope="module")
def bert(text, tmp_path_factory):
    return pretrain(text, tmp_path_factory.mktemp("bert") / "run", variant="bert", max_steps=1)


def test_vocabulary_of_another_model(text, bert, tmp_path, capsys):
    common = flags(data=text, output_dir=tmp_path / "run", block_size=16, tokenizer=bert, vocab_size=100)
    message = refused(capsys, "pretrain", *common)
    assert "ids but config.vocab_size is 100" in message and "build the model with vocab_size=" in message


def test_start_of_another_variant(text, bert, tmp_path, capsys):
    common = flags(data=text, output_dir=tmp_path / "run", block_size=16, init_from=bert)
    message = refused(capsys, "pretrain", *common, "--variant", "roberta")
    assert "is a checkpoint of variant 'xf_bert', not 'xf_roberta'; leave --variant out" in message
    message = refused(capsys, "pretrain", *common, "--hidden_size", "32")
    assert "has weights of another size for" in message and "leave out options that change the model" in message
    message = refused(capsys, "pretrain", *common, "--num_hidden_layers", "5")
    assert "has no weights for" in message


def test_start_of_a_foreign_model(text, tmp_path, capsys):
    BertConfig(add_cross_attention=False).save_pretrained(tmp_path / "other")  # with fields that ours have not
    common = flags(data=text, output_dir=tmp_path / "run", init_from=tmp_path / "other")
    message = refused(capsys, "pretrain", *common)
    assert "is a checkpoint of model type 'bert'" in message and "hf-xformers convert" in message


def test_evaluate(text, bert, tmp_path, capsys):
    def message(*argv, model=bert):
        return refused(capsys, "evaluate", "--model", model, "--data", text, *argv)

    assert (
        "evaluates a ForCausalLM class, and the model is saved as XFBertForMaskedLM; take --objective mlm"
        in message("--objective", "clm")
    )
    assert "unknown objective 'x'" in message("--objective", "x")
    assert "has no split 'tset': choose one of train, validation or all" in message("--split", "tset")
    assert "covers only 512" in message("--block_size", "600")
    assert "--block_size 0 must be at least 1 token" in message("--block_size", "0")
    assert "nowhere" in message(model="./nowhere")
    assert "Unknown field 'mask_rate'" in message("--objective.mask_rate", "1")
    assert "there is no file or folder 'nowhere.txt'" in refused(
        capsys, "evaluate", "--model", bert, "--data", "nowhere.txt"
    )
    assert "the following arguments are required: --model" in refused(capsys, "evaluate")
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (bare / name).write_text((bert / name).read_text())
    assert "holds no weights" in message(model=bare)
    config = json.loads((bert / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps({**config, "vocab_size": 50}))
    assert "ids but config.vocab_size is 50" in message(model=bare)


@pytest.mark.parametrize("command", ["evaluate", "finetune", "convert"])
def test_configurations_of_no_known_class(command, text, tmp_path, capsys):
    rest = {
        "evaluate": ["--data", text, "--model"],
        "finetune": ["--task", "ner", "--data", text, "--output_dir", tmp_path / "run", "--model"],
        "convert": ["--to", tmp_path / "to", "--from"],
    }[command]
    (tmp_path / "model").mkdir()
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({"model_type": "brt9"}))
    message = refused(capsys, command, *rest, tmp_path / "model")
    assert "model type 'brt9'" in message and "--debug" not in message
    config.write_text(json.dumps({"d_model": 64}))
    message = refused(capsys, command, *rest, tmp_path / "model")
    assert "model_type" in message and "`save_pretrained` wrote" in message and "--debug" not in message


def test_an_option_is_called_by_the_name_that_was_typed(text, tmp_path, capsys):
    run = ("--output_dir", tmp_path / "run")
    assert "argument --max-steps: invalid" in refused(capsys, "pretrain", "--data", text, *run, "--max-steps", "ten")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text(json.dumps({"model_type": "bert"}))
    message = refused(capsys, "uptrain", "--model", foreign, "--data", text, *run)
    assert f"--model {str(foreign)!r} is a checkpoint of model type 'bert'" in message and "--init_from" not in message


def test_other_runs_without_a_step(text, bert, tmp_path, capsys):
    rows = tmp_path / "rows.csv"
    rows.write_text("text,label\na,x\nb,y\n")
    out = ("--output_dir", tmp_path / "run", "--max_steps", "0")
    classify = ("--task", "text-classification", "--model", bert, "--data", rows)
    for argv in (("uptrain", "--model", bert, "--data", text, *out), ("finetune", *classify, *out)):
        assert "--max_steps 0 trains nothing" in refused(capsys, *argv)
        assert "--push_to_hub uploads" in refused(capsys, *argv[:-1], "1", "--push_to_hub")
    assert not (tmp_path / "run").exists()


def test_convert(bert, tmp_path, capsys):
    assert "--to" in refused(capsys, "convert", "--from", bert)
    assert "./nowhere" in refused(capsys, "convert", "--from", "./nowhere", "--to", tmp_path / "out")
    assert "lies in the target" in refused(capsys, "convert", "--from", bert, "--to", bert.parent)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").touch()
    assert "is not empty" in refused(capsys, "convert", "--from", bert, "--to", tmp_path / "used")


def test_the_packages_of_the_extra_are_known():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = {re.match(r"[\w-]+", item)[0] for item in project["optional-dependencies"]["train"]}
    distributions = packages_distributions()
    assert {distributions[name][0].replace("_", "-") for name in file_errors._OF_TRAIN} == extra


@pytest.mark.parametrize("package", ["accelerate", "datasets", "peft", "seqeval"])
def test_a_missing_package_of_an_extra_is_named(package, monkeypatch, capsys):
    """Where the models alone are installed; transformers names accelerate in a text of its own."""

    def run(argv):
        if package == "accelerate":
            raise ImportError("Using the `Trainer` with `PyTorch` requires `accelerate>=1.1.0`")
        raise ModuleNotFoundError(f"No module named '{package}.parts'", name=f"{package}.parts")

    monkeypatch.setattr("hf_xformers.cli._command", lambda name: run)
    assert f"needs {package}, which is not installed: pip install 'hf_xformers[train]'" in refused(capsys, "pretrain")
