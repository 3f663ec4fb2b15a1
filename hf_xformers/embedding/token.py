# SPDX-License-Identifier: Apache-2.0
"""Token embedding: one vector per token, plus type and position terms."""

from __future__ import annotations

import math
from typing import Literal, cast

from torch import Tensor, nn

from ..core.bounds import factor_or_flag
from ..core.components import register
from ..core.reading_weights import weight_of
from .base import EmbeddingSpec, InputPosition

LANGUAGES = "langs"  # the input with the number of a language for each token
# Inputs that mean something else to every model.
_NAMED = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds", "labels")


class ScaledTable(nn.Embedding):
    """embed_scale * E[w]: what a lookup gives is what `inputs_embeds` are. peft looks for the attribute's name."""

    def __init__(self, rows: int, width: int, embed_scale: float):
        super().__init__(rows, width)
        self.embed_scale = embed_scale

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.embed_scale


def stored_vectors(table: nn.Module, ids: Tensor) -> Tensor:
    """[..., D]: rows of a token table as they are stored, without the scale that a lookup gives them."""
    return table(ids) / getattr(table, "embed_scale", 1.0)


class TokenEmbedding(nn.Module):
    """x_t = scale * E[w_t] + type[s_t] + sum_n E_n[i_nt] + position(t), optionally normalized, then dropout.

    Vaswani et al. 2017, section 3.4 (`scale=True`: sqrt(D)); Devlin et al. 2019, section 3 (`normalize=True`, types);
    E_n are `id_tables`, as for languages (Conneau & Lample 2019, arXiv 1901.07291, section 3.1) or tasks (Sun et al.
    2020, arXiv 1907.12412, section 3.2).
    """

    def __init__(self, config, spec: TokenEmbeddingSpec):
        super().__init__()
        self.spec = spec
        factor = math.sqrt(config.hidden_size) if spec.scale is True else float(spec.scale or 1.0)
        self.factor = factor if spec.scales_given else None  # of what a lookup gives, and of given vectors
        self.scale = 1.0 if spec.scales_given else factor  # of a lookup alone
        # No padding index: a seq2seq decoder may start with the padding token, whose vector must learn.
        self.tokens = self.word_vectors(config)
        self.types = nn.Embedding(config.type_vocab_size, config.hidden_size) if config.type_vocab_size else None
        self.id_tables = nn.ModuleDict(
            {name: nn.Embedding(rows, config.hidden_size) for name, rows in spec.all_id_tables}
        )
        self.norm = config.normalization.build(config) if spec.normalize else None
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def word_vectors(self, config) -> nn.Module:
        """The module from ids [B, T] to vectors [B, T, D]."""
        size = config.vocab_size, config.hidden_size
        return nn.Embedding(*size) if self.scale == 1.0 else ScaledTable(*size, self.scale)

    def initialize(self, config, init) -> None:
        if config.initializer in ("xavier", "fan_in"):  # with the sqrt(D) scale, inputs then have unit variance
            init.normal_(self.tokens.weight, mean=0.0, std=config.initializer_factor * config.hidden_size**-0.5)
        elif config.initializer == "t5":
            init.normal_(self.tokens.weight, mean=0.0, std=config.initializer_factor)

    def lookup(self, input_ids: Tensor) -> Tensor:
        """Token vectors [B, T, D], scaled: what `inputs_embeds` replaces."""
        return self.tokens(input_ids)

    def forward(
        self,
        inputs_embeds: Tensor,
        token_type_ids: Tensor | None,
        positions: Tensor,
        position: InputPosition,
        **ids: Tensor,
    ) -> Tensor:
        """inputs_embeds [B, T, D], token_type_ids [B, T] or None, positions [B or 1, T], ids [B, T] or [B, 1] of
        `id_tables` by name, as far as they are given -> [B, T, D].

        Raises:
            ValueError: ids of another length.
        """
        hidden_states = inputs_embeds if self.factor is None else inputs_embeds * self.factor
        if self.types is not None:
            if token_type_ids is None:  # type 0 throughout, looked up once
                hidden_states = hidden_states + self.types(positions.new_zeros(1))
            else:
                hidden_states = hidden_states + self.types(token_type_ids)
        for name, table in self.id_tables.items():
            hidden_states = self._with_ids(hidden_states, name, cast(nn.Embedding, table), ids.get(name))
        hidden_states = position.embed(hidden_states, positions)
        if self.norm is not None:
            hidden_states = self.norm(hidden_states)
        return self.dropout(hidden_states)

    def _with_ids(self, hidden_states: Tensor, name: str, table: nn.Embedding, ids: Tensor | None) -> Tensor:
        """hidden_states [B, T, D] with the vectors of one of `id_tables`."""
        if ids is None:
            return hidden_states + weight_of(table)[0] if self.spec.absent_ids == "first" else hidden_states
        if ids.ndim != 2 or ids.shape[1] not in (1, hidden_states.shape[1]):
            raise ValueError(
                f"`{name}` must be [batch, length] like the tokens of this call, of which a row has"
                f" {hidden_states.shape[1]}, or [batch, 1], got {list(ids.shape)}."
            )
        return hidden_states + table(ids)


@register("embedding", "token")
class TokenEmbeddingSpec(EmbeddingSpec):
    """
    Args:
        scale: multiply token vectors by sqrt(hidden_size); `inputs_embeds` are taken as they are. A number in its
            place is a factor on both (Granite).
        scale_given: whether that number falls on `inputs_embeds` too (Falcon-H1: no).
        normalize: normalize the sum before dropout (BERT, BART).
        id_tables: further tables, each with the name of the model input [B, T] that holds ids for it, and its rows,
            e.g. `(("langs", 15),)`.
        languages: names of languages, with a table and the input `langs` [B, T] of their numbers in this order.
        absent_ids: where such an input is not given, the `first` row counts, as for token types, or `none`.
    """

    splits = frozenset({"table"})
    supports = frozenset({"context_parallel"})
    summary = "token (+ type) vectors plus an input position"

    scale: bool | float | int = False
    normalize: bool = False
    id_tables: tuple[tuple[str, int], ...] = ()
    languages: tuple[str, ...] = ()
    absent_ids: Literal["first", "none"] = "first"
    scale_given: bool = True

    @property
    def inputs(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(name for name, _ in self.all_id_tables)

    @property
    def all_id_tables(self) -> tuple[tuple[str, int], ...]:
        """The further tables, that of `languages` last."""
        return (*self.id_tables, (LANGUAGES, len(self.languages))) if self.languages else self.id_tables

    def check_fields(self) -> None:
        self.scale = factor_or_flag(self, "scale")
        twice = [name for name in self.languages if self.languages.count(name) > 1 or not name]
        if twice:
            raise ValueError(
                f"embedding {self.type!r} has the language {twice[0]!r} twice or without a name in `languages`"
                f" {list(self.languages)}; name each once."
            )
        for name, rows in self.all_id_tables:
            if not name.isidentifier() or name in _NAMED or self.inputs.count(name) > 1:
                raise ValueError(
                    f"embedding {self.type!r} names a further model input for each of `id_tables`, such as 'langs',"
                    f" got {name!r}, which is no name, is taken, or comes twice; give another."
                )
            if rows < 1:
                raise ValueError(f"embedding {self.type!r} needs a row at least in each of `id_tables`, got {rows}.")

    def check(self, config) -> None:
        super().check(config)
        if config.is_encoder_decoder and config.is_decoder and self.all_id_tables and self.absent_ids == "none":
            raise ValueError(
                f"embedding {self.type!r} has `id_tables` ({', '.join(name for name, _ in self.all_id_tables)}) with"
                " absent_ids='none', but ids go to the encoder alone, so that a decoder's tables would never be read;"
                " use absent_ids='first', or decoder={'embedding': {'type': 'token'}}."
            )

    @property
    def scales_given(self) -> bool:
        """Whether `inputs_embeds` are multiplied as well."""
        return not isinstance(self.scale, bool) and self.scale_given

    def normalizes(self) -> bool:
        return self.normalize

    def build(self, config, **where) -> TokenEmbedding:
        return TokenEmbedding(config, self)
