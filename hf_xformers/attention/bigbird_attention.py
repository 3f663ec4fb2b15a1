"""BigBird's attention: a window of blocks, random blocks, and global tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..core.context import LayerContext
from ..ops.common.real_tokens import first_real
from .longformer_attention import given_globals
from .shared.block_sparse import BlockSparseAttention


class BigBirdAttention(BlockSparseAttention):
    """Zaheer et al. 2020 (arXiv 2007.14062), section 2: softmax over N(i), the union of

    - a window: the token's own block of b tokens and (w - 1) / 2 blocks on each side;
    - r random blocks, drawn for each layer, head and block of tokens from the blocks outside its window;
    - global tokens, which see and are seen by all. ITC ("internal"): those of a text's first and last g blocks. ETC
      ("extended"): those of the model input `global_attention_mask`, which the stack `global_tokens` adds and sets.

    N(i) is a set: a block that is found twice counts once. Draws are a hash of seed, layer, head and block: the same
    in training, evaluation and after a reload. They are uniform over the blocks of the text, whatever its length,
    outside of window and global blocks; a text ends with its last real token, so that neither padding nor other texts
    change N(i).

    Time and memory O(T b (w + r + 2 g)).
    """

    def prepare(self, context: LayerContext, past_key_values: Cache | None) -> None:
        super().prepare(context, past_key_values)
        self.global_tokens(context)

    def global_tokens(self, context: LayerContext) -> tuple[Tensor | None, int | None]:
        spec = self.spec
        if spec.attention_type == "original_full":
            return None, 0
        if spec.global_mode == "etc":
            return given_globals(context, None)
        key = f"bigbird_globals_{spec.block_size}_{spec.num_global_blocks}"
        if key not in context.shared:
            context.shared[key] = self._end_blocks(context)
        return context.shared[key]

    def _end_blocks(self, context: LayerContext) -> tuple[Tensor | None, int | None]:
        """Tokens of the first and the last blocks of each text."""
        size, tokens = self.spec.block_size, self.spec.num_global_blocks * self.spec.block_size
        length = context.query_index.shape[0]
        if tokens == 0:
            return None, 0
        place, real = context.query_index[None], context.padding_mask
        if real is None:
            last = torch.full_like(place[:, :1], length - 1)
        else:
            first = first_real(real)[:, None]
            last = torch.where(real, place, first).amax(-1, keepdim=True) - first
            place = place - first
        chosen = (place < tokens) | (place // size > last // size - self.spec.num_global_blocks)
        chosen = chosen if real is None else chosen & real
        return chosen, min(2 * tokens, length)
