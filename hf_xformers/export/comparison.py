# SPDX-License-Identifier: Apache-2.0
"""A step's graph next to the model that it was made of, under torch and under onnxruntime."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ..modeling_base import XFormerPreTrainedModel
from .decoding_step import DecodingStep, States, after_step
from .state import Texts, longest_text, sample
from .whole_text import first_line, open_session

_STEPS = 16  # that are compared with the model
Run = Callable[[Tensor, Tensor, States], tuple[Tensor, States]]
Open = Callable[[Tensor, Tensor], States]


def compare(
    model: XFormerPreTrainedModel, run: Run, open_on: Open, step: DecodingStep, tolerance: float, what: str
) -> float:
    """The largest difference of logits, token by token, to the model on whole texts of several batches, the first
    places of some of which are padding, after texts of several lengths for an encoder."""
    longest, largest = longest_text(model), 0.0
    for batch, length, before in ((1, _STEPS, 9), (3, _STEPS, 6), (2, 2, 1)):
        length = length if longest is None else min(length, longest)
        texts = sample(model, batch, length, seed=batch, before=before)
        ids, real = texts.ids, texts.mask
        with torch.no_grad():
            expected = _whole(model, texts)
            if texts.source is None or texts.source_mask is None:
                states = step.start(batch)
            else:
                states = open_on(texts.source, texts.source_mask)
        mask = real.new_zeros(batch, step.settled)
        for place in range(length):
            mask = torch.cat((mask, real[:, place : place + 1]), 1)
            try:
                with torch.no_grad():
                    logits, states = run(ids[:, place : place + 1], mask, states)
            except Exception as error:
                raise ValueError(
                    f"{what} of {type(model).__name__} does not take {batch} texts with {mask.shape[1]} places:"
                    f" {first_line(error)}"
                ) from error
            keep = real[:, place] != 0
            if not keep.any():
                continue
            wanted = expected[:, place][keep].float()
            apart = (logits[keep].float() - wanted).abs().max().item()
            largest, limit = (
                max(largest, apart),
                tolerance * max(1.0, wanted.abs().max().item()),
            )
            if not apart <= limit:
                raise ValueError(
                    f"{what} of {type(model).__name__} differs from the model by {apart:.1e} at token {place + 1} of"
                    f" {batch} texts, more than {limit:.1e}; it does not compute this model and is not handed out."
                )
    return largest


def _whole(model: XFormerPreTrainedModel, texts: Texts) -> Tensor:
    """Logits [B, T, V] of whole texts, without a cache."""
    if texts.source is None:
        return model(input_ids=texts.ids, attention_mask=texts.mask, use_cache=False).logits
    read = {"decoder_input_ids": texts.ids, "decoder_attention_mask": texts.mask, "use_cache": False}
    return model(input_ids=texts.source, attention_mask=texts.source_mask, **read).logits


def input_names(model: XFormerPreTrainedModel) -> tuple[str, str]:
    """What a step's token and mask are called."""
    of = "decoder_" if model.config.is_encoder_decoder else ""
    return f"{of}input_ids", f"{of}attention_mask"


def under_onnxruntime(
    model: XFormerPreTrainedModel, files: tuple[Path, Path], step: DecodingStep, tolerance: float
) -> float | None:
    if importlib.util.find_spec("onnxruntime") is None:
        return None

    def session_of(file: Path) -> Callable[[dict[str, Tensor]], States]:
        session = open_session(file)
        taken = {entry.name for entry in session.get_inputs()}  # what a graph does not read may be left out of it

        def call(given: dict[str, Tensor]) -> States:
            found = session.run(None, {name: x.cpu().numpy() for name, x in given.items() if name in taken})
            return [torch.from_numpy(x).to(model.device) for x in found]

        return call

    names, (of_token, of_mask) = [state.name for state in step.states], input_names(model)
    once, opened = session_of(files[0]), None if step.opening is None else session_of(files[1])

    def run(token: Tensor, mask: Tensor, states: States) -> tuple[Tensor, States]:
        logits, *changed = once({of_token: token, of_mask: mask, **dict(zip(names, states))})
        return logits, after_step(step.states, states, changed)

    def open_on(ids: Tensor, mask: Tensor) -> States:
        return [] if opened is None else opened({"input_ids": ids, "attention_mask": mask})

    return compare(model, run, open_on, step, tolerance, "the ONNX graph")
