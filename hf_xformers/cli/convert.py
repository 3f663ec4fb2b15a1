# SPDX-License-Identifier: Apache-2.0
"""`hf-xformers convert`: checkpoints of transformers' own families as this package's variants and back, and other
components for a trained model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.components import SLOTS
from .arguments import parse_changes, parse_layers, split_dotted
from .console import in_options, print_facts, say
from .parser import CommandParser

_DESCRIPTION = """Convert a saved model of one of transformers' families into this package's variant of it, or into
freely mixed components, with its tokenizer; or a model of this package back. The direction follows from the model.
`hf-xformers list --families` names those that convert.

With components (--SLOT NAME, --SLOT.FIELD VALUE), --max-length or --num-key-value-heads the model, of transformers or
of this package, gets these in place of its own: weights that still have a meaning are kept, the others start anew, and
a report says which, and how far the outputs moved. `hf-xformers uptrain` continues the training."""
_SLOTS = tuple(slot for slot in SLOTS if slot != "head")  # --head is the class to make
_GROUPS = (*_SLOTS, "decoder")
_SAME = 1e-5  # movement that is rounding
# Arguments of the functions below -> options.
_OPTIONS = {
    "overwrite=True": "--overwrite",
    "direction": "--direction",
    "model_type": "--model-type",
    "layers": "--SLOT.layers",
    "head": "--head",
    "max_length": "--max-length",
    "gguf_file": "--gguf-file",
    "num_key_value_heads": "--num-key-value-heads",
    "per_layer_config": "--per-layer-config",
    "decoder": "--decoder.FIELD",
}


def run(argv: Sequence[str]) -> int:
    plain, dotted = split_dotted(list(argv), _GROUPS)
    arguments = make_parser().parse_args(plain)
    report_file = None if arguments.report is None else Path(arguments.report).expanduser()
    if report_file is not None and not report_file.absolute().parent.is_dir():
        raise ValueError(f"--report {arguments.report!r} is in a missing folder; give a file in one that exists")
    if report_file is not None and report_file.is_dir():
        raise ValueError(f"--report {arguments.report!r} is a folder; give a file")
    swaps = dotted or any(
        value is not None
        for value in (arguments.max_length, arguments.num_key_value_heads, arguments.per_layer_config)
    )
    with in_options(_OPTIONS):
        report = _swap(arguments, dotted) if swaps else _convert(arguments)
    swaps = hasattr(report, "changes")
    content = json.dumps(report.to_dict(), indent=2)
    if report_file is not None:
        from ..core.saved_files import write_json

        write_json(report_file, report.to_dict())
    if arguments.json:
        print(content)
        return 0
    facts = {
        "from": f"{arguments.source} ({report.source})",
        "to": f"{arguments.target} ({report.target})",
        "tensors kept": len(report.kept) if swaps else None,
        "tensors mapped": None if swaps else len(report.mapped),
        "tensors derived": len(report.derived),
        "tensors new": len(report.new),
        "tensors dropped": len(report.dropped),
    }
    movement = getattr(report, "movement", None)
    if movement is not None:
        facts |= {
            "KL(before || after), nats": movement.kl_mean,
            "same most likely answer": movement.agreement,
            "states moved by": movement.states,
        }
    if swaps and "attention" in dotted and arguments.max_length is None:
        known = json.loads((Path(arguments.target).expanduser() / "config.json").read_text(encoding="utf-8"))
        facts["longest text, tokens"] = f"{known['max_position_embeddings']:,}, as before (more: --max-length N)"
    print_facts("swapped" if swaps else "converted", facts)
    if swaps or not report.complete or report.notes:
        say(report.summary())
    if movement is not None and "attention" in dotted and max(movement.kl_mean or 0, movement.states or 0) < _SAME:
        say(f"Nothing moved in {movement.length} tokens; texts longer than what the new attention reads will move.")
    return 0


def _convert(arguments: argparse.Namespace) -> Any:
    from ..conversion import convert_checkpoint, swap_checkpoint

    for name, what in (("text", "the sample for"), ("seed", "that of the tensors that start anew in")):
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name} is {what} a swap; give components to swap, or leave it out")
    if arguments.head is not None and arguments.model_type is None and _stays(arguments):
        return swap_checkpoint(arguments.source, arguments.target, head=arguments.head, overwrite=arguments.overwrite)
    return convert_checkpoint(
        arguments.source,
        arguments.target,
        direction=arguments.direction,
        head=arguments.head,
        model_type=arguments.model_type,
        gguf_file=arguments.gguf_file,
        overwrite=arguments.overwrite,
    )


def _stays(arguments: argparse.Namespace) -> bool:
    """Whether a model of this package gets another head of this package: where that is asked for, or transformers has
    none for what the model is."""
    from ..conversion.checkpoint import goes_back, model_type_of
    from ..variants import model_types

    if arguments.gguf_file is not None or arguments.direction == "to_theirs":
        return False
    ours = model_type_of(arguments.source) in model_types()
    return ours and (arguments.direction == "to_ours" or not goes_back(arguments.source, arguments.head))


def _swap(arguments: argparse.Namespace, dotted: Mapping[str, Mapping[str, str]]) -> Any:
    from ..conversion.swap import source_config, swap_checkpoint

    if arguments.model_type is not None:
        raise ValueError(
            "--model-type is transformers' family to make, and a model with other components stays with this package;"
            " leave it out"
        )
    if arguments.direction == "to_theirs":
        raise ValueError(
            "--direction to_theirs cannot swap components, which transformers' own families do not have; leave it out"
        )
    config = source_config(arguments.source, arguments.gguf_file)
    chosen = {slot: fields["layers"] for slot, fields in dotted.items() if "layers" in fields}
    dotted = {slot: {key: fields[key] for key in fields if key != "layers"} for slot, fields in dotted.items()}
    changes: dict[str, Any] = dict(parse_changes(config, dotted))
    if arguments.num_key_value_heads is not None:
        changes["num_key_value_heads"] = arguments.num_key_value_heads
    if arguments.per_layer_config is not None:
        changes["per_layer_config"] = parse_layers(arguments.per_layer_config, "--per-layer-config")
    sample = None
    if arguments.text is not None:
        try:
            sample = [Path(arguments.text).expanduser().read_text(encoding="utf-8")]
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--text {arguments.text!r} cannot be read ({error}); give a text file") from None
        if not sample[0].strip():
            raise ValueError(f"--text {arguments.text!r} holds no text to compare the outputs on; give one that does")
    return swap_checkpoint(
        arguments.source,
        arguments.target,
        overwrite=arguments.overwrite,
        head=arguments.head,
        gguf_file=arguments.gguf_file,
        max_length=arguments.max_length,
        texts=sample,
        seed=arguments.seed or 0,
        layers=chosen,
        **changes,
    )


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="hf-xformers convert",
        description=_DESCRIPTION,
    )
    parser.add_argument(
        "--from", dest="source", required=True, metavar="MODEL", help="folder of a saved model, or Hub id"
    )
    parser.add_argument("--to", dest="target", required=True, metavar="DIR", help="folder to write; new or empty")
    parser.add_argument(
        "--head",
        metavar="CLASS",
        help="class to make, such as Model or ForMaskedLM; one that the source lacks starts anew, also in a model that"
        " stays with this package (--direction to_ours). Default: what the source has",
    )
    parser.add_argument(
        "--model-type",
        "--model_type",
        metavar="NAME",
        help="transformers' family to make of a model of this package; default: the one that it came from",
    )
    parser.add_argument(
        "--gguf-file",
        "--gguf_file",
        metavar="NAME",
        help="GGUF file in --from to read through transformers, which gives back its weights in full precision",
    )
    parser.add_argument(
        "--direction",
        choices=("auto", "to_ours", "to_theirs"),
        default="auto",
        help="to this package or to transformers; auto: by the model",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what is in --to")
    parser.add_argument("--report", metavar="FILE", help="write every tensor's fate into a JSON file")
    parser.add_argument("--json", action="store_true", help="print every tensor's fate as JSON")
    swap = parser.add_argument_group("swap", "See `hf-xformers list --components SLOT` for names and fields.")
    for slot in _SLOTS:  # for the help; they are taken out before
        swap.add_argument(f"--{slot}", metavar="NAME", default=argparse.SUPPRESS, help="default: as in the source")
    swap.add_argument(
        "--SLOT.layers",
        metavar="N-M,K",
        default=argparse.SUPPRESS,
        help="layers that get it, from 0 on, or all; the others stay as they are",
    )
    swap.add_argument(
        "--decoder.SLOT",
        metavar="NAME",
        default=argparse.SUPPRESS,
        help="what an encoder-decoder's decoder has instead",
    )
    for name, kind, text in (
        ("max-length", int, "tokens that positions shall cover"),
        ("num-key-value-heads", int, "heads that share keys and values (1: multi-query)"),
        ("per-layer-config", str, "what single layers have instead, as JSON by layer"),
    ):
        flags = dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}"))
        swap.add_argument(*flags, type=kind, metavar="N" if kind is int else "JSON", help=text)
    swap.add_argument(
        "--text", metavar="FILE", help="sample on which the outputs are compared; default: Python's help"
    )
    swap.add_argument("--seed", type=int, metavar="N", help="of the tensors that start anew (default: 0)")
    return parser
