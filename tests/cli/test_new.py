"""What `hf-xformers new` writes passes its own test as it stands: in a folder of one's own, and in a checkout."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from hf_xformers.cli import main
from hf_xformers.cli.new import TYPES, in_package, texts
from tests.refused import refused
from tests.test_contributing import examples

ROOT = Path(__file__).resolve().parents[2]


def process(folder, *arguments, path=None):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path or [folder, ROOT]))}
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


def make_all(folder):
    for kind in TYPES:
        assert main(["new", kind, f"my_{kind}", "--to", str(folder)]) == 0


def test_in_a_folder_of_its_own(tmp_path, capsys):
    make_all(tmp_path)
    assert "--import my_attention" in capsys.readouterr().err
    for kind in TYPES:
        card = ModelCard.load(tmp_path / f"my_{kind}.md")
        assert card.data.library_name == "hf_xformers" and "{" not in card.text.partition("## Use")[0]
        assert "None" not in card.text and "of a call's tokens" not in card.text  # the equation, not what it needs
    done = process(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", ".")
    assert done.returncode == 0, done.stdout[-4000:]
    # an option for once, and an entry point for everybody
    listing = ("-m", "hf_xformers", "list", "--components", "attention.my_attention")
    assert "scores fall linearly" in process(tmp_path, *listing, "--import", "my_attention").stdout
    assert "Unknown" in process(tmp_path, *listing).stderr
    installed = tmp_path / "parts-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: parts\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[hf_xformers.components]\nmine = my_attention\n")
    assert "scores fall linearly" in process(tmp_path, *listing).stdout


def test_in_a_checkout(tmp_path):
    shutil.copytree(ROOT / "hf_xformers", tmp_path / "hf_xformers", ignore=shutil.ignore_patterns("__pycache__"))
    make_all(tmp_path)
    assert (tmp_path / "hf_xformers/stacks/my_stack.py").exists()
    assert (tmp_path / "model_cards/components/my_stack.md").exists()
    layered = [path for path in tmp_path.rglob("my_*.py") if "hf_xformers.extend" in path.read_text()]
    assert not layered
    done = process(
        tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "tests", path=[tmp_path]
    )
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.parametrize("kind", TYPES)
def test_the_guide_has_the_same(kind):
    """CONTRIBUTING explains what is written."""
    room, example, *_ = TYPES[kind]
    assert examples()[f"{room}/{example}"] == texts(kind, example, True)[Path("hf_xformers", room, f"{example}.py")]


def test_refusals(tmp_path, capsys):
    def said(*argv):
        return refused(capsys, "new", *argv, "--to", tmp_path)

    assert "NAME 'My-Stack' is no name for a module" in said("stack", "My-Stack")
    assert "there is a module 'json' already" in said("stack", "json")
    for name in ("lambda", "class"):
        assert f"NAME '{name}' is no name for a module: use lower-case letters" in said("stack", name)
    taken = {"attention": "longformer", "stateful_attention": "performer", "objective": "mlm", "task": "tagging"}
    for kind, name in taken.items():
        assert f"NAME '{name}': there is such a" in said(kind, name)
    assert main(["new", "stack", "mine", "--to", str(tmp_path)]) == 0
    assert "mine.py' exists already" in said("stack", "mine")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.md", "mine.py", "test_mine.py"]


def test_a_component_keeps_its_name(tmp_path):
    """A class of another module is refused, before and after the one that has the name is read."""
    (tmp_path / "mine.py").write_text(texts("stack", "reversible", False)[Path("reversible.py")])
    for first in ("", "import hf_xformers.stacks.reversible; "):
        said = process(tmp_path, "-c", first + "import mine").stderr
        assert (
            "'reversible' is already registered by hf_xformers.stacks.reversible; choose another name in mine" in said
        )


def test_an_import_that_goes_on():
    code = "import torch\n\nfrom hf_xformers.extend import (\n    Stack,\n    bounded,\n)\n\nx = 1\n"
    expected = "from hf_xformers.core.components import bounded\nfrom hf_xformers.stacks.base import Stack\n"
    assert in_package(code) == f"import torch\n\n{expected}\nx = 1\n"
