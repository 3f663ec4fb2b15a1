# SPDX-License-Identifier: Apache-2.0
"""Several attentions of a layer in one cache: each has keys and values, or a state, of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from ..core.cache import KeepsMore, RecurrentStateLayer, XFormerCache
from ..core.call import Call, SublayerOutput, self_attention_cache
from .base import SublayerPlan, XFormerLayer
from .window_state import WindowCacheLayer


class _Parts(DynamicLayer):
    """Keys and values of one attention as every cache layer has them, and by name what further ones keep, in layers of
    the `kind`."""

    kind: ClassVar[type[CacheLayerMixin]] = DynamicLayer

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.parts: dict[str, Any] = {}

    def part(self, name: str) -> Any:
        """What the attention of that name keeps."""
        return self.parts.setdefault(name, self.kind())

    def _each(self, act: Callable[[Any], None]) -> None:
        for part in self.parts.values():
            act(part)

    def reset(self) -> None:
        super().reset()
        self.parts = {}

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self._each(lambda part: part.reorder_cache(beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._each(lambda part: part.batch_repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._each(lambda part: part.batch_select_indices(indices))

    def offload(self) -> None:
        super().offload()
        self._each(lambda part: part.offload())

    def prefetch(self) -> None:
        super().prefetch()
        self._each(lambda part: part.prefetch())


class PartsCacheLayer(KeepsMore, _Parts):
    """The attentions of a layer."""

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self._each(lambda part: part.crop(tokens_to_remove))


class StatePartsCacheLayer(_Parts):
    """Keys and values of one attention, and states of further ones that decay, which cannot be rolled back."""

    kind = RecurrentStateLayer
    is_croppable = False

    def crop(self, tokens_to_remove: int) -> None:
        self._each(lambda part: part.crop(tokens_to_remove))
        super().crop(tokens_to_remove)


class WindowPartsCacheLayer(WindowCacheLayer, _Parts):
    """The attentions of a layer, and the windows of its convolutions."""


class CellCacheLayer(WindowPartsCacheLayer):
    """Windows and attentions of a layer that need not have any of either: it counts the tokens itself."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.tokens_read = 0

    def advance(self, tokens: int) -> None:
        """So many more tokens were read."""
        self.tokens_read += tokens

    def get_seq_length(self) -> int:
        return self.tokens_read

    def reset(self) -> None:
        self.windows, self.parts, self.tokens_read = {}, {}, 0

    # It has no keys and values itself.

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._map(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))
        self._each(lambda part: part.reorder_cache(beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))
        self._each(lambda part: part.batch_repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda tensor: tensor[indices])
        self._each(lambda part: part.batch_select_indices(indices))


def part_of_cache(past_key_values: Cache | None, name: str) -> Cache | None:
    """The cache that the further attention `name` of all layers writes: a view of theirs.

    Raises:
        ValueError: the given cache has no place for one.
    """
    cache = self_attention_cache(past_key_values)
    if cache is None:
        return None
    layers = [layer.part(name) for layer in cache.layers if isinstance(layer, _Parts)]
    if not layers or len(layers) != len(cache.layers):
        raise ValueError(
            "This model keeps what several attentions of a layer have read, which the given"
            f" {type(cache).__name__} has no place for; leave `past_key_values` out, or make it with"
            " `hf_xformers.core.cache.make_cache(config)`."
        )
    return XFormerCache(layers)


class SeveralAttentionsLayer(XFormerLayer):
    """A layer with attentions next to `attention`. further: their planned names, which are those of their keys and
    values in a cache, too."""

    further: tuple[str, ...] = ()

    def run_entered(
        self,
        entry: SublayerPlan,
        entered: Tensor,
        context: Call,
        memory: Tensor | None,
        past_key_values: Cache | None,
        step: int,
    ) -> SublayerOutput:
        if entry.name in self.further:
            past_key_values = part_of_cache(past_key_values, entry.name)
        return super().run_entered(entry, entered, context, memory, past_key_values, step)
