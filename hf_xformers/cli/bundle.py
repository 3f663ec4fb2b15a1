# SPDX-License-Identifier: Apache-2.0
"""`hf-xformers bundle`: a checkpoint with the code that it needs, for users without this package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .console import print_facts
from .parser import CommandParser

_DESCRIPTION = """Write a checkpoint with the code that it needs, so that transformers and torch are enough to load it:
AutoModel....from_pretrained(FOLDER, trust_remote_code=True). A card is written where there is none."""


def run(argv: Sequence[str]) -> int:
    arguments = make_parser().parse_args(list(argv))
    from ..core.saved_files import read_object
    from ..hub import bundle
    from ..training.folder_lock import folder_lock

    with folder_lock(arguments.to, option="--to"):
        target = bundle(arguments.checkpoint, arguments.to, all_heads=arguments.all_heads)
    config = read_object(target / "config.json")
    saved = f".{(config.get('architectures') or [''])[0]}"
    auto = next((auto for auto, place in config["auto_map"].items() if place.endswith(saved)), "AutoModel")
    words = (target / "tokenizer_config.json").is_file()
    read = f'.from_pretrained("{target}", trust_remote_code=True)'
    code = sorted(target.glob("*.py"))
    print_facts(
        "self-contained",
        {
            "folder": str(target),
            "code files": len(code),
            "bytes of code": sum(path.stat().st_size for path in code),
            "load with": f"{auto}{read}",
            "its tokenizer": f"AutoTokenizer{read}" if words else None,
        },
    )
    return 0


def make_parser() -> CommandParser:
    parser = CommandParser(prog="hf-xformers bundle", description=_DESCRIPTION)
    parser.add_argument("checkpoint", type=Path, help="folder of a saved model of this package")
    parser.add_argument(
        "--to", type=Path, metavar="DIR", required=True, help="where to write it; may be the checkpoint's own folder"
    )
    parser.add_argument(
        "--all-heads",
        action="store_true",
        help="the classes of every head, for those who fine-tune it for something else",
    )
    return parser
