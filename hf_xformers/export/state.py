# SPDX-License-Identifier: Apache-2.0
"""What a decoder keeps between steps, seen from outside: named tensors, and counters of tokens.

A cache is an object of objects, of a kind for each mechanism. A graph reads and gives tensors alone. So the state is
taken apart into its tensors by their places in the cache, and put together again around others. How it grows is
observed: over some steps, batches and texts before them, every axis of every tensor must be a constant, the batch,
that of the memory, or grow by one with each token. What grows in another way has no graph for every step, and is
refused.

In an encoder-decoder what cross-attention has made of the memory belongs to the state, and no step changes it; so does
the mask of the memory. The memory itself does not: nothing reads it again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from ..core.cache import SummaryLayer, make_cache
from ..core.call import self_attention_cache
from ..core.outputs import TowerOutput
from ..modeling_base import XFormerPreTrainedModel
from ..modeling_xformer import XFormerModel

_LONGEST = 1 << 14  # tokens after which a state should have settled
_WATCHED = 4  # steps from which the rule is read
_BEFORE = 7  # tokens of the text that an encoder reads
MEMORY_MASK = "encoder_attention_mask"  # the state that says which places [B, M] of the memory are real
_MADE_OF_MEMORY = "cross_attention_cache."


class Unsettled(ValueError):
    """A state whose sizes follow no rule after so many tokens."""


@dataclass(frozen=True)
class StepState:
    """A tensor of a decoder's state.

    Args:
        name: its place in the cache.
        shape: sizes; "batch" where the axis is that of rows, "memory" where it is that of the memory, and a text such
            as "tokens - 1" where it grows by one with each token.
        axis: that of rows; None: all texts share it.
        dtype: of its numbers.
    """

    name: str
    shape: tuple[int | str, ...]
    axis: int | None
    dtype: torch.dtype

    @property
    def of_memory(self) -> bool:
        """Whether it is of the text that an encoder has read, and no step changes it."""
        return self.name == MEMORY_MASK or self.name.startswith(_MADE_OF_MEMORY)

    def sizes(self, batch: int, tokens: int, memory: int = 0) -> list[int]:
        """The shape for so many texts, after so many tokens each, with so many places of memory."""
        known = {"batch": batch, "memory": memory}
        return [
            size if isinstance(size, int) else known[size] if size in known else tokens + _apart(size)
            for size in self.shape
        ]

    @property
    def free_axes(self) -> tuple[int, ...]:
        """The axes whose size is not always the same."""
        return tuple(axis for axis, size in enumerate(self.shape) if isinstance(size, str))

    @property
    def grows(self) -> bool:
        return any(isinstance(size, str) and size not in ("batch", "memory") for size in self.shape)


def _apart(size: str) -> int:
    """How far a growing axis is from the number of tokens: -1 of "tokens - 1"."""
    return int(size.removeprefix("tokens").replace(" ", "") or 0)


@dataclass(frozen=True)
class Layout:
    """The tensors and counters of a cache. counters: place -> how far it is from the number of tokens read."""

    states: tuple[StepState, ...]
    counters: Mapping[str, int]


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Tensors and whole numbers in a cache, each after its place: names of attributes and keys, with dots."""
    if isinstance(value, (Tensor, int, torch.SymInt)) and not isinstance(value, bool):
        yield path, value
        return
    for name, part in _parts(value):
        yield from leaves(part, f"{path}.{name}" if path else str(name))


def around(value: Any, given: Mapping[str, Any], path: str = "") -> Any:
    """A copy of a cache with other tensors and numbers at the `given` places; the old one stays as it is."""
    if path in given:
        return given[path]
    parts = {name: around(part, given, f"{path}.{name}" if path else str(name)) for name, part in _parts(value)}
    if _holds(value):
        made = copy.copy(value)
        vars(made).update(parts)
        return made
    if isinstance(value, dict):
        return parts
    if isinstance(value, (list, tuple)):
        return type(value)(*parts.values()) if hasattr(value, "_fields") else type(value)(parts.values())
    return value


def _holds(value: Any) -> bool:
    """Whether it is an object whose attributes are parts of a state."""
    return isinstance(value, (Cache, CacheLayerMixin)) or (is_dataclass(value) and not isinstance(value, type))


def _parts(value: Any) -> list[tuple[Any, Any]]:
    if _holds(value):
        return list(vars(value).items())
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, (list, tuple)) else []


class Texts(NamedTuple):
    """Ids and mask [B, T] of what a decoder reads; in an encoder-decoder also those [B, S] of what its encoder has
    read before."""

    ids: Tensor
    mask: Tensor
    source: Tensor | None = None
    source_mask: Tensor | None = None

    def until(self, tokens: int) -> Texts:
        """The first so many tokens of the decoder."""
        return self._replace(ids=self.ids[:, :tokens], mask=self.mask[:, :tokens])


class Held(NamedTuple):
    """What a decoder has after some tokens. memory_mask [B, M]: of an encoder-decoder."""

    cache: Cache
    memory_mask: Tensor | None = None

    def tensors(self) -> dict[str, Any]:
        """Its tensors and numbers by name."""
        mask = {} if self.memory_mask is None else {MEMORY_MASK: self.memory_mask}
        return {**mask, **dict(leaves(self.cache))}

    def around(self, given: Mapping[str, Any]) -> Held:
        """The same with other tensors and numbers at the `given` names; the old one stays as it is."""
        return Held(around(self.cache, given), given.get(MEMORY_MASK, self.memory_mask))


def advance(model: XFormerPreTrainedModel, ids: Tensor, mask: Tensor, held: Held) -> Tensor:
    """Logits [B, t, V] of ids [B, t] after what is `held`, which continues. mask: of all tokens so far."""
    going_on = {"past_key_values": held.cache, "use_cache": True}
    if held.memory_mask is None:
        return model(input_ids=ids, attention_mask=mask, **going_on).logits
    # What stands in the memory's place is not read: the cache has what was made of it.
    nothing = torch.zeros((ids.shape[0], 1, model.config.hidden_size), dtype=model.dtype, device=ids.device)
    encoded = TowerOutput(last_hidden_state=nothing, memories=nothing, padding_mask=held.memory_mask != 0)
    return model(encoder_outputs=encoded, decoder_input_ids=ids, decoder_attention_mask=mask, **going_on).logits


def empty_cache(config: Any) -> Cache:
    """A cache that holds nothing which grows by blocks of tokens and can be made of the keys again."""
    cache = make_cache(config)
    own: Any = self_attention_cache(cache)
    own.layers = [DynamicLayer() if isinstance(layer, SummaryLayer) else layer for layer in own.layers]
    return cache


def begun(model: XFormerPreTrainedModel, source: Tensor, mask: Tensor, ids: Tensor, ids_mask: Tensor) -> Held:
    """What a decoder has after ids [B, t], the first ones, of a memory of `source` [B, S]."""
    encoded = cast(XFormerModel, model.base_model).trunk(input_ids=source, attention_mask=mask)
    real = mask if encoded.padding_mask is None else encoded.padding_mask
    cache = empty_cache(model.config)
    given = {"decoder_input_ids": ids, "decoder_attention_mask": ids_mask, "past_key_values": cache, "use_cache": True}
    model(encoder_outputs=encoded, attention_mask=mask, **given)
    return Held(cache, real.long())


@torch.no_grad()
def read(model: XFormerPreTrainedModel, texts: Texts) -> Held:
    """What the decoder has after these texts."""
    if texts.source is not None and texts.source_mask is not None:
        return begun(model, texts.source, texts.source_mask, texts.ids, texts.mask)
    held = Held(empty_cache(model.config))
    advance(model, texts.ids, texts.mask, held)
    return held


def sample(model: XFormerPreTrainedModel, batch: int, tokens: int, seed: int = 0, before: int = _BEFORE) -> Texts:
    """Texts of so many tokens; before the text of row i stand i places of padding. before: tokens of what an encoder
    reads, of which row i has i fewer."""
    generator = torch.Generator().manual_seed(seed)
    written = model.config.tower_configs()[-1].vocab_size  # a decoder may have a table of its own
    ids = torch.randint(0, written, (batch, tokens), generator=generator)
    rows = torch.arange(batch)[:, None]
    mask = torch.arange(tokens) >= rows.clamp(max=tokens - 1)
    found = [ids, mask.long()]
    if model.config.is_encoder_decoder:
        found.append(torch.randint(0, model.config.vocab_size, (batch, before), generator=generator))
        found.append((torch.arange(before) < (before - rows).clamp(min=1)).long())
    return Texts(*(tensor.to(model.device) for tensor in found))


def lengths_to_try(model: XFormerPreTrainedModel) -> list[int]:
    """After how many tokens a state may have settled, the likeliest first: no earlier than its windows are full."""
    cache: Any = self_attention_cache(read(model, sample(model, 2, 3)).cache)
    windows = [layer.sliding_window for layer in cache.layers if isinstance(layer, DynamicSlidingWindowLayer)]
    first = max([5, *(window + 1 for window in windows)])
    longest = longest_text(model)
    most = _LONGEST if longest is None else longest - _WATCHED
    tried = [first]
    while 2 * tried[-1] + 1 <= most and len(tried) < 5:
        tried.append(2 * tried[-1] + 1)
    return tried


def longest_text(model: XFormerPreTrainedModel) -> int | None:
    """What positions cover; None: any length."""
    return cast(Any, cast(XFormerModel, model.base_model).get_decoder()).max_length


def observe(model: XFormerPreTrainedModel, tokens: int) -> Layout:
    """How a state grows in the steps after `tokens` tokens.

    Raises:
        Unsettled: a size or counter that follows no rule.
    """
    base, *grown = _watched(model, 2, tokens)
    more = _watched(model, 3, tokens)[0]
    longer = _watched(model, 2, tokens, _BEFORE + 2)[0] if MEMORY_MASK in base else base
    memory = base[MEMORY_MASK].shape[1] if MEMORY_MASK in base else 0
    states, counters = [], {}
    for place, value in base.items():
        if any(place not in other for other in (more, longer, *grown)):
            raise Unsettled(f"`{place}` of its state is not always there")
        found = [other[place] for other in grown]
        if isinstance(value, int):
            if _growth(place, value, found):
                counters[place] = value - tokens
            continue
        sizes = [
            "memory"
            if longer[place].shape[axis] != size == memory
            else _size(f"{place}, axis {axis}", size, more[place].shape[axis], [x.shape[axis] for x in found], tokens)
            for axis, size in enumerate(value.shape)
        ]
        if longer[place].shape != value.shape and "memory" not in sizes:
            raise Unsettled(f"`{place}` of its state follows the length of the encoder's text in a way of its own")
        rows = [axis for axis, size in enumerate(sizes) if size == "batch"]
        same = all(x.shape == value.shape and torch.equal(x, value) for x in (more[place], *found))
        if same and not rows:
            continue  # a constant of the mechanism
        states.append(StepState(place, tuple(sizes), rows[0] if rows else None, value.dtype))
    if len(base) != len(more) or any(len(base) != len(other) for other in grown):
        raise Unsettled("its state has more tensors after some lengths than after others")
    return Layout(tuple(states), counters)


@torch.no_grad()
def _watched(model: XFormerPreTrainedModel, batch: int, tokens: int, before: int = _BEFORE) -> list[dict[str, Any]]:
    """What a decoder holds after `tokens` tokens, and after each of some more."""
    texts = sample(model, batch, tokens + _WATCHED, before=before)
    held, seen = read(model, texts.until(tokens)), []
    for count in range(tokens, tokens + _WATCHED + 1):
        seen.append({place: x.clone() if isinstance(x, Tensor) else x for place, x in held.tensors().items()})
        if count < texts.ids.shape[1]:
            advance(model, texts.ids[:, count : count + 1], texts.mask[:, : count + 1], held)
    return seen


def _growth(place: str, size: int, found: list[int]) -> int:
    """By how much a number grows with each token: 0 or 1."""
    growth = found[0] - size
    if growth in (0, 1) and found == [size + growth * count for count in range(1, len(found) + 1)]:
        return growth
    raise Unsettled(
        f"`{place}` of its state is {', '.join(map(str, (size, *found)))} in successive steps, neither constant nor"
        " one more for each token"
    )


def _size(place: str, size: int, of_more: int, found: list[int], tokens: int) -> int | str:
    growth = _growth(place, size, found)
    if of_more != size:
        if (size, of_more, growth) != (2, 3, 0):
            raise Unsettled(f"`{place}` of its state is {size} for two texts and {of_more} for three")
        return "batch"
    if not growth:
        return size
    apart = size - tokens
    return "tokens" if not apart else f"tokens {'-' if apart < 0 else '+'} {abs(apart)}"
