"""A component of one's own is a name to every command and in a fresh process."""

import os
import subprocess
import sys

import pytest

from tests.cli.test_main import ROOT

OWN = '''
from torch import nn
from hf_xformers import Spec, register

@register("feedforward", "{name}")
class MySpec(Spec):
    """A part of one's own."""
    summary = "nothing at all"
    supports = frozenset({{"packed_rows"}})
    def build(self, config, **where):
        return nn.Identity()
'''

FAMILY = '''
from hf_xformers.extend import SpecLike, VariantInfo, XFormerConfig, make_family

class XFMineConfig(XFormerConfig):
    """A family of one's own."""
    model_type = "xf_mine"
    position: SpecLike = "rotary"

INFO = VariantInfo("turns", "Nobody 2026", "https://example.org", "x", "O(T)", "@misc{x}")
make_family(XFMineConfig, "XFMine", ("Model", "ForMaskedLM"), INFO)
'''


def fresh(folder, *command, **environment):
    paths = os.pathsep.join([str(ROOT), *filter(None, [environment.pop("also", "")])])
    environment = {**os.environ, "PYTHONPATH": paths, **environment}
    return subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "my_parts.py").write_text(OWN.format(name="my_part"))
    site, about = tmp_path / "site", tmp_path / "site" / "their_parts-1.dist-info"
    about.mkdir(parents=True)
    (site / "their_parts.py").write_text(OWN.format(name="their_part") + FAMILY)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: their_parts\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[hf_xformers.components]\nparts = their_parts\n")
    return tmp_path


def test_commands_import_modules(folder):
    found = fresh(folder, "-m", "hf_xformers", "list", "--components", "feedforward", "--import", "my_parts")
    assert found.returncode == 0 and "my_part" in found.stdout and "nothing at all" in found.stdout
    unknown = fresh(folder, "-m", "hf_xformers", "pretrain", "--feedforward", "my_part", "--output_dir", "o")
    assert unknown.returncode == 2
    assert "hf-xformers COMMAND --import MODULE`, or the entry-point group hf_xformers.components" in unknown.stderr
    wrong = fresh(folder, "-m", "hf_xformers", "list", "--import", "your_parts")
    assert wrong.returncode == 2 and "'your_parts' of components cannot be imported (No module named" in wrong.stderr


def test_an_installed_package_is_found_and_processes_inherit_the_option(folder):
    code = "from hf_xformers import XFormerConfig as C; print(C(feedforward='their_part'), C(feedforward='my_part'))"
    found = fresh(folder, "-c", code, also=str(folder / "site"), HF_XFORMERS_IMPORT="my_parts")
    assert found.returncode == 0 and "their_part" in found.stdout and "my_part" in found.stdout, found.stderr


def test_processes_of_a_command_find_the_module_of_its_folder(folder):
    """As those that `benchmark` starts, whose path does not begin with the folder."""
    code = """if True:
        import subprocess, sys
        from hf_xformers.cli import main
        main(["list", "--components", "feedforward.my_part", "--import", "my_parts"])
        subprocess.run([sys.executable, "-P", "-c", "import my_parts"], check=True)"""
    found = fresh(folder, "-c", code)
    assert found.returncode == 0, found.stderr


def test_a_family_is_a_variant_to_every_command(folder):
    """It is found by its model type, and by peft, which is imported before it is made."""
    code = """if True:
        import peft
        from hf_xformers.cli import main
        from transformers import AutoConfig, AutoModelForMaskedLM
        sizes = dict(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
        model = AutoModelForMaskedLM.from_config(AutoConfig.for_model("xf_mine", **sizes))
        adapted = peft.get_peft_model(model, peft.LoraConfig()).peft_config["default"]
        model.save_pretrained("saved")
        print(type(model).__name__, adapted.target_modules, main(["list", "mine"]), main(["card", "saved"]))"""
    found = fresh(folder, "-c", code, also=str(folder / "site"))
    assert found.returncode == 0, found.stderr
    assert "XFMineForMaskedLM" in found.stdout and "q_proj" in found.stdout and "0 0" in found.stdout
    command = ("pretrain", "--variant", "mine", "--objective", "clm", "--output_dir", "o")
    refused = fresh(folder, "-m", "hf_xformers", *command, also=str(folder / "site"))
    assert "xf_mine" in refused.stderr and "clm" in refused.stderr and "Unknown variant" not in refused.stderr
