"""Damaged models, names that are none, and empty data: every command that reads a model refuses them in one paragraph,
before it writes anything. (`finetune` has its own in test_finetune.py, `convert` in tests/conversion.)"""

import contextlib
import errno
import json
import resource
import shutil
import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_xformers.cli.file_errors import explain
from tests.cli.test_errors import refused
from tests.training.runs import flags, pretrain

FEW = {"max_steps": 1, "disable_tqdm": "true"}
SHORT = {"block_size": 16, "max_steps": 1, "disable_tqdm": "true", "per_device_train_batch_size": 4}


@pytest.fixture(scope="module")
def bert(text, tmp_path_factory):
    return pretrain(text, tmp_path_factory.mktemp("bert") / "run", variant="bert", max_steps=1)


def commands(model, text, output, good):
    """Every command as it would read `model`; `good` is a whole one."""
    return {
        "evaluate": ["evaluate", *flags(model=model, data=text)],
        "pretrain": ["pretrain", *flags(init_from=model, data=text, output_dir=output, **SHORT)],
        "uptrain": ["uptrain", *flags(model=model, data=text, output_dir=output, **SHORT)],
        "teacher": ["uptrain", *flags(model=good, teacher=model, data=text, output_dir=output, **SHORT)],
        "swap": ["convert", "--from", str(model), "--to", str(output), "--attention", "talking_heads"],
        "convert": ["convert", "--from", str(model), "--to", str(output)],
    }


def more_commands(model, output):
    """The commands that read any checkpoint."""
    return {
        "push": ["push", str(model), "--repo", "user/m", "--dry-run"],
        "bundle": ["bundle", str(model), "--to", str(output)],
        "card": ["card", str(model), "--to", str(output) + ".md"],
        "export": ["export", "--model", str(model), "--output", str(output) + ".onnx"],
    }


def skip_without_onnx(command):
    """Export is refused for lack of its packages before anything else."""
    if command == "export":
        for package in ("onnx", "onnxscript"):
            pytest.importorskip(package)


def cut_off(model):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return ["safetensors"]


def no_header(model):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:4])
    return ["safetensors"]


def rewritten(model, change):
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def missing(model):
    name = "model.trunk.layers.1.attention.q_proj.weight"
    rewritten(model, lambda tensors: tensors.pop(name))
    return [name]


def unexpected(model):
    rewritten(model, lambda tensors: tensors.update({"model.trunk.layers.7.extra": torch.zeros(2)}))
    return ["model.trunk.layers.7.extra"]


def other_size(model):
    name = "model.trunk.layers.1.attention.q_proj.weight"
    rewritten(model, lambda tensors: tensors.update({name: torch.zeros(3)}))
    return []


def broken_config(model):
    (model / "config.json").write_text('{"model_type": "xf_be')
    return ["config.json"]


def random_bytes(model):
    (model / "model.safetensors").write_bytes(bytes(range(256)) * 8)
    return ["model.safetensors"]


def absurd_header(model):
    path = model / "model.safetensors"
    header = json.dumps({"x": {"dtype": "F32", "shape": [-1], "data_offsets": [8, 4]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    return ["model.safetensors"]


def header_that_is_a_list(model):
    (model / "model.safetensors").write_bytes((4).to_bytes(8, "little") + b"[ ] ")
    return ["model.safetensors"]


def config_that_is_a_list(model):
    (model / "config.json").write_text("[1, 2]")
    return ["config.json", "holds a list"]


def config_that_is_null(model):
    (model / "config.json").write_text("null")
    return ["config.json", "holds null"]


def index_outside(model):
    shutil.move(model / "model.safetensors", model.parent / "outside.safetensors")
    names = dict.fromkeys(load_file(model.parent / "outside.safetensors"), "../outside.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return ["'../outside.safetensors'", "which is not in the folder"]


FILES = [random_bytes, absurd_header, header_that_is_a_list, config_that_is_a_list, config_that_is_null, index_outside]
DAMAGE = [cut_off, no_header, missing, unexpected, other_size, broken_config, *FILES]
NAMES = ["not a repository", "a/b/c", "./nowhere", "owner/"]
READERS = ["evaluate", "pretrain", "uptrain", "teacher", "swap", "convert"]


def pairs(first, second, always=1):
    """Each of the first with some of the second, each of the second with one of the first."""
    return [(one, two) for i, one in enumerate(first) for j, two in enumerate(second) if not i or j < always]


@pytest.mark.parametrize("command, damage", pairs(READERS, DAMAGE, 3), ids=lambda x: getattr(x, "__name__", x))
def test_damaged_models(command, damage, text, bert, tmp_path, capsys):
    model = shutil.copytree(bert, tmp_path / "model")
    words = damage(model)
    before = {path: path.read_bytes() for path in model.rglob("*") if path.is_file()}
    message = refused(capsys, *commands(model, text, tmp_path / "out", bert)[command])
    for word in words:
        assert word in message
    if "layers." not in "".join(words):
        assert str(model) in message
    assert any(remedy in message for remedy in ("again", "give the folder", "save"))
    assert before == {path: path.read_bytes() for path in model.rglob("*") if path.is_file()}
    assert not (tmp_path / "out" / "model.safetensors").exists()


SHARING = ["push", "bundle", "card", "export"]


@pytest.mark.parametrize("command, damage", pairs(SHARING, [cut_off, *FILES]), ids=lambda x: getattr(x, "__name__", x))
def test_damaged_models_to_share(command, damage, bert, tmp_path, capsys):
    skip_without_onnx(command)
    model = shutil.copytree(bert, tmp_path / "model")
    words = damage(model)
    before = sorted(path.name for path in tmp_path.iterdir())
    message = refused(capsys, *more_commands(model, tmp_path / "out")[command])
    assert all(word in message for word in [*words, str(model), "again"])
    assert before == sorted(path.name for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    "command, content", pairs(["evaluate", "pretrain", "uptrain", "push", "card"], ['{"seed": ', "[]", "null"])
)
def test_damaged_summaries(command, content, text, bert, tmp_path, capsys):
    model = shutil.copytree(bert, tmp_path / "model")
    (model / "training_summary.json").write_text(content)
    known = {**commands(model, text, tmp_path / "out", bert), **more_commands(model, tmp_path / "out")}
    message = refused(capsys, *known[command])
    assert str(model / "training_summary.json") in message and "again" in message
    assert not (tmp_path / "out").exists()


# -------------------------------------------------------------------------------------------------- places to write to


def writers(model, text, output):
    """Every command that writes into a folder or a file."""
    file = output if output.is_file() else output.with_name(output.name + ".file")
    rows = file.parent.parent / "rows.csv"
    rows.write_text("text,label\n" + "".join(f"karan losel {n},a\nmitor nevin {n},b\n" for n in range(8)))
    over = {"output_dir": output, "overwrite_output_dir": True}
    return {
        "pretrain": ["pretrain", *flags(init_from=model, data=text, **over, **SHORT)],
        "uptrain": ["uptrain", *flags(model=model, data=text, **over, **SHORT)],
        "finetune": ["finetune", *flags(task="text-classification", model=model, data=rows, **over, **FEW)],
        "convert": ["convert", "--from", str(model), "--to", str(output), "--overwrite"],
        "swap": ["convert", "--from", str(model), "--to", str(output), "--overwrite", "--attention", "talking_heads"],
        "bundle": ["bundle", str(model), "--to", str(output)],
        "card": ["card", str(model), "--to", str(file)],
        "export": ["export", "--model", str(model), "--output", str(file)],
        "benchmark": ["benchmark", "--variants", "bert", "--output_dir", str(output)],
    }


WRITERS = ["pretrain", "uptrain", "finetune", "convert", "swap", "bundle", "card"]


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def disk(tmp_path):
    """A small disk of its own: (folder, function that mounts it with options)."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(*options):
        done = subprocess.run(["mount", *options, str(folder)], capture_output=True)
        if done.returncode:
            pytest.skip("a disk can be mounted by root alone")

    mount("-t", "tmpfs", "-o", "size=160k", "tmpfs")
    yield folder, mount
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def file_limit():
    """No file may grow beyond 12 kB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("command", WRITERS)
def test_a_full_disk(command, text, bert, disk, capsys):
    """What stood in the place is there afterwards, byte for byte, and nothing else."""
    folder, _ = disk
    output = shutil.copytree(bert, folder / "out")
    if command == "bundle":  # it writes over nothing but an earlier one
        config = json.loads((output / "config.json").read_text())
        (output / "config.json").write_text(json.dumps({**config, "auto_map": {}}))
    arguments = writers(bert, text, output)[command]
    (folder / "out.file").write_text("a card")
    with open(folder / "ballast", "wb") as ballast, contextlib.suppress(OSError):
        ballast.write(b"x" * 200_000)
    before = contents(folder)
    message = refused(capsys, *arguments)
    assert "no space left" in message or "see that the disk has space" in message
    assert contents(folder) == before


@pytest.mark.parametrize("command", WRITERS)
def test_files_that_grow_too_long(command, text, bert, tmp_path, file_limit, capsys):
    (tmp_path / "there").mkdir()
    output = tmp_path / "there" / "out"
    arguments = writers(bert, text, output)[command]
    file_limit()
    message = refused(capsys, *arguments)
    assert "ulimit -f" in message
    assert not list(output.glob("model.safetensors"))


@pytest.mark.parametrize("command", [*WRITERS, "export", "benchmark"])
def test_a_disk_that_is_read_only(command, text, bert, disk, capsys):
    skip_without_onnx(command)
    folder, mount = disk
    arguments = writers(bert, text, folder / "out")[command]
    mount("-o", "remount,ro")
    assert "can be read only" in refused(capsys, *arguments)


@pytest.mark.parametrize("command, inside", pairs([*WRITERS, "export", "benchmark"], [True, False]))
def test_output_that_is_a_file(command, inside, text, bert, tmp_path, capsys):
    (tmp_path / "there").mkdir()
    place = tmp_path / "there" / "out"
    place.write_text("mine")
    if command in ("card", "export") and not inside:
        pytest.skip("a file is what it writes")
    skip_without_onnx(command)
    message = refused(capsys, *writers(bert, text, place / "inner" if inside else place)[command])
    assert str(place) in message and "give" in message
    assert place.read_text() == "mine"


def test_what_the_system_says():
    """The number decides, wherever it stands; a bug stays one."""
    assert "no space left" in explain(Exception("I/O error: No space left on device (os error 28)"))
    assert explain(OSError(errno.EROFS, "x", "/a/b")).startswith("'/a/b': the disk can be read only")
    assert explain(OSError("cannot be reached")) == "cannot be reached"
    told = explain(
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 96000000000 bytes.")
    )
    assert told.startswith("there is not enough memory for 96.0 GB more; take smaller batches")
    assert explain(MemoryError()).startswith("there is not enough memory; take")
    assert explain(KeyError("x")) is None and explain(RuntimeError("shapes")) is None


@pytest.mark.parametrize("command, name", pairs(READERS, NAMES))
def test_names_that_are_none(command, name, text, bert, tmp_path, capsys):
    message = refused(capsys, *commands(name, text, tmp_path / "out", bert)[command])
    assert repr(name) in message
    assert any(remedy in message for remedy in ("give the folder", "give a folder", "Correct the name"))
    assert not (tmp_path / "out" / "model.safetensors").exists()
