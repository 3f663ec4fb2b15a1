# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run that trains a part of a model: they hold that part, and the rest is read from where the run
started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..core.saved_files import CHECKPOINT


def share_frozen(model: nn.Module, other: nn.Module) -> int:
    """Lets the frozen parameters of `model` be those of `other` of the same names, where the numbers are the same; how
    many bytes that saves. Neither may be changed in place from then on."""
    theirs, saved = dict(other.named_parameters()), 0
    for name, own in model.named_parameters():
        there = theirs.get(name)
        if there is None or own.requires_grad or own is there or own.shape != there.shape:
            continue
        if (own.dtype, own.device) == (there.dtype, there.device) and bool((own.data == there.data).all()):
            own.data, saved = there.data, saved + own.nbytes
    return saved


class TrainedAlone:
    """For a Trainer, before its class: folders `checkpoint-<step>` hold no frozen parameters. What is resumed has to
    start with these as the run did."""

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        me: Any = self
        if output_dir is not None and CHECKPOINT.fullmatch(Path(output_dir).name):
            frozen = self._frozen()
            state = me.model.state_dict() if state_dict is None else state_dict
            state_dict = {name: tensor for name, tensor in state.items() if name not in frozen}
        super()._save(output_dir, state_dict)  # type: ignore[misc]  # of a Trainer

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        frozen = self._frozen()
        missing = [name for name in load_result.missing_keys if name not in frozen]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))  # type: ignore[misc]

    def _frozen(self) -> set[str]:
        """By all of their names: a tied one has several."""
        me: Any = self
        state: dict[str, Tensor] = me.accelerator.unwrap_model(me.model).state_dict(keep_vars=True)
        return {name for name, kept in state.items() if isinstance(kept, nn.Parameter) and not kept.requires_grad}
