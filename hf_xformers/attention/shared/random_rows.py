# SPDX-License-Identifier: Apache-2.0
"""Random rows that features are made with: how they are drawn, kept, and drawn anew."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ...core.call import Call
from ...core.initialization import seeded_generator
from ...core.prepared import Prepared
from ...ops.linear.feature_maps import random_matrix

# Typed as a module, but no base at run time, so that the mixin stays out of `__init__`'s MRO.
_Base: Any = nn.Module if TYPE_CHECKING else object


class RowsOfCall(Prepared):
    """The random rows of a layer in one call."""

    rows: Tensor


class RandomRows(_Base):
    """Mixed into an attention: random rows [m, d], or [H, m, d] for features of each head's own.

    They are a saved buffer, drawn from the seed, the layer and the number of the draw, so that all processes hold the
    same ones. A pass keeps the rows that it began with, also where it is computed again for its gradients.

    Drawn anew every `redraw_interval` training passes, counted in the buffer `passes`; between passes by
    [`redraw_features`]. Evaluation, frozen projections (under adapters) and compiled training never redraw.

    Its spec has the fields `orthogonal`, `redraw_interval` and `seed`. `make_rows` comes last in `__init__`; a
    mechanism that calls it for some of its settings only has no rows, and no buffers, for the others.
    """

    directions: Tensor
    passes: Tensor
    draws: Tensor
    num_rows: int | None = None
    rows_by_head: bool = False
    regularized: bool = False

    def make_rows(self, number: int, *, by_head: bool = False, regularized: bool = False) -> None:
        """number: rows m. by_head: each head has its own. regularized: all of length sqrt(d)."""
        self.num_rows, self.rows_by_head, self.regularized = number, by_head, regularized
        self.register_buffer("directions", self.draw(0).to(torch.empty(0).device))
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))
        self.register_buffer("draws", torch.zeros((), dtype=torch.long))
        self._counted: int | None = None  # `passes` as a number, so that counting does not wait for a device

    def initialize(self, config, init) -> None:
        super().initialize(config, init)
        if self.num_rows is not None:
            init.copy_(self.directions, self.draw(0).to(self.directions.device))
            init.zeros_(self.passes)
            init.zeros_(self.draws)

    def draw(self, number: int) -> Tensor:
        """Draw `number` of this layer's rows, in float32."""
        kind = "cross" if self.cross else "causal" if self.is_causal else "self"
        generator = seeded_generator(self.spec.type, self.spec.seed, number, self.layer_idx, kind)
        with torch.device("cpu"):
            matrices = [
                random_matrix(
                    self.num_rows or 0,
                    self.head_dim,
                    orthogonal=self.spec.orthogonal,
                    scaling=int(self.regularized),
                    generator=generator,
                )
                for _ in range(self.num_heads if self.rows_by_head else 1)
            ]
            return torch.stack(matrices) if self.rows_by_head else matrices[0]

    @torch.no_grad()
    def redraw(self) -> None:
        """Replaces the random rows by the next draw."""
        self.draws += 1
        self.directions.copy_(self.draw(int(self.draws)))

    def prepare(self, context: Call, past_key_values: Cache | None) -> None:
        super().prepare(context, past_key_values)
        if not self.training or self.num_rows is None:
            return
        if context.find(RowsOfCall, id(self)) is not None:  # it runs at several depths
            return
        interval = self.spec.redraw_interval
        frozen = not (torch.is_grad_enabled() and self.q_proj.weight.requires_grad)
        if interval and not frozen and not torch.compiler.is_compiling():
            self._counted = int(self.passes) if self._counted is None else self._counted
            if self._counted and self._counted % interval == 0:
                self.redraw()
            self._counted += 1
            self.passes += 1
        context.keep(RowsOfCall(self.directions.clone()), id(self))

    def rows(self, context: Call) -> Tensor:
        """Those of this call."""
        if not self.training:  # nothing redraws them, and a graph need not know which layer it is of
            return self.directions
        found = context.find(RowsOfCall, id(self))
        return self.directions if found is None else found.rows

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._counted = None


def redraw_features(model: nn.Module) -> int:
    """Gives every layer of `model` that has random features its next ones; returns how many layers there were.

    For training loops that draw by a schedule of their own (with `redraw_interval=0`) or compile the model. Not for
    the middle of generating a text, whose state belongs to the features it was made with.
    """
    layers = [module for module in model.modules() if isinstance(module, RandomRows) and module.num_rows is not None]
    for layer in layers:
        layer.redraw()
    return len(layers)
