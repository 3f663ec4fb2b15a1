# SPDX-License-Identifier: Apache-2.0
"""Sequence parallelism: every process of a group holds a contiguous part of each text, and attention joins them.

What looks at single tokens needs nothing for it. An attention says how it is computed from parts, or why it is not
([`AttentionSpec.sequence_form`]); everything else is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ..ops.common.real_tokens import first_real, real_places
from .call import Call, segments_from_positions
from .call_readers import CallReader, read_by, sharding_in_force
from .components import SLOTS, why_no_packing
from .losses import labels_after_real_tokens
from .text_parts import Division, TextParts, check_alike, divide, division_in_force, whole_rows


class SequenceForm(Enum):
    """How an attention is computed where every process holds a part of each text, and what goes between processes."""

    SUM = "sums over all tokens, added up once: one state of a head, whatever the length"
    PREFIX = "sums over earlier tokens: the states of all processes, whatever the length"
    AFFINE = "a state that every part maps affinely: the maps of all processes, whatever the length"
    NEIGHBOURS = "keys and values near a part's borders: those of a window"
    CHOSEN = "keys and values near the borders, and of chosen tokens, whose own rows are merged by their denominators"
    SHORT = "keys and values of a short sequence, added up: its rows"
    MEMORY = "states before a part, which it remembers without a gradient: as many as its memory has"


@dataclass(frozen=True)
class Unserved:
    """An attention that is not computed from parts. why: a clause that continues from its name."""

    why: str


@contextlib.contextmanager
def sequence_parallel(group: Any = None) -> Iterator[None]:
    """Inside the block every process gives its model a part of each text ([`part_of_batch`]) and calls it together
    with the other processes of `group` (a `torch.distributed` group; `None`: all processes).

    A loss is that of the whole texts, the same in all processes. Gradients are those of the sum of all processes'
    losses, so that their mean over processes, which DistributedDataParallel and FSDP make, is the gradient of that
    loss.

    Raises:
        ValueError: there are no processes, or Accelerate divides texts already.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "Sequence parallelism divides texts over the processes of `torch.distributed`, and there are none; start"
            " them, e.g. with torchrun, and call `torch.distributed.init_process_group`."
        )
    if sharding_in_force():
        raise ValueError(
            "Accelerate divides texts over processes already; leave `cp_size` and `sp_size` of its"
            " `ParallelismConfig` at 1."
        )
    division = Division(group) if dist.get_world_size(group) > 1 else None
    before, reader = divide(division), read_by(None if division is None else DividedRows(division))
    try:
        yield
    finally:
        divide(before)
        read_by(reader)


class SequenceGroups(NamedTuple):
    """All processes in rows of as many as divide a text: those of a row read the same texts, other rows other texts.

    sequence: the group of this process's row, for [`sequence_parallel`] and [`part_of_batch`]. data: that of the
    processes with the same part of other texts. replica: the number of this process's row, of `replicas`.
    """

    sequence: Any
    data: Any
    replica: int
    replicas: int


def sequence_groups(processes: int) -> SequenceGroups:
    """The processes of this run as a mesh of data x sequence; every process has to call it.

    Consecutive processes divide a text, `processes` of them. The gradients of all processes' mean, which
    DistributedDataParallel makes, are then those of the mean of the rows' losses.

    Raises:
        ValueError: there are no processes, or they do not make rows of so many.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "There are no processes to divide texts over; start them, e.g. with torchrun, and call"
            " `torch.distributed.init_process_group`."
        )
    world, rank = dist.get_world_size(), dist.get_rank()
    if processes < 1 or world % processes:
        raise ValueError(
            f"{world} processes are not rows of {processes} that divide a text; take a number that divides {world}, or"
            f" start a multiple of {max(processes, 1)} processes."
        )
    rows = [list(range(first, first + processes)) for first in range(0, world, processes)]
    columns = [list(range(first, world, processes)) for first in range(processes)]
    groups = [[dist.new_group(ranks) for ranks in each] for each in (rows, columns)]  # all processes make all groups
    replica, place = divmod(rank, processes)
    return SequenceGroups(groups[0][replica], groups[1][place], replica, len(rows))


# ------------------------------------------------------------------------------------------------ which models


def why_not_sequence_parallel(config: Any) -> str:
    """Why a model of this config cannot be given parts of texts, in a clause; empty if it can."""
    if config.is_encoder_decoder:
        return "cross-attention of an encoder-decoder reads a text of another length"
    for layer in config.layer_configs():
        form = layer.attention.sequence_form(layer)
        if isinstance(form, Unserved):
            return f"attention {layer.attention.type!r} {form.why}"
        if layer.attention.losses:
            return f"`losses` of attention {layer.attention.type!r} compare heads over whole texts"
        if layer.position.turns_by_length(layer.attention.angles):
            return f"position {layer.position.type!r} as it is set turns tokens by the length of their text"
        if form is SequenceForm.MEMORY and not layer.stack.remembers_parts(config):
            return (
                f"stack {layer.stack.type!r} as it is set has no memory of a layer's own inputs in earlier segments,"
                f" which attention {layer.attention.type!r} needs there (stack 'segment_recurrent' has one)"
            )
        acts = layer.position.acts
        served = {"attention", "cross_attention"}
        if form is SequenceForm.NEIGHBOURS and "neighbors" in layer.position.supports and acts == {"score_bias"}:
            served.add("position")
        if form is SequenceForm.MEMORY:
            served.add("stack")
        for slot in SLOTS:
            spec = getattr(layer, slot)
            if slot in served:
                continue
            if "context_parallel" not in spec.supports:
                return f"{slot} {spec.type!r} reads more of a text than the part that a process holds"
    return ""


def check_sequence_parallel(config: Any) -> None:
    """Refuses a model that would be wrong on parts of texts.

    Raises:
        ValueError: what keeps the model from it.
    """
    why = why_not_sequence_parallel(config)
    if why:
        raise ValueError(
            f"Sequence parallelism gives every process a part of each text: {why}; use data parallelism (DDP or FSDP2)"
            " instead."
        )


# ------------------------------------------------------------------------------------------------ one call


class DividedRows(CallReader):
    """A call of a process that holds a part of each text."""

    def __init__(self, division: Division):
        self.division = division

    def keeps_cache(self, given: bool) -> bool:
        if given:
            raise ValueError(
                "Under sequence parallelism a process holds a part of each text, which no cache continues; leave"
                " `past_key_values` out, and generate outside of the block."
            )
        return False

    def read(
        self,
        tower: Any,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        **asked: Any,
    ) -> Call:
        position_ids = tower.from_zero(position_ids)
        parts, positions = parts_of_call(
            *(tower.config, self.division, inputs_embeds, attention_mask, position_ids),
            reads_tokens_alone=tower.reads_tokens_alone,
            literal=bool(asked.get("output_attentions")),
        )
        chosen = position_ids if attention_mask is None else None
        most = tower.max_length
        if most is not None and (chosen is not None or parts.total_length > most):
            tower.check_length(parts.largest(positions.max()))
        return tower.read_rows(inputs_embeds, **asked).but(
            padding_mask=None if parts.mask is None else parts.own(parts.mask),
            positions=positions,
            segment_ids=None if parts.documents is None else parts.own(parts.documents),
            parts=parts,
            position_ids=chosen,
        )


@torch.compiler.disable
def parts_of_call(
    config: Any,
    processes: Division,
    tokens: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    *,
    reads_tokens_alone: bool,
    literal: bool,
) -> tuple[TextParts, Tensor]:
    """Where the part of this process stands, and the positions [B or 1, t] of its tokens [B, t, D].

    reads_tokens_alone: what stands on the tower looks at single tokens. literal: attention weights are asked for.

    Raises:
        ValueError: the model, or this call, would be wrong on parts of texts.
    """
    check_sequence_parallel(config)
    if literal or config._attn_implementation == "eager":
        raise ValueError(
            "Sequence parallelism has no process that holds the attention weights of a whole text; leave"
            " `output_attentions` out and `attn_implementation` at 'sdpa'."
        )
    if not reads_tokens_alone:
        raise ValueError(
            "Sequence parallelism gives every process a part of each text, which only heads that read it token by"
            " token can stand on: a causal or masked language model, or a classifier of tokens without a CRF."
        )
    batch, length = tokens.shape[:2]
    if attention_mask is not None and tuple(attention_mask.shape) != (batch, length):
        raise ValueError(
            f"Under sequence parallelism `attention_mask` is that of the process's own tokens, {[batch, length]}, got"
            f" {list(attention_mask.shape)}; divide it like `input_ids`."
        )
    numbers = batch, length, int(attention_mask is not None), int(position_ids is not None)
    check_alike(
        numbers,
        processes.group,
        tokens.device,
        "Under sequence parallelism all processes hold as many rows and tokens, with or without `attention_mask` and"
        " `position_ids` (make the parts with `part_of_batch`)",
    )
    parts = TextParts(processes.group, length)
    if attention_mask is not None:
        mask = whole_rows((attention_mask.to(tokens.device) != 0).to(torch.uint8), processes.group).bool()
        parts.mask = None if bool(mask.all()) else mask
    if position_ids is not None:
        positions = position_ids if position_ids.ndim == 2 else position_ids[None]
        if positions.shape[1] != length:
            raise ValueError(
                f"Under sequence parallelism `position_ids` are those of the process's own {length} tokens, got"
                f" {list(position_ids.shape)}; divide them like `input_ids`."
            )
        if attention_mask is None:
            parts.documents = segments_from_positions(whole_rows(positions.expand(batch, -1), processes.group))
            problem = None if parts.documents is None else why_no_packing(config.layer_configs())
            if problem is not None:
                raise ValueError(problem)
        return parts, positions
    if parts.mask is not None:
        return parts, parts.own(real_places(parts.mask))
    return parts, torch.arange(parts.start, parts.start + length, device=tokens.device)[None]


def next_tokens(labels: Tensor, attention_mask: Tensor | None, processes: Division) -> Tensor:
    """labels [B, t] of this part (as `input_ids`, not shifted) and the mask of its tokens -> what each token predicts,
    [B, t], -100 for nothing: the target of a part's last token is the first label of the next part."""
    whole = whole_rows(labels, processes.group)
    if attention_mask is not None:
        mask = whole_rows((attention_mask.to(labels.device) != 0).to(torch.uint8), processes.group)
        whole = labels_after_real_tokens(whole, mask)
    first = dist.get_rank(processes.group) * labels.shape[1]
    return pad(whole[:, 1:], (0, 1), value=-100)[:, first : first + labels.shape[1]].contiguous()


def part_of_batch(batch: Mapping[str, Any], group: Any = None) -> dict[str, Any]:
    """The part of a batch that this process of `group` reads under [`sequence_parallel`].

    All processes are given the same batch. Its tensors [B, T, ...] (those as long as `input_ids`) are cut into as many
    parts of one length as there are processes; what T lacks to that is filled up on the right, without labels. Padding
    on the left moves to the right, with everything that belongs to its rows, so that blocks begin with a text.
    Labels are cut as they are: a causal model finds the next token in the next part itself.

    Raises:
        ValueError: there is neither `input_ids` nor `inputs_embeds`.
    """
    tokens = batch.get("input_ids", batch.get("inputs_embeds"))
    if not isinstance(tokens, Tensor) or tokens.ndim < 2:
        raise ValueError("A batch to be divided needs `input_ids` [batch, length] or `inputs_embeds`; give one.")
    count, rank, length = dist.get_world_size(group), dist.get_rank(group), tokens.shape[1]
    of_tokens = {
        name: value
        for name, value in batch.items()
        if isinstance(value, Tensor) and value.ndim >= 2 and value.shape[1] == length
    }
    part, lacking = -(-length // count), -length % count
    mask, positions = of_tokens.get("attention_mask"), of_tokens.get("position_ids")
    if mask is not None and mask.ndim == 2:
        lead = first_real(mask != 0)
        if bool(lead.any()):
            order = (torch.arange(length, device=mask.device) + lead[:, None].to(mask.device)) % length
            of_tokens = {name: _in_order(value, order) for name, value in of_tokens.items()}
    packed = positions is not None and mask is None and segments_from_positions(positions) is not None
    if lacking and mask is None and not packed:
        of_tokens["attention_mask"] = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
    filled = {name: _filled(name, value, lacking) for name, value in of_tokens.items()} if lacking else of_tokens
    cut = {name: value[:, rank * part : (rank + 1) * part].contiguous() for name, value in filled.items()}
    return {**batch, **cut}


def _in_order(value: Tensor, order: Tensor) -> Tensor:
    rows = max(len(value), len(order))  # positions and masks may have one row for all
    index = order.to(value.device).view(*order.shape, *[1] * (value.ndim - 2))
    return value.expand(rows, *value.shape[1:]).gather(1, index.expand(rows, -1, *value.shape[2:]))


def _filled(name: str, value: Tensor, lacking: int) -> Tensor:
    """A tensor [B, T, ...] with what its rows lack on the right: no labels, and a document of their own."""
    shape = (value.shape[0], lacking, *value.shape[2:])
    if name == "position_ids":
        more = torch.arange(lacking, dtype=value.dtype, device=value.device).expand(shape)
    else:
        more = value.new_full(shape, -100 if name in ("labels", "shift_labels") else 0)
    return torch.cat([value, more], dim=1)


__all__ = [
    "Division",
    "SequenceForm",
    "SequenceGroups",
    "Unserved",
    "check_sequence_parallel",
    "division_in_force",
    "next_tokens",
    "part_of_batch",
    "parts_of_call",
    "sequence_groups",
    "sequence_parallel",
    "why_not_sequence_parallel",
]
