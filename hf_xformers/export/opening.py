# SPDX-License-Identifier: Apache-2.0
"""The state before a decoder's first token, as a graph of the text that its encoder reads."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ..modeling_base import XFormerPreTrainedModel
from .state import Layout, begun, sample
from .whole_text import TALKATIVE, first_line, silent

_SOURCE = 5  # tokens of the text that is traced


class Opening(nn.Module):
    """input_ids and attention_mask [B, S] -> the states of `layout`: what cross-attention makes of the encoder's
    states, and what a decoder `begins` with, whatever the encoder has read."""

    def __init__(self, model: XFormerPreTrainedModel, layout: Layout, begins: tuple[Tensor, ...]):
        super().__init__()
        self.model, self.states = model, layout.states
        own = [state for state in layout.states if not state.of_memory]
        for number, x in enumerate(begins):
            self.register_buffer(f"begin_{number}", x, persistent=False)
        self.places = {state.name: f"begin_{number}" for number, state in enumerate(own)}

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> list[Tensor]:
        first = input_ids[:, :1] * 0  # any token: keys and values of the memory do not depend on it
        found = begun(self.model, input_ids, attention_mask, first, first + 1).tensors()
        batch, made = input_ids.shape[0], []
        for state in self.states:
            x = found[state.name] if state.of_memory else getattr(self, self.places[state.name])
            if not state.of_memory and state.axis is not None:
                x = x.expand([batch if axis == state.axis else size for axis, size in enumerate(x.shape)])
            made.append(x.clone(memory_format=torch.contiguous_format))
        return made


def trace_opening(
    model: XFormerPreTrainedModel, layout: Layout, begins: tuple[Tensor, ...]
) -> torch.export.ExportedProgram:
    """The graph for any batch and length. Raises `ValueError` where there is none."""
    texts, free = sample(model, 2, 1, before=_SOURCE), torch.export.Dim.DYNAMIC
    given: Any = (texts.source, texts.source_mask)
    try:
        with warnings.catch_warnings(), silent(*TALKATIVE), torch.no_grad():
            warnings.simplefilter("ignore")
            opening = Opening(model, layout, begins).eval()
            return torch.export.export(opening, given, dynamic_shapes=({0: free, 1: free},) * 2, strict=False)
    except Exception as error:
        raise ValueError(f"torch.export stops in the encoder at: {first_line(error)}") from error
