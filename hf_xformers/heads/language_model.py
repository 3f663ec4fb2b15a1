# SPDX-License-Identifier: Apache-2.0
"""Language-model heads."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from ..compat import is_trls_product, project
from ..core.bounds import factor_or_flag
from ..core.components import bounded, register
from .base import HeadSpec, Logits


class LanguageModelHead(nn.Module):
    """logits = W (scale * t(h)) + b with W [V, D], tied to the token table unless the config unties it; with a cap c
    they become c tanh(logits / c).

    t is the identity, BERT's transform, dense, activation, normalization (Devlin et al. 2019, released code), or a
    linear map to the width of the table.
    """

    def __init__(
        self,
        config: Any,
        *,
        transform: str | None,
        bias: bool,
        scale: float | None,
        projects: bool = False,
        cap: float | None = None,
        from_zero: bool = False,
    ):
        super().__init__()
        width = config.stack.output_width(config)
        table = config.embedding.table_width(config)
        self.dense = nn.Linear(width, table, bias=not projects) if transform or projects else None
        self.activation = ACT2FN[transform] if transform else None
        self.norm = config.normalization.build(config, width=table) if transform else None
        self.decoder = nn.Linear(
            table if self.dense is not None else width, config.head.num_outputs(config), bias=bias
        )
        self.scale = scale
        self.cap, self.from_zero = cap, from_zero

    def initialize(self, config: Any, init: Any) -> None:
        if self.from_zero and not config.tie_word_embeddings:
            init.zeros_(self.decoder.weight)

    @property
    def weight(self) -> Tensor:
        """W, where trl asks for it."""
        return self.decoder.weight

    @property
    def bias(self) -> Tensor | None:
        """b, where trl asks for it."""
        return self.decoder.bias

    def __setattr__(self, name: str, value: Any) -> None:
        # trl's `cast_lm_head_to_fp32` knows no scale and no cap.
        super().__setattr__("product" if name == "forward" and is_trls_product(value) else name, value)

    def product(self, hidden_states: Tensor) -> Tensor:
        """[..., D] -> W h + b, [..., V]."""
        return cast(Tensor, project(self.decoder, hidden_states))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., D] -> [..., V]."""
        if self.dense is not None:
            hidden_states = self.dense(hidden_states)
        if self.activation is not None and self.norm is not None:
            hidden_states = self.norm(self.activation(hidden_states))
        if self.scale is not None:
            hidden_states = hidden_states * self.scale
        logits = self.product(hidden_states)
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


@register("head", "linear")
class LinearHeadSpec(HeadSpec):
    """
    Args:
        bias: one per vocabulary entry (BART).
        scale: multiply hidden states by hidden_size^-0.5 first (T5 with tied tables), or by a number (Cohere,
            Granite).
        unpredicted: how many ids at the end of the vocabulary are read but never predicted, so that they have no
            logits (Image GPT's token of the start).
        cap: c, where logits become c tanh(logits / c), so that they stay within c (Gemma 2).
        from_zero: a projection that is not tied starts at zero (Child et al. 2019, arXiv 1904.10509, section 6).
    """

    splits = frozenset({"vocabulary"})
    supports = frozenset({"context_parallel"})
    summary = "one projection onto the vocabulary"
    any_width = True

    bias: bool = False
    scale: bool | float | int = False
    unpredicted: int = bounded(0, least=0)
    cap: float | int | None = bounded(None, above=0)
    from_zero: bool = False

    def check_fields(self) -> None:
        self.scale = factor_or_flag(self, "scale")

    def check(self, config: Any) -> None:
        if self.unpredicted and config.tie_word_embeddings:
            raise ValueError(
                f"linear head with `unpredicted={self.unpredicted}` has fewer rows than the token table and cannot be"
                " tied to it; set `tie_word_embeddings=False`."
            )
        if self.unpredicted >= config.vocab_size:
            raise ValueError(
                f"linear head: `unpredicted={self.unpredicted}` leaves nothing of `vocab_size` {config.vocab_size} to"
                " predict; lower it."
            )

    def num_outputs(self, config: Any) -> int:
        return config.vocab_size - self.unpredicted

    def logits(self, config: Any) -> Logits:
        scale = 1.0 if self.scale is False else config.hidden_size**-0.5 if self.scale is True else float(self.scale)
        plain = not self.bias and not self.unpredicted and self.cap is None
        # Who projects the states themselves scales the sum with the bias.
        return Logits(scale, self.cap, plain, projects=not self.bias or scale == 1.0)

    def build(self, config: Any, **where: Any) -> LanguageModelHead:
        scale = None if self.scale is False else self.logits(config).scale
        return LanguageModelHead(
            config, transform=None, bias=self.bias, scale=scale, cap=self.cap, from_zero=self.from_zero
        )


@register("head", "transform")
class TransformHeadSpec(HeadSpec):
    """activation: name in transformers' activation table. bias: one per vocabulary entry."""

    splits = frozenset({"vocabulary"})
    supports = frozenset({"context_parallel"})
    summary = "dense, activation and norm before the projection (BERT)"
    normalizes = True
    leads_back = True
    any_width = True

    activation: str = "gelu"
    bias: bool = True

    def check_fields(self) -> None:
        if self.activation not in ACT2FN:
            raise ValueError(
                f"transform head: unknown activation {self.activation!r}; known: {', '.join(sorted(ACT2FN))}."
            )

    def build(self, config: Any, **where: Any) -> LanguageModelHead:
        return LanguageModelHead(config, transform=self.activation, bias=self.bias, scale=None)


@register("head", "factorized")
class FactorizedHeadSpec(HeadSpec):
    """The way back from the embedding `factorized`: W P h with P [e, D], e the width of the token table (OPT). bias:
    one per vocabulary entry."""

    splits = frozenset({"vocabulary"})
    supports = frozenset({"context_parallel"})
    summary = "a linear map to the width of the token table before the projection"
    leads_back = True
    any_width = True

    bias: bool = False

    def build(self, config: Any, **where: Any) -> LanguageModelHead:
        return LanguageModelHead(config, transform=None, bias=self.bias, scale=None, projects=True)
