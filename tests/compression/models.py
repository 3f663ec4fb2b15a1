"""Tiny models of every engine and stack, and rows for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_xformers import XFormerConfig
from hf_xformers.variants import family
from tests.helpers import NO_DROPOUT, make_strong, tokens

GEOMETRY = {
    **NO_DROPOUT,
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}


def tiny(head: str = "ForCausalLM", *, seed: int = 0, double: bool = True, **fields: Any):
    """A model with random weights in which every term counts, in evaluation mode."""
    torch.manual_seed(seed)
    decodes = {"is_decoder": head == "ForCausalLM", "is_encoder_decoder": head == "ForSeq2SeqLM"}
    model = family("xformer")[head](XFormerConfig(**{**GEOMETRY, **decodes, **fields}))
    model = make_strong(model, amount=0.2).eval()
    return model.double() if double else model


def batch(rows: int = 2, length: int = 9, seed: int = 5) -> dict[str, Tensor]:
    ids = tokens(rows, length, seed=seed, high=60)
    mask = torch.ones_like(ids)
    mask[0, length - 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
