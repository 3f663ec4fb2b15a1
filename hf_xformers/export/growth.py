# SPDX-License-Identifier: Apache-2.0
"""What the memory of a graph grows with."""

from __future__ import annotations

import math
from typing import Any

import torch

# Lengths of text that are compared: where tensors of an efficient mechanism are larger than those of weights' size.
_SHORT, _LONG = 4096, 16384
_aten = torch.ops.aten


def grows_with_square(program: torch.export.ExportedProgram, inputs: list[str]) -> bool:
    """Whether the largest tensor that a program makes of a long text grows with the square of its length, not with the
    length. inputs: those that are [batch, length, ..]."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    lengths = [nodes[name].meta["val"].shape[1] for name in inputs if name in nodes]
    symbols = [size.node.expr for size in lengths if isinstance(size, torch.SymInt)]
    sizes: list[tuple[float, float]] = []
    for node in program.graph.nodes:
        for shape in _shapes_made(node):
            short, long = (math.prod(_at(size, symbols, length) for size in shape) for length in (_SHORT, _LONG))
            sizes.append((long, short))
    long, short = max(sizes)
    return bool(symbols) and long > short * (_LONG / _SHORT) ** 1.5


def _shapes_made(node: Any) -> list[list[Any]]:
    """Shapes of the tensors that a node makes, and of those that ONNX makes in its place."""
    made = node.meta.get("val")
    shapes = [
        list(x.shape) for x in (made if isinstance(made, tuple | list) else [made]) if isinstance(x, torch.Tensor)
    ]
    if node.op != "call_function":
        return [] if node.op == "placeholder" else shapes
    given = [x.meta["val"] for x in node.args if isinstance(x, torch.fx.Node) and "val" in x.meta]
    if node.target is _aten.scaled_dot_product_attention.default:  # scores
        shapes.append([*given[0].shape[:-1], given[1].shape[-2]])
    elif node.target is _aten.cummax.default:  # pairs of entries
        shapes.append([*given[0].shape, given[0].shape[node.args[1]]])
    elif node.target is _aten.searchsorted.Tensor:
        shapes.append([*given[1].shape, given[0].shape[-1]])
    return shapes


def _at(size: Any, symbols: list[Any], length: int) -> float:
    """A size of a text of that length, and of one row."""
    if not isinstance(size, torch.SymInt):
        return size
    expression = size.node.expr.subs(dict.fromkeys(symbols, length))
    return float(expression.subs(dict.fromkeys(expression.free_symbols, 1)))
