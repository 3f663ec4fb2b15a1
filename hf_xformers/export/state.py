"""What a decoder keeps between steps, seen from outside: named tensors, and counters of tokens.

A cache is an object of objects, of a kind for each mechanism. A graph reads and gives tensors alone. So the state is
taken apart into its tensors by their places in the cache, and put together again around others. How it grows is
observed: over some steps and batches, every axis of every tensor must be a constant, the batch, or grow by one with
each token. What grows in another way has no graph for every step, and is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicSlidingWindowLayer

from ..core.cache import make_cache
from ..modeling_base import XFormerPreTrainedModel
from ..modeling_xformer import XFormerModel

_LONGEST = 1 << 14  # tokens after which a state should have settled
_WATCHED = 4  # steps from which the rule is read


class Unsettled(ValueError):
    """A state whose sizes follow no rule after so many tokens."""


@dataclass(frozen=True)
class StepState:
    """A tensor of a decoder's state. name: its place in the cache. shape: sizes; "batch" where the axis is that of
    rows, and a text such as "tokens - 1" where it grows by one with each token. axis: that of rows; None: all texts
    share it. dtype: of its numbers."""

    name: str
    shape: tuple[int | str, ...]
    axis: int | None
    dtype: torch.dtype

    def sizes(self, batch: int, tokens: int) -> list[int]:
        """The shape for so many texts, after so many tokens each."""
        return [
            size if isinstance(size, int) else batch if size == "batch" else tokens + _apart(size)
            for size in self.shape
        ]

    @property
    def free_axes(self) -> tuple[int, ...]:
        """The axes whose size is not always the same."""
        return tuple(axis for axis, size in enumerate(self.shape) if isinstance(size, str))

    @property
    def grows(self) -> bool:
        return any(isinstance(size, str) and size != "batch" for size in self.shape)


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


@torch.no_grad()
def read(model: XFormerPreTrainedModel, ids: Tensor, mask: Tensor) -> Cache:
    """The cache after texts [B, T]."""
    cache = make_cache(model.config)
    model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
    return cache


def sample(model: XFormerPreTrainedModel, batch: int, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Ids and mask [batch, tokens]; before the text of row i stand i places of padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, model.config.vocab_size, (batch, tokens), generator=generator)
    mask = torch.arange(tokens) >= torch.arange(batch).clamp(max=tokens - 1)[:, None]
    return ids.to(model.device), mask.long().to(model.device)


def lengths_to_try(model: XFormerPreTrainedModel) -> list[int]:
    """After how many tokens a state may have settled, the likeliest first: no earlier than its windows are full."""
    cache = read(model, *sample(model, 2, 3))
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
    return cast(XFormerModel, model.base_model).trunk.max_length


def observe(model: XFormerPreTrainedModel, tokens: int) -> Layout:
    """How a state grows in the steps after `tokens` tokens.

    Raises:
        Unsettled: a size or counter that follows no rule.
    """
    base, *grown = _watched(model, 2, tokens)
    more = _watched(model, 3, tokens)[0]
    states, counters = [], {}
    for place, value in base.items():
        if any(place not in other for other in (more, *grown)):
            raise Unsettled(f"`{place}` of its state is not always there")
        found = [other[place] for other in grown]
        if isinstance(value, int):
            if _growth(place, value, found):
                counters[place] = value - tokens
            continue
        sizes = [
            _size(f"{place}, axis {axis}", size, more[place].shape[axis], [x.shape[axis] for x in found], tokens)
            for axis, size in enumerate(value.shape)
        ]
        rows = [axis for axis, size in enumerate(sizes) if size == "batch"]
        same = all(x.shape == value.shape and torch.equal(x, value) for x in (more[place], *found))
        if same and not rows:
            continue  # a constant of the mechanism
        states.append(StepState(place, tuple(sizes), rows[0] if rows else None, value.dtype))
    if len(base) != len(more) or any(len(base) != len(other) for other in grown):
        raise Unsettled("its state has more tensors after some lengths than after others")
    return Layout(tuple(states), counters)


@torch.no_grad()
def _watched(model: XFormerPreTrainedModel, batch: int, tokens: int) -> list[dict[str, Any]]:
    """What a cache holds after `tokens` tokens, and after each of some more."""
    ids, mask = sample(model, batch, tokens + _WATCHED)
    cache, seen = read(model, ids[:, :tokens], mask[:, :tokens]), []
    for count in range(tokens, tokens + _WATCHED + 1):
        seen.append({place: x.clone() if isinstance(x, Tensor) else x for place, x in leaves(cache)})
        if count < ids.shape[1]:
            given = {"attention_mask": mask[:, : count + 1], "past_key_values": cache}
            cache = model(input_ids=ids[:, count : count + 1], use_cache=True, **given).past_key_values
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


__all__ = ["Layout", "StepState", "Unsettled", "around", "leaves", "lengths_to_try", "longest_text", "observe", "read"]
