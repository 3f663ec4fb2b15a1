# SPDX-License-Identifier: Apache-2.0
"""Words together with their characters: what a small encoder reads in a word's spelling, besides its vector."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.components import bounded, register
from ..core.weight_decay import Undecayed
from ..data.word_characters import NO_CHARACTER, NO_WORD, NUM_CHARACTER_IDS
from ..ops.common.products import wide_products
from ..ops.common.relative_sinusoids import relative_sinusoids
from .base import InputPosition
from .token import TokenEmbedding, TokenEmbeddingSpec


class CharacterEncoder(Undecayed, nn.Module):
    """A word's vector from its characters: one layer of TENER's Transformer over them, and their maximum (Yan et al.
    2019, arXiv 1911.04474, section 3.1).

    x <- LN(x + A(x)), x <- LN(x + W_2 relu(W_1 x)), max over the word's characters; in head h A is softmax_s(q_t k_s +
    q_t R_{t-s} + u k_s + v R_{t-s}) v_s with k = x and R the sinusoids of signed distances. Cost O(C^2 w) a word.
    """

    undecayed = ("content_bias", "position_bias")

    def __init__(self, width: int, heads: int, inner: int, dropout: float, eps: float):
        super().__init__()
        self.num_heads = heads
        self.characters = nn.Embedding(NUM_CHARACTER_IDS, width)
        self.q_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(heads, width // heads))
        self.position_bias = nn.Parameter(torch.zeros(heads, width // heads))
        self.attention_norm, self.feedforward_norm = nn.LayerNorm(width, eps=eps), nn.LayerNorm(width, eps=eps)
        self.up_proj, self.down_proj = nn.Linear(width, inner), nn.Linear(inner, width)
        self.dropout = nn.Dropout(dropout)

    def initialize(self, config, init) -> None:
        for bias in (self.content_bias, self.position_bias):
            init.normal_(bias, mean=0.0, std=config.initializer_range)
        # The generic start is for wider maps: with it, 30 numbers would say next to nothing of a word. The norms make
        # up for small vectors, which learn faster: an optimizer's steps do not grow with what they change.
        init.normal_(self.characters.weight, mean=0.0, std=0.1)
        for projection in (self.q_proj, self.v_proj, self.up_proj, self.down_proj):
            init.xavier_uniform_(projection.weight)

    def attend(self, states: Tensor, real: Tensor) -> Tensor:
        """states [N, C, w], real [N, C] -> [N, C, w]."""
        count, length, width = states.shape

        def heads(x: Tensor) -> Tensor:
            return x.view(count, length, self.num_heads, -1).transpose(1, 2)

        query, key, value = heads(self.q_proj(states)), heads(states), heads(self.v_proj(states))
        place = torch.arange(length, device=states.device)
        distance = torch.arange(1 - length, length, device=states.device)
        table = relative_sinusoids(distance, width // self.num_heads, query.dtype)
        by_distance = wide_products(query + self.position_bias[:, None], table)  # column c is of distance c + 1 - C
        column = (place[:, None] - place[None] + length - 1).expand(*by_distance.shape[:2], -1, -1)
        scores = wide_products(query + self.content_bias[:, None], key) + by_distance.gather(-1, column)
        weights = scores.masked_fill(~real[:, None, None], torch.finfo(scores.dtype).min).softmax(-1).to(value.dtype)
        return torch.matmul(self.dropout(weights), value).transpose(1, 2).flatten(2)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [..., C] of the characters of words, each with one at least -> [..., w]."""
        flat = ids.flatten(0, -2)
        real = flat != NO_CHARACTER
        states = self.dropout(self.characters(flat))
        states = self.attention_norm(states + self.dropout(self.attend(states, real)))
        inner = self.down_proj(self.dropout(F.relu(self.up_proj(states))))
        states = self.feedforward_norm(states + self.dropout(inner))
        states = states.masked_fill(~real[..., None], torch.finfo(states.dtype).min)
        return states.amax(1).view(*ids.shape[:-1], -1)


class WordCharacterEmbedding(TokenEmbedding):
    """x_t = W [E[w_t] ; characters(t)] + position(t): the two vectors side by side, mapped to the model's width.

    Characters come as `character_ids` [B, T, C], a word's own even where the vocabulary lacks it. Without them, as for
    special tokens, every token counts as none that is spelt.
    """

    spec: WordCharacterSpec

    def __init__(self, config, spec: WordCharacterSpec):
        super().__init__(config, spec)
        sizes = (spec.character_width, spec.character_heads, spec.character_inner)
        self.character_encoder = CharacterEncoder(*sizes, config.hidden_dropout_prob, config.layer_norm_eps)
        self.join = nn.Linear(config.hidden_size + spec.character_width, config.hidden_size)

    def word_vectors(self, config) -> nn.Module:
        return nn.Embedding(config.vocab_size, config.hidden_size)

    def initialize(self, config, init) -> None:
        super().initialize(config, init)
        # A word's own vector starts at `initializer_range`, what is made of its characters at 1, which would drown it.
        deviations = torch.cat(
            [
                torch.full((config.hidden_size,), config.hidden_size**-0.5),
                torch.full((self.spec.character_width,), config.initializer_range * self.spec.character_width**-0.5),
            ]
        )
        start = torch.randn(self.join.weight.shape) * deviations
        init.copy_(self.join.weight, start.to(self.join.weight))

    def forward(
        self,
        inputs_embeds: Tensor,
        token_type_ids: Tensor | None,
        positions: Tensor,
        position: InputPosition,
        **ids: Tensor,
    ) -> Tensor:
        given = ids.pop("character_ids", None)
        spelt = self.character_encoder(self._checked(given, inputs_embeds))
        spelt = spelt.expand(*inputs_embeds.shape[:2], -1).to(inputs_embeds.dtype)
        joined = self.join(torch.cat([inputs_embeds, spelt], dim=-1))
        return super().forward(joined * self.scale, token_type_ids, positions, position, **ids)

    @staticmethod
    def _checked(ids: Tensor | None, tokens: Tensor) -> Tensor:
        if ids is None:
            return torch.full((1, 1, 1), NO_WORD, dtype=torch.long, device=tokens.device)
        if ids.ndim != 3 or ids.shape[:2] != tokens.shape[:2] or not ids.shape[2]:
            raise ValueError(
                f"`character_ids` must be [batch, length, characters] for tokens {list(tokens.shape[:2])}, with one"
                f" character at least, got {list(ids.shape)}; encode texts with a WordCharacterTokenizer."
            )
        # A word whose every character is padding would have no maximum.
        empty = (ids == NO_CHARACTER).all(-1, keepdim=True)
        return torch.where(empty, torch.full_like(ids, NO_WORD), ids)


@register("embedding", "word_characters")
class WordCharacterSpec(TokenEmbeddingSpec):
    """A token's vector and what an encoder makes of its characters (`character_ids` [B, T, C], as
    `hf_xformers.data.WordCharacterTokenizer` gives them). character_width: of a character's vector. character_heads:
    of the attention over characters. character_inner: width of its feed-forward. The rest is as for `token`."""

    supports = frozenset()
    summary = "word vectors next to an encoder's reading of their characters"

    character_width: int = bounded(30, least=1)
    character_heads: int = bounded(3, least=1)
    character_inner: int = bounded(60, least=1)

    @property
    def inputs(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("character_ids", *(name for name, _ in self.all_id_tables))

    def check_fields(self) -> None:
        super().check_fields()
        if self.character_width % (2 * self.character_heads):
            raise ValueError(
                f"embedding 'word_characters' needs heads of even width over characters, got `character_width`"
                f" {self.character_width} and `character_heads` {self.character_heads}; let twice the heads divide"
                " the width."
            )

    def check(self, config) -> None:
        super().check(config)
        if config.is_encoder_decoder and config.is_decoder:
            raise ValueError(
                "embedding 'word_characters' spells the encoder's words alone, so that a decoder's would never learn;"
                " set decoder={'embedding': 'token'}."
            )

    def build(self, config, **where) -> WordCharacterEmbedding:
        return WordCharacterEmbedding(config, self)
