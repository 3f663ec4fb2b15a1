# SPDX-License-Identifier: Apache-2.0
"""The inverse of a unit triangular matrix in ONNX's operators, for matrices whose size is known at run time alone.

Its module needs onnxscript, which reads the function's text: control flow in it becomes ONNX's."""

from __future__ import annotations

from typing import Any

from onnxscript import opset18 as op
from onnxscript import script


@script(default_opset=op)
def inverse_of_unit_lower(matrix: Any) -> Any:
    """(I + strictlower(A))^-1 of `[..., T, T]`. Diagonal blocks are inverted, which are of twice the size in each
    round: of [[L, 0], [B, M]] with the inverses of L and M the corner is -M^-1 B L^-1. As stable as substitution,
    which a series in powers of strictlower(A) is not: these grow like binomials where keys are alike."""
    size = op.Shape(matrix, start=-1)
    places = op.Range(0, op.Squeeze(size), 1)
    row, column = op.Unsqueeze(places, [1]), op.Unsqueeze(places, [0])
    inverse = op.Expand(op.CastLike(op.Equal(row, column), matrix), op.Shape(matrix))
    zero = op.CastLike(op.Constant(value_float=0.0), matrix)
    block = op.Constant(value_int=1)
    more = op.Less(block, op.Squeeze(size))
    while more:
        twice = op.Add(block, block)
        together = op.Equal(op.Div(row, twice), op.Div(column, twice))
        corner = op.And(together, op.Greater(op.Div(row, block), op.Div(column, block)))
        below = op.MatMul(op.Where(corner, matrix, zero), inverse)
        inverse = op.Sub(inverse, op.MatMul(inverse, below))
        block = op.Identity(twice)
        more = op.Less(block, op.Squeeze(size))
    return inverse
