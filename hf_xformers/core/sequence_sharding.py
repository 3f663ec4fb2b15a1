# SPDX-License-Identifier: Apache-2.0
"""Context and sequence parallelism: which models may be given a part of every text in each process, and when they are.

Each process then holds other tokens of the same texts, and attention alone may bring them together. What else looks
beyond its own token would silently see a part of the text.
"""

from __future__ import annotations

from typing import Any

import torch

from ..compat import parallelism_in_force
from .components import SLOTS

_INSTEAD = "use data parallelism (DDP or FSDP2) instead"


@torch.compiler.assume_constant_result
def sharding_in_force() -> str:
    """`"context"` or `"sequence"` where this process's Accelerate divides texts that way, else nothing."""
    parallelism = parallelism_in_force()
    if parallelism is None:
        return ""
    return "context" if parallelism.cp_enabled else "sequence" if parallelism.sp_enabled else ""


def why_not_context_parallel(config: Any) -> str:
    """Why a model of this config cannot be trained on parts of texts, in a clause; empty if it can.

    Components declare it (`Spec.supports`), and only causal order can be kept: torch's ring attention takes no
    mask.
    """
    if config.is_encoder_decoder or not config.is_decoder:
        return "only a causal decoder's order of tokens is kept between processes, and this model has an encoder"
    for layer in config.layer_configs():
        for slot in SLOTS:
            spec = getattr(layer, slot)
            if slot != "cross_attention" and "context_parallel" not in spec.supports:
                return f"{slot} {spec.type!r} reads more of a text than the part that a process holds"
    return ""


def check_sharding(config: Any, kind: str) -> None:
    """Refuses context or sequence parallelism (`kind`) for models that would be wrong under it.

    Raises:
        ValueError: what keeps the model from it.
    """
    if not kind:
        return
    if kind == "sequence":
        raise ValueError(
            "DeepSpeed's sequence parallelism exchanges heads inside transformers' own attention, which this "
            f"{config.model_type!r} model is not made of; {_INSTEAD}."
        )
    why = why_not_context_parallel(config)
    if not why and config._attn_implementation != "sdpa":
        why = (
            "torch exchanges keys and values inside SDPA alone, and `attn_implementation` is"
            f" {config._attn_implementation!r}"
        )
    if why:
        raise ValueError(f"Context parallelism gives every process a part of each text: {why}; {_INSTEAD}.")


def check_sharded_call(config: Any, *, reads_tokens_alone: bool, places: bool, padding: bool) -> None:
    """The same for one call of a tower. reads_tokens_alone: what stands on the tower looks at single tokens (a
    language model). places: the caller says where the tokens stand. padding: some tokens are padding.

    Raises:
        ValueError: the model, or this call, would be wrong.
    """
    kind = sharding_in_force()
    check_sharding(config, kind)
    if not kind:
        return
    if not reads_tokens_alone:
        raise ValueError(
            "Context parallelism gives every process a part of each text, which only a causal language model reads"
            f" token by token; {_INSTEAD}."
        )
    if not places:
        raise ValueError(
            "Under context parallelism a process cannot tell where its part of a text stands; give `position_ids`,"
            " divided like `input_ids`."
        )
    if padding:
        raise ValueError(
            "Context parallelism keeps causal order alone and drops padding masks; give rows that are full of text."
        )


__all__ = ["check_sharded_call", "check_sharding", "sharding_in_force", "why_not_context_parallel"]
