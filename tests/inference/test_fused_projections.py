"""Queries, keys and values from one product: the same numbers, the same files, and what is refused."""

import copy
import functools

import pytest
import torch
from torch import nn

from hf_xformers.attention.shared.base import Attention
from hf_xformers.inference import fuse_projections, split_projections
from tests.common.cases import CASES, covering
from tests.helpers import close, close_gradients, gradients, pad, tokens


def attentions(model):
    return [module for module in model.modules() if isinstance(module, Attention) and not module.cross]


@functools.cache
def kinds(case):
    """Attentions that join their projections, and what a position does inside them."""
    towers = case.preset.tower_configs()
    layers = [layer for tower in towers for layer in tower.layer_configs()]
    if not all(layer.attention.type in JOINED for layer in layers):
        return set()
    return {layer.attention.type for layer in layers} | {act for tower in towers for act in tower.position.acts}


JOINED = (
    *("dense", "longformer", "bigbird", "sliding_window", "sparse_transformer", "sinkhorn_transformer", "realformer"),
    *("linear_transformer", "performer", "rfa", "dpfp", "delta_net", "nystromformer", "informer", "clustered"),
    *("all_attention", "dynamic_mask", "poolingformer", "adaptive_span"),
)
SOME = covering([case for case in CASES if case.shape != "seq2seq"], kinds)
APART = ("xf_reformer", "xf_linformer", "xf_luna", "xf_synthesizer", "xf_talking_heads", "xf_average_attention")


def fused(case):
    model = case.build()
    assert fuse_projections(model) == len(attentions(model)) > 0
    return model


@pytest.mark.parametrize("case", SOME, ids=str)
def test_the_same_model(case):
    """Outputs and gradients on padded rows, with one matrix for three, and its parts under their names in files."""
    model = fused(case)
    plain, (ids, mask) = case.shared(), pad([tokens(9), tokens(5, seed=1)], 9, "right")
    real = mask.bool()[..., None]
    expected, found = (case.run(each, ids, mask, use_cache=False) * real for each in (plain, model))
    close(found, expected, 1e-12)
    slopes, joined = gradients(plain, expected), gradients(model, found)
    names = [name for name in joined if "qkv_proj" in name]
    assert len(slopes) - len(joined) == 2 * len(names) > 0
    for name in names:
        parts = [slopes.pop(name.replace("qkv_proj", f"{x}_proj")) for x in "qkv"]
        close(joined.pop(name), torch.cat(parts), 1e-9)
    close_gradients(joined, slopes)
    files, own = model.state_dict(), plain.state_dict()
    assert files.keys() == own.keys() and all(torch.equal(files[name], own[name]) for name in own)


def case_named(name):
    return next(case for case in CASES if str(case) == name)


def test_files(tmp_path):
    """Saved joined, loaded apart; saved apart, loaded joined; copied, cast, split again."""
    case = case_named("modern-decoder")  # queries have more heads than keys, and no biases
    plain, model = case.shared(), fused(case)
    ids = tokens(2, 9)
    expected = plain(ids).logits
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert attentions(again)[0].qkv_proj is None
    close(again(ids).logits, expected, 1e-12)
    other = fused(case)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    assert not other.load_state_dict(plain.state_dict()).unexpected_keys
    close(other(ids).logits, expected, 1e-12)
    close(copy.deepcopy(model)(ids).logits, expected, 1e-12)
    assert copy.deepcopy(model).float()(ids).logits.dtype == torch.float32
    assert fuse_projections(model) == split_projections(model) == len(attentions(model))
    assert split_projections(model) == 0
    assert {name: type(module) for name, module in model.named_modules()} == {
        name: type(module) for name, module in plain.named_modules()
    }
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), plain.parameters(), strict=True))


def test_generation_and_padding_removal():
    """With a cache, with real tokens alone, and in one graph."""
    case = case_named("xf_gpt2-decoder")
    plain, model = case.shared(), fused(case)
    ids, mask = pad([tokens(5), tokens(3, seed=1)], 5, "left")
    settings = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(ids, **settings), plain.generate(ids, **settings))
    case = case_named("xf_bert-encoder")
    model = case.build(unpad_inputs=True)
    fuse_projections(model)
    ids, mask = pad([tokens(9), tokens(5, seed=1)], 9, "right")
    real = mask.bool()
    with torch.no_grad():
        expected = case.shared()(ids, mask).logits[real]
        close(model(ids, mask).logits[real], expected, 1e-12)
        model.model.trunk.config.unpad_inputs = False
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
        close(compiled(ids, mask).logits[real], expected, 1e-12)
        torch._dynamo.reset()


def test_refusals():
    for name in APART:
        model = next(case for case in CASES if case.name == name).build()
        before = list(dict(model.named_parameters()))
        with pytest.raises(ValueError, match=r"attention '\w+' of layer 0 .*; leave its model as it is"):
            fuse_projections(model)
        assert before == list(dict(model.named_parameters()))
    case = case_named("xf_bert-encoder")
    model = case.build()
    attention = attentions(model)[1]
    for frozen in (attention.k_proj.weight, attention.k_proj.bias):
        frozen.requires_grad_(False)
        with pytest.raises(ValueError, match="of layer 1 has projections of different kinds"):
            fuse_projections(model)
        frozen.requires_grad_(True)
    handle = attention.v_proj.register_forward_hook(lambda *given: None)
    with pytest.raises(ValueError, match="of layer 1 has projections with an adapter, a hook"):
        fuse_projections(model)
    handle.remove()
    with pytest.raises(ValueError, match="Linear has no self-attention of this package"):
        fuse_projections(nn.Linear(2, 2))
    assert fuse_projections(model) == 2
    attention.qkv_proj = nn.Sequential(attention.qkv_proj)
    with pytest.raises(ValueError, match="layer 1 has become a Sequential; merge or remove"):
        split_projections(model)


def test_adapters():
    """Before them projections are split: their names would find nothing to adapt. What is merged can be joined."""
    peft = pytest.importorskip("peft")
    case = case_named("xf_bert-encoder")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    with pytest.raises(ValueError, match="not supported"):
        peft.get_peft_model(fused(case), settings)
    adapted = peft.get_peft_model(case.build(), settings)
    with pytest.raises(ValueError, match="has projections with an adapter|three projections"):
        fuse_projections(adapted)
    ids, merged = tokens(2, 7), adapted.merge_and_unload().eval()
    expected = merged(ids).logits
    fuse_projections(merged)
    close(merged(ids).logits, expected, 1e-12)


def test_converters():
    """A converted checkpoint has the projections as its own kind of model keeps them, joined or not."""
    from hf_xformers import to_transformers

    case = case_named("xf_gpt2-decoder")
    plain, joined = (to_transformers(model).state_dict() for model in (case.shared(), fused(case)))
    assert any("c_attn" in name for name in joined) and plain.keys() == joined.keys()
    assert all(torch.equal(plain[name], joined[name]) for name in plain)
