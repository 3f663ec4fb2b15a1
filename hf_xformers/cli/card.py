# SPDX-License-Identifier: Apache-2.0
"""`hf-xformers card`: the model card of a variant or of a checkpoint, with its attention map and measured figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..core.saved_files import write_text
from .console import say
from .parser import CommandParser

_DESCRIPTION = """Write the model card of a variant (what it changes, its equation, cost, components, an example, the
citation) or of a checkpoint folder (its geometry and training), with a picture of the attention map and, with
--results, the rows that `hf-xformers benchmark` measured for the variant. Without --to the card is printed."""


def run(argv: Sequence[str]) -> int:
    from ..hub.measured_card import make_card

    parser = CommandParser(prog="hf-xformers card", description=_DESCRIPTION)
    parser.add_argument(
        "name", metavar="VARIANT|FOLDER", help="a variant, with or without 'xf_', or a checkpoint folder"
    )
    parser.add_argument("--results", metavar="FILE", help="results.json of `hf-xformers benchmark`")
    parser.add_argument("--to", metavar="FILE", help="the card; its picture goes to maps/ next to it")
    arguments = parser.parse_args(list(argv))
    target = None if arguments.to is None else Path(arguments.to).expanduser()
    if target is not None and target.is_dir():
        raise ValueError(
            f"--to {arguments.to!r} is a folder; give a file in it, such as {str(target / 'README.md')!r}"
        )
    if target is not None and not target.absolute().parent.is_dir():
        raise ValueError(f"--to {arguments.to!r} is in a missing folder; give a file in one that exists")
    card = make_card(arguments.name, arguments.results)
    if target is None:
        print(card.text)
        say("give --to FILE to write the card with its picture")
        return 0
    picture = target.parent / card.picture_name
    write_text(picture, card.picture)
    write_text(target, card.text)
    say(f"{target} and {picture}")
    return 0
