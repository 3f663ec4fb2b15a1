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

`hf-xformers export --model FOLDER --output step.onnx --step` does it for a saved model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..modeling_base import XFormerPreTrainedModel
from .state import Layout, StepState, around, leaves, lengths_to_try, longest_text, observe, read, sample
from .whole_text import TALKATIVE, as_exported, exporter_of_onnx, first_line, layers_of, silent, translations

_STEPS = 16  # that are compared with the model
_FAR = (1 << 16) + 3  # tokens after which a graph has to be the same as at first
_NEXT = "next."
States = list[Tensor]
Run = Callable[[Tensor, Tensor, States], tuple[Tensor, States]]


@dataclass(frozen=True)
class DecodingStep:
    """A step of a decoder under torch.export.

    program: the graph of (token [B, 1], attention_mask [B, tokens with this one], states) -> (logits [B, V], states
    after it); `torch.export.save` stores it. states: what each state is, in this order. settled: places of padding
    before every text. begin: the states of such padding alone, for one text. difference: largest absolute difference
    to the model on texts of several batches and lengths.
    """

    program: torch.export.ExportedProgram
    states: tuple[StepState, ...]
    settled: int
    begin: tuple[Tensor, ...]
    difference: float

    def start(self, batch: int = 1) -> States:
        """The states before the first token of so many texts."""
        return _for_rows(self.states, self.begin, batch)

    def __call__(self, token: Tensor, attention_mask: Tensor, states: States) -> tuple[Tensor, States]:
        return self._run(token, attention_mask, states)

    @functools.cached_property
    def _run(self) -> nn.Module:
        return self.program.module()


@dataclass(frozen=True)
class StepReport:
    """path: the graph. start: the file of the states before the first token (safetensors, for one text; they are
    repeated along the rows' axis for more). states: what each of them is. The graph reads `input_ids` [B, 1],
    `attention_mask` [B, tokens] and every state by its name, and gives `logits` [B, V] and each state as `next.` and
    its name. settled: places of padding before every text. literal: whether attention is exported as its literal
    equation. difference: largest absolute difference to the model under onnxruntime; None where that is not
    installed."""

    path: str
    start: str
    states: tuple[StepState, ...]
    settled: int
    literal: bool
    difference: float | None


class _Step(nn.Module):
    """A model with a cache as a function of tensors. tokens that were read: all of the mask but the last one."""

    def __init__(self, model: XFormerPreTrainedModel, template: Any, layout: Layout):
        super().__init__()
        self.model, self.template, self.layout = model, template, layout

    def forward(self, input_ids: Tensor, attention_mask: Tensor, states: States) -> tuple[Tensor, States]:
        tokens = attention_mask.shape[1] - 1
        given: dict[str, Any] = {state.name: x for state, x in zip(self.layout.states, states, strict=True)}
        given.update({place: tokens + apart for place, apart in self.layout.counters.items()})
        cache = around(self.template, given)
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True)
        after = dict(leaves(output.past_key_values))
        # No view, and no input itself: what a runtime gets is its own.
        return output.logits[:, -1], [after[state.name].clone(memory_format=_FLAT) for state in self.layout.states]


_FLAT = torch.contiguous_format


def export_step(model: XFormerPreTrainedModel, *, tolerance: float = 1e-4) -> DecodingStep:
    """A step of a decoder as a program of torch.export, for any batch and any number of tokens before it.

    Args:
        tolerance: how far it may be from the model, relative to the largest logit.

    Raises:
        ValueError: no decoder, or its step has no such graph; the message says what stands in the way.
    """
    _check(model)
    with as_exported(model, literal=False):
        return _exported(model, tolerance)


def export_step_onnx(
    model: XFormerPreTrainedModel, path: str | Path, *, tolerance: float = 1e-4, opset: int | None = None
) -> StepReport:
    """Writes a step of a decoder as an ONNX graph to `path`, and the states that it begins with beside it, as
    `<name>.start.safetensors`; both, or neither.

    Args:
        tolerance: how far onnxruntime, if it is installed, may be from the model, relative to the largest logit.
        opset: version of ONNX's operators; None: that of torch's exporter.

    Raises:
        ImportError: onnx and onnxscript are not installed.
        ValueError: no decoder, or its step has no such graph; the message says what stands in the way.
    """
    _check(model)
    exporter_of_onnx()
    path = Path(path).absolute()
    if not path.parent.is_dir() or path.is_dir():
        raise ValueError(f"the graph cannot be written to {str(path)!r}; give a file in a folder that exists.")
    start = path.with_name(f"{path.stem}.start.safetensors")
    usual = all(layer.attention.exports_usual_path for layer in layers_of(model))
    problem: ValueError | None = None
    for literal in (False,) if usual else (False, True):
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".exporting-") as folder, as_exported(model, literal):
            step = _exported(model, tolerance)
            try:
                program = _to_onnx(model, step, opset)
                program.save(str(Path(folder) / path.name))
                difference = _under_onnxruntime(model, Path(folder) / path.name, step, tolerance)
            except ValueError as error:  # the literal equation may have one
                problem = error
                continue
            named = {state.name: x.contiguous() for state, x in zip(step.states, step.begin)}
            save_file(named, Path(folder) / start.name)
            for file in sorted(Path(folder).iterdir(), reverse=True):  # the graph last, which refers to the others
                os.replace(file, path.parent / file.name)
        return StepReport(str(path), str(start), step.states, step.settled, literal, difference)
    raise problem or RuntimeError("no form of attention was tried")


def _check(model: XFormerPreTrainedModel) -> None:
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{name} has two towers, and no graph of one step here; take `export_onnx` for whole texts, or"
            " transformers' exporters (`DynamoExporter.export_for_generation`)."
        )
    if not model.config.is_decoder or model.get_output_embeddings() is None:
        raise ValueError(f"{name} generates nothing, step by step; export it with `export_onnx`.")


def _exported(model: XFormerPreTrainedModel, tolerance: float) -> DecodingStep:
    reason = ""
    for tokens in lengths_to_try(model):
        try:
            layout = observe(model, tokens)
            program = _traced(model, layout, tokens)
        except ValueError as error:  # longer texts may follow a rule that shorter ones do not
            reason = reason or str(error)
            continue
        begin = _begin(model, layout, tokens)
        step = DecodingStep(program, layout.states, tokens, begin, 0.0)
        difference = _compare(model, step, step, tolerance, "the exported program")
        return dataclasses.replace(step, difference=difference)
    raise ValueError(
        f"{type(model).__name__} has no graph of one step for texts of every length: {reason.rstrip('.')}. Generate"
        " with `generate`, or export whole texts with `export_onnx`."
    )


def _begin(model: XFormerPreTrainedModel, layout: Layout, tokens: int) -> tuple[Tensor, ...]:
    """The states of one text that is `tokens` places of padding so far."""
    ids = torch.zeros((1, tokens), dtype=torch.long, device=model.device)
    found = dict(leaves(read(model, ids, torch.zeros_like(ids))))
    return tuple(found[state.name].contiguous() for state in layout.states)


def _for_rows(states: Sequence[StepState], begin: Sequence[Tensor], batch: int) -> States:
    """States of one text -> of `batch` texts."""
    return [
        x.clone() if state.axis is None else x.repeat_interleave(batch, dim=state.axis)
        for state, x in zip(states, begin)
    ]


def _traced(model: XFormerPreTrainedModel, layout: Layout, tokens: int) -> torch.export.ExportedProgram:
    """Raises `ValueError` where the program is not one for every batch and length."""
    ids, mask = sample(model, 2, tokens)
    cache = read(model, ids, mask)
    found = dict(leaves(cache))
    free = torch.export.Dim.DYNAMIC
    given = (
        ids[:, :1],
        torch.cat((mask, mask.new_ones(2, 1)), 1),
        [found[x.name].contiguous() for x in layout.states],
    )
    axes = ({0: free}, {0: free, 1: free}, [dict.fromkeys(state.free_axes, free) for state in layout.states])
    step = _Step(model, around(cache, {}), layout).eval()
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
    states go on as they were observed. Raises `ValueError` where not."""
    longest, module = longest_text(model), program.module()
    most = _FAR if longest is None else longest
    for batch, more in ((2, 0), (1, 1), (3, min(37, most - 1)), (1, most - 1)):
        with FakeTensorMode(allow_non_fake_inputs=True):
            given, after = (
                [torch.empty(state.sizes(batch, settled + more + count), dtype=state.dtype) for state in layout.states]
                for count in (0, 1)
            )
            token, mask = (torch.zeros((batch, count), dtype=torch.long) for count in (1, settled + more + 1))
            try:
                _, found = module(token, mask, given)
            except Exception as error:
                raise ValueError(
                    f"the graph would not be the same after {more + 1} tokens as at first ({first_line(error)})"
                ) from error
        for state, is_now, should_be in zip(layout.states, found, after):
            if is_now.shape != should_be.shape:
                raise ValueError(
                    f"`{state.name}` of its state would be {list(is_now.shape)} in place of {list(should_be.shape)}"
                    f" after {more + 1} tokens"
                )


def _compare(model: XFormerPreTrainedModel, run: Run, step: DecodingStep, tolerance: float, what: str) -> float:
    """The largest difference of logits, token by token, to the model on whole texts of several batches, the first
    places of some of which are padding."""
    longest, largest = longest_text(model), 0.0
    for batch, length in ((1, _STEPS), (3, _STEPS), (2, 2)):
        length = length if longest is None else min(length, longest)
        ids, real = sample(model, batch, length, seed=batch)
        with torch.no_grad():
            expected = model(input_ids=ids, attention_mask=real, use_cache=False).logits
        states, mask = step.start(batch), real.new_zeros(batch, step.settled)
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


def _to_onnx(model: XFormerPreTrainedModel, step: DecodingStep, opset: int | None) -> Any:
    names = [state.name for state in step.states]
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), silent(*TALKATIVE):
            warnings.simplefilter("ignore")
            return torch.onnx.export(
                step.program,
                dynamo=True,
                input_names=["input_ids", "attention_mask", *names],
                output_names=["logits", *(_NEXT + name for name in names)],
                opset_version=opset,
                custom_translation_table=translations(),
                verbose=False,
            )
    except Exception as error:
        raise ValueError(f"the step of {type(model).__name__} has no ONNX graph ({first_line(error)}).") from error


def _under_onnxruntime(
    model: XFormerPreTrainedModel, path: Path, step: DecodingStep, tolerance: float
) -> float | None:
    try:
        import onnxruntime
    except ImportError:
        return None
    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:  # its classes have no base of their own
        raise ValueError(
            f"onnxruntime {onnxruntime.__version__} does not run the graph ({first_line(error)}); give another"
            " `opset`."
        ) from error
    names = [state.name for state in step.states]
    taken = {entry.name for entry in session.get_inputs()}  # what a graph does not read may be left out of it

    def run(token: Tensor, mask: Tensor, states: States) -> tuple[Tensor, States]:
        given = {"input_ids": token, "attention_mask": mask, **dict(zip(names, states))}
        found = session.run(None, {name: x.cpu().numpy() for name, x in given.items() if name in taken})
        logits, *after = (torch.from_numpy(x) for x in found)
        return logits.to(model.device), [x.to(model.device) for x in after]

    return _compare(model, run, step, tolerance, "the ONNX graph")
