# SPDX-License-Identifier: Apache-2.0
"""The Feedback Transformer's stack: over time first, so that every layer reads what all layers made of earlier
steps."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from ..attention.feedback import FeedbackMemory
from ..core.cache import RecurrentStateLayer
from ..core.call import Call, add_losses, self_attention_cache
from ..core.components import register
from ..core.hand_overs import HandOver
from ..core.prepared import one_state
from ..normalization.base import norm_inputs
from .base import Stack, StackSpec
from .driver import Pass, StackOutput, memory_by_step


class FeedbackStack(Stack):
    """m_t = sum_l softmax(w)_l x_t^l; x_t^l = layer_l(x_t^{l-1}; memories m_{t-W} .. m_{t-1}) (Fan et al. 2020,
    arXiv 2002.09402, section 3), with x_t^0 the embedding and w [layers + 1] starting at 0.

    All layers read the same memories. Their keys and values k_t = W_k norm(m_t), v_t = W_v norm(m_t) are computed once
    per
    step: for all layers in common, or (`share_kv=False`) one pair per layer. The state that decoding and the next
    segment need is the window of keys and values, whatever the text's length and, shared, the depth; it is detached.

    Step t needs the top layer's output at t - 1, so time is a Python loop by the method's nature: T times L layer
    calls on one token each. Memory for the backward pass grows as T * sqrt(W): a step reads its window as one
    snapshot, which about sqrt(2 W) steps share, and the few steps since.

    When layers' outputs or attention weights are asked for, the layers run once more, each over the whole sequence
    with the memories given: that pass is recorded and is the output. It equals the stepwise one, up to its own
    dropout.
    """

    undecayed = ("mixture",)

    def __init__(self, config, spec: FeedbackSpec):
        super().__init__()
        config = config.layer(0)  # all are alike in what is read here, as `FeedbackSpec.build` sees to
        self.window = config.attention.window
        self.num_key_value_heads, self.head_dim = config.key_value_heads, config.head_width
        layers = config.num_hidden_layers
        self.groups = 1 if spec.share_kv else layers
        width = self.groups * self.num_key_value_heads * self.head_dim
        self.mixture = nn.Parameter(torch.zeros(layers + 1))
        self.normalization = config.normalization
        self.norm = config.normalization.build(config) if spec.normalize_memory else None
        self.k_proj = nn.Linear(config.hidden_size, width, bias=config.attention.bias)
        self.v_proj = nn.Linear(config.hidden_size, width, bias=config.attention.bias)

    def initialize(self, config, init) -> None:
        init.zeros_(self.mixture)
        if config.initializer == "t5":
            for projection in (self.k_proj, self.v_proj):
                init.normal_(projection.weight, mean=0.0, std=config.initializer_factor * config.hidden_size**-0.5)

    def merge(self, states: list[Tensor]) -> Tensor:
        """x^0 .. x^L, each [B, T, D] -> m [B, T, D]."""
        wide = self.mixture if self.mixture.dtype == torch.float64 else self.mixture.float()
        weights = torch.softmax(wide, dim=0).to(states[0].dtype)
        return torch.stack(states, dim=-1) @ weights

    def project(self, merged: Tensor, context: Call) -> tuple[Tensor, Tensor]:
        """m [B, T, D], the call of these T tokens -> keys and values [B, groups, K, T, d], zero where padded."""
        real = context.query_padding_mask
        merged = merged if self.norm is None else self.norm(merged, **norm_inputs(self.normalization, context))
        found = []
        for projection in (self.k_proj, self.v_proj):
            heads = projection(merged).view(*merged.shape[:2], self.groups, self.num_key_value_heads, self.head_dim)
            heads = heads.permute(0, 2, 3, 1, 4)
            found.append(heads if real is None else heads.masked_fill(~real[:, None, None, :, None], 0.0))
        return found[0], found[1]

    def carried(self, cache: Cache | None, like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the window before the first step, [B, groups, K, W, d]: the cache's, or empty
        memories."""
        if cache is not None:
            slot = cache.layers[0] if cache.layers else None
            if not isinstance(slot, RecurrentStateLayer):
                raise ValueError(
                    f"The feedback stack keeps a window of memories, which a {type(cache).__name__} has no place for;"
                    " leave `past_key_values` out, or make it with `hf_xformers.core.cache.make_cache(config)`."
                )
            if slot.state:
                return slot.state["keys"], slot.state["values"]
        empty = like.new_zeros(like.shape[0], self.groups, self.num_key_value_heads, self.window, self.head_dim)
        return empty, empty

    def forward(self, run: Pass) -> StackOutput:
        hidden_states, context, layers = run.hidden_states, run.context, run.layers
        past_key_values = run.past_key_values
        length = hidden_states.shape[1]
        cache = self_attention_cache(past_key_values)
        if run.memory is not None and past_key_values is None:
            # So that the memory's keys and values are computed once, not at every step.
            past_key_values = EncoderDecoderCache(DynamicCache(), DynamicCache())
        recorded = context.output_attentions or context.output_hidden_states
        for layer in layers:
            layer.prepare(context, past_key_values)
        memories = memory_by_step(run.memory, len(layers))
        window = Window(*self.carried(cache, hidden_states))
        start, written, outputs = window.parts()[:2], [], []
        aux_losses = run.losses
        for time in range(length):
            now = context.but(
                positions=context.positions[:, time : time + 1],
                query_index=context.query_index[time : time + 1],
                fresh=False,
                output_attentions=False,
                # 'eager' would have the weights of each step recorded.
                implementation="sdpa" if recorded else context.implementation,
            )
            state = hidden_states[:, time : time + 1]
            states, parts = [state], [part.unbind(1) for part in window.parts()]
            for index, layer in enumerate(layers):
                state = run.position.embed_layer(state, now.positions, index)
                state, _, losses = (layer.unrecorded if recorded else layer)(
                    state,
                    memories[index],
                    one_state(FeedbackMemory(*(part[index % self.groups] for part in parts))),
                    context=now,
                    step=index,
                    past_key_values=past_key_values,
                )
                add_losses(aux_losses, {name: loss / length for name, loss in losses.items()})
                states.append(state)
            pair = self.project(self.merge(states), now)
            window.append(*pair)
            if recorded:
                written.append(pair)
            outputs.append(state)
        if cache is not None:
            keys, values = (part.detach() for part in window.whole())
            slot: Any
            for index, slot in enumerate(cache.layers):
                slot.advance(length, **({"keys": keys, "values": values} if index == 0 else {}))
        if not recorded:
            return StackOutput(torch.cat(outputs, dim=1), context, aux_losses)

        # The last step's memory is read by later segments only.
        read_keys, read_values = (
            torch.cat([first, *(pair[which] for pair in written[:-1])], dim=-2).unbind(1)
            for which, first in enumerate(start)
        )
        state = hidden_states
        for index, layer in enumerate(layers):
            state = run.position.embed_layer(state, context.positions, index)
            state, _, _ = layer(
                state,
                memories[index],
                one_state(FeedbackMemory(read_keys[index % self.groups], read_values[index % self.groups])),
                context=context,
                step=index,
                past_key_values=past_key_values,
            )
        return StackOutput(state, context, aux_losses)


class Window:
    """Keys and values of the last W steps, kept so that W of them can be read at every step without a copy of all.

    A copy per step would make the backward pass keep T * W of them. Here a snapshot [..., W, d] serves for `period`
    steps, each of which leaves out its oldest entries and adds the steps since the snapshot was made. The copies of
    both are fewest, T * sqrt(2 W), for a period of sqrt(2 W).
    """

    def __init__(self, keys: Tensor, values: Tensor):
        self.snapshot = (keys, values)
        self.recent: tuple[list[Tensor], list[Tensor]] = ([], [])
        self.period = min(keys.shape[-2], math.ceil(math.sqrt(2 * keys.shape[-2])))

    def parts(self) -> tuple[Tensor, ...]:
        """Older keys and values [..., W - n, d], recent keys and values [..., n, d]; 0 <= n < period."""
        count = len(self.recent[0])
        older = [part[..., count:, :] for part in self.snapshot]
        recent = [
            torch.cat(new, dim=-2) if new else part[..., :0, :]
            for part, new in zip(self.snapshot, self.recent, strict=True)
        ]
        return (*older, *recent)

    def whole(self) -> tuple[Tensor, Tensor]:
        """Keys and values [..., W, d], oldest first."""
        older_keys, older_values, recent_keys, recent_values = self.parts()
        return torch.cat([older_keys, recent_keys], dim=-2), torch.cat([older_values, recent_values], dim=-2)

    def append(self, keys: Tensor, values: Tensor) -> None:
        """The keys and values [..., 1, d] of one more step."""
        self.recent[0].append(keys)
        self.recent[1].append(values)
        if len(self.recent[0]) == self.period:
            self.snapshot, self.recent = self.whole(), ([], [])


@register("stack", "feedback")
class FeedbackSpec(StackSpec):
    """Time outside, depth inside; needs attention 'feedback', which has the window.

    share_kv: all layers read the same keys and values; off, each has its own projections of the memories.
    normalize_memory: normalize a memory before its projections, as layers that normalize their input do (turn it off
    for post-LN layers).
    """

    keeps_tokens = False  # they come one at a time
    gives = frozenset({HandOver.FEEDBACK})
    summary = "every layer reads all layers' outputs of earlier steps, one step after the other"

    share_kv: bool = True
    normalize_memory: bool = True

    def build(self, config, **where) -> FeedbackStack:
        views = [config.layer(index) for index in range(config.num_hidden_layers)]
        kinds = [
            (view.attention.window, view.attention.bias, view.key_value_heads, view.head_width, view.normalization)
            for view in views
        ]
        if any(kind != kinds[0] for kind in kinds):
            raise ValueError(
                "The feedback stack gives all layers the same memories, so `per_layer_config` cannot change the"
                " attention's window or bias, the head width, the number of key/value heads or the normalization."
            )
        return FeedbackStack(config, self)
