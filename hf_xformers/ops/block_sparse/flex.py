# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention on CUDA with FlexAttention and the same predicates.

The block mask is built from the pattern's arithmetic on block ends, because `create_block_mask` evaluates all T x T
pairs. On the CPU FlexAttention has no backward pass, so it is never chosen there; its uncompiled form serves as a
test.
"""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad

from ...compat import graphs_at_most
from ..common.kept import kept
from .pattern_atoms import Band, BlockSets
from .pattern_base import Pattern

BLOCK = 128
# With the tiles that torch chooses, the numbers of a bias ask for more shared memory than a GPU has.
_SMALL_TILES = {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_stages": 2, "bwd_num_stages": 1}
_SMALL_TILES |= {"bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 32}
GRAPHS = 64  # of one type of call: lengths, widths, types, with and without gradients
_RETURNS_AUX = "return_aux" in inspect.signature(flex_attention).parameters  # torch 2.9


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
    """Block sets of all heads as a tensor that the kernel can index, instead of arithmetic to be repeated for every
    pair, and for every head. A head's number takes the place of the length, which nothing reads in a bound pattern."""

    def __init__(self, block: int, table: Tensor):
        self.block, self.table = block, table  # [slots, heads, rows]

    def drawn_within(self, row: Tensor, length: Tensor) -> list[Tensor]:
        return [slot[length if len(slot) > 1 else 0, row] for slot in self.table]


class _Bound(Pattern):
    """Another atom, which is bound to its length."""

    def __init__(self, atom: Pattern):
        self.atom = atom

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return self.atom.allows(q, k)


def _in_one(heads: list[Pattern], rows: int, device: torch.device) -> Pattern | None:
    """One pattern for heads that differ in the entries of their block sets alone, which become tables; None: they
    differ in more."""
    first, *others = heads
    if isinstance(first, BlockSets):
        drawn = [own.drawn(torch.arange(rows)) for own in heads if isinstance(own, BlockSets)]
        if len(drawn) < len(heads) or len({(own.block, len(slots)) for own, slots in zip(heads, drawn)}) > 1:
            return None
        return _Tabled(first.block, torch.stack([torch.stack(slots) for slots in drawn], 1).to(device))
    if any(type(own) is not type(first) for own in others):
        return None
    if not first.children():
        return _Bound(first) if all(own == first for own in others) else None
    parts = []
    for children in zip(*(own.children() for own in heads)):
        part = _in_one(list(children), rows, device)
        if part is None:
            return None
        parts.append(part)
    return first.with_children(tuple(parts))


@kept(256)
def _block_map(
    pattern: Pattern,
    num_heads: int,
    lengths: tuple[int, int],
    offsets: tuple[int, int],
    has_full: bool,
    device: torch.device,
) -> tuple[list[Pattern], Tensor, BlockMask]:
    """Distinct head patterns (one where tables tell them apart), the number of each head's pattern [H], and the blocks
    of keys of each block of queries, for `lengths` of queries and keys that begin at `offsets`. has_full: blocks that
    are allowed as a whole skip the predicate."""
    distinct: dict[Pattern, int] = {}
    which = [distinct.setdefault(pattern.for_head(head), len(distinct)) for head in range(num_heads)]
    begins, ends = [], []
    for length, offset in zip(lengths, offsets):
        begins.append(torch.arange(0, length, BLOCK) + offset)
        ends.append((begins[-1] + BLOCK).clamp(max=offset + length) - 1)
    places = (begins[0][:, None], ends[0][:, None], begins[1][None], ends[1][None])
    active, full = (
        torch.stack([getattr(own, test)(*places).expand(len(begins[0]), len(begins[1])) for own in distinct])
        for test in ("may", "covers")
    )
    rows = (offsets[0] + lengths[0] - 1) // min((atom_block(own) for own in distinct), default=1) + 1
    one = _in_one(list(distinct), rows, device)
    tabled = [_in_one([own], rows, device) or own for own in distinct] if one is None else [one]
    lists: list[Any] = []
    for chosen in (active & ~full, active & full) if has_full else (active,):
        chosen = chosen if len(distinct) == 1 else chosen[which]
        order = chosen.int().argsort(dim=-1, descending=True, stable=True)
        lists += [chosen.sum(-1)[None].int().to(device), order[None].int().to(device)]
    count, index, full_count, full_index = lists if has_full else (*lists, None, None)
    mask = BlockMask.from_kv_blocks(count, index, full_count, full_index, BLOCK_SIZE=BLOCK, seq_lengths=lengths)
    return tabled, torch.tensor(which, device=device), mask


def atom_block(pattern: Pattern) -> int:
    """The smallest block size of a table inside the pattern, 1 if there is none."""
    if isinstance(pattern, BlockSets):
        return pattern.block
    return min((atom_block(child) for child in pattern.children()), default=1)


class Places(NamedTuple):
    """Where queries and keys begin, and whether later keys are hidden."""

    query_offset: int
    key_offset: int
    causal: bool


def flex_block_sparse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    places: Places,
    scale: float,
    *,
    key_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    bias: Callable[[Tensor, Tensor], Tensor] | None = None,
    cap: float = 0.0,
    needs_lse: bool = True,
    compiled: bool = True,
) -> tuple[Tensor, Tensor | None] | None:
    """The engine's contract for one call without dropout and side keys; `bias` depends on distances alone.

    Shapes as in `block_sparse_attention`; returns the output and the log-sum-exp [B, H, T_q] (None if not needed).
    None, with a warning, where the device has too little shared memory for the kernel.
    """
    (q_len, k_len), shift = (q.shape[2], k.shape[2]), places.query_offset - places.key_offset
    bound = (pattern & Band(None, 0) if places.causal else pattern).bind(places.key_offset + k_len)
    # Whole blocks skip the predicate, which holds padding and documents too.
    has_full = key_mask is None and segment_ids is None
    patterns, which, template = _block_map(bound, q.shape[1], (q_len, k_len), places[:2], has_full, q.device)

    def mask_mod(b: Tensor, h: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        q_at, k_at = q_index + places.query_offset, k_index + places.key_offset
        allowed = patterns[0].allows_within(q_at, k_at, which[h])
        for number, own in enumerate(patterns[1:], 1):
            allowed = torch.where(which[h] == number, own.allows_within(q_at, k_at, h), allowed)
        if key_mask is not None:
            allowed = allowed & key_mask[b, k_index]
        if segment_ids is not None:
            allowed = allowed & (segment_ids[b, q_index + shift] == segment_ids[b, k_index])
        return allowed

    line = None
    if bias is not None:  # [H, q_len + k_len - 1], by distance
        distances = torch.arange(1 - q_len, k_len, device=q.device) - shift
        line = bias(torch.zeros_like(distances[:1]), distances).flatten(end_dim=-2).expand(q.shape[1], -1)
        line = line.to(torch.promote_types(q.dtype, torch.float32))  # the type of scores

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        score = cap * torch.tanh(score / cap) if cap else score
        return score if line is None else score + line[h, k_index - q_index + q_len - 1]

    mask = copy.copy(template)
    mask.mask_mod = mask_mod
    options: dict[str, Any] = {"block_mask": mask, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    if cap or line is not None:
        options["score_mod"] = score_mod
    if line is not None:
        options["kernel_options"] = _SMALL_TILES
    if needs_lse:
        options |= {"return_aux": flex.AuxRequest(lse=True)} if _RETURNS_AUX else {"return_lse": True}
    kind = (*map(_kind, patterns), key_mask is None, segment_ids is None, bias is None, needs_lse, cap, scale)
    result = _attend(kind, q, k, v, options, compiled)
    if result is None or not needs_lse:
        return None if result is None else (result, None)
    return result[0], result[1].lse if _RETURNS_AUX else result[1]


def flex_chosen_blocks(
    q: Tensor, k: Tensor, v: Tensor, choices: Tensor, limit: Tensor, block: int, scale: float, *, compiled: bool = True
) -> Tensor | None:
    """Attention of each query over the blocks that it has chosen, see `chosen_block_attention`.

    choices [B, H, T, n]: numbers of blocks, -1: none. limit [B, T]: keys from there on are hidden. The kernel passes
    over 128 keys that none of 128 queries has chosen. None, with a warning, where it does not fit on the device.
    """
    q_len, k_len, count = q.shape[2], k.shape[2], choices.shape[3]
    q_blocks, k_blocks = -(-q_len // BLOCK), -(-k_len // BLOCK)
    first, last = choices * block // BLOCK, (choices * block + block - 1) // BLOCK
    steps = torch.arange((block - 2) // BLOCK + 2, device=q.device)
    touched = (first[..., None] + steps).minimum(last[..., None].clamp(max=k_blocks - 1))
    touched = touched.masked_fill(choices[..., None] < 0, k_blocks).flatten(3)  # one more place, which is cut off
    touched = pad(touched, (0, 0, 0, q_blocks * BLOCK - q_len), value=k_blocks)
    chosen = torch.zeros(*choices.shape[:2], q_blocks, k_blocks + 1, dtype=torch.bool, device=q.device)
    chosen = chosen.scatter(3, touched.unflatten(2, (q_blocks, BLOCK)).flatten(3), True)[..., :-1]
    order = chosen.int().argsort(dim=-1, descending=True, stable=True).int()
    choices, limit = choices.int(), limit.int()

    def mask_mod(b: Tensor, h: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        of_key = k_index // block
        allowed = choices[b, h, q_index, 0] == of_key
        for number in range(1, count):
            allowed = allowed | (choices[b, h, q_index, number] == of_key)
        return allowed & (k_index < limit[b, q_index])

    mask = BlockMask.from_kv_blocks(
        chosen.sum(-1).int(), order, BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=(q_len, k_len)
    )
    options: dict[str, Any] = {"block_mask": mask, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    return _attend(("chosen", count, block, scale), q, k, v, options, compiled)


def _attend(kind: tuple, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], compiled: bool) -> Any:
    """The kernel's result; None, said once for each type of call, where the device has no room for it."""
    if not compiled or torch.compiler.is_compiling():
        return flex_attention(q, k, v, **options)
    sizes = (kind, q.shape[3], v.shape[3], q.dtype, torch.is_grad_enabled(), q.device)
    if sizes in _too_large:
        return None
    try:
        # Beyond its limit torch would run the form that holds all T x T scores, without a word.
        with graphs_at_most(GRAPHS):
            return _compiled(kind)(q, k, v, **options)
    except RuntimeError as error:
        if "No valid triton configs" not in str(error):
            raise
        _too_large.add(sizes)
        reason = str(error).splitlines()[0]
        warnings.warn(f"FlexAttention's kernel does not fit on the device; tiles are slower. {reason}", stacklevel=2)
        return None


_too_large: set[tuple] = set()  # types of calls and sizes


def _kind(pattern: Pattern) -> tuple:
    """What a pattern is made of, without its numbers, which graphs take as they come."""
    return (type(pattern.atom if isinstance(pattern, _Bound) else pattern), *map(_kind, pattern.children()))


@functools.cache
def _compiled(kind: tuple) -> Callable:
    """The kernel for one type of call. torch counts graphs by code object, so that each has its own."""

    def attend(q: Tensor, k: Tensor, v: Tensor, **options):
        return flex_attention(q, k, v, **options)

    attend.__code__ = attend.__code__.replace(co_name=f"flex_attention_{abs(hash(kind))}")
    return torch.compile(attend)
