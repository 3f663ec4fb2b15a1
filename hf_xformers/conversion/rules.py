# SPDX-License-Identifier: Apache-2.0
"""The language of the weight tables: one list of rules per family, read in both directions.

A rule names tensors of transformers' model and of ours, and an operation with its inverse. In names, `@` stands for
the base model's prefix (`bert.` or nothing; `model.` or nothing), `{i}` for a layer of the only tower or of the
encoder, `{j}` for a layer of an encoder-decoder's decoder, and a final `.*` for `.weight` and `.bias`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = list[Tensor]


@dataclass(frozen=True)
class Operation:
    """A change of tensors and its inverse. plain: the tensor itself is only renamed or laid out differently."""

    name: str
    to_ours: Callable[[Tensors], Tensors]
    to_theirs: Callable[[Tensors], Tensors]
    plain: bool = False


def _layout(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous() if tensor.ndim == 2 else tensor


def _equal(tensors: Tensors) -> Tensor:
    first = tensors[0]
    if not all(other.data_ptr() == first.data_ptr() or torch.equal(other, first) for other in tensors[1:]):
        raise ValueError("they hold different values, but the other side has one tensor for them")
    return first


def _all_zero(tensors: Tensors) -> Tensors:
    if any(bool(tensor.any()) for tensor in tensors):
        raise ValueError(
            "it is not zero, and the other side has no such tensor (keep the model as it is, or train it again with"
            " `requires_grad_(False)` on this tensor)"
        )
    return []


def _unfuse(tensors: Tensors) -> Tensors:
    return [part.contiguous() for part in _layout(tensors[0]).chunk(3, dim=0)]


def _same(tensors: Tensors) -> Tensors:
    return tensors


COPY = Operation("copied", _same, _same, plain=True)
TRANSPOSE = Operation("transposed", lambda t: [_layout(t[0])], lambda t: [_layout(t[0])], plain=True)
ROW = Operation("row of a matrix", lambda t: [t[0].squeeze(0)], lambda t: [t[0].unsqueeze(0)], plain=True)
FUSED = Operation("fused query, key and value", _unfuse, lambda t: [_layout(torch.cat(t, dim=0))])
STACKED = Operation("stacked", lambda t: [torch.stack(t)], lambda t: [x.contiguous() for x in t[0].unbind()])
SHARED = Operation("shared", lambda t: [_equal(t)], lambda t: [_equal(t)])
FIRST = Operation("first of several", lambda t: t[:1], lambda t: t[:1])
ZERO = Operation("zero", _same, _all_zero)
NONE = Operation("no counterpart", _same, _same)


@dataclass(frozen=True)
class Rule:
    """`theirs` and `ours`: names of tensors as the module's text says; `operation` leads from the first to the
    second."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    operation: Operation = COPY


def copied(theirs: str, ours: str) -> Rule:
    """The same tensor under another name."""
    return Rule((theirs,), (ours,))


def transposed(theirs: str, ours: str) -> Rule:
    """transformers' `Conv1D` [in, out] and `nn.Linear` [out, in]; vectors are copied."""
    return Rule((theirs,), (ours,), TRANSPOSE)


def row(theirs: str, ours: str) -> Rule:
    """[1, n] and [n]."""
    return Rule((theirs,), (ours,), ROW)


def fused(theirs: str, query: str, key: str, value: str) -> Rule:
    """One `Conv1D` [D, 3 D] = [q | k | v] (bias [3 D]) and three `nn.Linear` [D, D]."""
    return Rule((theirs,), (query, key, value), FUSED)


def fused_by_head(theirs: str, query: str, key: str, value: str, *, groups: int, queries: int = 1) -> Rule:
    """One `nn.Linear` whose rows stand in `groups`, for each of them `queries` heads of queries, one of keys and one
    of values, and three `nn.Linear`."""

    def split(tensors: Tensors) -> Tensors:
        parts = tensors[0].unflatten(0, (groups, queries + 2, -1)).split([queries, 1, 1], dim=1)
        return [part.flatten(0, 2).contiguous() for part in parts]

    def join(tensors: Tensors) -> Tensors:
        counts = (queries, 1, 1)
        parts = [part.unflatten(0, (groups, count, -1)) for part, count in zip(tensors, counts, strict=True)]
        return [torch.cat(parts, dim=1).flatten(0, 2)]

    return Rule((theirs,), (query, key, value), Operation("fused query, key and value of each head", split, join))


def stacked(theirs: tuple[str, ...], ours: str) -> Rule:
    """Tensors of one shape, and one with an axis for them in front."""
    return Rule(theirs, (ours,), STACKED)


def joined(theirs: str, ours: tuple[str, ...], widths: tuple[int, ...], name: str) -> Rule:
    """One tensor of theirs that holds the rows of several of ours, `widths` of each; name: for the report."""

    def divide(tensors: Tensors) -> Tensors:
        return [part.contiguous() for part in tensors[0].split(widths)]

    return Rule((theirs,), ours, Operation(name, divide, lambda tensors: [torch.cat(tensors)]))


def joined_by_group(theirs: str, ours: tuple[str, ...], groups: int, widths: tuple[int, ...], name: str) -> Rule:
    """One tensor of theirs whose rows stand in `groups`, each with `widths` rows of each of ours; name: for the
    report."""

    def divide(tensors: Tensors) -> Tensors:
        parts = tensors[0].unflatten(0, (groups, -1)).split(widths, dim=1)
        return [part.flatten(0, 1).contiguous() for part in parts]

    def join(tensors: Tensors) -> Tensors:
        return [torch.cat([part.unflatten(0, (groups, -1)) for part in tensors], dim=1).flatten(0, 1)]

    return Rule((theirs,), ours, Operation(name, divide, join))


def shared(theirs: tuple[str, ...], ours: tuple[str, ...]) -> Rule:
    """One tensor under several names; refused where they differ."""
    return Rule(theirs, ours, SHARED)


def first(theirs: tuple[str, ...], ours: str) -> Rule:
    """The first name is the tensor that is read; the others repeat it."""
    return Rule(theirs, (ours,), FIRST)


def zero(ours: str) -> Rule:
    """A tensor that only we have: zero when it is made, and refused on the way back if it is not."""
    return Rule((), (ours,), ZERO)


def computed(theirs: str, table: Callable[[], Tensor], what: str) -> Rule:
    """A table of theirs that we compute: refused where it holds something else, made anew on the way back."""

    def holds(found: Tensor, wanted: Tensor) -> bool:
        error = (found - wanted).abs()
        return bool(error.max() < 1e-2) and float((error > 1e-4).float().mean()) < 1e-3  # few round the other way

    def check(tensors: Tensors) -> Tensors:
        found, wanted = tensors[0].float(), table().to(tensors[0].device)
        saved_as = (torch.float32, torch.float16, torch.bfloat16)  # it may have been in half precision once
        if not any(holds(found, wanted.to(dtype).float()) for dtype in saved_as):
            raise ValueError(f"it is not the table of {what}, and the other side computes those")
        return []

    return Rule((theirs,), (), Operation(f"{what}, computed", check, lambda _: [table()]))


def sinusoids(rows: int, width: int, layout: str = "interleaved") -> Tensor:
    """[rows, width] float32: sin(t / 10000^(2i / width)) and the cosine in turn, or all sines first ("half"), in
    double precision as transformers makes its tables."""
    rates = 10000.0 ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(rows, dtype=torch.float64)[:, None] / rates
    parts = (angles.sin(), angles.cos())
    return (torch.cat(parts, dim=-1) if layout == "half" else torch.stack(parts, dim=-1).flatten(-2)).float()


def only_theirs(*theirs: str) -> Rule:
    """Tensors that we have nothing for: dropped, or started anew on the way back."""
    return Rule(theirs, (), NONE)


def only_ours(*ours: str) -> Rule:
    """The same for tensors that transformers has nothing for."""
    return Rule((), ours, NONE)


@dataclass(frozen=True)
class Entry:
    """A rule for concrete tensors of one pair of models. group: the part of the model it belongs to."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    operation: Operation
    group: str

    def ends(self, to_ours: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(source names, target names)."""
        return (self.theirs, self.ours) if to_ours else (self.ours, self.theirs)


def expand(rules: tuple[Rule, ...], group: str, prefixes: tuple[str, str], layers: tuple[int, int]) -> list[Entry]:
    """The concrete entries of `rules`. prefixes: what `@` stands for in (their, our) names; layers: of the only tower
    or encoder, and of the decoder (0 without one)."""
    entries = []
    for rule in rules:
        names = (*rule.theirs, *rule.ours)
        decoder = any("{j}" in name for name in names)
        layered = decoder or any("{i}" in name for name in names)
        count = layers[1] if decoder else layers[0]
        suffixes = ("weight", "bias") if any(name.endswith(".*") for name in names) else ("",)
        for index in range(count if layered else 1):
            for suffix in suffixes:

                def concrete(name: str, prefix: str, index: int = index, suffix: str = suffix) -> str:
                    name = name[:-1] + suffix if name.endswith(".*") else name
                    name = prefix + name[1:] if name.startswith("@") else name
                    return name.replace("{i}", str(index)).replace("{j}", str(index))

                theirs = tuple(concrete(name, prefixes[0]) for name in rule.theirs)
                ours = tuple(concrete(name, prefixes[1]) for name in rule.ours)
                entries.append(Entry(theirs, ours, rule.operation, group))
    return entries
