"""Code as users write it, which mypy reads together with the package: names have types, and these are right."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, assert_type

import torch
from transformers import AutoConfig, AutoModelForMaskedLM, BertConfig, BertModel, PreTrainedModel

import hf_xformers
from hf_xformers import XFBertConfig, XFBertForMaskedLM, XFormerConfig, XFormerForCausalLM
from hf_xformers.conversion import from_transformers, to_transformers

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


def test_auto_classes(tmp_path: Path) -> None:
    config = XFBertConfig(**SIZES)
    assert_type(config.hidden_size, int)
    model = XFBertForMaskedLM(config)
    assert_type(model, XFBertForMaskedLM)
    model.save_pretrained(tmp_path)
    again = AutoModelForMaskedLM.from_pretrained(str(tmp_path))
    logits: torch.Tensor = again(input_ids=torch.tensor([[5, 6, 7]])).logits
    assert logits.shape == (1, 3, 50) and isinstance(again, PreTrainedModel)
    assert isinstance(AutoConfig.from_pretrained(str(tmp_path)), XFormerConfig)


def test_mixed_components() -> None:
    config = XFormerConfig(**SIZES, attention={"type": "sliding_window", "window": 8}, position="rotary")
    model = XFormerForCausalLM(config)
    assert_type(model, XFormerForCausalLM)
    output = model(input_ids=torch.tensor([[5, 6, 7]]))
    assert output.logits.shape == (1, 3, 50)
    back = to_transformers(from_transformers(BertModel(BertConfig(**SIZES))))
    assert_type(back, PreTrainedModel)


def functions() -> dict[str, Any]:
    """Public functions, and methods of public classes, by name."""
    found: dict[str, Any] = {}
    packages = [hf_xformers, *(getattr(hf_xformers, name) for name in hf_xformers._PACKAGES)]
    for thing in (getattr(package, name) for package in packages for name in package.__all__):
        own = {"": thing} if inspect.isfunction(thing) else vars(thing) if inspect.isclass(thing) else {}
        for name, member in own.items():
            member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if inspect.isfunction(member) and (name[:1] != "_" or name == "__init__"):
                found[f"{member.__module__}.{member.__qualname__}"] = inspect.unwrap(member)
    return {name: function for name, function in found.items() if name.startswith("hf_xformers.")}


def test_public_functions_are_annotated() -> None:
    missing = []
    for name, function in functions().items():
        signature = inspect.signature(function)
        parameters = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
        if any(p.annotation is p.empty for p in parameters) or (
            signature.return_annotation is signature.empty and not name.endswith(".__init__")
        ):
            missing.append(name)
    assert len(functions()) > 500 and not missing
