"""What differs between releases of transformers: inputs take either name of a cache, outputs have this release's."""

import argparse
import ast
import importlib
import inspect
import pkgutil
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformers

from hf_xformers import compat
from hf_xformers.compat import CACHE
from hf_xformers.conversion import from_transformers, to_transformers
from hf_xformers.core.cache import make_cache
from hf_xformers.variants import config_class, family
from tests.helpers import NO_DROPOUT, close, gradients, tiny_fields, tokens

HEADS = [("xf_gpt2", "Model"), ("xf_gpt2", "ForCausalLM"), ("xf_indigo", "ForCausalLM"), ("xf_t5", "ForSeq2SeqLM")]
NAMES = ("past_key_values", "cache")
each_head = pytest.mark.parametrize(("name", "head"), HEADS)


def build(name, head):
    kind = {"ForSeq2SeqLM": "seq2seq", "ForCausalLM": "decoder"}.get(head, "encoder")
    fields = {**tiny_fields(config_class(name), kind), "is_encoder_decoder": kind == "seq2seq", **NO_DROPOUT}
    torch.manual_seed(0)
    return family(name)[head](config_class(name)(**fields)).double().eval()


def call(model, ids, **more):
    text = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    output = model(**{"input_ids": tokens(2, 5), text: ids}, **more)
    return output, output.last_hidden_state if "last_hidden_state" in output else output.logits


@each_head
@pytest.mark.parametrize("given", NAMES)
def test_a_cache_under_either_name(name, head, given):
    model, ids = build(name, head), tokens(2, 6)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        begun, _ = call(model, ids[:, :4], use_cache=True)
        assert CACHE in begun.keys()
        output, states = call(model, ids[:, 4:], **{given: begun[CACHE]}, use_cache=True)
        close(states, call(model, ids)[1][:, 4:])
    assert output[CACHE] is begun[CACHE] and output.past_key_values is output[CACHE]
    assert output[CACHE].get_seq_length() == 6
    output.past_key_values = other = make_cache(model.config)  # what reads and sets the former name goes on
    assert output[CACHE] is other and getattr(output, CACHE) is other


@each_head
def test_the_package_asks_by_this_release_s_name(name, head, monkeypatch):
    """Where padding stands between tokens, too, for which these are moved."""
    asked = []
    monkeypatch.setattr(transformers.utils.generic.logger, "warning_once", asked.append)
    model, ids = build(name, head), tokens(1, 4)
    model(ids, attention_mask=torch.tensor([[1, 0, 1, 1]]), use_cache=True)
    assert not asked


@each_head
def test_two_caches_are_refused(name, head):
    model = build(name, head)
    with pytest.raises(ValueError, match=r"`cache` and `past_key_values` are two names .* give one of them"):
        call(model, tokens(2, 3), **{given: make_cache(model.config) for given in NAMES})


@pytest.mark.parametrize("given", NAMES)
def test_a_tower_takes_either(given):
    tower, ids = build("xf_gpt2", "ForCausalLM").get_decoder(), tokens(1, 5)
    with torch.no_grad():
        cache = tower(input_ids=ids[:, :3], use_cache=True)[CACHE]
        output = tower(input_ids=ids[:, 3:], use_cache=True, **{given: cache})
        close(output.last_hidden_state, tower(input_ids=ids).last_hidden_state[:, 3:])


@pytest.mark.parametrize(("name", "head"), HEADS[1:])
def test_checkpointed_layers_do_not_write_twice(name, head):
    """A layer that runs again for the gradient would find its own keys in the cache it was given."""
    model, ids = build(name, head).train(), tokens(2, 6)
    expected = gradients(model, call(model, ids, use_cache=False)[1])
    model.activation_checkpointing_enable()
    output, logits = call(model, ids, past_key_values=make_cache(model.config))
    found = gradients(model, logits)
    assert output.get(CACHE) is None
    for key, gradient in expected.items():
        close(found[key], gradient)


def test_reformers_with_and_without_a_bias_of_tokens():
    """transformers' has one from 5.24 on, which is zero for a model of ours that has none."""
    theirs = transformers.ReformerForMaskedLM(
        transformers.ReformerConfig(
            attn_layers=["local"],
            hidden_size=16,
            num_attention_heads=2,
            attention_head_size=8,
            feed_forward_size=16,
            vocab_size=50,
            axial_pos_embds=False,
            max_position_embeddings=16,
            local_attn_chunk_length=4,
            is_decoder=False,
        )
    )
    config = from_transformers(theirs).config
    assert config.head.bias == (CACHE == "cache")
    for bias in {False, config.head.bias}:
        config.head = {"type": "linear", "bias": bias}
        ours, ids = family("xf_reformer")["ForMaskedLM"](config).eval(), tokens(1, 8, high=50)
        close(to_transformers(ours).eval()(ids).logits, ours(ids).logits, 1e-5)
    config.head = {"type": "linear", "scale": True}
    with pytest.raises(ValueError, match="has no counterpart in transformers"):
        to_transformers(family("xf_reformer")["ForMaskedLM"](config))


# ---------------------------------------------------------------- borrowed names


# Modules that transformers documents for whoever writes models and trainers; everything of torch but what has an
# underscore, and of accelerate and peft their own namespaces.
DOCUMENTED = {
    *("activations", "cache_utils", "generation", "hf_argparser", "masking_utils", "modeling_layers"),
    *("modeling_outputs", "modeling_utils", "models.auto.configuration_auto", "trainer_callback", "trainer_utils"),
    *("training_args", "utils", "utils.logging"),
}
STANDARD = {
    *(
        name
        for owner in (argparse.ArgumentParser(), argparse.HelpFormatter, NamedTuple("Row", []), sys)
        for name in dir(owner)
    ),
    "_group_actions",
}
SOURCES = [path for path in Path(compat.__file__).parent.rglob("*.py") if path.name != "compat.py"]


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def foreign_names(tree, own):
    """What a file imports or reads of other libraries that none of them promises to keep."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            library, _, module = (node.module or "").partition(".")
            if library == "transformers" and module and module not in DOCUMENTED:
                yield f"{library}.{module}"
            if (library == "accelerate" and module not in ("", "utils")) or (library == "peft" and module):
                yield f"{library}.{module}"
            if library == "torch":
                yield from filter(is_private, [*module.split("."), *(alias.name for alias in node.names)])
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            yield node.attr
        elif isinstance(node, ast.Constant) and node.value in ("_extra_content", compat.LAYER_SETTINGS):
            yield node.value


def test_no_other_file_borrows():
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
    own = {*STANDARD, *" ".join(compat.HOOKS.values()).split()}
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                own.add(node.attr)
    found = {path.name: sorted(names) for path, tree in trees.items() if (names := set(foreign_names(tree, own)))}
    assert not found, f"import these in hf_xformers/compat.py: {found}"


@pytest.mark.parametrize("name", compat.BORROWED)
def test_borrowed_names_are_there(name):
    assert getattr(compat, name) is not None


def test_a_name_that_is_gone_is_refused_in_words(monkeypatch):
    monkeypatch.setitem(compat.BORROWED, "gone", ("transformers.integrations.moe.gone", "a product"))
    with pytest.raises(ImportError, match=r"^transformers 5\.\S+ has no `transformers.\S+.gone` \(a product\)"):
        from hf_xformers.compat import gone  # noqa: F401


@pytest.mark.parametrize("path", compat.HOOKS)
def test_hooks_are_there(path):
    owner = pkgutil.resolve_name(path)
    bases = [base for base in owner.__mro__ if base.__module__.partition(".")[0] in ("transformers", "torch")]
    source = "".join(map(inspect.getsource, bases))
    for name in compat.HOOKS[path].split():
        assert hasattr(owner, name) or f"self.{name}" in source, name


def test_hooks_are_listed():
    """A method that no release of its base class calls any more would silently do nothing."""
    listed = {path.rpartition(".")[2]: names.split() for path, names in compat.HOOKS.items()}
    modules = ("modeling.language", "modeling.head_classes", "training.trainer", "finetuning.trainer", "core.cache")
    classes = {
        value
        for name in modules
        for value in vars(importlib.import_module(f"hf_xformers.{name}")).values()
        if isinstance(value, type) and value.__module__.startswith("hf_xformers")
    }
    for base in {base for found in classes for base in found.__mro__ if base.__name__ in listed}:
        for found in (found for found in classes if issubclass(found, base)):
            overridden = {name for name in vars(found) if is_private(name) and name in vars(base)} - {"_abc_impl"}
            assert overridden <= {*listed[base.__name__], *listed["PreTrainedModel"]}, (found, base)
