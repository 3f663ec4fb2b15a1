"""The Sparse Transformer's factorised attention: strided and fixed."""

from __future__ import annotations

from typing import Literal

from ..components import register
from ..ops import patterns
from ..ops.pattern_base import Pattern
from .block_sparse import BlockSparseSpec, check_at_least


@register("attention", "sparse_transformer", aliases=("sparse",))
class SparseTransformerSpec(BlockSparseSpec):
    """Two sets of keys whose composition reaches every token (Child, Gray, Radford and Sutskever 2019, arXiv 1904.10509,
    section 4), with stride l near sqrt(T):

    - strided: A1 = {j : i - l < j <= i}, A2 = {j <= i : (i - j) mod l = 0}, for data with a period of l (images);
    - fixed: A1 = {j <= i : floor(j / l) = floor(i / l)}, A2 = A1 and {j <= i : j mod l >= l - c}, for text. The c summary
      columns alone would leave the first tokens without any key; the released code always adds the own block.

    An encoder (not in the paper) drops "j <= i". Time and memory O(T (l + T / l)) strided, O(T (l + c T / l)) fixed.

    kind: strided or fixed. stride: l, tokens. summary_width: c (`None`: a quarter of the stride). factorization: `merged`,
    every head reads both sets; `layers`, A1 in even and A2 in odd layers; `heads`, A1 in even and A2 in odd heads.
    num_verts: so many different runs of c summary columns, which heads take in turn (fixed)."""

    summary = "local attention and every l-th token, or summary tokens"

    kind: Literal["strided", "fixed"] = "fixed"
    stride: int = 128
    summary_width: int | None = None
    factorization: Literal["merged", "layers", "heads"] = "merged"
    num_verts: int = 1

    def check_fields(self) -> None:
        fields = {name: getattr(self, name) for name in ("stride", "summary_width", "num_verts")}
        check_at_least("sparse_transformer", 1, **fields)
        if self.width * self.num_verts > self.stride:
            raise ValueError(
                f"sparse_transformer has no room for {self.num_verts} runs of {self.width} summary columns in a `stride` of "
                f"{self.stride}; lower `num_verts` or `summary_width`."
            )

    def check(self, config) -> None:
        counts = {"heads": config.num_attention_heads, "layers": config.num_hidden_layers}
        if counts.get(self.factorization) == 1:
            raise ValueError(
                f"sparse_transformer cannot spread its two sets of keys over {self.factorization}, of which there is one; use "
                "factorization='merged'."
            )

    @property
    def width(self) -> int:
        """c."""
        if self.summary_width is not None:
            return self.summary_width
        return max(min(self.stride // 4, self.stride // self.num_verts), 1)

    def pattern(self, config, layer_idx: int) -> Pattern:
        heads = range(config.num_attention_heads)
        if self.factorization == "merged":
            own = [self._first(config) | self._second(head) for head in heads]
        elif self.factorization == "layers":
            own = [self._second(head) if layer_idx % 2 else self._first(config) for head in heads]
        else:
            own = [self._second(head // 2) if head % 2 else self._first(config) for head in heads]
        return own[0] if len(set(own)) == 1 else patterns.per_head(*own)

    def _first(self, config) -> Pattern:
        """A1."""
        if self.kind == "fixed":
            return patterns.block_local(self.stride)
        return patterns.band(self.stride - 1, 0 if config.is_decoder else self.stride - 1)

    def _second(self, turn: int) -> Pattern:
        """A2; `turn` chooses the columns."""
        if self.kind == "strided":
            return patterns.strided(self.stride)
        return patterns.fixed(self.stride, self.width, turn % self.num_verts)
