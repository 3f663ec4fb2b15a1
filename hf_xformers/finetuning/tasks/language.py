# SPDX-License-Identifier: Apache-2.0
"""Language modeling on new text: masked, causal or span corruption, continued from a saved model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...objectives import Objective, build_objective
from .base import Encoded, Task, Trivial

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from ..options import TaskData


class LanguageModeling(Task):
    """Packed rows under an objective of pretraining. Metrics: loss (nats), perplexity and accuracy over all
    targets."""

    id = "language-modeling"
    head = "MaskedLM"  # until `choose` knows better
    metric = "loss"
    metric_names = ("loss", "perplexity", "accuracy")
    reads = ("text_column", "objective")
    mean_loss = False
    predicts = False
    objective: Objective

    def choose(self, heads: Sequence[str], architecture: str | None) -> None:
        """Takes the objective asked for, else the one of the saved model's class, else the first that `heads` allow.

        Raises ValueError for an unknown objective, and for one that no head fits.
        """
        from ...training.building import language_objective, objectives_for_heads

        fitting = objectives_for_heads(heads, rows="blocks")
        name = self.options.objective
        if name is None:
            own = [key for key in fitting if (architecture or "").endswith(f"For{language_objective(key).head}")]
            name = (own or fitting)[0]
        wanted = language_objective(name)
        if wanted.type not in fitting:
            raise ValueError(
                f"objective {name!r} needs a For{wanted.head} class, which the model has not; take --objective "
                f"{' or '.join(fitting)}"
            )
        self.objective = build_objective(name)
        self.head = self.objective.head  # type: ignore[misc]

    def load(self, source: TaskData) -> dict[str, Dataset]:
        from ...data import load_text_dataset
        from ...data.delimited import reading_as
        from ..sources import limited

        if source.validation_data or source.test_data:
            raise ValueError(
                "language-modeling divides files by their names; give all of them, or a folder, with --data"
            )
        if source.column_names:
            raise ValueError(
                "language-modeling takes names of columns from the header line of a file; write one there, and leave"
                " --column_names out"
            )
        if not source.data:
            raise ValueError("no data is named; give files, a folder or a Hub dataset id with --data")
        with reading_as(source.encoding):
            found = load_text_dataset(
                source.data[0] if len(source.data) == 1 else source.data,
                text_column=self.options.text_column,
                config_name=source.data_config,
                validation_fraction=source.validation_fraction,
                sample_by=self.objective.sample_by,
                num_proc=source.num_proc,
            )
        return limited(found, source)

    def settle(self, splits: Mapping[str, Dataset], config: PreTrainedConfig | None) -> None:
        """Nothing to find: `load` made the one column."""

    def texts(self, rows: Dataset) -> Iterable[str]:
        return rows["text"]

    def encode(self, rows: Dataset, tokenizer: PreTrainedTokenizerBase, split: str) -> Encoded:
        from ...training.text import make_rows

        self.tokenizer = tokenizer
        made = make_rows(rows, tokenizer, self.objective, self.max_length, whole=split != "train")
        return Encoded(made, made)

    def collator(self, tokenizer: PreTrainedTokenizerBase, model: Any, seed: int) -> Any:
        return self.objective.collator(tokenizer, seed=seed)

    def reduce(self, outputs: Any, inputs: Mapping[str, Any], next_token: bool) -> tuple[Tensor, ...]:
        from ...training.evaluation import token_statistics

        labels = inputs["labels"]
        logits = outputs["logits"][:, -labels.shape[1] :]  # prompt tuning puts virtual tokens before the text
        return (token_statistics(logits, labels, next_token=next_token),)

    def predictions(self, kept: Sequence[np.ndarray], encoded: Encoded) -> list[dict[str, Any]]:
        """A language model predicts tokens; of each row of them the sums are kept."""
        return [
            {"row": row, "nats": float(nats), "targets": int(count), "right": int(right)}
            for row, (nats, count, right) in enumerate(kept[0])
        ]

    def trivial(self, train: Encoded) -> Trivial | None:
        """The most frequent token, where targets are tokens of the text."""
        if self.head == "Seq2SeqLM":
            return None
        counts = self._counts(train)
        token = int(counts.argmax())
        return Trivial(f"always the token {self.tokenizer.convert_ids_to_tokens(token)!r}", token)

    def baseline(self, trivial: Trivial, predicted: Sequence[Mapping[str, Any]], encoded: Encoded) -> dict[str, float]:
        counts = self._counts(encoded)
        return {"accuracy": float(counts[trivial.answer] / max(1, counts.sum()))}

    def _counts(self, encoded: Encoded) -> np.ndarray:
        """How often every token may be a target, [vocabulary]: a mask never hides the special ones."""
        counts = np.zeros(len(self.tokenizer), dtype=np.int64)
        for ids in encoded.features["input_ids"]:
            counts += np.bincount(ids, minlength=len(counts))
        if self.head == "MaskedLM":
            counts[self.tokenizer.all_special_ids] = 0
        return counts

    def score(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        from ...training.evaluation import summarise

        return summarise(np.array([[row["nats"], row["targets"], row["right"]] for row in rows]))
