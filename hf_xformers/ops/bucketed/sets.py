# SPDX-License-Identifier: Apache-2.0
"""Which tokens a query reads in the order of a round."""

from __future__ import annotations

from dataclasses import dataclass

OWN_KEY = -1e5  # score of a query's own key as the last resort (appendix A)


@dataclass(frozen=True)
class Recent:
    """A query reads the `window` nearest earlier tokens of its own label, and itself.

    Causal in the strict sense: no later token changes what an earlier one reads. window: tokens, >= 0.
    """

    window: int

    def __post_init__(self) -> None:
        if self.window < 0:
            raise ValueError(f"Recent needs window >= 0, got {self.window}.")


@dataclass(frozen=True)
class Chunks:
    """The order is cut into chunks; a query reads its own chunk and some around it.

    Args:
        size: tokens per chunk.
        before, after: chunks before and after its own.
        causal: later positions are hidden (but they do move chunk borders, so this form is causal by masking only).
        own_label: of those, only tokens with its own label.
        circular: chunks of all rounds form one ring, so that the first chunk of a round looks back into the last one
            of the round before (the released code of Reformer).
    """

    size: int
    before: int = 1
    after: int = 0
    causal: bool = False
    own_label: bool = True
    circular: bool = False

    def __post_init__(self) -> None:
        if self.size < 1 or self.before < 0 or self.after < 0:
            raise ValueError(
                f"Chunks needs size >= 1, before >= 0 and after >= 0, got {self.size}, {self.before} and {self.after}."
            )
        if self.circular and self.own_label:
            raise ValueError("A circular order passes from one round's labels to another's; set own_label=False.")
