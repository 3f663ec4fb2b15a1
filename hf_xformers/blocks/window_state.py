# SPDX-License-Identifier: Apache-2.0
"""What sublayers that read a short window of earlier tokens share: the window's inputs, padding, the state for
decoding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from ..core.cache import FollowsRows
from ..core.call import Call, Sublayer, self_attention_cache


class WindowCacheLayer(FollowsRows, DynamicLayer):
    """Keys and values, and the last inputs [B, n, D] of sublayers with a window, by name. These cannot be rolled back,
    so decoding that drops tokens again (assisted generation) is refused by transformers."""

    is_croppable = False

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.windows: dict[str, Tensor] = {}

    def _map(self, function) -> None:
        self.windows = {name: function(tensor) for name, tensor in self.windows.items()}

    def reset(self) -> None:
        super().reset()
        self.windows = {}

    def crop(self, *args, **kwargs) -> None:
        raise ValueError(
            "A window of inputs cannot be rolled back with keys and values; decode without an assistant model (which"
            " drops tokens)."
        )


class WindowSublayer(Sublayer):
    """A sublayer whose output at t depends on its inputs at t - n .. t (and, in an encoder that looks both ways, later
    ones); padding and what lies before the text are zeros.

    name: under which the state is kept.
    """

    def __init__(self, name: str, layer_idx: int):
        super().__init__()
        self.name, self.layer_idx = name, layer_idx

    def real_inputs(self, hidden_states: Tensor, context: Call) -> Tensor:
        """[B, T, D] with zeros at padding."""
        mask = context.query_padding_mask
        return hidden_states if mask is None else hidden_states.masked_fill(~mask[..., None], 0.0)

    def windows_of(
        self,
        hidden_states: Tensor,
        width: int,
        context: Call,
        past_key_values: Cache | None,
        step: int | None,
        name: str | None = None,
    ) -> Tensor:
        """The inputs [B, T + width - 1, D] of windows of `width` tokens: in a decoder those that end at each token, in
        an encoder those around it (of an even width, the one more stands before)."""
        if context.causal:
            return self.with_past(hidden_states, width - 1, context, past_key_values, step, name)
        around = (0, 0, width // 2, (width - 1) // 2)
        return nn.functional.pad(self.real_inputs(hidden_states, context), around)

    def with_past(
        self,
        hidden_states: Tensor,
        count: int,
        context: Call,
        past_key_values: Cache | None,
        step: int | None,
        name: str | None = None,
    ) -> Tensor:
        """The inputs [B, count + T, D]: the `count` last ones before these (zeros where there are none), then
        these. name: of the state, where the sublayer has several."""
        name = self.name if name is None else name
        states = self.real_inputs(hidden_states, context)
        cache = self_attention_cache(past_key_values)
        if cache is None:
            return nn.functional.pad(states, (0, 0, count, 0))
        step = self.layer_idx if step is None else step
        layer = cache.layers[step] if step < len(cache.layers) else None
        if not isinstance(layer, WindowCacheLayer):
            raise ValueError(
                f"This model keeps a window of inputs next to keys and values, which the given {type(cache).__name__}"
                " has no place for; leave `past_key_values` out, or make it with"
                " `hf_xformers.core.cache.make_cache(config)`."
            )
        before = layer.windows.get(name)
        joined = (
            nn.functional.pad(states, (0, 0, count, 0))
            if before is None
            else torch.cat((before.to(states), states), 1)
        )
        layer.windows[name] = joined[:, joined.shape[1] - count :].clone()  # not a view that keeps the whole text
        return joined


def check_window_block(name: str, config, kept: str = "a window of inputs") -> None:
    """Refuses mechanisms whose cache has no place for what else is `kept`. Raises `ValueError`."""
    if config.is_decoder and not config.attention.keeps_keys_alone:
        raise ValueError(
            f"block {name!r} keeps {kept} besides the keys and values of attention 'dense', which attention"
            f" {config.attention.type!r} has no place for in a decoder; use 'dense' there."
        )
