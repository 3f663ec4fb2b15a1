# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: a row of tokens of many texts, whose keys and values lie in pages.

At each step transformers' `generate_batch` puts new prompts and the next tokens of running texts into one row, [1, N].
Keys and values are kept in pages of fixed size, a list of them for each text (Kwon et al. 2023, arXiv 2309.06180), and
a text leaves as soon as it ends (Yu et al. 2022, "Orca"). Layers see the pages as a cache, and a mask of pairs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from ..core.hand_overs import HandOver
from .cache import cache_layers
from .call import Call
from .call_readers import CallReader
from .components import Spec

# How a position may act where a key's slot says nothing of its place: what it adds to the scores of a pair by other
# means than a bias counts slots.
_ACTS = frozenset({"input", "layer_input", "rotation", "score_bias"})
# Back-ends that read a mask of pairs, and transformers' name for the first of them where keys are in pages.
_EAGER = "paged|eager"
_IMPLEMENTATIONS = ("eager", "sdpa", _EAGER)


class PagedTexts(Cache, CallReader):
    """The pages as layers see them in one step. pages: transformers' `PagedAttentionCache`; where: arguments of its
    `update`, which say where keys are written and read."""

    def __init__(self, pages: Any, where: dict[str, Any]):
        super().__init__(layers=[])
        self.pages, self.where = pages, where

    @classmethod
    def of_step(cls, cache: Any, arguments: dict[str, Any]) -> Any:
        """The `cache` of a call, as layers see it. In a step of continuous batching it is transformers' pages, and
        what says where in them is taken out of the further `arguments`."""
        if cache is None or isinstance(cache, Cache):
            return cache
        from ..compat import PagedAttentionArgs

        usual = {"input_ids", "attention_mask", "position_ids", "use_cache"}
        names = [name for name in PagedAttentionArgs.__annotations__ if name not in usual and name in arguments]
        return cls(cache, {name: arguments.pop(name) for name in names})

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [1, K, N, d] of the step's tokens -> those of all tokens so far of its texts, [1, K, S, d],
        one text after the other."""
        return self.pages.update(key_states, value_states, layer_idx, kwargs=dict(self.where))

    def read(
        self,
        tower: Any,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        **asked: Any,
    ) -> Call:
        """The call of a step: position_ids [1, N], the place of each token in its own text; attention_mask
        [1, 1, N, S], which of the keys that the pages give it sees."""
        if attention_mask is None or position_ids is None:
            raise ValueError("A step of continuous batching needs a mask of pairs and the places of tokens; use sdpa.")
        positions = position_ids.long()
        return Call(
            padding_mask=None,
            positions=positions,
            query_index=positions[0],
            key_index=self.key_places(attention_mask.shape[-1]),
            causal=True,
            fresh=False,
            static=True,  # keys beyond a token's own text stand among those that it is given
            explicit_mask=attention_mask,
            implementation=literal_name(tower.config._attn_implementation),
            inputs_embeds=inputs_embeds,
        )

    def key_places(self, count: int) -> Tensor:
        """[S]: where in its own text each of the `count` keys stands."""
        (ends,) = self.where["cu_seq_lens_k"].values()
        slots = torch.arange(count, device=ends.device)
        begins = ends.long()
        return slots - begins[torch.searchsorted(begins, slots, right=True) - 1]


def literal_name(implementation: str) -> str:
    """The name of a back-end without pages."""
    return "eager" if implementation == _EAGER else implementation


def why_not_paged(config: Any) -> str:
    """Why a model's texts cannot share pages of keys and values, in a few words that continue from "which"; empty:
    they can."""
    if config.is_encoder_decoder or not config.is_decoder:
        kind = "an encoder-decoder keeps a memory for each text" if config.is_encoder_decoder else "it is no decoder"
        return f"a model of type {config.model_type!r} cannot do: {kind}"
    return why_not_side_by_side(config)


def why_not_side_by_side(config: Any) -> str:
    """The same for the texts of an encoder or a decoder whose tokens stand in one row, and see those of their own text
    in attention alone."""
    sizes = {(layer.key_value_heads, layer.head_width) for layer in config.layer_configs()}
    for layer in config.layer_configs():
        for slot in ("stack", "block"):
            spec = getattr(layer, slot)
            if "unpadding" not in spec.supports:
                return f"{_named(spec)} does not allow: {spec.why_not.get('unpadding', 'it mixes tokens by itself')}"
        if layer.block.mixes:
            return f"{_named(layer.block)} does not allow: {layer.block.mixes}"
        if "pages" in layer.block.why_not:
            return f"{_named(layer.block)} does not allow: {layer.block.why_not['pages']}"
        if "pages" not in layer.attention.supports:
            return f"{_named(layer.attention)} does not allow: its state is not keys and values that any mask may hide"
        if HandOver.EARLIER_IDS in layer.feedforward.reads:
            return f"{_named(layer.feedforward)} does not allow: it reads the token before"
        position = layer.position
        if position.acts - _ACTS:
            return f"{_named(position)} does not allow: its terms of scores count the slots of one text"
        if position.turns_by_length(layer.attention.angles):
            return f"{_named(position)} does not allow: a longer text turns its keys anew"
    for layer, holder in cache_layers(config):
        if type(layer) is not DynamicLayer:
            return f"{_named(holder)} does not allow: it keeps a state of another type"
    if len(sizes) > 1:
        return "layers with different heads do not allow: all pages have one size"
    return ""


def check_paged(config: Any, longest: int) -> None:
    """Refuses continuous batching for a model that cannot do it, before anything runs. longest: tokens of the longest
    text to come, 0 where that is not known.

    Raises:
        ValueError: names the component, back-end or length that stands against it.
    """
    if reason := why_not_paged(config):
        raise ValueError(
            f"Continuous batching keeps keys and values of many texts in pages, which {reason}; use `generate`."
        )
    if config._attn_implementation not in _IMPLEMENTATIONS:
        raise ValueError(
            f"Continuous batching gives models of this package a mask of pairs, which attn_implementation"
            f" {config._attn_implementation!r} does not read; call `set_attn_implementation('sdpa')` first."
        )
    most = config.position.max_length(config)
    if most is not None and longest > most:
        raise ValueError(
            f"A prompt and its continuation may have {longest} tokens here, but position {config.position.type!r} of"
            f" this model covers {most} (`max_position_embeddings`); shorten prompts, or set a smaller"
            " `max_new_tokens`."
        )


def _named(spec: Spec) -> str:
    return f"{spec.slot} {spec.type!r}"
