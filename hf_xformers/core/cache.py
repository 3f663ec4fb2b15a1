# SPDX-License-Identifier: Apache-2.0
"""Generation caches: one layer per execution step, of the type that its mechanism declares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    QuantizedCache,
)

from .components import Spec
from .sharing import layer_at


def alone(tensor: Tensor) -> Tensor:
    """The tensor, in memory of its own where it is the small part of another one, all of which it would keep: what is
    left of a long prompt, say."""
    if torch.compiler.is_compiling() or tensor.untyped_storage().nbytes() <= 2 * tensor.nbytes:
        return tensor
    return tensor.clone()


class WindowLayer(DynamicSlidingWindowLayer):
    """Keys and values of the last tokens, without the memory of those before them."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        found = super().update(key_states, value_states, *args, **kwargs)
        if self.keys is not None and self.values is not None and not self.record_past:
            self.keys, self.values = alone(self.keys), alone(self.values)
        return found


class RecurrentStateLayer(CacheLayerMixin):
    """The state of a mechanism that keeps no keys and values: named tensors whose first axis is the batch.

    The size does not grow with the text. A state cannot be rolled back, so decoding that drops tokens again (assisted
    generation) is refused by transformers (`is_croppable`).

    by_slot: padding takes room in it, as in a window of the last slots.
    """

    is_croppable = False
    supports_early_init = False
    by_slot = False

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.state: dict[str, Tensor] = {}
        self.cumulative_length = 0

    def advance(self, tokens: int, **state: Tensor) -> None:
        """Replaces the named tensors after `tokens` more tokens were read."""
        self.state.update({name: alone(tensor) for name, tensor in state.items()})
        self.cumulative_length += tokens
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise TypeError("This mechanism keeps a state instead of keys and values; its own module updates it.")

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cumulative_length + query_length, 0

    def reset(self) -> None:
        self.state, self.cumulative_length, self.is_initialized = {}, 0, False

    def _map(self, function) -> None:
        self.state = {name: function(tensor) for name, tensor in self.state.items()}

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._map(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda tensor: tensor[indices])

    def offload(self) -> None:
        """Small by design: it stays where it is."""

    def prefetch(self) -> None:
        """Small by design: it stays where it is."""

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError(
                "A recurrent state cannot forget its last tokens; decode without an assistant model (which drops"
                " tokens)."
            )


class SlotStateLayer(RecurrentStateLayer):
    """A state that holds the last slots as they stood, padding included."""

    by_slot = True


class FollowsRows:
    """Mixin, before a cache layer of keys and values: further tensors that lead with the batch, which follow its rows.
    `_map(function)` replaces each of them."""

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        raise NotImplementedError

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self._map(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        self._map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)  # type: ignore[misc]
        self._map(lambda tensor: tensor[indices])


class SummaryLayer(FollowsRows, DynamicLayer):
    """Keys and values, and what a mechanism has made of blocks of them: `made`, tensors [B, ...] of the real tokens in
    the first `known` slots. It depends on the order of these tokens, not on where padding stands, so that slots may be
    moved; and it can be made of the keys again, so that a plain layer may take its place."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.made: tuple[Tensor, ...] = ()
        self.known = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.known = min(self.known, self.get_seq_length())  # the others were taken back
        return super().update(key_states, value_states, *args, **kwargs)

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        self.made = tuple(map(function, self.made))

    def reset(self) -> None:
        super().reset()
        self.made, self.known = (), 0


class KeepsMore:
    """A cache layer with required state besides keys and values: a plain layer cannot replace it. Unlike a recurrent
    state it may forget its last tokens again."""


def self_attention_layers(config) -> list:
    """Cache layers of one tower, by execution step: each of the type that the stack, the block or else the attention
    says (`StackSpec.cache_layer`, `BlockSpec.cache_layer`, `AttentionSpec.cache_layer`)."""
    return [layer for layer, _ in cache_layers(config)]


def cache_layers(config) -> list[tuple[CacheLayerMixin, Spec]]:
    """The same, each next to the component whose state it keeps."""
    return [_cache_layer(config.layer(index), step, index) for step, index in enumerate(layer_at(config))]


def _cache_layer(layer_config, step: int, index: int) -> tuple[CacheLayerMixin, Spec]:
    """A new cache layer of an execution step and its layer, and the component whose state it keeps."""
    stack, block = layer_config.stack, layer_config.block
    for holder, layer in (
        (stack, stack.cache_layer(layer_config, step)),
        (block, block.cache_layer(layer_config)),
    ):
        if layer is not None:
            return layer, holder
    return layer_config.attention.cache_layer(layer_config, index), layer_config.attention


def appended(cache: Cache, key: Tensor, value: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Keys and values [B, K, S, d] of all tokens so far, those of the current ones included, [B, K, T, d].

    Raises:
        ValueError: a given cache has keys of other heads, as prefix tuning makes them by the config's sizes alone.
    """
    layer = cache.layers[step] if step < len(cache.layers) else None
    held = layer.keys if isinstance(layer, DynamicLayer) else None
    if held is not None and held.ndim == 4 and held.shape[2] and held.shape[1::2] != key.shape[1::2]:
        heads, width = key.shape[1::2]
        sizes = f"`PrefixTuningConfig(num_attention_heads={heads}, token_dim={heads * width})` if all layers are alike"
        raise ValueError(
            f"The cache given holds keys of {held.shape[1]} heads of width {held.shape[3]}, and layer {step} makes"
            f" {heads} of width {width}; choose LoRA or prompt tuning, which put nothing into the cache"
            + (f", or give {sizes}." if value.shape[1::2] == key.shape[1::2] else ".")
        )
    return cache.update(key, value, step)


def appended_with_numbers(
    cache: Cache, key: Tensor, value: Tensor, numbers: Tensor, step: int
) -> tuple[Tensor, Tensor, Tensor]:
    """[`appended`] with numbers [B, H, T] in float32 at least, as many for each key, which lie in the cache as further
    channels of the keys, bit by bit where keys are in half precision -> keys, values and numbers of all tokens.

    Raises:
        ValueError: a cache that rounds what it holds.
    """
    if isinstance(cache, QuantizedCache):
        raise ValueError(
            "This position keeps sums in float32 next to the keys, which a quantized cache would round; leave"
            " `cache_implementation` out, or take 'static' or 'offloaded'."
        )
    (batch, heads, length), width, wide = numbers.shape, key.shape[-1], numbers.dtype
    beside = numbers.unflatten(1, (key.shape[1], -1)).transpose(2, 3)
    narrow = key.dtype.itemsize < wide.itemsize
    if narrow:
        beside = beside.detach().flatten().view(key.dtype).view(batch, key.shape[1], length, -1)
    key, value = appended(cache, torch.cat((key, beside.to(key.dtype)), dim=-1), value, step)
    key, beside = key.split((width, key.shape[-1] - width), dim=-1)
    if narrow:
        beside = beside.detach().flatten().view(wide).view(*beside.shape[:3], -1)
    found = beside.transpose(2, 3).reshape(batch, heads, -1)
    if narrow and numbers.requires_grad and isinstance(cache.layers[step], DynamicLayer):
        found = torch.cat((found[..., : found.shape[2] - length], numbers), dim=-1)  # bits have no gradient
    return key, value, found


def stateful_part(config) -> str:
    """The component whose state is not plain keys and values (its slot and name), or nothing. config: one tower's."""
    for layer, holder in cache_layers(config):
        if not layer.is_croppable or isinstance(layer, KeepsMore):
            return f"{holder.slot} {holder.type!r}"
    return ""


class XFormerCache(DynamicCache):
    """A growing cache whose layers are of the types that the model's mechanisms declare."""

    def __init__(self, layers: list):
        Cache.__init__(self, layers=layers)


def use_declared_layers(cache: Cache, config) -> None:
    """Gives an empty `DynamicCache` the layers that the mechanisms of a tower declare, where layers of keys and values
    do not serve them. config: the tower's."""
    if type(cache) is not DynamicCache:
        return
    if all(type(layer) is DynamicLayer and not layer.is_initialized for layer in cache.layers):
        layers = self_attention_layers(config)
        if stateful_part(config) or 0 < len(cache.layers) < len(layers):
            cache.layers, cache.layer_class_to_replicate = layers, None


def make_cache(config) -> Cache:
    """An empty cache for a config: of its decoder tower where it has two towers, with room for the memory."""
    if config.is_encoder_decoder:
        return decoder_cache(config.tower("decoder"))
    return XFormerCache(self_attention_layers(config))


def decoder_cache(config) -> EncoderDecoderCache:
    """An empty cache for the config of a decoder tower, with room for the memory."""
    return EncoderDecoderCache(XFormerCache(self_attention_layers(config)), DynamicCache())
