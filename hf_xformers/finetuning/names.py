# SPDX-License-Identifier: Apache-2.0
"""Names that users and data sets commonly give: to tasks, and to the columns that a task reads."""

from __future__ import annotations

from ..core.components import did_you_mean
from ..core.discovery import import_plugins, import_room

TASK_NAMES = [
    "text-classification",
    "multi-label-classification",
    "regression",
    "token-classification",
    "question-answering",
    "multiple-choice",
    "summarization",
    "extractive-summarization",
    "translation",
    "language-modeling",
    "forecasting",
    "image-classification",
    "speech-recognition",
]  # and those that `register_task` adds
TASK_ALIASES = {
    "classification": "text-classification",
    "sequence-classification": "text-classification",
    "sentiment": "text-classification",
    "sentiment-analysis": "text-classification",
    "nli": "text-classification",
    "paraphrase": "text-classification",
    "multi-label": "multi-label-classification",
    "multilabel": "multi-label-classification",
    "multilabel-classification": "multi-label-classification",
    "similarity": "regression",
    "sts": "regression",
    "tagging": "token-classification",
    "ner": "token-classification",
    "pos": "token-classification",
    "chunking": "token-classification",
    "qa": "question-answering",
    "squad": "question-answering",
    "extractive-qa": "question-answering",
    "mcq": "multiple-choice",
    "mc": "multiple-choice",
    "swag": "multiple-choice",
    "summarisation": "summarization",
    "summary": "summarization",
    "extractive-summarisation": "extractive-summarization",
    "extractive": "extractive-summarization",
    "mt": "translation",
    "lm": "language-modeling",
    "language-modelling": "language-modeling",
    "forecast": "forecasting",
    "time-series": "forecasting",
    "image": "image-classification",
    "images": "image-classification",
    "asr": "speech-recognition",
    "automatic-speech-recognition": "speech-recognition",
    "ctc": "speech-recognition",
    "transcription": "speech-recognition",
}

# First texts, each with the second that goes with it.
TEXT_PAIRS: dict[str, str | None] = {
    "sentence1": "sentence2",
    "sentence_1": "sentence_2",
    "premise": "hypothesis",
    "question1": "question2",
    "text1": "text2",
    "text_a": "text_b",
    "question": "sentence",
    "text": None,
    "sentence": None,
    "review": None,
    "review_body": None,
    "content": None,
    "tweet": None,
    "comment": None,
    "comment_text": None,
    "utterance": None,
    "document": None,
    "article": None,
}
CLASS_LABELS = (
    "label",
    "labels",
    "class",
    "target",
    "sentiment",
    "stars",
    "rating",
    "category",
    "topic",
    "intent",
    "emotion",
    "polarity",
    "is_duplicate",
    "gold_label",
    "score",
)
NUMBER_LABELS = ("label", "labels", "score", "similarity", "similarity_score", "rating", "stars", "value", "target")
LABEL_LISTS = ("labels", "label", "tags", "classes", "categories", "topics", "emotions", "genres")
WORDS = ("tokens", "words", "text")
TAGS = ("ner_tags", "tags", "labels", "ner", "entities", "pos_tags", "pos", "upos", "chunk_tags", "label")
# Which of these an alias of tagging asks for.
TAGS_OF_ALIAS = {"pos": ("pos_tags", "pos", "upos"), "chunking": ("chunk_tags",)}
QUESTIONS = ("question", "query")
CONTEXTS = ("context", "paragraph", "passage")
ANSWERS = ("answers", "answer")
CHOICE_TEXTS = ("sent1", "startphrase", "context", "article", "question", "premise", "ctx", "text")
CHOICES = ("choices", "endings", "options", "answers")
NUMBERED_CHOICES = tuple(f"{word}{mark}" for word in ("ending", "choice", "option", "sol") for mark in ("", "_"))
CHOICE_LABELS = ("label", "answer", "answerKey", "labels")
LONG_TEXTS = ("article", "document", "dialogue", "source", "text", "content", "report")
TIMES = ("date", "time", "datetime", "timestamp", "ds", "month", "day", "hour")
IMAGES = ("image", "img", "picture", "photo", "file_name", "path")
SOUNDS = ("audio", "sound", "speech", "wav", "file", "file_name", "path")
TRANSCRIPTS = ("text", "transcript", "transcription", "sentence", "utterance")
SUMMARIES = ("highlights", "summary", "abstract", "target", "title", "headline")


def known_task(name: str) -> str | None:
    """The task of a name or alias, in any spelling of case, `_` and `-`; None for an unknown one."""
    plain = name.strip().lower().replace("_", "-").replace(" ", "-")
    wanted = TASK_ALIASES.get(plain, plain)
    if wanted not in TASK_NAMES:  # then it is of a file dropped into the folder, or of another package
        import_room("finetuning.tasks", wanted.replace("-", "_"))
        import_plugins()
    return next((task for task in TASK_NAMES if task.replace("_", "-") == wanted), None)


def resolve_task(name: str) -> str:
    """The task of a name or alias. Raises ValueError for an unknown one, with the closest."""
    found = known_task(name)
    if found is None:
        hint = did_you_mean(name.strip().lower(), (*TASK_NAMES, *TASK_ALIASES), cutoff=0.4)
        raise ValueError(f"unknown task {name!r}.{hint} Choose one of {', '.join(TASK_NAMES)}")
    return found
