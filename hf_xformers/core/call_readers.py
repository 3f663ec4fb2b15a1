# SPDX-License-Identifier: Apache-2.0
"""What reads a call whose rows are not whole texts: its cache, a block of the program, or Accelerate.

Under context and sequence parallelism of Accelerate every process holds other tokens of the same texts, and attention
alone may bring them together. What else looks beyond its own token would silently see a part of the text.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..compat import parallelism_in_force
from .call import Call
from .components import SLOTS

_INSTEAD = "use data parallelism (DDP or FSDP2) instead"


class CallReader:
    """Reads a call whose rows are not whole texts, and which therefore moves no tokens."""

    def keeps_cache(self, given: bool) -> bool:
        """Whether such a call may fill a cache. given: there is one; raises `ValueError` where it cannot continue."""
        return True

    def read(
        self,
        tower: Any,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        **asked: Any,
    ) -> Call:
        """The call of a tower on inputs_embeds [B, T, D]. asked: further arguments of its `read_rows`."""
        raise NotImplementedError


_reader: CallReader | None = None  # a plain variable, which a compiler watches


def read_by(reader: CallReader | None) -> CallReader | None:
    """Makes `reader` the one of this block of the program; returns the one before."""
    global _reader
    before, _reader = _reader, reader
    return before


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


class ShardedRows(CallReader):
    """A call of a process that holds some tokens of each text, between which torch exchanges keys and values."""

    def read(
        self,
        tower: Any,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        **asked: Any,
    ) -> Call:
        """Raises `ValueError` for a model, or a call, that would be wrong."""
        check_sharding(tower.config, sharding_in_force())
        context = tower.read_rows(inputs_embeds, attention_mask, None, **asked)
        if not tower.reads_tokens_alone:
            raise ValueError(
                "Context parallelism gives every process a part of each text, which only a causal language model reads"
                f" token by token; {_INSTEAD}."
            )
        if position_ids is None:
            raise ValueError(
                "Under context parallelism a process cannot tell where its part of a text stands; give `position_ids`,"
                " divided like `input_ids`."
            )
        if context.padding_mask is not None or context.explicit_mask is not None:
            raise ValueError(
                "Context parallelism keeps causal order alone and drops padding masks; give rows that are full of"
                " text."
            )
        position_ids = tower.from_zero(position_ids)
        positions = position_ids if position_ids.ndim == 2 else position_ids[None]
        tower.check_length(positions)
        return context.but(positions=positions, position_ids=position_ids if attention_mask is None else None)


def reader_of_call(cache: Any) -> CallReader | None:
    """What reads this call: its cache, the block of the program that it is in, or what Accelerate makes of texts.
    None: its rows are texts."""
    if isinstance(cache, CallReader):
        return cache
    if _reader is None and sharding_in_force():
        return ShardedRows()
    return _reader
