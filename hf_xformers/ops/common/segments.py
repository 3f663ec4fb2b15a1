# SPDX-License-Identifier: Apache-2.0
"""Cutting a long sequence into a few segments, so that working memory stays a fraction of the inputs.

A scan keeps chunks (the quadratic blocks) and segments apart: all chunks of one segment are computed together in
batched matrix products, and segments follow one another. The number of segments is bounded, so the Python loop over
them does not grow with the sequence.

That suits a processor, whose cache holds a segment. Any other device gains nothing by it and waits for every launch:
there a segment is as long as memory allows, and products take their operands in the type of the inputs. Both are
decided here and nowhere else.

Names as in the scans: `R = B H` rows of states, `N` chunks per segment, `C` tokens per chunk, `W` any width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .feature_map import MapWithPullback

_MAX_SEGMENTS = 16
_MAX_SEGMENTS_COMPILED = 4  # torch.compile unrolls the loop: fewer segments, more memory, bearable compile times
_MIN_SEGMENT_TOKENS = 128
_BATCH_NUMBERS = 1 << 26  # largest tensor made at once off the processor, about: 256 MiB of float32
_BATCH_CHUNKS = 256  # what joins the states of that many chunks is a matrix of their pairs


def in_one_batch(x: Tensor) -> bool:
    """Whether all chunks are computed together, as everywhere but on a processor."""
    return x.device.type != "cpu"


def operand_dtype(x: Tensor) -> torch.dtype:
    """The type of the operands of products over tokens such as `x`; they are summed in `accumulation_dtype`.

    float16 is not among them: features and states may leave its range. A graph has float32 operands, since not every
    version of torch compiles products whose result is wider than their operands.
    """
    if x.is_cuda and x.dtype == torch.bfloat16 and torch.version.hip is None and not torch.compiler.is_compiling():
        return x.dtype
    return accumulation_dtype(x.dtype)


def segments(length: int, x: Tensor, chunk_size: int = 1, width: int = 1) -> list[tuple[int, int]]:
    """`(start, stop)` of the segments of a sequence, each but the last a multiple of `chunk_size` long.

    At most 16 of them; more when the features are wider than 128, so that a segment of features stays as large. Off
    the processor, by memory: `x [..., W]` are tokens of the whole sequence.
    A backward pass must reuse the list of its forward pass, since only one of them may run under torch.compile.
    """
    if isinstance(length, torch.SymInt):  # a graph for every length, in which none can be told from another
        return [(0, length)]
    if in_one_batch(x) and length:
        a_token = x.numel() // (length * max(x.shape[-1], 1)) * max(width, x.shape[-1], chunk_size)
        tokens = max(_BATCH_NUMBERS // max(a_token, 1), _MIN_SEGMENT_TOKENS)
        tokens = min(tokens, _BATCH_CHUNKS * chunk_size) if chunk_size > 1 else tokens
        tokens = -(-tokens // chunk_size) * chunk_size
        return [(start, min(start + tokens, length)) for start in range(0, length, tokens)]
    most = _MAX_SEGMENTS * max(width, 128) // 128
    if torch.compiler.is_compiling():
        most = _MAX_SEGMENTS_COMPILED
    tokens = max(_MIN_SEGMENT_TOKENS, -(-length // most))
    tokens = -(-tokens // chunk_size) * chunk_size
    return [(start, min(start + tokens, length)) for start in range(0, length, tokens)]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for everything else: the type in which sums over the sequence are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def to_chunks(x: Tensor, start: int, stop: int, chunk: int, dtype: torch.dtype) -> Tensor:
    """Tokens `start..stop` of `[B, H, T, W]` as chunks `[R N, C, W]`, zeros after the end."""
    x = x[:, :, start:stop].to(dtype)
    tail = -x.shape[2] % chunk
    if tail:
        x = F.pad(x, (0, 0, 0, tail))
    return x.reshape(-1, chunk, x.shape[-1])


def put_chunks(target: Tensor | None, start: int, stop: int, rows: Tensor) -> None:
    """Inverse of `to_chunks`: writes chunks to tokens `start..stop` of `[B, H, T, W]` or, with W = 1, of `[B, H,
    T]`."""
    if target is not None:
        whole = rows.reshape(*target.shape[:2], -1, *([rows.shape[-1]] if target.dim() == 4 else []))
        target[:, :, start:stop] = whole[:, :, : stop - start]


def keep_chunks(mask: Tensor | None, x: Tensor, start: int, stop: int, chunk: int) -> Tensor | None:
    """The padding mask of `x [B, H, T, W]` as `[R N, C, 1]`, False after the end too; None if it would be True
    throughout."""
    tail = -(stop - start) % chunk
    if mask is None and not tail:
        return None
    piece = x.new_ones(x.shape[0], stop - start, dtype=torch.bool) if mask is None else mask[:, start:stop]
    piece = F.pad(piece, (0, tail)) if tail else piece
    return piece[:, None].expand(-1, x.shape[1], -1).reshape(-1, chunk, 1)


def masked(x: Tensor, keep: Tensor | None) -> Tensor:
    """Zeros where `keep` is False."""
    return x if keep is None else x.masked_fill(~keep, 0.0)


def features_of(feature_map, params, x: Tensor, lead: torch.Size, active: list[int] | None = None):
    """`(phi, log factor [..., 1] or None, pull)`: pull maps their gradients to those of `x` and the active parameters.

    The map sees the chunks `[B H N, C, d]` as `[B, H, N C, d]`, `lead` = (B, H). Without `active`, pull must not be
    used.
    """
    if feature_map is None:
        return x, None, lambda to_phi, to_log: (to_phi,)
    compiling = torch.compiler.is_compiling()  # the compiler differentiates a map as well as it can itself be written
    if isinstance(feature_map, MapWithPullback) and not torch.is_grad_enabled() and not compiling:
        phi, logs, own = feature_map.with_pullback(x.view(*lead, -1, x.shape[-1]), params, active or ())

        def pull_own(to_phi, to_log):
            to_x, *to_params = own(to_phi.reshape(phi.shape), None if to_log is None else to_log.reshape(logs.shape))
            return to_x.view_as(x), *to_params

        logs_of_chunks = None if logs is None else logs.reshape(*x.shape[:2], 1)
        return phi.reshape(*x.shape[:2], -1), logs_of_chunks, pull_own

    def evaluate(x, *chosen):
        values = list(params)
        for index, value in zip(active or (), chosen):
            values[index] = value
        features = feature_map(x.view(*lead, -1, x.shape[-1]), *values)
        features = (features,) if isinstance(features, Tensor) else (features[0], features[1][..., None])
        return tuple(part.reshape(*x.shape[:2], -1) for part in features)

    if active is None:
        features, pullback = evaluate(x), None
    else:
        features, pullback = torch.func.vjp(evaluate, x, *[params[index] for index in active])[:2]
    scaled = len(features) == 2

    def pull(to_phi, to_log):
        return pullback((to_phi, to_log) if scaled else (to_phi,))

    return features[0], features[1] if scaled else None, pull


def low_features(feature_map, params, x, start, stop, chunk, dtypes, active: list[int] | None = None):
    """`features_of` tokens `start..stop` of `x [B, H, T, d]`: `dtypes` are those that a map computes in, and that its
    features are wanted in."""
    wide, low = dtypes
    piece = to_chunks(x, start, stop, chunk, low if feature_map is None else wide)
    features, logs, pull = features_of(feature_map, params, piece, x.shape[:2], active)
    return features.to(low), logs, pull


def active_params(params, needs_input_grad) -> tuple[list[int], list[Tensor | None]]:
    """Which parameters of the map need a gradient, and where it will be summed."""
    needs = needs_input_grad[len(needs_input_grad) - len(params) :]
    active = [index for index, need in enumerate(needs) if need]
    return active, [torch.zeros_like(p) if need else None for p, need in zip(params, needs)]


def accumulate(totals: list[Tensor | None], gradients) -> None:
    """Adds the gradients of the active parameters to their totals."""
    for total, gradient in zip([total for total in totals if total is not None], gradients):
        total += gradient


def like_or_none(x: Tensor | None) -> Tensor | None:
    """Uninitialized memory for the gradient of an optional input."""
    return None if x is None else torch.empty_like(x)
