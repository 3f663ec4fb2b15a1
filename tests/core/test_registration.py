"""Importing the package: enough for the Auto classes, in whichever order things are imported."""

import pickle
import subprocess
import sys
import textwrap

import pytest
import torch

import hf_xformers
from hf_xformers._registration import LazyVariants
from hf_xformers.variants import config_class, family, model_types, resolve
from tests.common.cases import FAMILY_HEADS, TESTED_HEADS
from tests.forks import forks
from tests.helpers import tiny_fields, tokens


def fresh(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def run(program, process=fresh):
    done = process(textwrap.dedent(program))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


NAMES = """[name.rpartition(".")[2] for name in sys.modules if name.startswith("hf_xformers.variants.")]"""


def test_auto_classes():
    """Imported after those: resolved by name, and no other variant is imported for it."""
    output = run(
        f"""
        import sys
        from transformers import AutoConfig, AutoModelForMaskedLM
        import hf_xformers
        sizes = dict(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=9)
        config = AutoConfig.for_model("xf_bert", **sizes)
        model = AutoModelForMaskedLM.from_config(config)
        print(type(config).__name__, type(model).__name__)
        print({NAMES})
        """,
        forks().run,
    )
    assert output.splitlines() == ["XFBertConfig XFBertForMaskedLM", "['bert']"]


def test_from_pretrained_in_a_new_process(tmp_path):
    """A saved folder is all that another process needs, beside `import hf_xformers`, here before the Auto classes."""
    config = config_class("xf_gpt2")(**tiny_fields(config_class("xf_gpt2")))
    torch.manual_seed(0)
    model = family("xf_gpt2")["ForCausalLM"](config).eval()
    model.save_pretrained(tmp_path)
    ids = tokens(1, 5)
    output = run(f"""
        import sys
        import hf_xformers, torch
        from transformers import AutoModelForCausalLM
        model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})
        print({NAMES})
        print(type(model).__name__, float(model(torch.tensor({ids.tolist()})).logits.double().sum()))
        """)
    assert output.splitlines()[-2] == "['gpt2']"
    name, total = output.splitlines()[-1].split()
    assert name == "XFGPT2ForCausalLM"
    assert float(total) == pytest.approx(model(ids).logits.double().sum().item(), abs=1e-3)


def test_the_mapping_behaves():
    """What transformers does with its mapping of configs: membership, length, iteration, missing keys."""
    from transformers import CONFIG_MAPPING

    ours = set(model_types())
    assert ours <= set(CONFIG_MAPPING.keys()) and "xf_nothing" not in CONFIG_MAPPING
    for name in ours:
        assert name in CONFIG_MAPPING and CONFIG_MAPPING[name].model_type == name
    with pytest.raises(KeyError):
        CONFIG_MAPPING["xf_nothing"]


def test_lazy_entries():
    """Names are there at once, classes when they are read; what was there before stays."""
    entries = LazyVariants({"theirs": int}, {"xf_bert": "hf_xformers.variants.bert", "theirs": "no.such.module"})
    assert list(entries) == list(entries.keys()) == ["theirs", "xf_bert"] and len(entries) == 2
    assert "xf_bert" in entries and "xf_nothing" not in entries
    assert entries["theirs"] is entries.get("theirs") is int
    assert entries.get("xf_nothing") is None and entries.get("xf_nothing", 3) == 3
    entries["xf_bert"] = str  # what registering does
    assert dict(entries.items()) == {"theirs": int, "xf_bert": str} and list(entries.values()) == [int, str]
    assert pickle.loads(pickle.dumps(entries)) == {"theirs": int, "xf_bert": str}


def test_no_model_of_transformers_is_shadowed():
    from transformers import AutoConfig, BertConfig

    assert type(AutoConfig.for_model("bert")) is BertConfig
    assert all(name == "xformer" or name.startswith("xf_") for name in model_types())


@pytest.mark.parametrize("name", list(model_types()))
def test_pickling(name):
    """Classes, configs and models of every family; every head of some."""
    for head, model_class in family(name).items():
        assert pickle.loads(pickle.dumps(model_class)) is model_class
        if (name, head) in FAMILY_HEADS and (name, head) not in TESTED_HEADS:
            continue
        config = config_class(name)(
            **tiny_fields(config_class(name), "seq2seq" if head == "ForSeq2SeqLM" else "encoder")
        )
        torch.manual_seed(0)
        model = model_class(config).eval()
        again = pickle.loads(pickle.dumps(model))
        assert type(again) is model_class and again.config.to_dict() == model.config.to_dict()
        for one, other in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(one, other)


def test_names_of_the_package():
    """`hf_xformers.<class>` finds every class of every family, and says so when there is none."""
    for name in model_types():
        for model_class in (config_class(name), *family(name).values()):
            assert getattr(hf_xformers, model_class.__name__) is model_class
    for missing in ("XFBertForSeq2SeqLM", "XFNothing", "nothing", "XF", "_private"):
        with pytest.raises(AttributeError, match=missing):
            getattr(hf_xformers, missing)
    assert "XFormerConfig" in dir(hf_xformers)


def test_resolve():
    assert resolve("bert") == resolve("xf_bert") == "xf_bert" and resolve("xformer") == "xformer"
    with pytest.raises(ValueError, match=r"Unknown variant 'brt'\. Did you mean 'bert'"):
        resolve("brt")


def test_names_of_classes_are_in_the_tables_of_transformers():
    """Where Trainer, model cards and `transformers serve` look a class up, before any of them is imported; types of
    models are not, which may be of one shape or another."""
    output = run(f"""
        import sys
        import hf_xformers
        from transformers.modelcard import TASK_MAPPING
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as causal
        print("XFBertForMaskedLM" in TASK_MAPPING["fill-mask"].values(), "xf_gpt2" in causal)
        print("XFGPT2ForCausalLM" in causal.values(), "XFGPT2ForMaskedLM" in causal.values())
        print("XFConformerForCTC" in TASK_MAPPING["automatic-speech-recognition"].values(), {NAMES})
        """)
    assert output.splitlines() == ["True False", "True False", "True []"]


@pytest.mark.parametrize("head, table", [("ForCausalLM", "CAUSAL_LM"), ("ForSeq2SeqLM", "SEQ_TO_SEQ_CAUSAL_LM")])
def test_every_generating_class_is_in_its_table(head, table):
    from transformers.models.auto import modeling_auto

    names = getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES").values()
    made = [family(name)[head].__name__ for name in model_types() if head in config_class(name).heads]
    assert made and set(made) <= set(names)


def test_its_own_classes_do_not_go_next_to_a_checkpoint():
    with pytest.raises(ValueError, match=r"is a class of hf_xformers, .* `hf_xformers\.hub\.bundle\(model, folder\)`"):
        family("xf_bert")["ForMaskedLM"].register_for_auto_class("AutoModelForMaskedLM")
