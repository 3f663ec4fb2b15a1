# SPDX-License-Identifier: Apache-2.0
"""HAN's stack for translating documents: layers over a sentence, then attention to the sentences before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from ..compat import shared_setting
from ..core.cache import FollowsRows, KeepsMore
from ..core.call import Call, add_losses, dropout_rate, self_attention_cache
from ..core.call_features import CallFeature
from ..core.components import bounded, register
from ..core.prepared import Prepared, State
from ..ops.common.fused import fused_attention
from .base import StackSpec
from .driver import Pass, StackOutput
from .plain import PlainStack


class ContextCacheLayer(KeepsMore, FollowsRows, DynamicLayer):
    """Keys and values, and the states [B, K, T, D] of the sentences before, with their mask [B, K, T], by name. They
    are the same for all tokens of a text, so that dropping tokens again leaves them alone."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.states: dict[str, Tensor] = {}

    def _map(self, function) -> None:
        self.states = {name: function(tensor) for name, tensor in self.states.items()}

    def reset(self) -> None:
        super().reset()
        self.states = {}


class HeadedReading(nn.Module):
    """Multi-head attention of queries to keys of their own rows."""

    dropout = dropout_rate("attention_dropout")

    def __init__(self, config):
        super().__init__()
        width, first = config.hidden_size, config.layer(0)  # layers may differ in what follows
        self.num_heads, self.dropout = first.num_attention_heads, first.attention_probs_dropout_prob
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, queries: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        """queries [R, T, D], keys [R, S, D], mask [R, S] -> [R, T, D]; of a row without a key, what it is given is of
        no meaning, but finite."""
        query, key, value = (
            x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for x in (self.q_proj(queries), self.k_proj(keys), self.v_proj(keys))
        )
        open_rows = mask | ~mask.any(-1, keepdim=True)
        drop = self.dropout if self.training else 0.0
        output = fused_attention(query, key, value, attn_mask=open_rows[:, None, None, :], dropout_p=drop)
        return self.o_proj(output.transpose(1, 2).flatten(2))


class HierarchicalContext(nn.Module):
    """Miculicich et al. 2018 (arXiv 1809.01576), section 2, eqs. 1-6, with the norms of its code (idiap/HAN_NMT). For
    the state h_t of a word and the states h^j of the words of the K sentences before:

    s^j_t = MHA(LN(h_t), h^j),   d_t = FF(MHA(LN(h_t), LN(s^1_t .. s^K_t))),   g_t = sigmoid([h_t ; d_t] W_g + b)
    out_t = LN((1 - g_t) h_t + g_t d_t)

    FF(x) = x + W2 relu(W1 LN(x)). Sentences have no positions. Where no sentence is before, out_t = h_t: the model is
    that of single sentences. Cost O(T sum_j T_j D + T K D).
    """

    def __init__(self, config):
        super().__init__()
        width, eps = config.hidden_size, shared_setting(config, "layer_norm_eps")
        self.word_norm, self.sentence_norm, self.summary_norm, self.inner_norm, self.output_norm = (
            nn.LayerNorm(width, eps=eps) for _ in range(5)
        )
        self.word_attention, self.sentence_attention = HeadedReading(config), HeadedReading(config)
        self.up_proj = nn.Linear(width, config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, width)
        self.gate_proj = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, states: Tensor, before: Tensor, mask: Tensor) -> Tensor:
        """states [B, T, D], before [B, K, S, D], mask [B, K, S] boolean -> [B, T, D]."""
        (batch, length, width), count = states.shape, before.shape[1]
        queries = self.word_norm(states).unsqueeze(1).expand(-1, count, -1, -1).flatten(0, 1)
        read = self.word_attention(queries, before.flatten(0, 1), mask.flatten(0, 1))
        read = read.view(batch, count, length, width).transpose(1, 2).flatten(0, 1)  # [B * T, K, D]
        there = mask.any(-1)
        found = self.sentence_attention(
            self.sentence_norm(states).view(batch * length, 1, width),
            self.summary_norm(read),
            there.unsqueeze(1).expand(-1, length, -1).flatten(0, 1),
        )
        inner = self.down_proj(self.dropout(self.up_proj(self.inner_norm(found)).relu()))
        found = (found + self.dropout(inner)).view(batch, length, width)
        gate = torch.sigmoid(self.gate_proj(torch.cat([states, found], dim=-1)))
        mixed = self.output_norm((1 - gate) * states + gate * found)
        return torch.where(there.any(-1)[:, None, None], mixed, states)


class FurtherStates(State):
    """The embedded sentences before, [B, K, S, D]."""

    states: Tensor


class FurtherTexts(Prepared):
    """The call of the sentences before."""

    call: Call


@dataclass(frozen=True)
class EmbedsFurtherTexts(CallFeature):
    """The sentences before, where they are given and no cache has what was made of them. most: of them; causal: the
    tower is a decoder."""

    most: int
    causal: bool

    def enter(self, context: Call, tower: Any) -> None:
        prefix = "decoder_" if self.causal else ""
        names = (f"{prefix}context_input_ids", f"{prefix}context_attention_mask")
        ids, mask = (context.inputs.get(name) for name in names)
        if ids is None or not context.fresh or context.inputs_embeds is None:
            return
        batch, most = context.inputs_embeds.shape[0], self.most
        if ids.ndim != 3 or ids.shape[0] != batch or ids.shape[1] > most:
            raise ValueError(
                f"`{names[0]}` {list(ids.shape)} does not belong to a batch of {batch} texts with at most {most}"
                " sentences before each; give [batch, sentences, length]."
            )
        if mask is not None and mask.shape != ids.shape:
            raise ValueError(
                f"`{names[1]}` {list(mask.shape)} is not the mask of `{names[0]}` {list(ids.shape)}; give 1 for each"
                " real token, 0 for padding and missing sentences."
            )
        vectors = tower.embedding.lookup(ids.flatten(0, 1))
        real = torch.ones_like(ids) if mask is None else mask
        inner = tower.make_context(vectors, real.flatten(0, 1).long(), None)
        inner.padding_mask = real.flatten(0, 1) != 0
        inner.inputs = {"input_ids": ids.flatten(0, 1)}
        hidden_states = tower.embedded(vectors, None, inner)
        tower.position.share(inner, hidden_states)
        context.keep(FurtherTexts(inner))
        context.start(FurtherStates(hidden_states.unflatten(0, ids.shape[:2])))


class HanStack(PlainStack):
    """Layers over a sentence, and over those before it; then [`HierarchicalContext`] on this tower's side.

    The sentences before, which the tower has embedded, go through the same layers, each by itself. Where the decoder
    reads them as well, an encoder gives it their states behind the sentence's own, [B, T + K * S, D], marked as
    padding for anything else.
    """

    def __init__(self, config, spec: HanNmtSpec):
        super().__init__()
        self.spec, self.causal = spec, config.is_decoder
        self.hands_on = config.is_encoder_decoder and not config.is_decoder and spec.side != "encoder"
        own = spec.side in (("decoder", "both") if config.is_decoder else ("encoder", "both"))
        self.context = HierarchicalContext(config) if own else None

    def forward(self, run: Pass) -> StackOutput:
        hidden_states, context = run.hidden_states, run.context
        given, texts = context.states.pop((FurtherStates, None), None), context.find(FurtherTexts)
        before, inner = (None, None) if given is None or texts is None else (given.states, texts.call)
        run.memory, around = self._divided(run.memory, context)
        output = super().forward(run)
        states, mask = self._before(run, before, inner, around, output)
        if states is None or mask is None:
            if self.context is not None and torch.is_grad_enabled():  # no parameter is left without a gradient
                states = output.hidden_states.new_zeros(hidden_states.shape[0], 1, 1, hidden_states.shape[-1])
                nothing = torch.zeros(states.shape[:3], dtype=torch.bool, device=states.device)
                output.hidden_states = self.context(output.hidden_states, states, nothing)
            return output
        if self.context is not None:
            output.hidden_states = self.context(output.hidden_states, states, mask)
        if self.hands_on:
            real = context.padding_mask
            if real is None:
                real = torch.ones(hidden_states.shape[:2], dtype=torch.bool, device=hidden_states.device)
            flat = states.flatten(1, 2)
            output.hidden_states = torch.cat([output.hidden_states, flat], dim=1)
            # What is behind counts for no other reader.
            output.context = output.context.but(padding_mask=F.pad(real, (0, flat.shape[1]), value=False))
        return output

    def _before(
        self,
        run: Pass,
        before: Tensor | None,
        inner: Call | None,
        memory: tuple[Tensor, Tensor] | None,
        output: StackOutput,
    ) -> tuple[Tensor | None, Tensor | None]:
        """States [B, K, S, D] of the sentences before and their mask [B, K, S], made once per text."""
        if self.context is None and not self.hands_on:
            return None, None
        cache = self_attention_cache(run.past_key_values)
        kept: Any = None if cache is None else cache.layers[0]
        if isinstance(kept, ContextCacheLayer) and kept.states:
            return kept.states["before"], kept.states["mask"]
        if before is None or inner is None:
            return None, None
        if cache is not None and not isinstance(kept, ContextCacheLayer):
            raise ValueError(
                "Stack 'han_nmt' keeps the sentences before next to keys and values, which the given"
                f" {type(cache).__name__} has no place for; leave `past_key_values` out, or make it with"
                " `hf_xformers.core.cache.make_cache(config)`."
            )
        own = run.within(before.flatten(0, 1), inner)
        if memory is not None:
            own.memory, inner.memory_padding_mask = memory
        result = super().forward(own)
        add_losses(output.aux_losses, result.aux_losses)
        states = result.hidden_states.unflatten(0, before.shape[:2])
        mask = inner.padding_mask.view(before.shape[:3])  # type: ignore[union-attr]  # texts before have one
        if isinstance(kept, ContextCacheLayer):
            kept.states = {"before": states, "mask": mask}
        return states, mask

    def _divided(self, memory: Tensor | None, context: Call) -> tuple[Tensor | None, tuple[Tensor, Tensor] | None]:
        """A decoder's memory -> (of its sentence, that of the sentences before [B * K, S, D] with its mask)."""
        told = context.inputs.get("context_input_ids")
        if memory is None or told is None or not self.causal or self.spec.side == "encoder":
            return memory, None
        mask = context.inputs.get("context_attention_mask")
        batch, count, length = told.shape
        own = memory.shape[1] - count * length
        if memory.shape[0] != batch or own < 1:
            raise ValueError(
                f"The memory {list(memory.shape)} was not made with `context_input_ids` {list(told.shape)}; give the"
                " encoder and the decoder the same batch and the same sentences before."
            )
        behind = memory[:, own:].reshape(batch * count, length, -1)
        real = torch.ones_like(told, dtype=torch.bool) if mask is None else mask != 0
        if context.memory_padding_mask is not None:
            context.memory_padding_mask = context.memory_padding_mask[:, :own]
        return memory[:, :own], (behind, real.flatten(0, 1))


@register("stack", "han_nmt", aliases=("han",))
class HanNmtSpec(StackSpec):
    """context_size: sentences before that are read, K. side: whose states are mixed with those of these sentences, the
    encoder's, the decoder's, or both.

    Inputs: `context_input_ids` and `context_attention_mask` [B, K, S], the source sentences before, and for the
    decoder's side `decoder_context_input_ids` and `decoder_context_attention_mask`, their translations as the decoder
    reads them, shifted right.
    """

    summary = "layers over a sentence, then attention to the sentences before it in the document"
    inputs: ClassVar[tuple[str, ...]] = (
        "context_input_ids",
        "context_attention_mask",
        "decoder_context_input_ids",
        "decoder_context_attention_mask",
    )

    context_size: int = bounded(3, least=1)
    side: Literal["encoder", "decoder", "both"] = "encoder"

    def check(self, config) -> None:
        if config.hidden_size % config.num_attention_heads:
            raise ValueError(
                f"stack 'han_nmt' divides `hidden_size` {config.hidden_size} among its heads, and"
                f" {config.num_attention_heads} (`num_attention_heads`) is no divisor of it; take one that is."
            )
        if config.is_decoder and self.side != "encoder" and not config.attention.keeps_keys_alone:
            raise ValueError(
                f"stack 'han_nmt' with `side={self.side!r}` keeps states next to keys and values in a decoder, for"
                f" which attention {config.attention.type!r} has no place; use 'dense', or `side='encoder'`."
            )
        if self.side == "decoder" and not config.is_encoder_decoder and not config.is_decoder:
            raise ValueError(
                "stack 'han_nmt' with `side='decoder'` does nothing in an encoder alone; set `side='encoder'`."
            )

    def call_feature(self, config) -> EmbedsFurtherTexts:
        return EmbedsFurtherTexts(self.context_size, config.is_decoder)

    def sentences_before(self) -> int:
        return self.context_size

    def cache_layer(self, config, step: int) -> CacheLayerMixin | None:
        return ContextCacheLayer() if config.is_decoder and self.side != "encoder" and step == 0 else None

    def build(self, config, **where) -> HanStack:
        return HanStack(config, self)
