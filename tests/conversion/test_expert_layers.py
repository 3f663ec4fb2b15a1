"""Decoders with experts as published files have them, and what of them has no counterpart."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_xformers import XFormerConfig, XFormerForCausalLM
from hf_xformers.conversion import from_transformers, to_transformers
from tests.conversion.architectures import architectures

ENTRIES = architectures()
# Names in files, where every expert has tensors of its own.
PUBLISHED = {
    "mixtral": "model.layers.0.block_sparse_moe.experts.3.w1.weight",
    "qwen2_moe": "model.layers.0.mlp.experts.3.gate_proj.weight",
    "qwen3_moe": "model.layers.0.mlp.experts.3.up_proj.weight",
    "deepseek_v3": "model.layers.1.mlp.experts.3.gate_proj.weight",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_files_with_tensors_of_single_experts(name, tmp_path):
    entry = ENTRIES[name]
    model = entry.make(entry.generating())
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert PUBLISHED[name] in weights
    if name == "deepseek_v3":  # the layer for a token further ahead
        weights["model.layers.61.eh_proj.weight"] = torch.zeros(2, 2)
        save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    found, expected = from_transformers(str(tmp_path)).state_dict(), from_transformers(model).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


EXPERTS = {
    **{"type": "deepseek_moe", "num_experts": 4, "scores": "softmax", "balance_rate": None, "expert_size": 6},
    "shared_size": 12,
}


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("mixtral", {"scores": "sigmoid"}, "feedforward='deepseek_moe' .*'scores': 'sigmoid'.* has no counterpart"),
        ("mixtral", {"balance_rate": 0.1}, "feedforward='deepseek_moe' .*'balance_rate': 0.1.* has no counterpart"),
        ("mixtral", {"groups": 2, "topk": 1}, "'groups': 2.* has no counterpart"),
        ("mixtral", {"shared_size": None, "limit": 7.0}, "'limit': 7.0.* has no counterpart"),
        ("gpt_oss", {}, "attention='dense' .*'learned_sinks': False.* has no counterpart"),
        ("mixtral", None, "feedforward 'swiglu' has no counterpart"),
        ("qwen3_moe", None, "layers of this family have experts"),
    ],
)
def test_experts_without_counterpart(model_type, changes, message):
    network = {"type": "swiglu", "bias": False} if changes is None else {**EXPERTS, **changes}
    config = XFormerConfig(
        **{"vocab_size": 20, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1},
        **{"intermediate_size": 6, "is_decoder": True, "type_vocab_size": 0, "hidden_dropout_prob": 0.0},
        **{"normalization": "rms_norm", "residual": "pre_ln", "head": "linear", "position": "rotary"},
        attention={"type": "dense", "bias": False},
        feedforward=network,
    )
    with pytest.raises(ValueError, match=message):
        to_transformers(XFormerForCausalLM(config), model_type=model_type)
