# SPDX-License-Identifier: Apache-2.0
"""`hf-xformers push`: a checkpoint or an adapter to the Hub, with a card."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .console import print_facts, print_table, say
from .parser import CommandParser

_DESCRIPTION = """Upload a saved model with its tokenizer, or an adapter alone, to the Hugging Face Hub in one commit,
with a card that holds the figures of its training. Needs a token: `hf auth login`, or HF_TOKEN. A README.md in the
folder is uploaded as it is; one that somebody wrote in the repository stays. States of the optimizer, logs,
predictions and the checkpoints of the run are not uploaded."""


def run(argv: Sequence[str]) -> int:
    arguments = make_parser().parse_args(list(argv))
    from ..hub.checkpoint_card import CardFacts
    from ..hub.push import prepare_upload, push

    facts = CardFacts(
        license=arguments.license,
        language=arguments.language,
        base_model=arguments.base_model,
        datasets=arguments.dataset,
        tags=arguments.tag,
    )
    upload = prepare_upload(arguments.checkpoint, arguments.repo, self_contained=arguments.self_contained, facts=facts)
    sizes = upload.sizes()
    if upload.card_is_generated and arguments.license is None:
        say("the card names no license: say it with --license, e.g. --license apache-2.0")
    unused = [f"--{name}" for name in ("license", "language", "dataset", "tag") if getattr(arguments, name)]
    if unused and not upload.card_is_generated:
        say(f"README.md in the folder is the card as it is, without {unused[0]}")
    if arguments.dry_run:
        print_table(f"would be uploaded to {arguments.repo}", ("file", "bytes"), sizes.items())
        print(upload.card)
        return 0
    say(f"uploading {len(sizes)} files ({sum(sizes.values()):,} bytes) to {arguments.repo}")
    commit = push(
        upload,
        private=True if arguments.private else None,
        revision=arguments.revision,
        commit_message=arguments.commit_message,
        create_pr=arguments.create_pr,
    )
    print_facts("pushed", {"commit": commit.commit_url, "pull request": commit.pr_url})
    return 0


def make_parser() -> CommandParser:
    parser = CommandParser(prog="hf-xformers push", description=_DESCRIPTION)
    parser.add_argument("checkpoint", type=Path, help="folder of a saved model or adapter, or of a finished run")
    parser.add_argument("--repo", required=True, metavar="USER/NAME", help="the repository, made if there is none")
    parser.add_argument("--private", action="store_true", help="make a new repository private")
    parser.add_argument(
        "--self-contained",
        action="store_true",
        help="upload the model's code too, so that trust_remote_code=True replaces this package",
    )
    parser.add_argument(
        "--revision", metavar="BRANCH", help="branch to commit to, made if there is none (default: main)"
    )
    parser.add_argument("--commit-message", metavar="TEXT", help="default: what is uploaded")
    parser.add_argument("--create-pr", action="store_true", help="open a pull request instead of committing")
    parser.add_argument("--dry-run", action="store_true", help="show files, sizes and the card; connect to nothing")
    card = parser.add_argument_group("card", "What the folder does not say.")
    card.add_argument("--license", metavar="ID", help="e.g. apache-2.0")
    card.add_argument("--language", nargs="+", default=[], metavar="CODE", help="e.g. en de")
    card.add_argument(
        "--base-model", "--base_model", metavar="USER/NAME", help="the model on the Hub that this one was made of"
    )
    card.add_argument("--dataset", nargs="+", default=[], metavar="ID", help="datasets on the Hub it was trained on")
    card.add_argument("--tag", nargs="+", default=[], metavar="TAG", help="further tags of the card")
    return parser
