# SPDX-License-Identifier: Apache-2.0
"""Checkpoints and adapters to the Hub: what belongs to them, with a card, in one commit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.saved_files import read_object
from .adapter_card import CONFIGS as ADAPTER_CONFIGS
from .adapter_card import public_config, read_adapter
from .bundle import code_files, kept_heads, load_config, refuse_broken, with_auto_maps
from .checkpoint_card import CardFacts, checkpoint_card
from .checkpoint_files import CONFIG, MARK, MODEL, checkpoint_files, kind_of
from .training_record import HUB_ID

CARD = "README.md"
# What stands in cards that nobody has written: ours, and those of libraries and of Trainer, for somebody to complete.
_GENERATED = (MARK, "[More Information Needed]", "according to the information the Trainer had access to")


@dataclass
class Upload:
    """What a push sends: path in the repository -> a local file, or content that was made for it."""

    repo_id: str
    files: dict[str, Path | bytes]
    card_is_generated: bool

    @property
    def card(self) -> str:
        content = self.files[CARD]
        return content.read_text(encoding="utf-8") if isinstance(content, Path) else content.decode()

    def sizes(self) -> dict[str, int]:
        """Path in the repository -> bytes."""
        return {
            name: content.stat().st_size if isinstance(content, Path) else len(content)
            for name, content in sorted(self.files.items())
        }


def prepare_upload(
    folder: str | Path, repo_id: str, *, self_contained: bool = False, facts: CardFacts | None = None
) -> Upload:
    """Collects what a push of `folder` sends, without a connection.

    A card in the folder is taken as it is, unless it was generated or is an unfilled template.

    Raises:
        ValueError: no checkpoint, no id, or `self_contained` for what has no code to go with.
    """
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    folder = Path(folder).expanduser()
    try:
        validate_repo_id(repo_id)
        complete = repo_id.count("/") == 1
    except HFValidationError:
        complete = False
    if not complete:
        raise ValueError(
            f"--repo {repo_id!r} is no repository of the Hub; give USER/NAME, of letters, digits, '-', '_' and '.'"
        )
    base_model = None if facts is None else facts.base_model
    if base_model is not None and HUB_ID.fullmatch(base_model) is None:
        raise ValueError(f"--base-model {base_model!r} is no model of the Hub; give USER/NAME")
    kind = kind_of(folder)
    files: dict[str, Path | bytes] = dict(checkpoint_files(folder))
    if self_contained:
        if kind != MODEL:
            raise ValueError(
                f"{str(folder)!r} is an adapter, which has no code of its own; push its base model with"
                " --self-contained"
            )
        config = load_config(folder)
        heads = kept_heads(config)
        code = code_files(config, heads)
        described = with_auto_maps(folder, config, heads)
        refuse_broken(code, described[CONFIG])
        files |= {name: text.encode() for name, text in {**code, **described}.items()}
    if kind != MODEL:
        public = public_config(folder, kind, read_adapter(folder, kind, base_model))
        if public is not None:
            files[ADAPTER_CONFIGS[kind]] = public
    has_code = self_contained or (kind == MODEL and "auto_map" in read_object(folder / CONFIG))
    card = files.get(CARD)
    own = card.read_text(encoding="utf-8", errors="replace") if isinstance(card, Path) else None
    generated = own is None or _is_generated(own)
    if generated:
        files[CARD] = str(checkpoint_card(folder, repo_id, self_contained=has_code, facts=facts)).encode()
    return Upload(repo_id, files, generated)


def push(
    upload: Upload,
    *,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
    create_pr: bool = False,
    token: str | None = None,
) -> Any:
    """Sends an upload to the Hub in one commit; returns its `CommitInfo`. Until the commit, which comes when all is
    sent, the repository stays as it is. private: for a repository that does not exist yet. revision: a branch, made if
    there is none. A card that somebody wrote in the repository is not replaced by a generated one.

    Raises:
        ValueError: no token, one that may not write there, no connection, or any other answer of the Hub.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token

    token = token or get_token()
    if not token:
        raise ValueError(
            "there is no token of the Hub on this machine: log in with `hf auth login`, or set HF_TOKEN to a token"
            " with write access"
        )
    if constants.HF_HUB_OFFLINE:
        raise ValueError("HF_HUB_OFFLINE is set, so that nothing can be pushed; unset it")
    api = HfApi(token=token, library_name="hf_xformers")
    with _plain_errors(upload.repo_id):
        api.create_repo(upload.repo_id, private=private, exist_ok=True)
        if revision is not None and not revision.startswith("refs/pr"):
            api.create_branch(upload.repo_id, branch=revision, exist_ok=True)
        files: Mapping[str, Path | bytes] = upload.files
        if upload.card_is_generated and _has_own_card(api, upload.repo_id, revision):
            files = {name: content for name, content in files.items() if name != CARD}
        operations = [
            CommitOperationAdd(path_in_repo=name, path_or_fileobj=content) for name, content in sorted(files.items())
        ]
        return api.create_commit(
            upload.repo_id,
            operations,
            commit_message=commit_message or "Upload with hf-xformers",
            revision=revision,
            create_pr=create_pr,
        )


def _has_own_card(api: Any, repo_id: str, revision: str | None) -> bool:
    import tempfile

    from huggingface_hub import ModelCard
    from huggingface_hub.errors import RemoteEntryNotFoundError

    with tempfile.TemporaryDirectory() as folder:
        try:
            path = api.hf_hub_download(repo_id, CARD, revision=revision, local_dir=folder)
        except RemoteEntryNotFoundError:
            return False
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    body = ModelCard(text, ignore_metadata_errors=True).text  # what the Hub writes for a license has none
    return bool(body.strip()) and not _is_generated(text)


def _is_generated(card: str) -> bool:
    return any(words in card for words in _GENERATED)


@contextlib.contextmanager
def _plain_errors(repo_id: str) -> Iterator[None]:
    """Turns what the client raises into one sentence with the remedy."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError

    unchanged = "no commit was made, and files that were sent need not be sent again"
    try:
        yield
    except (HfHubHTTPError, HTTPError, ConnectionError, RuntimeError, LocalEntryNotFoundError) as error:
        cause = _response_error(error)
        status = None if cause is None else cause.response.status_code
        said = _first_line(getattr(cause, "server_message", None) or str(error))
        if status == 401:
            raise ValueError(
                f"the Hub does not know this token or no repository {repo_id!r} that it may see ({said}); log in again"
                " with `hf auth login`, or set HF_TOKEN to a valid token"
            ) from error
        if status == 403:
            raise ValueError(
                f"this token may not write to {repo_id!r} ({said}); take one with write access, another --repo, or "
                "--create-pr"
            ) from error
        if status is not None:
            raise ValueError(f"the Hub answered {status} ({said}); {unchanged}: try again") from error
        raise ValueError(f"the Hub cannot be reached or broke off ({said}); {unchanged}: try again") from error


def _response_error(error: BaseException | None) -> Any:
    """The error among this one and its causes that holds an answer of the Hub."""
    while error is not None and getattr(error, "response", None) is None:
        error = error.__cause__
    return error


def _first_line(text: str) -> str:
    return next((line.strip() for line in str(text).splitlines() if line.strip()), "no reason given").rstrip(".")
