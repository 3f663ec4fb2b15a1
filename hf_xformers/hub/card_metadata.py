# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint's card says to the Hub, its task, an example to try, the metrics; and what its Python imports."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..core.components import record_lookups
from ..core.head_names import HEADS
from ..core.saved_files import read_object
from .model_card import PIPELINES

# Head -> task of `transformers.pipeline`; None where it has none for the head.
TASKS: dict[str, str | None] = {
    **PIPELINES,
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": None,
    "ForMultipleChoice": None,
    "Model": "feature-extraction",
}
# Tasks that the Hub knows, and transformers has no pipeline for: they go into tags and into the table of results.
_HUB_TASKS = {
    "ForQuestionAnswering": "question-answering",
    "ForMultipleChoice": "multiple-choice",
    "ForTimeSeriesPrediction": "time-series-forecasting",
}
_OTHER_NAMES = {"LMHeadModel": "ForCausalLM", "ForConditionalGeneration": "ForSeq2SeqLM"}  # in transformers
_GENERATION = ("summarization", "translation")
_LOSSES = ("loss", "seconds", "tokens")

_EXAMPLES = {
    "text-generation": "The first thing to do is",
    "text-classification": "This was better than I had expected.",
    "token-classification": "Ada Lovelace was born in London.",
    "feature-extraction": "A sentence of a few words.",
    "summarization": "The library opened in 1901. It was enlarged twice, and holds two million books today.",
    "translation": "The library opens at nine o'clock.",
}


IMPORT = "import hf_xformers  # makes the variants known to the Auto classes"
_PROVIDED = ("hf_xformers", "transformers", "transformers_modules", "__main__")


def own_imports(place: Any) -> list[str]:
    """Lines that import the modules of other packages that a saved model's family and components are in; none where
    its config is not on this machine. place: the model's folder, or its id on the Hub."""
    from transformers import AutoConfig

    found: set[type] = set()
    with contextlib.suppress(ValueError, TypeError, OSError, KeyError), record_lookups() as specs:
        config = AutoConfig.from_pretrained(place, local_files_only=True, trust_remote_code=False)
        found = {type(config), *specs}
    modules = {cls.__module__ for cls in found if cls.__module__.partition(".")[0] not in _PROVIDED}
    return [f"import {module}  # registers what the model is made of" for module in sorted(modules)]


def head_of(architecture: str) -> str:
    """The head of a class by its name."""
    other = next((head for end, head in _OTHER_NAMES.items() if architecture.endswith(end)), None)
    return other or max((head for head in HEADS if architecture.endswith(head)), key=len, default="Model")


def hub_task(head: str, trained: str | None) -> str | None:
    """The Hub's name of what a model does. trained: the task that it was fine-tuned for."""
    if trained in _GENERATION:
        return trained
    return TASKS.get(head) or _HUB_TASKS.get(head)


def widget(folder: Path, head: str, trained: str | None) -> list[dict[str, str]] | None:
    """An example to try on the model's page; None where the folder has no tokenizer to read it."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    if head == "ForQuestionAnswering":
        return [
            {"text": "When did the library open?", "context": "The library opened in 1901 and was enlarged twice."}
        ]
    if head == "ForMaskedLM":
        mask = _mask_token(folder)
        return None if mask is None else [{"text": f"The library opens at nine o'clock in the {mask}."}]
    example = _EXAMPLES.get(str(hub_task(head, trained)))
    return None if example is None else [{"text": example}]


def _mask_token(folder: Path) -> str | None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            token: Any = read_object(folder / name).get("mask_token")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                return token
    return None


def metric_names(scores: Iterable[tuple[str, str]]) -> list[str] | None:
    """The metrics among what was measured, each once."""
    return list(dict.fromkeys(metric for _, metric in scores if metric not in _LOSSES)) or None
