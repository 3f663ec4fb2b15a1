"""One head of keys and values for many heads of queries, against tied heads, GPTBigCode, Falcon and pooled heads."""

import torch
from transformers import FalconConfig, GPTBigCodeConfig
from transformers.models.falcon.modeling_falcon import FalconAttention
from transformers.models.gpt_bigcode.modeling_gpt_bigcode import GPTBigCodeAttention

from hf_xformers import (
    XFMultiQueryAttentionConfig,
    XFMultiQueryAttentionForCausalLM,
    XFormerConfig,
    XFormerForMaskedLM,
)
from hf_xformers.conversion import swap_components
from tests.attention.score_helpers import GEOMETRY, HEADS, WIDTH, build_layers, make_context, run_layers, vectors
from tests.helpers import close, tiny_fields, tokens

HEAD = WIDTH // HEADS


def widened_to_all_heads(layer, groups):
    """The state of `layer` with its keys and values copied to every head of a group."""
    state = layer.state_dict()
    for name in state:
        if name[:2] in ("k_", "v_"):
            of_groups = state[name].unflatten(0, (groups, HEAD))
            state[name] = torch.cat([of_groups[head * groups // HEADS] for head in range(HEADS)])
    return state


@torch.no_grad()
def test_gpt_bigcode():
    (ours,) = build_layers("dense", causal=True, num_key_value_heads=1)
    config = GPTBigCodeConfig(n_embd=WIDTH, n_head=HEADS, multi_query=True, attn_pdrop=0.0, resid_pdrop=0.0)
    config._attn_implementation = "eager"
    theirs = GPTBigCodeAttention(config, layer_idx=0).double().eval()
    for part in ("weight", "bias"):  # queries, one key, one value
        own = torch.cat([getattr(getattr(ours, f"{letter}_proj"), part) for letter in "qkv"])
        getattr(theirs.c_attn, part).copy_(own)
        getattr(theirs.c_proj, part).copy_(getattr(ours.o_proj, part))
    states = vectors(2, 6)
    order = torch.full((6, 6), torch.finfo(torch.float64).min, dtype=torch.float64).triu(1)[None, None]
    close(run_layers([ours], states, make_context(6, True))[0].output, theirs(states, attention_mask=order)[0], 1e-7)


@torch.no_grad()
def test_falcon():
    (ours,) = build_layers({"type": "dense", "bias": False}, causal=True, num_key_value_heads=1)
    fields = dict(new_decoder_architecture=False, multi_query=True, alibi=True, bias=False, attention_dropout=0.0)
    config = FalconConfig(hidden_size=WIDTH, num_attention_heads=HEADS, hidden_dropout=0.0, **fields)
    config._attn_implementation = "eager"
    theirs = FalconAttention(config, layer_idx=0).double().eval()
    theirs.query_key_value.weight.copy_(torch.cat([getattr(ours, f"{letter}_proj").weight for letter in "qkv"]))
    theirs.dense.weight.copy_(ours.o_proj.weight)
    states = vectors(2, 6)
    order = torch.full((6, 6), torch.finfo(torch.float64).min, dtype=torch.float64).triu(1).expand(2, 1, 6, 6)
    flat = torch.zeros(2 * HEADS, 1, 6, dtype=torch.float64)  # a bias of zero in place of positions
    found = theirs(states, alibi=flat, attention_mask=order)[0]
    close(run_layers([ours], states, make_context(6, True))[0].output, found, 1e-7)


def test_cache_has_one_head():
    model = XFMultiQueryAttentionForCausalLM(
        XFMultiQueryAttentionConfig(**tiny_fields(XFMultiQueryAttentionConfig, "decoder"))
    ).eval()
    past = model(tokens(2, 7), use_cache=True).past_key_values
    assert {tuple(layer.keys.shape[1:3]) for layer in past.layers} == {(1, 7)}


def test_parameters_are_those_of_full_heads():
    """The wider feed-forward holds what keys and values save, up to their biases."""
    with torch.device("meta"):
        shared = XFMultiQueryAttentionForCausalLM(XFMultiQueryAttentionConfig(is_decoder=True))
        config = XFMultiQueryAttentionConfig(num_key_value_heads=None, intermediate_size=3072, is_decoder=True)
        whole = XFMultiQueryAttentionForCausalLM(config)
    assert abs(shared.num_parameters() / whole.num_parameters() - 1) < 1e-3


def test_pooled_heads():
    """Up-training starts from the mean of a group's heads, which is the model itself where heads were tied."""
    (tied,) = build_layers("dense", num_key_value_heads=1)
    source = XFormerForMaskedLM(XFormerConfig(**GEOMETRY))
    with torch.no_grad():
        for layer in source.model.trunk.layers:
            layer.attention.load_state_dict(
                {name: value.float() for name, value in widened_to_all_heads(tied, 1).items()}
            )
    pooled, report = swap_components(source.eval(), num_key_value_heads=1, measure=False)
    ids = tokens(2, 7, high=50)
    assert pooled.config.key_value_heads == 1 and any("mean" in how for _, _, how in report.derived)
    with torch.no_grad():
        close(pooled(ids).logits, source(ids).logits, 1e-5)
