"""What tests of mechanisms share that group tokens by content: one small geometry, one layer, its context and
states."""

from __future__ import annotations

import torch
from transformers import initialization as init

from hf_xformers import XFormerConfig
from hf_xformers.core.call import Call

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "residual": "pre_ln",
    "initializer_range": 0.3,
}


def build_layer(attention, decoder=False, layer_idx=0, **fields):
    """One layer of `attention` in double precision, the same at every call."""
    config = XFormerConfig(**SIZES, is_decoder=decoder, use_cache=False, attention=attention, **fields)
    torch.manual_seed(1)
    made = config.attention.build(config, layer_idx=layer_idx)
    made.initialize(config, init)
    return made.double()


def context(length, decoder=False, mask=None, implementation="sdpa"):
    slots = torch.arange(length)
    return Call(mask, slots[None], slots, slots, decoder, True, implementation=implementation)


def states(length, batch=2, seed=0):
    return torch.randn(batch, length, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
