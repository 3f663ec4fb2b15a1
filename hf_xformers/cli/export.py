# SPDX-License-Identifier: Apache-2.0
"""`hf-xformers export`: a saved model as an ONNX graph."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .console import in_options, print_facts
from .parser import CommandParser

_DESCRIPTION = """Write a saved model, with its head, as an ONNX graph for any batch and length, and compare it with
the model under onnxruntime where that is installed (pip install onnx onnxscript onnxruntime). Text models read
input_ids and attention_mask, encoder-decoders decoder_input_ids as well, image models pixel_values, models of sound
input_features. A decoder's graph reads the whole text, without a cache; with --step it is that of one step, which
reads a token and the state so far and gives the next state, for any batch and any number of tokens. An encoder-decoder
has a second graph then, which makes the first state of the text for its encoder."""
_SAMPLE = (2, 16)  # rows, tokens
# Arguments of the function below -> options.
_OPTIONS = {
    "dynamic=False": "--fixed",
    "length": "--length",
    "batch": "--batch",
    "opset": "--opset",
    "tolerance": "--tolerance",
    "head": "--head",
}


def run(argv: Sequence[str]) -> int:
    arguments = make_parser().parse_args(list(argv))
    if arguments.check and importlib.util.find_spec("onnxruntime") is None:
        raise ValueError("--check compares under onnxruntime, which is not installed: pip install onnxruntime")
    from ..conversion.checkpoint import model_type_of, open_ours
    from ..core.saved_files import refuse_damaged_weights
    from ..export import export_onnx, export_step_onnx
    from ..variants import model_types

    source, output = arguments.model, Path(arguments.output).expanduser()
    if output.is_dir() or not output.suffix:
        output /= "model.onnx"
    if (Path(source).expanduser() / "adapter_config.json").is_file():
        raise ValueError(f"{source!r} holds an adapter alone; merge it into its model, and export the result")
    model_type = model_type_of(source)
    if model_type not in model_types():
        raise ValueError(
            f"{source!r} holds a model of type {model_type!r}, which is none of this package's variants; convert it"
            " first with `hf-xformers convert --from ... --to ...`, or take optimum's exporter"
        )
    if arguments.step and arguments.fixed:
        raise ValueError("--step makes a graph for any batch and length; leave --fixed out")
    sample = (arguments.batch, arguments.length)
    if arguments.step and sample != _SAMPLE:
        raise ValueError("--batch and --length are of the sample of a whole text; leave them out with --step")
    refuse_damaged_weights(source)
    with in_options(_OPTIONS):
        try:
            found = open_ours(source, model_type, arguments.head)
            saved_in, model = found.model.dtype, found.model.float()
            _refuse_random_weights(found, f"{source!r} has no weights for --head {arguments.head}")
            with contextlib.suppress(OSError):  # which the export then says in its own words
                output.parent.mkdir(parents=True, exist_ok=True)
            if arguments.step:
                return _step(arguments, model, saved_in, output, export_step_onnx)
            report = export_onnx(
                model,
                output,
                batch=arguments.batch,
                length=arguments.length,
                dynamic=not arguments.fixed,
                tolerance=arguments.tolerance,
                opset=arguments.opset,
            )
        except ImportError as error:
            raise ValueError(str(error)) from error
    difference = report.difference
    print_facts(
        "exported",
        {
            "file": report.path,
            "bytes": output.stat().st_size,
            "model": type(model).__name__,
            **_weights(saved_in),
            "outputs": ", ".join(report.outputs),
            "inputs": ", ".join(report.inputs),
            "shapes": report.shapes,
            "attention": report.attention,
            "largest difference": "not compared: pip install onnxruntime" if difference is None else difference,
        },
    )
    return 0


def _weights(saved_in: Any) -> dict[str, str]:
    """Where the graph's are of another type than the checkpoint's: what is said of it."""
    name = str(saved_in).removeprefix("torch.")
    return {} if name == "float32" else {"weights": f"float32 (saved as {name})"}


def _refuse_random_weights(found: Any, problem: str) -> None:
    """Raises ValueError for a head that was never trained. A pooler that was not is left out of the graph."""
    absent = [name for name in sorted(found.absent) if ".pooler." not in f".{name}"]
    if absent:
        raise ValueError(
            f"{problem} ({absent[0]}), so that its graph would give random numbers; leave --head out, or fine-tune the"
            " model first"
        )
    if found.absent:
        found.model.base_model.pooler = None


def _step(arguments: Any, model: Any, saved_in: Any, output: Path, export_step_onnx: Any) -> int:
    """Exports one step of a decoder."""
    report = export_step_onnx(model, output, tolerance=arguments.tolerance, opset=arguments.opset)
    grows = sum(state.grows for state in report.states)
    difference = report.difference
    print_facts(
        "exported",
        {
            "file": report.path,
            "bytes": output.stat().st_size,
            "model": type(model).__name__,
            **_weights(saved_in),
            "states": f"{len(report.states)}, of which {grows} grow with the text",
            "before the first token": report.start,
            "places of padding before it": report.settled,
            "attention": "literal equation" if report.literal else "usual path",
            "largest difference": "not compared: pip install onnxruntime" if difference is None else difference,
        },
    )
    return 0


def make_parser() -> CommandParser:
    parser = CommandParser(prog="hf-xformers export", description=_DESCRIPTION)
    parser.add_argument("--model", required=True, metavar="DIR", help="folder of a saved model of this package")
    parser.add_argument("--output", required=True, metavar="FILE.onnx", help="file to write, or a folder for it")
    parser.add_argument(
        "--head", metavar="CLASS", help="class to export, such as Model or ForMaskedLM; default: what was saved"
    )
    parser.add_argument("--opset", type=int, metavar="N", help="version of ONNX's operators; default: the exporter's")
    parser.add_argument(
        "--check", action="store_true", help="fail where onnxruntime is missing, and nothing is compared"
    )
    parser.add_argument(
        "--tolerance", type=float, default=1e-4, help="largest difference, relative to the outputs (default: 1e-4)"
    )
    parser.add_argument("--step", action="store_true", help="of a decoder: one step, with its state in and out")
    parser.add_argument("--fixed", action="store_true", help="a graph for --batch and --length alone")
    parser.add_argument("--batch", type=int, default=_SAMPLE[0], metavar="N", help="rows of the sample (default: 2)")
    parser.add_argument(
        "--length", type=int, default=_SAMPLE[1], metavar="N", help="tokens of the sample of text (default: 16)"
    )
    return parser
