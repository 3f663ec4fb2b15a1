"""The linear map from a state to numbers for the labels of a task."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class LabelLayer(nn.Linear):
    """nn.Linear [..., width] -> [..., labels], which says what to do when a saved one has other labels.

    An adapter's folder holds this layer and names its base model by place alone, whose config has other labels;
    [`LabelsOfAdapters`] finds those of the adapter where it can.
    """

    def resize(self, labels: int) -> None:
        """Room for so many labels, to be loaded."""
        for name in ("weight", "bias"):
            old = getattr(self, name)
            setattr(self, name, nn.Parameter(old.new_zeros(labels, *old.shape[1:]), old.requires_grad))
        self.out_features = labels

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Tensor],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        saved = state_dict.get(f"{prefix}weight")
        if saved is not None and saved.ndim == 2 and saved.shape[0] != self.out_features:
            error_msgs.append(
                f"{prefix}weight is saved for {saved.shape[0]} labels, and this model was built for"
                f" {self.out_features}; give `num_labels={saved.shape[0]}`, or their names with `id2label={{0: ...}}`,"
                " to `from_pretrained`, which an adapter's base model does not know"
            )
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


_LABELS = "id2label"


class LabelsOfAdapters:
    """Mixin of classifiers: an adapter of peft brings its labels along.

    peft gives every adapted model the configurations of its adapters, `peft_config`. A new one is told the labels of
    the model, in its free field `auto_mapping`, and takes them into its folder; from one that has labels the model
    takes theirs, before weights are read.
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
            known = adapter.auto_mapping or {}
            names = {int(key): label for key, label in known.get(_LABELS, {}).items()}
            if not names:
                adapter.auto_mapping = {**known, _LABELS: dict(self.config.id2label)}
                continue
            for place, module in self.named_modules():  # type: ignore[attr-defined]  # of the class beside this
                if isinstance(module, LabelLayer) and place.endswith(f"modules_to_save.{name}"):
                    if module.out_features == self.config.num_labels != len(names):
                        module.resize(len(names))
                    self.config.id2label = names
                    self.config.label2id = {label: key for key, label in names.items()}
                    self.num_labels = len(names)

    @peft_config.deleter
    def peft_config(self) -> None:
        vars(self).pop("_adapters", None)


__all__ = ["LabelLayer", "LabelsOfAdapters"]
