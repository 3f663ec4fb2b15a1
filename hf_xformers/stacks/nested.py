# SPDX-License-Identifier: Apache-2.0
"""What stacks share that read a text as sentences (or paragraphs) of words."""

from __future__ import annotations

import torch
from torch import Tensor

from ..blocks.nesting import Nesting, make_nesting
from ..core.call import Call


def nesting_of(
    hidden_states: Tensor, context: Call, width: int, most: int, field: str = "max_sentences", *, name: str, part: str
) -> Nesting:
    """How the tokens of a call stand in parts of at most `width`. most: parts that there are positions for; field: by
    which a model has more; name: of the stack; part: what it calls them.

    Raises:
        ValueError: a 4-D mask, or more parts than positions.
    """
    if context.explicit_mask is not None:
        raise ValueError(
            f"stack {name!r} keeps words of different {part}s apart by itself and takes no 4-D mask; give a [batch,"
            f" length] mask of real tokens, and `sentence_ids` for {part}s."
        )
    nesting = make_nesting(hidden_states, context.padding_mask, context.inputs.get("sentence_ids"), width)
    if nesting.sentences > most:
        raise ValueError(
            f"The text has {nesting.sentences} {part}s of at most {width} tokens, but stack {name!r} has positions for"
            f" {most}; shorten the text, or build the model with more (`{field}`)."
        )
    return nesting


def last_words(nesting: Nesting) -> Tensor:
    """[B * S]: the place of each sentence's last word (of one without words, 0)."""
    return (nesting.words.flatten(0, 1).sum(-1) - 1).clamp(min=0)


def at_places(words: Tensor, places: Tensor) -> Tensor:
    """words [R, W, D], places [R] -> [R, D]."""
    return words[torch.arange(words.shape[0], device=words.device), places]


def check_outer_position(config, name: str) -> None:
    """Refuses positions that count the tokens of a whole text inside the layers of a stack that has none."""
    if config.position.acts & {"score_bias", "layer_input"} or config.position.shares_tables:
        raise ValueError(
            f"position {config.position.type!r} acts inside layers on one sequence, which stack {name!r} has not; use"
            " 'none' (the stack has positions of its own) or 'rotary'."
        )
