# SPDX-License-Identifier: Apache-2.0
"""The stack contract."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from ..core.components import Spec
from ..core.context import LayerContext
from ..core.pooling import TextPooler
from ..core.prepared import Prepared, State
from ..core.weight_decay import Undecayed
from .driver import Pass, StackOutput


class FurtherStates(State):
    """The embedded texts before, [B, K, S, D]."""

    states: Tensor


class FurtherTexts(Prepared):
    """The call of the texts before (`StackSpec.context_texts`)."""

    call: LayerContext


class Stack(Undecayed, nn.Module):
    """Drives layers over depth. Layers belong to the tower and come with the run, so that a stack may have them in any
    order, any number of times, or over time first; what the stack itself learns stands on it."""

    def forward(self, run: Pass) -> StackOutput:
        """What comes after the layers of `run`."""
        raise NotImplementedError


class StackSpec(Spec):
    """Base of stack specs. gives_memories: as an encoder, it makes a memory for each decoder layer.
    feeds_gates: gives gates inside sublayers their noise and their budget (`core/gates.py`). unpads: it takes the real
    tokens of a batch as one row (`unpad_inputs`); if not, why_not_unpad says what keeps it from that. has_exits: there
    is a classifier after every layer, each with a loss of its own; has_token_exits: one of tokens.
    passes_streams: it carries what layers hand on to the next ones. prepares_together: all its layers prepare one and
    the same call, so that what the first of them owns reaches the others.
    keeps_tokens: its layers see the text's tokens, all of them, each in its place. tells_earlier_ids: they are told
    the ids of the call's tokens and of the one before, too. replays_memory: gradients go through the segment memory to
    the segments before, which a trainer may replay. passes_log_probs: it adds up what its layers hand out, row by row
    and as it is, so that probabilities of choices come through (`core/choices.py`). drops_layers: a layer may be left
    out of a training step (`layer_drop`). padding_last: it is given padding behind the tokens of each row."""

    passes_log_probs: ClassVar[bool] = False
    drops_layers: ClassVar[bool] = False
    padding_last: ClassVar[bool] = False
    gives_memories: ClassVar[bool] = False
    feeds_gates: ClassVar[bool] = False
    unpads: ClassVar[bool] = False
    has_exits: ClassVar[bool] = False
    has_token_exits: ClassVar[bool] = False
    passes_streams: ClassVar[bool] = True
    prepares_together: ClassVar[bool] = True
    keeps_tokens: ClassVar[bool] = True
    tells_earlier_ids: ClassVar[bool] = False
    replays_memory: ClassVar[bool] = False
    why_not_unpad: ClassVar[str] = "it reads states by row between its layers"

    def num_layers(self, config: Any) -> int:
        """Modules to build (fewer than steps when weights are shared over depth)."""
        return config.num_hidden_layers

    def num_steps(self, config: Any) -> int:
        """Executions of a layer, which is the number of cache slots."""
        return config.num_hidden_layers

    def cache_layer(self, config: Any) -> CacheLayerMixin | None:
        """A new layer of a generation cache that holds the state of one execution step, whatever the attention; None:
        the attention says which."""
        return None

    def cache_layer_at(self, config: Any, step: int) -> CacheLayerMixin | None:
        """The same for one execution step, where they differ."""
        return self.cache_layer(config)

    def outer_layers(self, config: Any) -> int:
        """How many of a decoder's first layers read the whole rows and the columns of a grid of tokens by turns, for
        later rows alone; 0: none do."""
        return 0

    def memory_slots(self, config: Any) -> int | None:
        """States beside the segment that a layer reads of a segment memory, and a generation cache has room for; None:
        there is no such memory, and a cache grows with the text."""
        return None

    def remembers_parts(self, config: Any) -> bool:
        """Whether the parts of a text that processes hold can be the segments of its memory: each layer remembers its
        own input in earlier ones, which all processes have at the same time."""
        return False

    def cache_slots(self, config: Any) -> int | None:
        """Keys and values that a generation cache has room for; None: it grows with the text."""
        return self.memory_slots(config)

    def restarts_after(self, config: Any) -> int | None:
        """Tokens after which positions begin anew, and nothing sees further back; None: they go on with the text."""
        return None

    def sentences_before(self) -> int:
        """How many sentences before the text's own it reads, as inputs of their own."""
        return 0

    def context_texts(self, config: Any) -> tuple[str, str] | None:
        """Names of the inputs that hold ids and mask [B, K, S] of further texts, which the tower embeds for it."""
        return None

    def replays(self) -> bool:
        """Whether `XFormerTrainer` replays memories, where they can be (`replays_memory`)."""
        return False

    def output_width(self, config: Any) -> int:
        """Width of the last states, which the final norm, the pooler and the heads read."""
        return config.hidden_size

    def gives_every_token(self, config: Any) -> bool:
        """Whether the last states are one for each token of the text."""
        return True

    def build_pooler(self, config: Any) -> TextPooler | None:
        """What makes a text's vector of the last states in place of the usual pooler, called with `(hidden_states [B,
        T, D], padding_mask)` and the model inputs that its class names in `inputs`; None: the usual one."""
        return None

    def build_token_exits(self, config: Any) -> nn.Module | None:
        """Classifiers of tokens inside the stack, for the token classification head, or None."""
        return None

    def build_language_exits(self, config: Any) -> nn.Module | None:
        """What lets tokens of a decoder leave early, for the heads that predict tokens, or None."""
        return None

    def build_exits(self, config: Any) -> nn.Module | None:
        """Classifiers inside the stack, for the sequence classification head (see heads/early_exit.py), or None."""
        return None
