"""One run at a time in a folder."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hf_xformers.cli import main
from hf_xformers.conversion.checkpoint import replacing
from hf_xformers.core.saved_files import LOCK_FILE
from hf_xformers.training.folder_lock import folder_lock
from tests.training.runs import pretrain_flags

# Another process that holds a folder's lock until it is told to end.
HOLDER = """
import sys
from hf_xformers.training.folder_lock import folder_lock
with folder_lock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """(folder, process that holds it)."""
    folder = tmp_path / "run"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], env=environment, text=True, **pipes)
    assert process.stdout.readline() == "held\n"
    yield folder, process
    process.kill()
    process.wait()


def test_another_process_is_kept_out_until_the_first_dies(holder):
    folder, process = holder
    assert json.loads((folder / LOCK_FILE).read_text())["pid"] == process.pid
    with (
        pytest.raises(
            ValueError, match=rf"another process \(process {process.pid} on .+\) is writing to --output_dir"
        ),
        folder_lock(folder),
    ):
        pass
    process.send_signal(signal.SIGKILL)  # it removes nothing behind itself
    process.wait()
    assert (folder / LOCK_FILE).exists()
    with folder_lock(folder):
        assert json.loads((folder / LOCK_FILE).read_text())["pid"] == os.getpid()
    assert not (folder / LOCK_FILE).exists()


@pytest.mark.parametrize("command", ["pretrain", "benchmark", "finetune", "bundle", "uptrain"])
def test_every_command_that_fills_a_folder_asks(command, holder, text, tmp_path, capsys):
    folder, _ = holder
    rows = tmp_path / "rows.csv"
    rows.write_text("text,label\n" + "a,x\nb,y\n" * 20)
    argv = {
        "pretrain": pretrain_flags(text, folder),
        "benchmark": ["--variants", "performer", "--lengths", "8", "--output_dir", folder],
        "finetune": ["--task", "text-classification", "--variant", "bert", "--data", rows, "--output_dir", folder],
        "bundle": [tmp_path, "--to", folder],
    }
    if command == "uptrain":
        source = tmp_path / "source"
        assert main(["pretrain", *map(str, pretrain_flags(text, source, max_steps=1))]) == 0
        argv["uptrain"] = ["--model", source, "--data", text, "--output_dir", folder, "--max_steps", "1"]
    assert main([command, *map(str, argv[command])]) == 2
    error = capsys.readouterr().err
    assert "is writing to --" in error and str(folder) in error
    assert [path.name for path in folder.iterdir()] == [LOCK_FILE]


def test_only_the_process_that_writes_locks(holder):
    with folder_lock(holder[0], writes=False):
        pass


def test_the_same_process_may_ask_again_and_a_folder_that_stays_empty_goes(tmp_path):
    folder = tmp_path / "a" / "run"
    with folder_lock(folder):
        with folder_lock(folder):
            pass
        assert (folder / LOCK_FILE).exists()
    assert not folder.exists()
    with folder_lock(folder):
        (folder / "result").touch()
    assert [path.name for path in folder.iterdir()] == ["result"]


def test_a_file_and_a_disk_that_takes_nothing(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match="is a file; give a folder"), folder_lock(file):
        pass
    with pytest.raises(NotADirectoryError, match="Not a directory"), folder_lock(file / "run"):
        pass  # what the system says is put in words by the commands

    def read_only(self, *args, **kwargs):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("filelock.FileLock.acquire", read_only)
    with pytest.raises(OSError, match="Read-only file system"), folder_lock(tmp_path):
        pass


def test_a_conversion_loses_nobodys_result(tmp_path):
    target = tmp_path / "target"
    with pytest.raises(ValueError, match="Another process has written"), replacing(target):
        target.mkdir()
        (target / "theirs").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["target"] and (target / "theirs").exists()
