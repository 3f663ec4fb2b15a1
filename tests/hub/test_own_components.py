"""Components and families of a user's own files, in self-contained checkpoints and on cards."""

from __future__ import annotations

import sys

import pytest
from transformers import AutoModel

from hf_xformers import XFormerConfig, XFormerForMaskedLM
from hf_xformers.adapters import add_adapter, save_adapter
from hf_xformers.core.components import SLOTS
from hf_xformers.hub import bundle
from hf_xformers.hub.adapter_card import read_adapter
from hf_xformers.hub.push import prepare_upload
from tests.helpers import tiny_fields

OWN = """
from my_bundle_scale import SCALE
from hf_xformers.extend import (
    FeedForward, FeedForwardSpec, SpecLike, SublayerOutput, VariantInfo, XFormerConfig, make_family, register
)


class MyPart(FeedForward):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, hidden_states, context):
        return SublayerOutput(hidden_states * self.scale)


@register("feedforward", "my_bundle_parts")
class MySpec(FeedForwardSpec):
    scale: float = SCALE

    def build(self, config, **where):
        return MyPart(self.scale)


class XFMyBundleConfig(XFormerConfig):
    model_type = "xf_my_bundle"
    position: SpecLike = "rotary"


INFO = VariantInfo("turns", "Nobody 2026", "https://example.org", "x", "O(T)", "@misc{x}")
make_family(XFMyBundleConfig, "XFMyBundle", ("Model", "ForMaskedLM"), INFO)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A free mix with a component, and a family, of one file that imports another."""
    for name in ("my_bundle_parts", "my_bundle_scale"):
        monkeypatch.setitem(sys.modules, name, None)  # so that it is forgotten afterwards
        del sys.modules[name]
    (tmp_path / "my_bundle_parts.py").write_text(OWN)
    (tmp_path / "my_bundle_scale.py").write_text("SCALE = 0.5\n")
    monkeypatch.syspath_prepend(tmp_path)
    import my_bundle_parts

    fields = tiny_fields(XFormerConfig, "encoder")
    mix = XFormerForMaskedLM(XFormerConfig(**{**fields, "feedforward": "my_bundle_parts"}))
    yield mix, my_bundle_parts.XFMyBundleForMaskedLM(my_bundle_parts.XFMyBundleConfig(**fields))
    SLOTS["feedforward"]._specs.pop("my_bundle_parts", None)


@pytest.mark.slow
def test_code_of_ones_own_loads_or_is_refused(own, tmp_path):
    """Helper files go along, a family with other components in the same file is no obstacle, and what cannot load is
    refused before anything is written."""
    mix, of_family = own
    out = bundle(mix, tmp_path / "mix")  # which loads the code without the package
    assert "from .my_bundle_scale import SCALE\n" in (out / "my_bundle_parts.py").read_text()
    assert "SCALE = 0.5\n" in (out / "my_bundle_scale.py").read_text()
    of_family.save_pretrained(tmp_path / "family")
    (tmp_path / "my_bundle_scale.py").write_text("SCALE = float(open(__file__[:-3] + '.txt').read())\n")
    with pytest.raises(ValueError, match="code of 'my_bundle_parts' and 'my_bundle_scale' cannot be .*FileNotFound"):
        bundle(mix, tmp_path / "broken")
    with pytest.raises(ValueError, match="cannot be loaded"):
        prepare_upload(tmp_path / "family", "user/m", self_contained=True)
    assert not (tmp_path / "broken").exists()
    (tmp_path / "my_bundle_parts.py").write_text(f"import my_bundle_scale\n{OWN}")
    with pytest.raises(ValueError, match="has `import my_bundle_scale`, .* write `from my_bundle_scale import NAME`"):
        bundle(mix, tmp_path / "broken")
    del SLOTS["feedforward"]._specs["my_bundle_parts"]  # as where the package is imported and `my_bundle_parts` not
    with pytest.raises(ValueError, match="brings it along, for processes that do not import hf_xformers"):
        AutoModel.from_pretrained(out, trust_remote_code=True)


def test_cards_import_what_is_ones_own(own, tmp_path):
    from peft import LoraConfig, get_peft_model

    line = "import my_bundle_parts  # registers"
    for name, model in zip(("mix", "family"), own):
        model.save_pretrained(tmp_path / name)
        assert line in prepare_upload(tmp_path / name, "user/m").card.split("## Use")[1]
    model = AutoModel.from_pretrained(tmp_path / "mix")
    get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "lora")
    assert line in "\n".join(read_adapter(tmp_path / "lora", "peft").use("user/lora"))
    model = AutoModel.from_pretrained(tmp_path / "mix")
    add_adapter(model, "mine", "houlsby")
    save_adapter(model, tmp_path / "bottleneck", "mine")
    assert line in "\n".join(read_adapter(tmp_path / "bottleneck", "bottleneck").use("user/bottleneck"))
