# SPDX-License-Identifier: Apache-2.0
"""ONNX forms of operators that torch does not translate by itself. Its function needs onnxscript."""

from __future__ import annotations

from typing import Any

import torch

from ..compat import grouped_mm_fallback


def translations() -> dict[Any, Any]:
    """By operator, what makes its form."""
    from onnxscript import opset18

    from .triangular import inverse_of_unit_lower

    op: Any = opset18  # whose types know tensors alone, no numbers in their place

    def sort_stable(self: Any, stable: Any = None, dim: int = -1, descending: bool = False) -> Any:
        # ONNX says of TopK that equal values stand in the order of their places: it is stable.
        size = op.Shape(self, start=dim, end=None if dim == -1 else dim + 1)
        return op.TopK(self, size, axis=dim, largest=int(descending), sorted=1)

    def searchsorted(
        sorted_sequence: Any, self: Any, out_int32: bool = False, right: bool = False, **kwargs: Any
    ) -> Any:
        # How many entries stand before each value, counted.
        entries, values = op.Unsqueeze(sorted_sequence, [-2]), op.Unsqueeze(self, [-1])
        before = op.LessOrEqual(entries, values) if right else op.Less(entries, values)
        return op.ReduceSum(op.Cast(before, to=6 if out_int32 else 7), [-1], keepdims=0)

    def cummax(self: Any, dim: int) -> Any:
        # The largest of all entries up to each one, over pairs of entries.
        order = list(range(len(self.shape)))
        order[dim], order[-1] = order[-1], order[dim]
        moved = op.Transpose(self, perm=order)
        places = op.Range(0, op.Squeeze(op.Shape(moved, start=-1)), 1)
        earlier = op.LessOrEqual(places, op.Unsqueeze(places, [1]))
        entries, ends = op.Unsqueeze(moved, [-2]), op.Unsqueeze(moved, [-1])
        values = op.ReduceMax(op.Where(earlier, entries, ends), [-1], keepdims=0)
        largest = op.And(earlier, op.Equal(entries, op.Unsqueeze(values, [-1])))
        indices = op.ReduceMax(op.Where(largest, places, 0), [-1], keepdims=0)  # of equals the last, as torch's
        return op.Transpose(values, perm=order), op.Transpose(indices, perm=order)

    def solve_triangular(
        self: Any, B: Any, upper: bool = False, left: bool = True, unitriangular: bool = False
    ) -> Any:
        if upper or not left or not unitriangular:
            raise NotImplementedError("of triangular systems only I + strictlower(A) has a form in ONNX")
        return op.MatMul(inverse_of_unit_lower(self), B)

    def grouped_matmul(rows: Any, weight: Any, ends: Any) -> Any:
        # Every expert reads its rows and zeros in place of the others': rows stay where they are, at E times the
        # products.
        last = op.Unsqueeze(op.Cast(ends, to=7), [0])
        places = op.Unsqueeze(op.Range(0, op.Squeeze(op.Shape(rows, start=0, end=1)), 1), [1])
        expert = op.ReduceSum(op.Cast(op.LessOrEqual(last, places), to=7), [1], keepdims=1)
        total = None
        for index in range(int(weight.shape[0])):
            own = op.Mul(rows, op.CastLike(op.Equal(expert, index), rows))
            part = op.MatMul(own, op.Gather(weight, index, axis=0))
            total = part if total is None else op.Add(total, part)
        return total

    aten = torch.ops.aten
    table = {
        aten.sort.stable: sort_stable,
        aten.searchsorted.Tensor: searchsorted,
        aten.cummax.default: cummax,
        aten.linalg_solve_triangular.default: solve_triangular,
    }
    table[grouped_mm_fallback().default] = grouped_matmul
    return table
