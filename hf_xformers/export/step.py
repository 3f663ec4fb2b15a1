# SPDX-License-Identifier: Apache-2.0
"""One step of a decoder as a graph: a token and the state so far go in, logits and the next state come out.

```python
from hf_xformers.export import export_step, export_step_onnx

step = export_step(model)                            # torch.export, for any batch and any number of tokens
report = export_step_onnx(model, "step.onnx")        # the same for runtimes without Python
```

The state has one form from the first token on. It is that of texts which begin with `settled` places of padding:
windows are full, of padding at first. So a generation starts from the state of `settled` such places, which comes with
the graph, and its mask starts with as many zeros:

    states, mask = step.start(batch), zeros [batch, settled]
    for each token [batch, 1]:
        mask = mask with ones behind it
        logits, states = step(token, mask, states)

The decoder of an encoder-decoder has its memory in the state, as cross-attention has read it: a second graph makes the
state before the first token of a text for the encoder,

    states, mask = step.start_on(input_ids [batch, source], attention_mask), zeros [batch, settled]

and what no step changes comes back as it was. ONNX graphs do not give that out again.

`hf-xformers export --model FOLDER --output step.onnx --step` does it for a saved model.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ..compat import FakeTensorMode
from ..modeling_base import XFormerPreTrainedModel
from .comparison import compare, input_names, under_onnxruntime
from .decoding_step import DecodingStep, States, StepReport, after_step
from .opening import trace_opening
from .state import Held, Layout, advance, lengths_to_try, longest_text, observe, read, sample
from .whole_text import TALKATIVE, as_exported, check_model, exporter_of_onnx, first_line, silent, to_onnx

_FAR = (1 << 16) + 3  # tokens after which a graph has to be the same as at first
_NEXT = "next."


class _Step(nn.Module):
    """A model with a cache as a function of tensors. tokens that were read: all of the mask but the last one."""

    def __init__(self, model: XFormerPreTrainedModel, template: Held, layout: Layout):
        super().__init__()
        self.model, self.template, self.layout = model, template, layout

    def forward(self, input_ids: Tensor, attention_mask: Tensor, states: States) -> tuple[Tensor, States]:
        tokens = attention_mask.shape[1] - 1
        given: dict[str, Any] = {state.name: x for state, x in zip(self.layout.states, states, strict=True)}
        given.update({place: tokens + apart for place, apart in self.layout.counters.items()})
        held = self.template.around(given)
        logits = advance(self.model, input_ids, attention_mask, held)
        after = held.tensors()
        # No view, and no input itself: what a runtime gets is its own.
        changed = [after[state.name] for state in self.layout.states if not state.of_memory]
        return logits[:, -1], [x.clone(memory_format=_FLAT) for x in changed]


_FLAT = torch.contiguous_format


def export_step(model: XFormerPreTrainedModel, *, tolerance: float = 1e-4) -> DecodingStep:
    """A step of a decoder as a program of torch.export, for any batch and any number of tokens before it.

    Args:
        tolerance: how far it may be from the model, relative to the largest logit.

    Raises:
        TypeError: no model of this package.
        ValueError: no decoder, half precision, or its step has no such graph; the message says what stands in the way.
    """
    _check(model)
    with as_exported(model, literal=False):
        return _exported(model, tolerance)


def export_step_onnx(
    model: XFormerPreTrainedModel, path: str | Path, *, tolerance: float = 1e-4, opset: int | None = None
) -> StepReport:
    """Writes a step of a decoder as an ONNX graph to `path`, and the states that it begins with next to it, as
    `<name>.start.safetensors`; both, or neither.

    Args:
        tolerance: how far onnxruntime, if it is installed, may be from the model, relative to the largest logit.
        opset: version of ONNX's operators; None: that of torch's exporter.

    Raises:
        ImportError: onnx and onnxscript are not installed.
        TypeError: no model of this package.
        ValueError: no decoder, half precision, or its step has no such graph; the message says what stands in the way.
    """
    _check(model)
    exporter_of_onnx()
    path = Path(path).absolute()
    if not path.parent.is_dir() or path.is_dir():
        raise ValueError(f"the graph cannot be written to {str(path)!r}; give a file in a folder that exists.")
    kind = "onnx" if model.config.is_encoder_decoder else "safetensors"
    start = path.with_name(f"{path.stem}.start.{kind}")
    problem: ValueError | None = None
    for literal in (False, True):
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".exporting-") as folder, as_exported(model, literal):
            step = _exported(model, tolerance)
            try:
                _to_onnx(model, step, opset).save(str(Path(folder) / path.name))
                _save_start(model, step, Path(folder) / start.name, opset)
                made = (Path(folder) / path.name, Path(folder) / start.name)
                difference = under_onnxruntime(model, made, step, tolerance)
            except ValueError as error:  # the literal equation may have one
                problem = error
                continue
            for file in sorted(Path(folder).iterdir(), reverse=True):  # the graph last, which refers to the others
                os.replace(file, path.parent / file.name)
        return StepReport(str(path), str(start), step.states, step.settled, literal, difference)
    raise problem or RuntimeError("no form of attention was tried")


def _check(model: XFormerPreTrainedModel) -> None:
    check_model(model)
    name = type(model).__name__
    decodes = model.config.is_decoder or model.config.is_encoder_decoder
    if not decodes or model.get_output_embeddings() is None:
        raise ValueError(
            f"{name} generates nothing, step by step; export it whole (`export_onnx`, or `hf-xformers export` without"
            " `--step`)."
        )


def _exported(model: XFormerPreTrainedModel, tolerance: float) -> DecodingStep:
    reason = ""
    for tokens in lengths_to_try(model):
        try:
            layout = observe(model, tokens)
            program = _traced(model, layout, tokens)
            begin = _begin(model, layout, tokens)
            opening = trace_opening(model, layout, begin) if model.config.is_encoder_decoder else None
        except ValueError as error:  # longer texts may follow a rule that shorter ones do not
            reason = reason or str(error)
            continue
        step = DecodingStep(program, layout.states, tokens, begin, 0.0, opening)
        difference = compare(model, step, step.start_on, step, tolerance, "the exported program")
        return dataclasses.replace(step, difference=difference)
    raise ValueError(
        f"{type(model).__name__} has no graph of one step for texts of every length: {reason.rstrip('.')}. Generate"
        " with `generate`, or export whole texts with `export_onnx`."
    )


def _begin(model: XFormerPreTrainedModel, layout: Layout, tokens: int) -> tuple[Tensor, ...]:
    """The states of one text that is `tokens` places of padding so far, but for those of the memory."""
    text = sample(model, 1, tokens)
    found = read(model, text._replace(ids=torch.zeros_like(text.ids), mask=torch.zeros_like(text.mask))).tensors()
    return tuple(found[state.name].contiguous() for state in layout.states if not state.of_memory)


def _traced(model: XFormerPreTrainedModel, layout: Layout, tokens: int) -> torch.export.ExportedProgram:
    """Raises `ValueError` where the program is not one for every batch and length."""
    texts = sample(model, 2, tokens)
    held = read(model, texts)
    found = held.tensors()
    free = torch.export.Dim.DYNAMIC
    given = (
        texts.ids[:, :1],
        torch.cat((texts.mask, texts.mask.new_ones(2, 1)), 1),
        [found[x.name].contiguous() for x in layout.states],
    )
    axes = ({0: free}, {0: free, 1: free}, [dict.fromkeys(state.free_axes, free) for state in layout.states])
    step = _Step(model, held.around({}), layout).eval()
    try:
        with warnings.catch_warnings(), silent(*TALKATIVE), torch.no_grad():
            warnings.simplefilter("ignore")
            program = torch.export.export(step, given, dynamic_shapes=axes, strict=False)
    except Exception as error:
        raise ValueError(f"torch.export stops at: {first_line(error)}") from error
    _check_far(model, program, layout, tokens)
    return program


def _check_far(
    model: XFormerPreTrainedModel, program: torch.export.ExportedProgram, layout: Layout, settled: int
) -> None:
    """Runs the program on shapes alone, which tells for any length whether it is still the same one, and whether
    states continue as they were observed. Raises `ValueError` where not."""
    longest, module = longest_text(model), program.module()
    most = _FAR if longest is None else longest
    for batch, more, memory in ((2, 0, 7), (1, 1, 1), (3, min(37, most - 1), 40), (1, most - 1, 2)):
        with FakeTensorMode(allow_non_fake_inputs=True):
            given, after = (
                [
                    torch.empty(
                        state.sizes(batch, settled + more + count, memory), dtype=state.dtype, device=model.device
                    )
                    for state in layout.states
                ]
                for count in (0, 1)
            )
            token, mask = (
                torch.zeros((batch, count), dtype=torch.long, device=model.device) for count in (1, settled + more + 1)
            )
            try:
                _, found = module(token, mask, given)
            except Exception as error:
                raise ValueError(
                    f"the graph would not be the same after {more + 1} tokens as at first ({first_line(error)})"
                ) from error
        for state, is_now, should_be in zip(layout.states, after_step(layout.states, given, found), after):
            if is_now.shape != should_be.shape:
                raise ValueError(
                    f"`{state.name}` of its state would be {list(is_now.shape)} in place of {list(should_be.shape)}"
                    f" after {more + 1} tokens"
                )


def _to_onnx(model: XFormerPreTrainedModel, step: DecodingStep, opset: int | None) -> Any:
    changed = [_NEXT + state.name for state in step.states if not state.of_memory]
    inputs = [*input_names(model), *(state.name for state in step.states)]
    return _graph(model, step.program, inputs, ["logits", *changed], opset)


def _save_start(model: XFormerPreTrainedModel, step: DecodingStep, path: Path, opset: int | None) -> None:
    """Writes what a generation begins with: states, or the graph that makes them of an encoder's text."""
    if step.opening is not None:
        names = [state.name for state in step.states]
        _graph(model, step.opening, ["input_ids", "attention_mask"], names, opset).save(str(path))
        return
    # Layers may begin with one tensor, which such a file cannot hold.
    begin = {state.name: x.clone(memory_format=torch.contiguous_format) for state, x in zip(step.states, step.begin)}
    save_file(begin, path)


def _graph(
    model: XFormerPreTrainedModel,
    program: torch.export.ExportedProgram,
    inputs: Sequence[str],
    outputs: Sequence[str],
    opset: int | None,
) -> Any:
    what = f"the step of {type(model).__name__}"
    return to_onnx(
        program, inputs, outputs, opset, what, lambda e: ValueError(f"{what} has no ONNX graph ({first_line(e)}).")
    )
