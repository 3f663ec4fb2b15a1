# SPDX-License-Identifier: Apache-2.0
"""What a classifier and the adapters of peft on it tell each other: the task and the labels."""

from __future__ import annotations

from typing import Any

from transformers.utils import logging

from ..compat import check_saved_names, under_adapter, was_loaded
from .label_layer import LabelLayer

logger = logging.get_logger(__name__)

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
    classifier: Any

    @property
    def peft_config(self) -> dict[str, Any]:
        if "_adapters" not in vars(self):
            raise AttributeError(f"{type(self).__name__} has no adapters of peft.")
        return vars(self)["_adapters"]

    @peft_config.setter
    def peft_config(self, adapters: dict[str, Any]) -> None:
        vars(self)["_adapters"] = adapters
        check_saved_names(self, adapters)
        for name, adapter in adapters.items():
            given = adapter.task_type is not None
            if not given and under_adapter(self.classifier) is None:  # with a task peft trains the classifier in whole
                adapter.task_type = TASK_TYPES.get(type(self).__name__.rpartition("For")[2])
            known = adapter.auto_mapping or {}
            names = {int(key): label for key, label in known.get(_LABELS, {}).items()}
            if not names:
                adapter.auto_mapping = {**known, _LABELS: dict(self.config.id2label)}
                if given:  # by which peft chooses what trains and saves the classifier
                    self._keep_answering(adapter)
                self._say_what_is_lost(adapter, "classifier" if given else "")
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

    def _keep_answering(self, adapter: Any) -> None:
        """peft knows the layer of answers as `qa_outputs`; here it is `classifier`. It reads the names afterwards."""
        if adapter.task_type == "QUESTION_ANS" and "classifier" not in (adapter.modules_to_save or ()):
            adapter.modules_to_save = [*(adapter.modules_to_save or ()), "classifier"]
            self.classifier = under_adapter(self.classifier) or self.classifier  # adapted, as one of all linear layers

    def _say_what_is_lost(self, adapter: Any, kept: str) -> None:
        """Reports parts around the layers, but for `kept`, that no checkpoint had and that peft neither trains nor
        saves."""
        parameters: dict[str, Any] = dict(self.named_parameters())  # type: ignore[attr-defined]
        if adapter.inference_mode or not any(map(was_loaded, parameters.values())):
            return
        fresh = [key for key, value in parameters.items() if not (was_loaded(value) or value.requires_grad)]
        fresh = [key.removeprefix("model.") for key in fresh if not key.startswith("model.") or ".pooler." in key]
        lost = sorted({key.partition(".")[0] for key in fresh if ".original_module." not in key} - {kept})
        if lost:
            logger.warning(
                f"The checkpoint has no {' and no '.join(lost)}, and peft neither trains nor saves any: the adapter"
                f" would be loaded next to other random numbers. Give the adapter's config `modules_to_save={lost}`."
            )
