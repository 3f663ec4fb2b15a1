"""Block-sparse attention on CUDA with FlexAttention and the same predicates.

The block mask is built from the pattern's arithmetic on block ends, because `create_block_mask` evaluates all T x T
pairs. On the CPU FlexAttention has no backward pass, so it is never chosen there; its uncompiled form serves as a
test.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ..common.kept import kept
from .pattern_atoms import Band, BlockSets
from .pattern_base import Pattern

BLOCK = 128


def flex_applies(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the compiled kernel takes these tensors: CUDA, single or half precision, head widths that are powers of
    two."""
    widths = (q.shape[3], v.shape[3])
    return (
        q.device.type == "cuda"
        and q.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and all(width >= 16 and width & (width - 1) == 0 for width in widths)
        and q.shape[2] > 1
    )


class _Tabled(BlockSets):
    """A block set as a tensor that the kernel can index, instead of arithmetic to be repeated for every pair."""

    def __init__(self, sets: BlockSets, rows: int, device: torch.device):
        self.block = sets.block
        self.slots = [slot.to(device) for slot in sets.drawn(torch.arange(rows))]

    def drawn(self, row: Tensor) -> list[Tensor]:
        return [slot[row] for slot in self.slots]


@kept(16)
def _block_map(
    pattern: Pattern, num_heads: int, q_len: int, k_len: int, q_offset: int, k_offset: int, device: torch.device
) -> tuple[list[Pattern], Tensor, tuple[Tensor, ...]]:
    """Distinct head patterns, the number of each head's pattern [H], and lists of active and of full key blocks.

    The lists are (count [1, H or 1, Q], indices [1, H or 1, Q, K]) of partial blocks, then the same of full ones.
    """
    distinct: dict[Pattern, int] = {}
    which = [distinct.setdefault(pattern.for_head(head), len(distinct)) for head in range(num_heads)]
    starts = (torch.arange(0, q_len, BLOCK), torch.arange(0, k_len, BLOCK))
    q_lo, k_lo = starts[0][:, None] + q_offset, starts[1][None] + k_offset
    q_hi, k_hi = (q_lo + BLOCK).clamp(max=q_offset + q_len) - 1, (k_lo + BLOCK).clamp(max=k_offset + k_len) - 1
    maps = []
    for own in distinct:
        active, full = (test(q_lo, q_hi, k_lo, k_hi) for test in (own.may, own.covers))
        maps.append((active & ~full, active & full))
    if len(distinct) == 1:
        partial, full = (x[None] for x in maps[0])
    else:
        partial, full = (torch.stack([maps[index][kind] for index in which]) for kind in (0, 1))
    rows = (q_offset + q_len - 1) // min((atom_block(own) for own in distinct), default=1) + 1
    tabled = [own.mapped(lambda x: _Tabled(x, rows, device) if isinstance(x, BlockSets) else x) for own in distinct]
    lists = []
    for chosen in (partial, full):
        order = chosen.int().argsort(dim=-1, descending=True, stable=True)
        lists += [chosen.sum(-1)[None].int().to(device), order[None].int().to(device)]
    return tabled, torch.tensor(which, device=device), tuple(lists)


def atom_block(pattern: Pattern) -> int:
    """The smallest block size of a table inside the pattern, 1 if there is none."""
    if isinstance(pattern, BlockSets):
        return pattern.block
    return min((atom_block(child) for child in pattern.children()), default=1)


def flex_block_sparse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    key_mask: Tensor | None,
    geometry: tuple[int, int, bool],
    scale: float,
    compiled: bool = True,
) -> tuple[Tensor, Tensor]:
    """The engine's contract for one call without dropout, bias and side keys; geometry is (q_offset, k_offset,
    causal).

    Shapes as in `block_sparse_attention`; returns the output and the log-sum-exp [B, H, T_q].
    """
    q_offset, k_offset, causal = geometry
    pattern = (pattern & Band(None, 0) if causal else pattern).bind(k_offset + k.shape[2])
    patterns, which, (count, index, full_count, full_index) = _block_map(
        pattern, q.shape[1], q.shape[2], k.shape[2], q_offset, k_offset, q.device
    )

    def mask_mod(b: Tensor, h: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        q_at, k_at = q_index + q_offset, k_index + k_offset
        allowed = patterns[0].allows(q_at, k_at)
        for number, own in enumerate(patterns[1:], 1):
            allowed = torch.where(which[h] == number, own.allows(q_at, k_at), allowed)
        return allowed if key_mask is None else allowed & key_mask[b, k_index]

    full: tuple[Tensor | None, Tensor | None] = (full_count, full_index)
    if key_mask is not None:
        # Full blocks skip the predicate, which holds the padding too: treat them as partial ones.
        merged = torch.zeros_like(index).scatter_(-1, index.long(), _first(count, index))
        merged = merged | torch.zeros_like(index).scatter_(-1, full_index.long(), _first(full_count, full_index))
        order = merged.argsort(dim=-1, descending=True, stable=True)
        count, index = merged.sum(-1).int(), order.int()
        full = (None, None)
    mask = BlockMask.from_kv_blocks(
        count, index, *full, BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=(q.shape[2], k.shape[2])
    )
    run = _compiled() if compiled else flex_attention
    return run(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1], return_lse=True)


def _first(count: Tensor, index: Tensor) -> Tensor:
    """1 for the first `count` entries of each list, 0 behind."""
    return (torch.arange(index.shape[-1], device=index.device) < count[..., None]).to(index.dtype)


@functools.cache
def _compiled():
    return torch.compile(flex_attention)
