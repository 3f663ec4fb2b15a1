"""Tiny checkpoints with a tokenizer, as the clients of this package meet them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hf_xformers.data import train_tokenizer
from hf_xformers.variants import config_class, family
from tests.common.cases import TEXT_TYPES, covering, defaults
from tests.common.exceptions import exception
from tests.helpers import NO_DROPOUT, make_strong, tiny_fields

TEXTS = [
    "the small cat sat on the warm mat",
    "a dog ran over the wide green field and then slept",
    "rain fell",
    "who saw the bird that sang in the old tree",
]
READERS = [name for name in TEXT_TYPES if {"ForMaskedLM", "ForSeq2SeqLM"} & set(family(name))]
CAUSAL = [name for name in TEXT_TYPES if "ForCausalLM" in family(name)]

# One family for each engine, where a client costs too much to meet all of them.
ENGINES = [
    "xf_bert",
    "xf_longformer",
    "xf_bigbird",
    "xf_reformer",
    "xf_performer",
    "xf_linformer",
    "xf_nystromformer",
    "xf_funnel_transformer",
    "xf_universal_transformer",
    "xf_switch_transformer",
]
CAUSAL_ENGINES = [
    "xf_gpt2",
    "xf_longformer",
    "xf_sparse_transformer",
    "xf_reformer",
    "xf_performer",
    "xf_delta_net",
    "xf_transformer_xl",
    "xf_feedback_transformer",
    "xf_universal_transformer",
    "xf_switch_transformer",
]


SEEN = ("embedding", "position", "stack", "head")  # slots that decide about a model's inputs, outputs and state


@functools.cache
def seen_parts(name: str) -> set[Any]:
    """What a client can see of a family: whatever stands around its layers, and its engine where it is the one for
    it. What layers do inside has tests of its own."""
    towers = defaults(name).tower_configs()
    parts = {(slot, getattr(tower.layer(0), slot).type, tower.is_decoder) for tower in towers for slot in SEEN}
    return parts | ({name} & {*ENGINES, *CAUSAL_ENGINES})


def met(names: list[str]) -> list[str]:
    """Few of the families, which together have all that a client can see of any."""
    return covering(names, seen_parts)


def excused(client: str, name: str, head: str | None = None) -> str | None:
    """Why a family is excused from a client (see tests/common/exceptions.py)."""
    return exception([name], f"{client}:{head}", client)


@functools.cache
def tokenizer(template: str = "cls_sep") -> PreTrainedTokenizerFast:
    made = train_tokenizer(
        TEXTS * 2, kind="wordpiece", vocab_size=90, num_sentinels=0, template=template, model_max_length=32
    )
    made.padding_side = "left" if template == "bos" else "right"
    return made


def template(head: str) -> str:
    """Prompts of causal models are open-ended; the others read whole texts."""
    return "bos" if head == "ForCausalLM" else "cls_sep"


def build(name: str, head: str, /, **changes: Any) -> PreTrainedModel:
    """A tiny model whose vocabulary and special tokens are the tokenizer's, always with the same parameters."""
    words = tokenizer(template(head))
    ids = {f"{role}_token_id": getattr(words, f"{role}_token_id") for role in ("pad", "bos", "eos")}
    kind = "seq2seq" if head == "ForSeq2SeqLM" else "encoder"
    fields = {"vocab_size": len(words), **NO_DROPOUT, **ids, "num_labels": 3, **changes}
    config = config_class(name)(**tiny_fields(config_class(name), kind, **fields))
    torch.manual_seed(0)
    return make_strong(family(name)[head](config)).eval()


def save(model: PreTrainedModel, head: str, folder: Path) -> str:
    model.save_pretrained(folder)
    tokenizer(template(head)).save_pretrained(folder)
    return str(folder)
