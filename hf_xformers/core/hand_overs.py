# SPDX-License-Identifier: Apache-2.0
"""What one component of a config makes for another one to read, declared by both and checked in one place."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any


class HandOver(Enum):
    """What a spec `gives`, and another spec of the same layer `reads`."""

    SENTENCES = "a text as sentences of words"
    PARAGRAPHS = "a text's paragraphs as rows, with which rows are of one text"
    PIXELS = "the pixels inside every patch of an image"
    SLOTS = "those of a memory besides the text"
    FEEDBACK = "memories of what all layers gave at earlier steps"
    SUMMARIES = "global tokens that stand for parts of the text"
    TASK = "a vector of each text's task"

    # Who needs one of these says so in its own `check`.
    SEGMENT_MEMORY = "states of earlier segments"
    KEY_USAGE = "a ledger for how much attention each key gets"
    POOLED_QUERIES = "queries that are fewer than keys, each with a place of its own"
    SCATTERED_QUERIES = "queries that stand anywhere among the keys, and which pairs are in sight"
    KEY_STATES = "other states for keys and values than queries are made of, with a position inside attention"
    LEADING_KEYS = "keys and values to stand before those of the tokens"
    AXES = "the rows and the columns of a grid of tokens, by turns"
    SPANS = "states of spans of the text, which go through layers besides those of tokens"
    EARLIER_IDS = "the ids of the call's tokens, and of the one before"
    GATE_NOISE = "noise and a budget for gates inside sublayers"
    MEMORIES = "a memory of an encoder for each decoder layer"
    INSERTION_ORDER = "tokens in the order of their generation, which stand elsewhere in the text"
    SERIES = "numbers of a time series"
    TOKEN_MAP = "a nonlinear map of single tokens, which is a feed-forward's work"


@dataclass(frozen=True)
class Between:
    """The slot that gives, the one that reads, and the sentences for a reader without giver and a giver without reader
    (None: it does without). `reader` and `giver` in them stand for the components' names."""

    giver: str
    reader: str
    not_given: str
    not_read: str | None


HAND_OVERS = {
    HandOver.SENTENCES: Between(
        "stack",
        "block",
        "block {reader!r} works on sentences, which stack {giver!r} does not make; set `stack='hi_transformer'`.",
        "stack {giver!r} needs layers that work at both levels, which block {reader!r} does not; set"
        " `block='hi_transformer'`.",
    ),
    HandOver.PARAGRAPHS: Between(
        "stack",
        "block",
        "block {reader!r} works on paragraphs, which stack {giver!r} does not make; set `stack='hiersumm'`.",
        "stack {giver!r} needs layers that read the other paragraphs, which block {reader!r} has not; set"
        " `block='hiersumm'`.",
    ),
    HandOver.PIXELS: Between(
        "embedding",
        "block",
        "block {reader!r} reads pixels, which embedding {giver!r} does not give; set `embedding='pixel_patch'` in a"
        " config of images, e.g. XFTransformerInTransformerConfig.",
        "embedding {giver!r} gives pixels, which block {reader!r} does not read; set"
        " `block='transformer_in_transformer'`, or take the embedding 'patch'.",
    ),
    HandOver.SLOTS: Between(
        "stack",
        "block",
        "block {reader!r} reads the slots of a memory, which stack {giver!r} does not give; use stack 'memformer', or"
        " block 'vanilla'.",
        "stack {giver!r} has a memory that block {reader!r} does not read; use block 'memformer'.",
    ),
    HandOver.FEEDBACK: Between(
        "stack",
        "attention",
        "attention {reader!r} reads memories that only stack 'feedback' makes, not {giver!r}; set `stack='feedback'`.",
        "stack {giver!r} makes memories that attention {reader!r} does not read; set `attention='feedback'`.",
    ),
    HandOver.SUMMARIES: Between(
        "stack",
        "position",
        "position {reader!r} has labels for tokens and the global tokens that stand for them, which stack {giver!r}"
        " does not give; use stack='etc', or position 'shaw_relative'.",
        None,
    ),
    HandOver.TASK: Between(
        "stack",
        "residual",
        "residual {reader!r} reads a vector of the task, which stack {giver!r} does not make; set `stack='ca_mtl'`, or"
        " `residual='post_ln'`.",
        None,
    ),
}


def check_hand_overs(config: Any, slots: Iterable[str]) -> None:
    """Raises `ValueError` where a component in one of `slots` reads what none gives, or gives what none reads. config:
    of one layer."""
    specs = [getattr(config, slot) for slot in slots]
    for what, between in HAND_OVERS.items():
        giver, reader = getattr(config, between.giver), getattr(config, between.reader)
        for spec in specs:
            if what in spec.reads and what not in giver.gives:
                raise ValueError(between.not_given.format(giver=giver.type, reader=spec.type))
        if what in giver.gives and what not in reader.reads and between.not_read is not None:
            raise ValueError(between.not_read.format(giver=giver.type, reader=reader.type))
