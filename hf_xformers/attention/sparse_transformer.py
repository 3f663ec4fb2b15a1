# SPDX-License-Identifier: Apache-2.0
"""The Sparse Transformer's factorized attention: strided and fixed."""

from __future__ import annotations

import math
from typing import Literal

from ..core.components import bounded, register
from ..ops.block_sparse import patterns
from ..ops.block_sparse.patterns import Pattern
from ..ops.common.token_grid import TokenGrid
from .shared.pattern_spec import BlockSparseSpec


@register("attention", "sparse_transformer", aliases=("sparse",))
class SparseTransformerSpec(BlockSparseSpec):
    """Two sets of keys whose composition reaches every token (Child, Gray, Radford and Sutskever 2019, arXiv
    1904.10509, section 4), with stride l near sqrt(T):

    - strided: A1 = {j : i - l < j <= i}, A2 = {j <= i : (i - j) mod l = 0}, for data with a period of l (images);
    - fixed: A1 = {j <= i : floor(j / l) = floor(i / l)}, A2 = A1 and {j <= i : j mod l >= l - c}, for text. The c
      summary columns alone would leave the first tokens without any key; the released code always adds a token's own
      block.

    An encoder (not in the paper) drops "j <= i". Time and memory O(T (l + T / l)) strided, O(T (l + c T / l)) fixed:
    with a constant c and l near sqrt(T) both are O(T sqrt(T)). A pattern has one stride for texts of all lengths, or a
    later token would change what an earlier one reads; so it is the root of the longest that positions are made for.

    Args:
        kind: strided or fixed.
        stride: l, tokens (`None`: sqrt(max_position_embeddings)).
        summary_width: c (`None`: 8, the least of the paper's; a quarter of a stride that is given).
        factorization: `merged`, every head reads both sets; `layers`, A1 in even and A2 in odd layers; `heads`, A1 in
            even and A2 in odd heads.
        num_verts: so many different runs of c summary columns, which heads take in turn (fixed).
    """

    summary = "local attention and every l-th token, or summary tokens"

    kind: Literal["strided", "fixed"] = "fixed"
    stride: int | None = bounded(None, least=1)
    summary_width: int | None = bounded(None, least=1)
    factorization: Literal["merged", "layers", "heads"] = "merged"
    num_verts: int = bounded(1, least=1)

    def check_fields(self) -> None:
        if self.stride is not None:
            self._check_room(self.stride)

    def _check_room(self, stride: int) -> None:
        width = self.width_in(stride)
        if width * self.num_verts > stride:
            raise ValueError(
                f"sparse_transformer has no room for {self.num_verts} runs of {width} summary columns in a `stride` of"
                f" {stride}; lower `num_verts` or `summary_width`."
            )

    def check(self, config) -> None:
        self._check_room(self.stride_of(config))
        counts = {"heads": config.num_attention_heads, "layers": config.num_hidden_layers}
        if counts.get(self.factorization) == 1:
            raise ValueError(
                f"sparse_transformer cannot spread its two sets of keys over {self.factorization}, of which there is"
                " one; use factorization='merged'."
            )

    def stride_of(self, config) -> int:
        """l."""
        return self.stride or math.isqrt(config.max_position_embeddings - 1) + 1

    def token_grid(self, config) -> TokenGrid:
        """Rows of l tokens."""
        stride = self.stride_of(config)
        return TokenGrid(max(-(-config.max_position_embeddings // stride), 1), stride)

    def width_in(self, stride: int) -> int:
        """c."""
        if self.summary_width is not None:
            return self.summary_width
        return max(min(8 if self.stride is None else stride // 4, stride // self.num_verts), 1)

    def pattern(self, config, layer_idx: int) -> Pattern:
        heads = range(config.num_attention_heads)
        if self.factorization == "merged":
            own = [self._first(config) | self._second(config, head) for head in heads]
        elif self.factorization == "layers":
            own = [self._second(config, head) if layer_idx % 2 else self._first(config) for head in heads]
        else:
            own = [self._second(config, head // 2) if head % 2 else self._first(config) for head in heads]
        return own[0] if len(set(own)) == 1 else patterns.per_head(*own)

    def _first(self, config) -> Pattern:
        """A1."""
        stride = self.stride_of(config)
        if self.kind == "fixed":
            return patterns.block_local(stride)
        return patterns.band(stride - 1, 0 if config.is_decoder else stride - 1)

    def _second(self, config, turn: int) -> Pattern:
        """A2; `turn` chooses the columns."""
        stride = self.stride_of(config)
        if self.kind == "strided":
            return patterns.strided(stride)
        return patterns.fixed(stride, self.width_in(stride), turn % self.num_verts)
