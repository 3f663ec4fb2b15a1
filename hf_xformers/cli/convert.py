"""`hf-xformers convert`: a checkpoint of transformers' own families as this package's variant, or back."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from .console import print_facts, say
from .parser import CommandParser

_DESCRIPTION = """Convert a saved model of transformers (BERT, RoBERTa, GPT, GPT-2, BART, T5) into this package's variant,
with its tokenizer, or one of this package's variants back. The direction follows from the model."""


def run(argv: Sequence[str]) -> int:
    arguments = make_parser().parse_args(list(argv))
    from ..conversion import convert_checkpoint

    report = convert_checkpoint(
        arguments.source,
        arguments.target,
        direction=arguments.direction,
        head=arguments.head,
        overwrite=arguments.overwrite,
    )
    if arguments.json:
        print(json.dumps(report.to_dict(), indent=2))
        return 0
    facts = {
        "from": f"{arguments.source} ({report.source})",
        "to": f"{arguments.target} ({report.target})",
        "tensors mapped": len(report.mapped),
        "tensors derived": len(report.derived),
        "tensors new": len(report.new),
        "tensors dropped": len(report.dropped),
    }
    print_facts("converted", facts)
    if not report.complete or report.notes:
        say(report.summary())
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="hf-xformers convert", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument(
        "--from", dest="source", required=True, metavar="MODEL", help="folder of a saved model, or Hub id"
    )
    parser.add_argument("--to", dest="target", required=True, metavar="DIR", help="folder to write; new or empty")
    parser.add_argument("--head", help="class to make, such as Model or ForMaskedLM; default: what the source has")
    parser.add_argument("--direction", choices=("auto", "to_ours", "to_theirs"), default="auto")
    parser.add_argument("--overwrite", action="store_true", help="replace what is in --to")
    parser.add_argument("--json", action="store_true", help="print every tensor's fate as JSON")
    return parser
