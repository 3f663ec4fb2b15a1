# SPDX-License-Identifier: Apache-2.0
"""What a classifier and the adapters of peft on it tell each other: the task and the labels."""

from __future__ import annotations

from typing import Any

from .label_layer import LabelLayer

# What peft calls the task of a head.
TASK_TYPES = {
    "SequenceClassification": "SEQ_CLS",
    "TokenClassification": "TOKEN_CLS",
    "QuestionAnswering": "QUESTION_ANS",
    "CausalLM": "CAUSAL_LM",
    "Seq2SeqLM": "SEQ_2_SEQ_LM",
}
_LABELS = "id2label"


class TellsAdapters:
    """Mixin of classifiers: an adapter of peft brings its labels along.

    peft gives every adapted model the configurations of its adapters, `peft_config`. A new one is told the labels of
    the model, in its free field `auto_mapping`, and takes them into its folder; from one that has labels the model
    takes theirs, before weights are read. One without a `task_type` is told the head's: else peft writes the model's
    class into that field.
    """

    config: Any
    num_labels: int

    @property
    def peft_config(self) -> dict[str, Any]:
        if "_adapters" not in vars(self):
            raise AttributeError(f"{type(self).__name__} has no adapters of peft.")
        return vars(self)["_adapters"]

    @peft_config.setter
    def peft_config(self, adapters: dict[str, Any]) -> None:
        vars(self)["_adapters"] = adapters
        for name, adapter in adapters.items():
            if adapter.task_type is None:
                adapter.task_type = TASK_TYPES.get(type(self).__name__.rpartition("For")[2])
            known = adapter.auto_mapping or {}
            names = {int(key): label for key, label in known.get(_LABELS, {}).items()}
            if not names:
                adapter.auto_mapping = {**known, _LABELS: dict(self.config.id2label)}
                continue
            for place, module in self.named_modules():  # type: ignore[attr-defined]  # of the class next to this
                if isinstance(module, LabelLayer) and place.endswith(f"modules_to_save.{name}"):
                    if module.out_features == self.config.num_labels != len(names):
                        module.resize(len(names))
                    self.config.id2label = names
                    self.config.label2id = {label: key for key, label in names.items()}
                    self.num_labels = len(names)

    @peft_config.deleter
    def peft_config(self) -> None:
        vars(self).pop("_adapters", None)


__all__ = ["TASK_TYPES", "TellsAdapters"]
