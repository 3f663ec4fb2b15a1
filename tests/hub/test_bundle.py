"""A self-contained checkpoint works where this package is not installed, and gives the same numbers bit for bit."""

from __future__ import annotations

import ast
import functools
import graphlib
import json
import re
import sys

import pytest
import torch

from hf_xformers import XFBertConfig, XFBertModel, XFormerConfig
from hf_xformers.adapters import add_adapter
from hf_xformers.core.components import SLOTS
from hf_xformers.data.patch_processors import patch_processor
from hf_xformers.families import HEADS, SERVED
from hf_xformers.hub import bundle
from hf_xformers.hub.bundle import auto_map, code_files, kept_heads
from hf_xformers.hub.checkpoint_files import checkpoint_files
from hf_xformers.hub.flattening import Flattener, unseen
from hf_xformers.variants import config_class, family, model_types
from tests.helpers import make_strong, tiny_fields
from tests.hub.isolated import ROOT, run, run_without_package

# One family for every engine, and heads that are made of others of their family: (variant, head, shape).
ENGINES = (
    ("bert", "ForMaskedLM", "encoder"),
    ("longformer", "ForMaskedLM", "encoder"),
    ("bigbird", "ForSequenceClassification", "encoder"),
    ("reformer", "ForCausalLM", "decoder"),
    ("performer", "ForMaskedLM", "encoder"),
    ("linformer", "ForMaskedLM", "encoder"),
    ("transformer_xl", "ForCausalLM", "decoder"),
    ("t5", "ForSeq2SeqLM", "seq2seq"),
    ("switch_transformer", "ForSeq2SeqLM", "seq2seq"),
    ("gpt2", "ForCausalLM", "decoder"),
    ("deberta", "ForMaskedLM", "encoder"),
    ("electra", "ForReplacedTokenPreTraining", "encoder"),
    ("indigo", "ForSequenceClassification", "decoder"),
    ("vision_transformer", "ForImageClassification", "encoder"),
    ("xformer", "ForMaskedLM", "encoder"),
)
PARTS = ({"type": "learned_absolute", "offset": 2}, {"type": "t5_relative_bias"})
POSITIONS = {"alibi": "alibi", "t5_bias": "t5_relative_bias", "combined": {"type": "combined", "parts": PARTS}}

LOAD = """
import json, sys, torch, transformers
from pathlib import Path

for folder in sorted(Path(sys.argv[1]).iterdir()):
    known = torch.load(folder / "known.pt")
    auto = getattr(transformers, known["auto"])
    places = [folder]
    # What was saved again is read with its head where text is generated, and without one everywhere.
    for again in (False, True)[: 1 + ("generated" in known)]:
        model = auto.from_pretrained(places[-1], trust_remote_code=True).eval()
        assert type(model).__module__.startswith("transformers_modules."), type(model)
        for tensor in (*model.parameters(), *model.buffers()):  # on some processors alignment decides on a last bit
            tensor.data = tensor.data.clone()
        with torch.no_grad():
            logits = model(**known["inputs"]).logits
        assert torch.equal(logits, known["logits"]), (folder.name, again, (logits - known["logits"]).abs().max())
        if "generated" in known:
            ids = model.generate(known["inputs"]["input_ids"], max_new_tokens=4, do_sample=False, pad_token_id=0)
            assert torch.equal(ids, known["generated"]), (folder.name, ids)
        places.append(Path(sys.argv[2]) / folder.name)
        model.save_pretrained(places[-1])
        saved = json.loads((places[-1] / "config.json").read_text())["auto_map"]
        assert saved == known["auto_map"], (folder.name, saved)
    copies = {name.split(".")[2] for name in sys.modules if name.startswith(type(model).__module__.split(".")[0])
              and name.split(".")[1:2] == [folder.name] and name.count(".") > 2}
    assert len(copies) == 1, (folder.name, copies)
    headless = transformers.AutoModel.from_pretrained(places[-1], trust_remote_code=True)
    assert type(headless.config) is type(model.config)
    print("loaded", folder.name)
"""


def inputs_of(cls, shape):
    generator = torch.Generator().manual_seed(1)
    if cls.modality == "image":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    if cls.modality == "sound":
        return {"input_features": torch.randn(2, 24, 12, generator=generator)}
    given = {"input_ids": torch.randint(5, 60, (2, 12), generator=generator)}
    if shape == "encoder":
        given["attention_mask"] = torch.tensor([[1] * 12, [1] * 9 + [0] * 3])
    if shape == "seq2seq":
        given["decoder_input_ids"] = torch.randint(5, 60, (2, 5), generator=generator)
    return given


@pytest.mark.slow
def test_engines_without_the_package(tmp_path):
    source, again = tmp_path / "bundles", tmp_path / "again"
    free = [("xformer", "ForMaskedLM", "encoder", place, position) for place, position in POSITIONS.items()]
    engines = [*((*engine, engine[0], None) for engine in ENGINES), *free]
    for variant, head, shape, name, position in engines:
        cls = config_class(variant)
        torch.manual_seed(0)
        changes = {} if position is None else {"position": position}
        model = make_strong(family(variant)[head](cls(**{**tiny_fields(cls, shape), **changes}))).eval()
        bundle(model, source / name)
        known = {
            "inputs": inputs_of(cls, shape),
            "auto": HEADS[head],
            "auto_map": auto_map(cls, (head, *kept_heads(cls(), type(model).__name__))),
        }
        with torch.no_grad():
            known["logits"] = model(**known["inputs"]).logits
            if name in ("gpt2", "t5"):
                ids = known["inputs"]["input_ids"]
                known["generated"] = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
        torch.save(known, source / name / "known.pt")
    printed = run_without_package(LOAD, str(source), str(again), home=tmp_path / "home", timeout=280)
    assert printed.count("loaded") == len(engines)


# What the code of a checkpoint may import beside the standard library: what transformers itself needs.
ALLOWED = {"torch", "transformers", "tokenizers", "huggingface_hub", "numpy", *sys.stdlib_module_names}


def siblings(name, text):
    """The files that a file imports, as `from .x import ...` or `from . import x`, and those of them that it imports
    when it is imported itself; nothing else may be imported but what is always there."""
    found, at_once = zip(*(siblings_of_module(name, part) for part in re.split(r"(?m)^(?=# -{20} )", text)))
    return set().union(*found), set().union(*at_once)


@functools.cache
def siblings_of_module(name, text):
    """The same of one of the modules that share a file. Most families have it in theirs, and it is read once."""
    found, tree = set(), ast.parse(text, name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert {alias.name.partition(".")[0] for alias in node.names} <= ALLOWED, name
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module.partition(".")[0] in ALLOWED, name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 1, name
            found |= files_of(node)
    at_once = [files_of(node) for node in tree.body if isinstance(node, ast.ImportFrom) and node.level]
    return found, set().union(*at_once)


def files_of(node):
    return {f"{part}.py" for part in ([node.module] if node.module else [alias.name for alias in node.names])}


@pytest.mark.parametrize("model_type", model_types())
def test_code_is_closed(model_type):
    """All files compile and import each other or what is always there; the loader finds all of them from every
    class."""
    cls = config_class(model_type)
    files = code_files(cls(**tiny_fields(cls, "decoder" if cls().is_decoder else "encoder")), cls.heads)
    runs = {}
    for name, text in files.items():
        found, runs[name] = siblings(name, text)
        assert "/" not in name and found <= set(files), name
    list(graphlib.TopologicalSorter(runs).static_order())  # no file waits for itself
    assert len(files) <= 31
    references = auto_map(cls, cls.heads)
    served = {SERVED[head] for head in cls.heads if head in SERVED}
    assert len(references) == 1 + len({HEADS[head] for head in cls.heads} | served)
    for reference in references.values():
        module, name = reference.split(".")
        assert module == references["AutoConfig"].split(".")[0]  # the loader copies the code once for each file
        assert name in files[f"{module}.py"] or "make_family" in files[f"{module}.py"]
    for module in {reference.split(".")[0] for reference in references.values()}:
        assert unseen(files, module) == []


def test_only_what_is_used():
    files = code_files(XFormerConfig(), XFormerConfig.heads)
    assert "class DenseAttention" in files["attention.py"] and "class Performer" not in files["attention.py"]
    mixed = XFormerConfig(num_hidden_layers=2, per_layer_config={1: {"attention": "performer"}}, decoder=None)
    assert "class Performer" in code_files(mixed, mixed.heads)["attention.py"]
    decoder = XFormerConfig(is_encoder_decoder=True, decoder={"position": "rotary"})
    assert "class RotarySpec" in code_files(decoder, decoder.heads)["position.py"]


def test_only_the_heads_that_it_has(tmp_path):
    cls = config_class("gpt2")
    model = family("gpt2")["ForCausalLM"](cls(**tiny_fields(cls, "decoder")))
    out = bundle(model, tmp_path / "out")
    assert {"modeling.py", "variants_gpt2.py"} <= {path.name for path in out.glob("*.py")}
    heads = (out / "modeling.py").read_text()
    assert "class XFormerForCausalLM" in heads and "Classif" not in heads and "NextSentence" not in heads
    assert set(json.loads((out / "config.json").read_text())["auto_map"]) == {
        "AutoConfig",
        "AutoModel",
        "AutoModelForCausalLM",
        "AutoModelForDecision",
    }
    bundle(out, out, all_heads=True)
    heads = (out / "modeling.py").read_text()
    assert "class XFormerForTokenClassification" in heads and "ImageClassification" not in heads
    assert "AutoModelForSequenceClassification" in (out / "config.json").read_text()


TOGETHER = """
import sys, torch
from pathlib import Path
from transformers import AutoModelForMaskedLM

root = Path(sys.argv[1])
ids = torch.load(root / "ids.pt")

def aligned(model):  # on some processors the last bit of a product depends on where a file has its weights
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return model

def check(folder, start, **more):
    model = AutoModelForMaskedLM.from_pretrained(root / folder, **more).eval()
    assert type(model).__module__.startswith(start), type(model)
    with torch.no_grad():
        assert torch.equal(aligned(model)(ids).logits, torch.load(root / f"{folder}.pt"))
    model(ids).logits.sum().backward()
    return model

first = check("one", "transformers_modules.one.", trust_remote_code=True)
second = check("two", "transformers_modules.two.", trust_remote_code=True)
import hf_xformers
installed = check("two", "hf_xformers.", trust_remote_code=True)
check("one", "hf_xformers.", trust_remote_code=False)
for model, folder in ((first, "one"), (second, "two")):
    with torch.no_grad():
        assert torch.equal(aligned(model)(ids).logits, torch.load(root / f"{folder}.pt"))
installed.save_pretrained(root / "plain")
assert "auto_map" not in (root / "plain" / "config.json").read_text() and not list((root / "plain").glob("*.py"))
check("one", "hf_xformers.")
"""


@pytest.mark.slow
def test_beside_the_package(tmp_path):
    """Two copies of the code, then the package: each its own, operators of the engines included."""
    cls = config_class("longformer")
    ids = torch.randint(5, 60, (2, 12), generator=torch.Generator().manual_seed(1))
    torch.save(ids, tmp_path / "ids.pt")
    for seed, name in enumerate(("one", "two")):
        torch.manual_seed(seed)
        model = make_strong(family("longformer")["ForMaskedLM"](cls(**tiny_fields(cls, "encoder")))).eval()
        bundle(model, tmp_path / name)
        with torch.no_grad():
            torch.save(model(ids).logits, tmp_path / f"{name}.pt")
    run([sys.executable, "-c", TOGETHER, str(tmp_path)], home=tmp_path / "home", PYTHONPATH=str(ROOT))


def test_a_card_is_that_of_the_last_bundle(tmp_path):
    for variant in ("bert", "linformer"):
        cls = config_class(variant)
        bundle(family(variant)["Model"](cls(**tiny_fields(cls, "encoder"))), tmp_path)
    assert "xf_linformer" in (tmp_path / "README.md").read_text()


GREY = """
import sys
from PIL import Image
from transformers import AutoImageProcessor
processor = AutoImageProcessor.from_pretrained(sys.argv[1], trust_remote_code=True)
print(type(processor).__name__, processor(Image.new("RGB", (8, 8)), return_tensors="pt")["pixel_values"].shape)
"""


def test_the_processor_of_one_channel_goes_along(tmp_path):
    pytest.importorskip("PIL")
    cls = config_class("vision_transformer")
    model = family("vision_transformer")["ForImageClassification"](cls(**{**tiny_fields(cls), "num_channels": 1}))
    model.save_pretrained(tmp_path / "run")
    patch_processor((8, 8), 1).save_pretrained(tmp_path / "run")
    bundle(tmp_path / "run", tmp_path / "out")
    printed = run_without_package(GREY, str(tmp_path / "out"), home=tmp_path / "home")
    assert "GreyImageProcessor torch.Size([1, 1, 8, 8])" in printed
    assert "data_grey_images.py" in checkpoint_files(tmp_path / "out")


def test_of_a_folder(tmp_path):
    cls = config_class("bert")
    model = family("bert")["Model"](cls(**tiny_fields(cls, "encoder")))
    model.save_pretrained(tmp_path / "run")
    (tmp_path / "run" / "optimizer.pt").write_text("no part of the model")
    (tmp_path / "run" / "README.md").write_text("# Mine\n")
    out = bundle(tmp_path / "run", tmp_path / "out")
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "run" / "model.safetensors").read_bytes()
    assert (out / "README.md").read_text() == "# Mine\n" and not (out / "optimizer.pt").exists()
    assert json.loads((out / "config.json").read_text())["auto_map"] == auto_map(cls, ("Model",))
    assert "auto_map" not in (tmp_path / "run" / "config.json").read_text()
    (out / "attention_old.py").write_text((out / "core_discovery.py").read_text())
    (out / "mine.py").write_text("x = 1\n")
    before = (out / "config.json").read_bytes()
    assert bundle(out, out) == out  # in place, and again
    assert (out / "config.json").read_bytes() == before
    assert not (out / "attention_old.py").exists() and (out / "mine.py").exists()


def test_component_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "my_bundle_part.py").write_text(
        "from torch import nn\n\n"
        "from hf_xformers import Spec, register\n"
        "from hf_xformers.feedforward.dense import (\n    DenseFeedForward,  # what it stands on\n)\n\n\n"
        '@register("feedforward", "my_bundle_part")\n'
        "class MySpec(Spec):\n    def build(self, config, **where):\n        return nn.Identity()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import my_bundle_part  # noqa: F401

    try:
        files = code_files(XFormerConfig(feedforward="my_bundle_part"), ("Model",))
    finally:
        del SLOTS["feedforward"]._specs["my_bundle_part"]
    text = files["my_bundle_part.py"]
    assert "from .core import Spec\nfrom .core import register\n" in text
    assert "from .feedforward import (\n    DenseFeedForward,  # what it stands on\n)" in text


def test_import_statements():
    source = (
        "from __future__ import annotations\n"
        "from ..core import outputs\n"
        "from ..ops.block_sparse import patterns\n\n\n"
        "def late():\n"
        "    é = 1; from ..ops.block_sparse.patterns import band as b  # why\n"
        "    from ..ops import linear, nystrom\n"
    )
    flattener = Flattener({"hf_xformers.attention.mine": source}, {})
    flattener.add(["hf_xformers.attention.mine"])
    assert flattener.files()["attention_mine.py"] == (
        "from __future__ import annotations\n"
        "from . import core_outputs as outputs\n"
        "from . import ops_block_sparse_patterns as patterns\n\n\n"
        "def late():\n"
        "    é = 1; from .ops_block_sparse_patterns import band as b  # why\n"
        "    from . import ops_linear as linear\n"
        "    from . import ops_nystrom as nystrom\n"
    )
    for bad, match in (
        ("import hf_xformers.core.cache\n", "'mine' has `import hf_xformers.core.cache`, which .* by name"),
        (
            "from hf_xformers import XFormerModel\n",
            "'mine' has `from hf_xformers import XFormerModel`, which .* by name",
        ),
        (None, "no Python file"),
    ):
        flattener = Flattener({} if bad is None else {"mine": bad}, {})
        with pytest.raises(ValueError, match=match):
            flattener.add(["mine"])


def test_refusals(tmp_path, monkeypatch):
    from transformers import BertConfig, BertModel

    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 8,
        "vocab_size": 9,
    }
    theirs = BertModel(BertConfig(**sizes))
    theirs.save_pretrained(tmp_path / "theirs")
    adapted = XFBertModel(XFBertConfig(**sizes))
    add_adapter(adapted, "reviews")
    (tmp_path / "empty").mkdir()
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text("{}")
    for what, match in (
        (tmp_path / "theirs", "type 'bert', which is none of this package's"),
        (tmp_path / "empty", "is no checkpoint"),
        (tmp_path / "config", "no weights"),
        (tmp_path / "nowhere", "there is no folder"),
        (theirs, "belongs to no family"),
        (theirs.pooler, "got BertPooler"),
        (adapted, "has the adapter 'reviews', .*; save that with `save_adapter`"),
    ):
        with pytest.raises(ValueError, match=match):
            bundle(what, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.chdir(tmp_path)  # which is nothing that a model without a name was loaded from
    with pytest.raises(ValueError, match="holds other files"):
        bundle(family("bert")["Model"](config_class("bert")(**tiny_fields(config_class("bert"), "encoder"))), ".")


def test_modules_of_a_room_share_files():
    """Names that mean two things begin another file, which imports earlier ones alone."""
    future = "from __future__ import annotations\n"
    sources = {
        "hf_xformers.core.a": f"{future}from torch import nn\n\n\ndef _help():\n    return 1\n\n\nA = _help()\n",
        "hf_xformers.core.b": f"{future}from torch import nn\nfrom .a import A as first\n\nB = first + 1\n",
        "hf_xformers.core.c": f"{future}from .b import B\ndef _help():\n    from .b import first\n    return B\n",
        "hf_xformers.core.d": f"{future}from .c import _help\n\nC = _help()\n",
    }
    flattener = Flattener({}, {})
    flattener.sources = sources
    flattener.join(["core"])
    files = flattener.files()
    assert list(files) == ["core.py", "core_2.py"]
    assert "from ." not in files["core.py"]
    assert "from .core import B\n" in files["core_2.py"] and "from .core import first\n" in files["core_2.py"]
    first = {"__name__": "core"}
    exec(files["core.py"], first)
    assert (first["A"], first["B"]) == (1, 2)
