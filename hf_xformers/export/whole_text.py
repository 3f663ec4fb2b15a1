# SPDX-License-Identifier: Apache-2.0
"""Models of whole texts, images or sounds as ONNX graphs, for runtimes without Python.

```python
from hf_xformers.export import export_onnx

report = export_onnx(model, "model.onnx")
```

`hf-xformers export --model FOLDER --output model.onnx` does the same for a saved model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.evaluating import evaluating
from ..modeling_base import XFormerPreTrainedModel
from .growth import grows_with_square
from .translations import translations

# What a graph gives, where the model's output has it.
_RESULTS = ("logits", "last_hidden_state", "pooler_output", "start_logits", "end_logits")
_FAR = 1 << 16  # tokens, for which a graph without a limit has to be the same
# Loggers of what the exporter is made of; what matters of it is in the error or in the comparison.
TALKATIVE = ("torch.onnx", "onnxscript", "torch.export", "torch.fx", "torch.fx.experimental.symbolic_shapes")


@dataclass(frozen=True)
class OnnxReport:
    """
    Args:
        path: the file.
        inputs, outputs: names of what the graph reads and gives.
        dynamic: whether batch and length may differ from call to call (else they are `shape`).
        literal: whether attention is exported as its literal equation.
        quadratic: whether the largest tensor of the graph grows with the square of the length.
        difference: largest absolute difference to the model under onnxruntime; None where that is not installed.
    """

    path: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dynamic: bool
    shape: tuple[int, int]
    literal: bool
    quadratic: bool
    difference: float | None

    @property
    def shapes(self) -> str:
        """What the graph takes, in words."""
        if not self.dynamic:
            return f"{self.shape[0]} images" if "pixel_values" in self.inputs else f"{self.shape[0]} x {self.shape[1]}"
        return "any number of images" if "pixel_values" in self.inputs else "any batch and length"

    @property
    def attention(self) -> str:
        """Which form attention has, and what the graph's memory grows with, in words."""
        memory = f", memory O(length{'^2' if self.quadratic else ''})" if self.dynamic else ""
        return ("literal equation" if self.literal else "usual path") + memory


class _Plain(nn.Module):
    """A model whose output is a tuple of tensors. What it keeps between steps has no place in one graph, so that
    decoders read the whole text in every call."""

    def __init__(self, model: XFormerPreTrainedModel, names: tuple[str, ...]):
        super().__init__()
        self.model, self.names = model, names
        decodes = model.config.is_decoder or model.config.is_encoder_decoder
        self.options = {"use_cache": False} if decodes else {}

    def results(self, **inputs: Tensor) -> tuple[Tensor, ...]:
        output = self.model(**inputs, **self.options)
        return tuple(output[name] for name in self.names)


class _ReadsText(_Plain):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        return self.results(input_ids=input_ids, attention_mask=attention_mask)


class _ReadsTypedText(_Plain):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> tuple[Tensor, ...]:
        return self.results(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)


class _ReadsTwoTexts(_Plain):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor) -> tuple[Tensor, ...]:
        return self.results(input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=decoder_input_ids)


class _ReadsImages(_Plain):
    def forward(self, pixel_values: Tensor) -> tuple[Tensor, ...]:
        return self.results(pixel_values=pixel_values)


class _ReadsSound(_Plain):
    def forward(self, input_features: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        return self.results(input_features=input_features, attention_mask=attention_mask)


def _plain(model: XFormerPreTrainedModel, names: tuple[str, ...]) -> _Plain:
    if model.config.modality == "image":
        return _ReadsImages(model, names)
    if model.config.modality == "sound":
        return _ReadsSound(model, names)
    if _reads_two_texts(model):
        return _ReadsTwoTexts(model, names)
    return (_ReadsTypedText if _reads_types(model) else _ReadsText)(model, names)


def _reads_two_texts(model: XFormerPreTrainedModel) -> bool:
    """Whether the decoder's text is given: a classifier makes it of the encoder's, with its padding."""
    return model.config.is_encoder_decoder and (model.base_model is model or model.get_output_embeddings() is not None)


def _reads_types(model: XFormerPreTrainedModel) -> bool:
    return model.config.type_vocab_size > 1 and not model.config.is_encoder_decoder


def export_onnx(
    model: XFormerPreTrainedModel,
    path: str | Path,
    *,
    batch: int = 2,
    length: int = 16,
    dynamic: bool = True,
    tolerance: float = 1e-4,
    opset: int | None = None,
) -> OnnxReport:
    """Writes `model`, with or without a head, as an ONNX graph: of `input_ids` and `attention_mask`, both int64
    `[batch, length]`, where the model tells texts apart of `token_type_ids`, and of an encoder-decoder that is no
    classifier of `decoder_input_ids`; of an image model of `pixel_values`; of a model of sound of `input_features` and
    `attention_mask`. Decoders are exported without their cache: the graph gives the logits of all tokens of a text,
    and a generation calls it with the text so far ([`export_step_onnx`] has graphs of one step). Attention has its
    usual path, or where that has no graph its literal equation. The file, and one next to it for weights of more than
    2 GB, are written whole or not at all.

    Args:
        batch, length: the sample that is traced; with `dynamic=False` also the only shape that the graph takes.
        tolerance: how far onnxruntime, if it is installed, may be from the model on real tokens, relative to the
            largest output. Another shape than the sample's is compared as well where shapes are dynamic.
        opset: version of ONNX's operators; None: that of torch's exporter.

    Raises:
        ImportError: onnx and onnxscript are not installed.
        TypeError: no model of this package; of one of peft, give what `merge_and_unload()` makes.
        ValueError: the model has no such graph (the message says what stands in the way), also of that opset, its
            weights are in half precision, in which nothing can be compared, or the graph differs.
    """
    check_model(model)
    least = 2 if dynamic else 1  # where sizes are free, 1 is traced as fixed
    if batch < least or length < least:
        raise ValueError(
            f"the sample must be {least} x {least} or more, got {batch} x {length}: raise `batch` or `length`."
        )
    exporter_of_onnx()
    if dynamic:
        for layer in layers_of(model):
            if reason := layer.attention.why_not.get("any_length"):
                raise ValueError(
                    f"attention {layer.attention.type!r} has no graph for every length: {reason}; give `length` and "
                    "`dynamic=False`."
                )
    path = Path(path)
    if not path.absolute().parent.is_dir() or path.is_dir():
        raise ValueError(f"the graph cannot be written to {str(path)!r}; give a file in a folder that exists.")
    problem: ValueError | None = None
    for literal in (False, True):
        scratch = tempfile.TemporaryDirectory(dir=path.absolute().parent, prefix=".exporting-")
        with scratch as folder, as_exported(model, literal), torch.no_grad():
            try:
                made = _write(model, Path(folder) / path.name, (batch, length), dynamic, literal, tolerance, opset)
            except ValueError as error:  # the literal equation may have a graph; what is said is of the usual path
                problem = problem or error
                continue
            for file in sorted(Path(folder).iterdir(), reverse=True):  # weights, then the graph that refers to them
                os.replace(file, path.absolute().parent / file.name)
        return dataclasses.replace(made, path=str(path))
    raise problem or RuntimeError("no form of attention was tried")


def _write(
    model: XFormerPreTrainedModel,
    path: Path,
    shape: tuple[int, int],
    dynamic: bool,
    literal: bool,
    tolerance: float,
    opset: int | None,
) -> OnnxReport:
    """Writes the graph of a model as it is set, and compares it."""
    longest = _longest(model)
    traced = shape
    if dynamic and not literal and model.config.modality == "text":
        # 3: by which the sample of a decoder is shorter
        least = max(layer.attention.traced_length(layer) for layer in layers_of(model)) + 3
        traced = shape[0], max(shape[1], least if longest is None else min(least, longest))
    sample = _sample(model, *traced)
    output = model(**sample)
    names = tuple(name for name in _RESULTS if isinstance(getattr(output, name, None), Tensor))
    if not names:
        raise ValueError(
            f"{type(model).__name__} gives {', '.join(output)}, none of which a graph hands out; export another"
            " `head` of it, such as Model or ForMaskedLM."
        )
    what = type(model).__name__
    program = _trace(_plain(model, names), sample, dynamic, literal, what)
    most = min((bounds.upper for bounds in program.range_constraints.values()), default=_FAR)
    if dynamic and not literal and most < (_FAR if longest is None else longest):
        raise ValueError(
            f"{what} has no ONNX graph of its computation (from {most + 1} tokens on it would be"
            " another one); `dynamic=False` may give a graph for one shape."
        )
    to_onnx(program, list(sample), names, opset, what, lambda error: _no_graph(what, error, dynamic)).save(str(path))
    difference = _compare(model, path, names, _shapes(shape, traced, longest, dynamic), tolerance)
    grows = grows_with_square(program, [name for name in sample if name != "pixel_values"])
    return OnnxReport(str(path), tuple(sample), names, dynamic, shape, literal, grows, difference)


def exporter_of_onnx() -> None:
    """Raises `ImportError` where what torch exports with is not installed."""
    try:
        import onnxscript  # noqa: F401
    except ImportError:
        raise ImportError("ONNX graphs are made with onnx and onnxscript: pip install onnx onnxscript") from None


def check_model(model: Any) -> None:
    """Raises `TypeError` for others' models, `ValueError` for half precision, whose rounding would hide a mistake."""
    if not isinstance(model, XFormerPreTrainedModel):
        remedy = "merge the adapter by `merge_and_unload()`" if hasattr(model, "peft_config") else "convert it first"
        raise TypeError(f"{type(model).__name__} is no model of hf_xformers, and those alone are exported; {remedy}.")
    if model.dtype in (torch.float16, torch.bfloat16):
        raise ValueError(f"graphs are compared in float32, and the model is in {model.dtype}; give `model.float()`.")


def open_session(path: Path) -> Any:
    """onnxruntime's session on a file. Raises ValueError for a graph that it does not run."""
    import onnxruntime

    try:
        return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:  # its classes have no base of their own
        raise ValueError(
            f"onnxruntime {onnxruntime.__version__} does not run the graph ({first_line(error)}); give another"
            " `opset`."
        ) from error


def first_line(error: BaseException) -> str:
    """What an exporter says at bottom, in short."""
    while error.__cause__ is not None:
        error = error.__cause__
    said = str(error).strip()
    if "specialized it to be" in said:
        return "lengths or batches that should be free become constants of the graph"
    return said.splitlines()[0][:200] if said else type(error).__name__


@contextlib.contextmanager
def as_exported(model: XFormerPreTrainedModel, literal: bool) -> Iterator[None]:
    """The model in evaluation mode, on the path that is exported, and afterwards as it was."""
    implementation = model.config._attn_implementation
    towers = [part for part in model.modules() if isinstance(part, XFormerPreTrainedModel)]
    unpads = [tower.config for tower in towers if tower.config.unpad_inputs]
    try:
        model.set_attn_implementation("eager" if literal else "sdpa")
        for config in unpads:
            config.unpad_inputs = False
        with evaluating(model):
            yield
    finally:
        model.set_attn_implementation(implementation)
        for config in unpads:
            config.unpad_inputs = True


def layers_of(model: XFormerPreTrainedModel) -> list[Any]:
    """The distinct layers of all towers."""
    return [layer for tower in model.config.tower_configs() for layer in tower.layer_configs()]


def _sample(model: XFormerPreTrainedModel, batch: int, length: int) -> dict[str, Tensor]:
    """Inputs: ids and a mask [batch, length] in which every row but the first is padded, or images, or features of
    frames and their mask."""
    generator, config = torch.Generator().manual_seed(0), model.config
    if config.modality == "image":
        size = (batch, config.num_channels, *config.image_shape)
        return {"pixel_values": torch.randn(size, generator=generator).to(model.device, model.dtype)}
    lengths = torch.arange(batch).neg() + length
    mask = (torch.arange(length) < lengths.clamp(min=1)[:, None]).long()
    if config.modality == "sound":
        features = torch.randn((batch, length, config.num_mel_bins), generator=generator)
        return {"input_features": features.to(model.device, model.dtype), "attention_mask": mask.to(model.device)}
    ids = torch.randint(0, config.vocab_size, (batch, length), generator=generator)
    given = {"input_ids": ids, "attention_mask": mask}
    if _reads_types(model):
        given["token_type_ids"] = torch.randint(0, config.type_vocab_size, (batch, length), generator=generator)
    if _reads_two_texts(model):  # of a length of its own
        shape = (batch, max(2, length - 3))
        rows = config.tower("decoder").vocab_size
        given["decoder_input_ids"] = torch.randint(0, rows, shape, generator=generator)
    return {name: tensor.to(model.device) for name, tensor in given.items()}


def _trace(
    module: nn.Module, sample: dict[str, Tensor], dynamic: bool, literal: bool, model: str
) -> torch.export.ExportedProgram:
    axes = {name: range(1 if name == "pixel_values" else 2) for name in sample}  # images have one size
    free = {name: dict.fromkeys(places, torch.export.Dim.DYNAMIC) for name, places in axes.items()}
    shapes = free if dynamic else None
    problem: Exception | None = None
    for strict in (False, True) if literal else (False,):  # dynamo continues at some numbers of tensors
        try:
            with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), silent(*TALKATIVE):
                warnings.simplefilter("ignore")
                given = tuple(sample.values())
                return torch.export.export(module.eval(), given, dynamic_shapes=shapes, strict=strict)
        except Exception as error:
            problem = problem or error
    raise _no_graph(model, problem or RuntimeError("nothing was traced"), dynamic) from problem


def to_onnx(
    program: torch.export.ExportedProgram,
    inputs: Sequence[str],
    outputs: Sequence[str],
    opset: int | None,
    what: str,
    refused: Callable[[Exception], ValueError],
) -> Any:
    """torch's ONNX program. what: it computes; refused: the error where the exporter ends with one."""
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), silent(*TALKATIVE):
            warnings.simplefilter("ignore")
            made = torch.onnx.export(
                program,
                dynamo=True,
                input_names=list(inputs),
                output_names=list(outputs),
                opset_version=opset,
                custom_translation_table=translations(),
                verbose=False,
            )
    except Exception as error:
        raise refused(error) from error
    version = None if made is None else made.model.opset_imports.get("")
    if opset is not None and version != opset:  # where a conversion fails, the exporter keeps its own version
        raise ValueError(
            f"{what} has no ONNX graph of opset {opset}, but one of opset {version}; leave `opset` out, or take"
            " another."
        )
    return made


def _no_graph(model: str, error: Exception, dynamic: bool) -> ValueError:
    first = first_line(error)
    missing = first.startswith("No ONNX function found")  # an operator, and so for one shape as well
    remedy = "; `dynamic=False` may give a graph for one shape" if dynamic and not missing else ""
    return ValueError(f"{model} has no ONNX graph of its computation ({first}){remedy}.")


@contextlib.contextmanager
def silent(*names: str) -> Iterator[None]:
    """Loggers that speak of errors alone."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


def _longest(model: XFormerPreTrainedModel) -> int | None:
    """The most tokens that all towers take; None: any number."""
    inner: Any = model.base_model
    towers = [tower for tower in (inner.trunk, inner.decoder) if tower is not None]
    limits = [tower.max_length for tower in towers if tower.max_length is not None]
    return min(limits) if limits else None


def _shapes(
    shape: tuple[int, int], traced: tuple[int, int], longest: int | None, dynamic: bool
) -> list[tuple[int, int]]:
    """Shapes that are compared: of a graph for every length also others than what was traced, and one token."""
    if not dynamic:
        return [shape]
    (batch, length), most = shape, traced[1] + 5 if longest is None else longest
    found = [shape, (batch + 1, min(length + 5, most)), (1, max(length - 3, 1)), (2, 1)]
    return found if traced == shape else [*found, (2, min(traced[1] + 5, most))]


def _compare(
    model: XFormerPreTrainedModel, path: Path, names: tuple[str, ...], shapes: list[tuple[int, int]], tolerance: float
) -> float | None:
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    session = open_session(path)
    largest = 0.0
    for shape in shapes:
        inputs = _sample(model, *shape)
        output = model(**inputs)
        given = {name: tensor.cpu().numpy() for name, tensor in inputs.items()}
        mask = None if _reads_two_texts(model) else inputs.get("attention_mask")  # a decoder's text is not padded
        try:
            results = session.run(list(names), given)
        except Exception as error:  # its classes have no base of their own
            raise ValueError(
                f"onnxruntime does not run the graph on a batch of {shape[0]} x {shape[1]} ({first_line(error)}); the"
                " graph does not compute this model and is not written."
            ) from error
        for name, found in zip(names, results):
            expected = output[name].float().cpu()
            apart = (torch.from_numpy(found).float() - expected).abs()
            if (
                mask is not None
                and expected.shape[:2] == mask.shape
                and expected.ndim > 1
                and name not in ("pooler_output",)
            ):
                keep = mask.cpu().bool()
                apart, expected = apart[keep], expected[keep]
            difference, limit = apart.max().item(), tolerance * max(1.0, expected.abs().max().item())
            largest = max(largest, difference)
            if not difference <= limit:  # nor where it is no number
                raise ValueError(
                    f"under onnxruntime `{name}` differs by {difference:.1e} on a batch of {shape[0]} x"
                    f" {shape[1]}, more than {limit:.1e}; the graph does not compute this model and is not written."
                )
    return largest
