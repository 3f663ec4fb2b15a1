"""What a model and the adapters of peft on it tell each other: the task, and the labels of classifiers."""

from __future__ import annotations

from typing import Any, ClassVar

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
    """Mixin of heads: an adapter of peft knows its task and brings its labels along.

    peft gives every adapted model the configurations of its adapters, `peft_config`. One without a `task_type` is told
    the head's, without which peft's Auto classes look for the model's class and refuse other packages than
    transformers. A new one on a classifier is told the labels of the model, in its free field `auto_mapping`, and
    takes them into its folder; from one that has labels the model takes theirs, before weights are read.
    """

    has_labels: ClassVar[bool] = False
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
                adapter.task_type = TASK_TYPES.get(type(self).__name__.partition("For")[2])
            if self.has_labels:
                self._share_labels(name, adapter)

    @peft_config.deleter
    def peft_config(self) -> None:
        vars(self).pop("_adapters", None)

    def _share_labels(self, name: str, adapter: Any) -> None:
        known = adapter.auto_mapping or {}
        names = {int(key): label for key, label in known.get(_LABELS, {}).items()}
        if not names:
            adapter.auto_mapping = {**known, _LABELS: dict(self.config.id2label)}
            return
        for place, module in self.named_modules():  # type: ignore[attr-defined]  # of the class beside this
            if isinstance(module, LabelLayer) and place.endswith(f"modules_to_save.{name}"):
                if module.out_features == self.config.num_labels != len(names):
                    module.resize(len(names))
                self.config.id2label = names
                self.config.label2id = {label: key for key, label in names.items()}
                self.num_labels = len(names)


__all__ = ["TASK_TYPES", "TellsAdapters"]
