# SPDX-License-Identifier: Apache-2.0
"""The stack contract."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from torch import nn
from transformers.cache_utils import CacheLayerMixin

from ..core.components import Spec
from ..core.weight_decay import Undecayed
from .driver import Pass, StackOutput


class Stack(Undecayed, nn.Module):
    """Drives layers over depth. Layers belong to the tower and come with the run, so that a stack may have them in any
    order, any number of times, or over time first; what the stack itself learns stands on it."""

    def forward(self, run: Pass) -> StackOutput:
        """What comes after the layers of `run`."""
        raise NotImplementedError


class StackSpec(Spec):
    """Base of stack specs. exits: what leaves at its classifiers inside ([`StackSpec.build_exits`]), `texts`,
    `tokens`, or tokens of a `decoder`; empty: it has none. shares: what of its layers reaches the others: `all`, also
    what they pass on to the next ones; what they have `prepared`, as all prepare one and the same call; or `nothing`.
    keeps_tokens: its layers see the text's tokens, all of them, each in its place."""

    exits: ClassVar[Literal["", "texts", "tokens", "decoder"]] = ""
    shares: ClassVar[Literal["all", "prepared", "nothing"]] = "all"
    keeps_tokens: ClassVar[bool] = True
    why_not: ClassVar[Mapping[str, str]] = {"unpadding": "it reads states by row between its layers"}

    def num_layers(self, config: Any) -> int:
        """Modules to build (fewer than steps when weights are shared over depth)."""
        return config.num_hidden_layers

    def num_steps(self, config: Any) -> int:
        """Executions of a layer, which is the number of cache slots."""
        return config.num_hidden_layers

    def cache_layer(self, config: Any, step: int) -> CacheLayerMixin | None:
        """A new layer of a generation cache that holds the state of one execution step, whatever the attention; None:
        the attention says which."""
        return None

    def memory_slots(self, config: Any) -> int | None:
        """States besides the segment that a layer reads of a segment memory, and a generation cache has room for;
        None: there is no such memory, and a cache grows with the text."""
        return None

    def remembers_parts(self, config: Any) -> bool:
        """Whether the parts of a text that processes hold can be the segments of its memory: each layer remembers its
        own input in earlier ones, which all processes have at the same time."""
        return False

    def cache_slots(self, config: Any) -> int | None:
        """Keys and values that a generation cache has room for; None: it grows with the text."""
        return self.memory_slots(config)

    def output_width(self, config: Any) -> int:
        """Width of the last states, which the final norm, the pooler and the heads read."""
        return config.hidden_size

    def gives_every_token(self, config: Any) -> bool:
        """Whether the last states are one for each token of the text."""
        return True

    def build_exits(self, config: Any) -> nn.Module:
        """Classifiers inside the stack, for the heads that read `exits` of this kind."""
        raise NotImplementedError(f"stack {self.type!r} has no exits.")
