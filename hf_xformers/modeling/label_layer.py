# SPDX-License-Identifier: Apache-2.0
"""The linear map from a state to numbers for the labels of a task."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class LabelLayer(nn.Linear):
    """nn.Linear [..., width] -> [..., labels], which says what to do when a saved one has other labels.

    An adapter's folder holds this layer and names its base model by place alone, whose config has other labels;
    `TellsAdapters` finds those of the adapter where it can.
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
