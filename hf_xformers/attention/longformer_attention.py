"""Longformer's attention: a sliding window, and global tokens with projections of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..core.context import LayerContext, SublayerOutput
from .shared.block_sparse import BlockSparseAttention


def given_globals(context: LayerContext, most: int | None) -> tuple[Tensor | None, int | None]:
    """The model input `global_attention_mask` [B, T] as a boolean mask of real tokens, and the largest number of them
    in a
    row: the input `max_global_tokens` or `most`, where they bound it, else counted once per call. A graph that is
        being
    recorded cannot count, and makes room for all tokens. (None, 0) where there are none.

    Raises:
        ValueError: the mask is not [B, T], stands in a decoder, or has more tokens than `most`.
    """
    given = context.inputs.get("global_attention_mask")
    if given is None:
        return None, 0
    if "global_tokens" not in context.shared:
        length = context.query_index.shape[0]
        if context.causal:
            raise ValueError(
                "`global_attention_mask` was given to a causal decoder, whose tokens cannot read later ones; leave it"
                " out."
            )
        if given.ndim != 2 or given.shape[1] != length:
            raise ValueError(
                f"`global_attention_mask` must be [batch, length] with length {length}, got {list(given.shape)}."
            )
        chosen = given.to(context.query_index.device) > 0
        if context.padding_mask is not None:
            chosen = chosen & context.padding_mask
        most = context.inputs.get("max_global_tokens", most)
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            most = length if most is None else most
        else:
            found = int(chosen.sum(-1).max()) if chosen.numel() else 0
            if most is not None and found > most:
                raise ValueError(
                    f"A row of `global_attention_mask` has {found} tokens, more than `max_global_tokens` {most}; raise"
                    " that."
                )
            most = found
        context.shared["global_tokens"] = (None, 0) if most == 0 else (chosen, most)
    return context.shared["global_tokens"]


class LongformerAttention(BlockSparseAttention):
    """Beltagy, Peters and Cohan 2020 (arXiv 2004.05150), section 3.1, with window W and global tokens G.

    Token i not in G: softmax over {j : |i - j| <= W / 2} and G with the projections Q, K, V. Token i in G: softmax
    over all tokens with Q_g, K_g, V_g, which start as copies of Q, K, V. G comes as the model input
    `global_attention_mask` [B, T], 1 = global; padding never is.

    Heads of a layer may have gaps ("dilation", section 3.1): |i - j| = g t, t <= W / 2. A decoder reads
    {i - g t : 0 <= t <= W / 2} and has no global tokens (the paper's character model).

    Time and memory O(T (W + |G|)), |G| that of the row with most. State: keys and values of the last g W / 2 + 1
    tokens.
    """

    def __init__(self, config, spec, **where):
        super().__init__(config, spec, **where)
        self.separate = not self.is_causal and spec.separate_global_projections
        if self.separate:
            for name in "qkv":
                local = getattr(self, f"{name}_proj")
                own = nn.Linear(local.in_features, local.out_features, bias=spec.bias)
                self.add_module(f"{name}_global_proj", own)

    def initialize(self, config, init) -> None:
        super().initialize(config, init)
        if self.separate:
            for name in "qkv":
                local, own = getattr(self, f"{name}_proj"), getattr(self, f"{name}_global_proj")
                init.copy_(own.weight, local.weight)
                if own.bias is not None:
                    init.copy_(own.bias, local.bias)

    def prepare(self, context: LayerContext, past_key_values: Cache | None) -> None:
        super().prepare(context, past_key_values)
        self.global_tokens(context)

    def global_tokens(self, context: LayerContext) -> tuple[Tensor | None, int | None]:
        return given_globals(context, self.spec.max_global_tokens)

    def forward(
        self,
        hidden_states: Tensor,
        context: LayerContext,
        *,
        memory: Tensor | None = None,
        past_key_values: Cache | None = None,
        step: int | None = None,
    ) -> SublayerOutput:
        step = self.layer_idx if step is None else step
        query, key, value = self.project_self(hidden_states, context, past_key_values, step)
        rows = self._global_rows(hidden_states, context)
        output, weights = self.attend(query, key, value, context, rows)
        output = self.o_proj(output.reshape(*hidden_states.shape[:-1], -1))
        if self.separate and rows is None and torch.is_grad_enabled():
            # Without global tokens their projections still take part, with gradient zero: distributed training
            # waits for the gradient of every parameter.
            output = output + 0.0 * sum(p.sum() for name in "qkv" for p in self._own(name).parameters())
        return SublayerOutput(output, weights)

    def _own(self, name: str) -> nn.Linear:
        return getattr(self, f"{name}_global_proj")

    def _global_rows(self, hidden_states: Tensor, context: LayerContext) -> tuple[Tensor, Tensor, Tensor] | None:
        if not self.separate or self.global_tokens(context)[0] is None:
            return None
        query, key, value = (self._own(name)(hidden_states) for name in "qkv")
        query, key = self.normalized(query, key)
        query, key, value = self.heads(query), self.heads(key), self.heads(value)
        rotation = self.rotation(context)
        return (query, key, value) if rotation is None else (rotation(query), rotation(key), value)
