# SPDX-License-Identifier: Apache-2.0
"""Windows of a text that a causal model reads one after the other, with one key and value carried from each to the
next."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache

from ..attention.shared.base import LeadingKeys
from ..blocks.base import XFormerLayer
from ..core.call import Call, add_losses, self_attention_cache
from ..core.components import bounded, register
from ..core.hand_overs import HandOver
from ..core.segment_memory import SegmentMemory, read_single
from ..ops.common.real_tokens import real_last
from ..position.base import Position, Turns
from .base import Stack, StackSpec
from .driver import Pass, StackOutput
from .text_segments import TextSegments
from .text_windows import ContinuedText, RestartingPositions, WindowCacheLayer, Windows

SEGMENT_MEMORY = "segment_memory"


class RecurrenceModule(nn.Module):
    """k, v = W gelu(... gelu(W_1 z)): a window's vector z [B, D] -> a key and a value for each head, [B, K, 1, d]."""

    def __init__(self, config, spec: RecurrentWindowsSpec, layer: int):
        super().__init__()
        view = config.layer(layer)
        self.heads, width = view.key_value_heads, view.hidden_size
        hidden = spec.recurrence_hidden or width
        widths = [width, *[hidden] * (spec.recurrence_layers - 1)]
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))
        self.k_proj = nn.Linear(widths[-1], self.heads * view.head_width)
        self.v_proj = nn.Linear(widths[-1], self.heads * view.head_width)

    def forward(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            vector = F.gelu(layer(vector))
        key, value = (proj(vector).unflatten(-1, (self.heads, 1, -1)) for proj in (self.k_proj, self.v_proj))
        return key, value


class RecurrentWindowsStack(Stack):
    """A text is read in windows of W tokens. z_s = mean over window s of the states that layer `extract_layer` gives;
    in window s + 1 the attention of layer `insert_layer` has one more key and value, k, v = r(z_s), which all its
    queries see (Yoshida, Ettinger and Gimpel 2020, arXiv 2008.07027). Nothing else passes from window to window, and
    positions begin anew in each, so that a model trained on texts of W tokens reads texts of any length.

    A row's windows are counted from its first real token; padding is in no mean. A call begins a window; z comes and
    goes as `segment_memory`, with gradient. Within a call gradients go back through its windows, whose activations are
    made again one window at a time (`checkpoint_windows`), and over several calls with memory replay
    (`hf_xformers.training.replay`). With a generation cache windows continue from call to call: it holds the keys and
    values of the current window, z and the mean so far, whatever the length of the text.
    """

    def __init__(self, config, spec: RecurrentWindowsSpec):
        super().__init__()
        self.spec, self.window, self.mean = spec, spec.length(config), spec.pooling == "mean"
        self.extract, self.insert = spec.depths(config)
        self.recurrence = RecurrenceModule(config, spec, self.insert)

    def begin(self, given: SegmentMemory | None, like: Tensor) -> Windows:
        """The windows that texts begin with. Raises `TypeError` and `ValueError` for a memory that does not fit."""
        state, mask = read_single(given, (like.shape[0], 1, like.shape[-1]))
        if state is None:
            return Windows.begin(like)
        return Windows.begin(like, state[:, 0], None if mask is None else mask[:, 0])

    def forward(self, run: Pass) -> StackOutput:
        hidden_states, context, position = run.hidden_states, run.context, run.position
        cache = self_attention_cache(run.past_key_values)
        slots = self.slots(cache)
        going_on, given = slots[0].windows if slots else None, context.inputs.get(SEGMENT_MEMORY)
        windows, knows = going_on, True
        if windows is None:
            windows, knows = self.begin(given, hidden_states), given is not None and bool(given.states)
        text: TextSegments | None = None
        segments: Any = [(hidden_states, context)]
        if going_on is not None:
            full = windows.place == self.window
            self.forget(slots, full)
            windows = windows.rolled(full, self.mean)
            segments = text = ContinuedText(hidden_states, context, position, self.window, windows.place)
        elif hidden_states.shape[1] > self.window:
            segments = text = TextSegments(hidden_states, context, position, self.window)
        parts: list[Tensor] = []
        aux_losses: dict[str, Tensor] = {}
        often = self.spec.checkpoint_windows and text is not None and cache is None and torch.is_grad_enabled()
        for index, (states, inner) in enumerate(segments):
            if index:
                full, knows = windows.place == self.window, True
                self.forget(slots, full)
                windows = windows.rolled(full, self.mean)
            if index and self.spec.detach_every and index % self.spec.detach_every == 0:
                windows.carried = windows.carried.detach()
            carried = windows.carried.to(states.dtype) if knows else None
            arguments = (run.layers, states, carried, windows.held, inner, position, cache, slots)
            made = checkpoint(self.read, *arguments, use_reentrant=False) if often else self.read(*arguments)
            states, pooled, losses = made
            real = inner.query_padding_mask
            windows = windows.with_tokens(pooled, real, self.mean)
            add_losses(aux_losses, {name: loss / len(segments) for name, loss in losses.items()})
            self.commit(slots, real, states)
            parts.append(states)
        joined = parts[0] if text is None else text.joined(parts)
        if torch.is_grad_enabled() and not knows:  # parameters that take no part would puzzle distributed training
            key, value = self.recurrence(windows.carried.to(joined.dtype))
            joined = joined + 0.0 * (key.mean() + value.mean())
        if slots:
            slots[0].windows = windows
            for slot in slots:
                slot.cumulative_length += hidden_states.shape[1]
        left = None if going_on is not None else self.left(windows, hidden_states)
        return StackOutput(joined, context, aux_losses, segment_memory=left)

    def read(
        self,
        layers: Sequence[XFormerLayer],
        hidden_states: Tensor,
        carried: Tensor | None,
        held: Tensor,
        context: Call,
        position: Position,
        cache: Cache | None,
        slots: Sequence[WindowCacheLayer],
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """One window, or a part of it: states [B, t, D] -> those of the last layer, those that are pooled, losses.
        carried [B, D], of the rows that `held` [B] has one; None: no row has."""
        outer = self.with_stored(context, slots)
        inner = outer if carried is None else self.with_carried(outer, carried, held)
        for depth, layer in enumerate(layers):
            layer.prepare(inner if depth == self.insert else outer, cache)
        pooled = hidden_states
        aux_losses: dict[str, Tensor] = {}
        for depth, layer in enumerate(layers):
            hidden_states = position.embed_layer(hidden_states, context.positions, depth)
            seen = inner if depth == self.insert else outer
            hidden_states, _, losses = layer(
                hidden_states, None, seen.states, context=seen, step=depth, past_key_values=cache
            )
            add_losses(aux_losses, losses)
            if depth == self.extract:
                pooled = hidden_states
        return hidden_states, pooled, aux_losses

    def with_stored(self, context: Call, slots: Sequence[WindowCacheLayer]) -> Call:
        """The call on a part of a window whose earlier tokens are in the cache."""
        stored = slots[0].stored if slots else 0
        if not stored:
            return context
        new, earlier = context.query_index.shape[0], cast(Tensor, slots[0].real)
        real = context.padding_mask
        real = earlier.new_ones(earlier.shape[0], new) if real is None else real
        index = torch.arange(stored + new, device=earlier.device)
        real = torch.cat([earlier, real], dim=1)
        return context.derive(Turns, padding_mask=real, query_index=index[stored:], key_index=index, fresh=False)

    def with_carried(self, context: Call, vector: Tensor, held: Tensor) -> Call:
        """The call as the layer with one more key sees it: that key comes first, in the rows `held` [B]."""
        if context.explicit_mask is not None:
            raise ValueError(
                "`segment_memory` adds a key that a prepared mask [B, 1, T, S] says nothing of; give a mask [B, T]."
            )
        key, value = self.recurrence(vector)
        real, count = context.padding_mask, context.key_index.shape[0]
        real = held.new_ones(held.shape[0], count) if real is None else real
        seen = context.derive(
            Turns,
            padding_mask=torch.cat([held[:, None], real], dim=1),
            query_index=context.query_index + 1,
            key_index=torch.arange(count + 1, device=held.device),
            fresh=False,
        )
        seen.start(LeadingKeys(key, value))
        return seen

    def left(self, windows: Windows, like: Tensor) -> SegmentMemory:
        """What a call leaves to the next one, [B, 1, D]."""
        begun = windows.place > 0
        vector = torch.where(begun[:, None], windows.left(self.mean), windows.carried).to(like.dtype)
        return SegmentMemory((vector[:, None],), (begun | windows.held)[:, None])

    @staticmethod
    def slots(cache: Cache | None) -> list[WindowCacheLayer]:
        """The layers of a generation cache. Raises `ValueError` for one of another type."""
        found = [] if cache is None else list(cache.layers)
        for slot in found:
            if not isinstance(slot, WindowCacheLayer):
                raise ValueError(
                    f"Stack 'recurrent_windows' keeps the tokens of a window, which a {type(cache).__name__} of"
                    f" {type(slot).__name__} has no place for; leave `past_key_values` out, or make it with"
                    " `hf_xformers.core.cache.make_cache(config)`."
                )
        if cache is not None and not found:
            raise ValueError(
                f"Stack 'recurrent_windows' keeps the tokens of a window, which an empty {type(cache).__name__} has no"
                " place for; make the cache with `hf_xformers.core.cache.make_cache(config)`."
            )
        return cast("list[WindowCacheLayer]", found)

    @staticmethod
    def forget(slots: Sequence[WindowCacheLayer], full: Tensor) -> None:
        """The stored tokens of rows whose window is full [B] are of no window any more."""
        if slots and slots[0].real is not None:
            slots[0].real = slots[0].real & ~full[:, None]

    def commit(self, slots: Sequence[WindowCacheLayer], real: Tensor | None, states: Tensor) -> None:
        """After a part of a window that the layers have written to the cache: which of its slots are tokens of it."""
        if not slots:
            return
        batch, new = states.shape[:2]
        first = slots[0]
        marks = first.real
        added = states.new_ones(batch, new, dtype=torch.bool) if real is None else real
        marks = added if marks is None else torch.cat([marks, added], dim=1)
        order = None if real is None or new == 1 else real_last(marks)
        first.real = (marks if order is None else marks.gather(1, order))[:, -self.window :]
        for slot in slots:
            slot.keep(self.window, order)


@register("stack", "recurrent_windows", aliases=("recurrent_pretrained_lm",))
class RecurrentWindowsSpec(StackSpec):
    """Windows of a text, with one key and value carried from each to the next.

    Args:
        window_size: W (tokens; `None`: `max_position_embeddings`).
        extract_layer: whose output is pooled, counted from 0 (`None`: the last).
        insert_layer: whose attention has the key and value (`None`: the second, or the only one).
        recurrence_hidden, recurrence_layers: width of the feed-forward network that makes them (`None`: the model's)
            and its linear maps.
        pooling: the `mean` of a window's states, or the `last` one.
        detach_every: windows after which gradients end within a call (`None`: they go through all).
        checkpoint_windows: make the activations of a call's windows again in the backward pass, one window at a time.
        replay: whether `XFormerTrainer` goes back through the micro-batches of an optimizer's step by memory replay;
            else gradients end with a batch.
    """

    summary = "windows, with one key and value carried from each to the next"
    inputs = (SEGMENT_MEMORY,)
    shares = "prepared"

    window_size: int | None = bounded(None, least=1)
    extract_layer: int | None = None
    insert_layer: int | None = None
    recurrence_hidden: int | None = bounded(None, least=1)
    recurrence_layers: int = bounded(3, least=1)
    pooling: Literal["mean", "last"] = "mean"
    detach_every: int | None = bounded(None, least=1)
    checkpoint_windows: bool = True
    replay: bool = True

    def replays(self) -> bool:
        return self.replay

    def length(self, config) -> int:
        """W (tokens)."""
        return config.max_position_embeddings if self.window_size is None else self.window_size

    def call_feature(self, config) -> RestartingPositions:
        return RestartingPositions(self.length(config))

    def depths(self, config) -> tuple[int, int]:
        """The layer that is pooled, and the one that reads."""
        layers = config.num_hidden_layers
        extract = layers - 1 if self.extract_layer is None else self.extract_layer
        insert = min(1, layers - 1) if self.insert_layer is None else self.insert_layer
        return extract, insert

    def cache_layer(self, config, step: int) -> WindowCacheLayer:
        return WindowCacheLayer()

    def cache_slots(self, config) -> int:
        return self.length(config)

    def check_fields(self) -> None:
        if self.window_size == 1:
            raise ValueError(
                "recurrent_windows needs `window_size` >= 2, got 1: a token alone in its window has no other to read."
            )

    def check(self, config) -> None:
        if not config.is_decoder or config.is_encoder_decoder:
            raise ValueError(
                "stack 'recurrent_windows' reads a text from left to right in one tower; set `is_decoder=True` and"
                " `is_encoder_decoder=False`, or use the stack 'plain'."
            )
        for name, depth in zip(("extract_layer", "insert_layer"), self.depths(config), strict=True):
            if not 0 <= depth < config.num_hidden_layers:
                raise ValueError(
                    f"recurrent_windows has `{name}` {depth}, and the model has layers 0 to"
                    f" {config.num_hidden_layers - 1}; choose one of these."
                )
        longest = config.position.max_length(config)
        if longest is not None and self.length(config) > longest:
            raise ValueError(
                f"recurrent_windows has windows of {self.length(config)} tokens, and position"
                f" {config.position.type!r} covers {longest}; set `window_size` to at most that."
            )
        reads = HandOver.LEADING_KEYS in config.attention.reads
        if not reads or config.block.cache_layer(config) is not None:
            what = "block" if reads else "attention"
            raise ValueError(
                f"stack 'recurrent_windows' carries a key from window to window, which {what}"
                f" {getattr(config, what).type!r} has no place for; use attention 'dense' and block 'vanilla'."
            )
        inside = config.position.acts & {"score_bias", "score_terms", "head_terms"}
        if inside:
            raise ValueError(
                f"position {config.position.type!r} acts on pairs of tokens, and the key that stack"
                " 'recurrent_windows' carries from window to window has no place in the text; use a position such as"
                " 'learned_absolute' or 'rotary'."
            )

    def build(self, config, **where) -> RecurrentWindowsStack:
        return RecurrentWindowsStack(config, self)
