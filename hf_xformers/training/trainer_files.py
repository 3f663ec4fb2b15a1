# SPDX-License-Identifier: Apache-2.0
"""What a Trainer writes and reads again: checkpoints that are whole or none, of one process or of parts of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..core.finite import refuse_non_finite
from ..core.saved_files import SHARDED_OPTIMIZER, STATE_FILE
from .checkpoints import check_processes
from .expert_parts import ExpertParts
from .segments import SegmentCarrier


class KeepingTrainer(Trainer):
    """Trainer whose checkpoints are as [`XFormerTrainer`] says."""

    experts: ExpertParts | None = None
    segments: SegmentCarrier | None = None
    _use_cache: bool | None = None  # of the config, which Trainer changes while it trains

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        check_processes(resume_from_checkpoint, self.args.world_size)
        if self.experts is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            self._issue_warnings_after_load(self.experts.load(resume_from_checkpoint))
        loaded: Any = self.model if model is None else model
        refuse_non_finite(loaded, str(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if self.experts is None or best is None:
            super()._load_best_model()
        else:
            self._issue_warnings_after_load(self.experts.load(best))

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        tied = getattr(self.accelerator.unwrap_model(self.model), "all_tied_weights_keys", None) or {}
        missing = [key for key in load_result.missing_keys if key not in tied]  # which their source has brought
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self.experts is not None and checkpoint is not None:
            self.experts.load_progress(self.optimizer, self.lr_scheduler, checkpoint)
            return
        if checkpoint is not None and (Path(checkpoint) / SHARDED_OPTIMIZER).is_dir():
            raise ValueError(
                f"{checkpoint!r} was saved by a run with `expert_parallel`; resume it with that, or start a new run"
                " from its weights."
            )
        super()._load_optimizer_and_scheduler(checkpoint)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        before = self.state.best_global_step
        if super()._determine_best_metric(metrics, trial):
            return True
        name = self.args.metric_for_best_model
        value = None if name is None else metrics.get(f"eval_{name.removeprefix('eval_')}")
        if not before or value != self.state.best_metric or "eval_loss" not in metrics:
            return False
        losses = [entry["eval_loss"] for entry in self.state.log_history
                  if entry["step"] == before and "eval_loss" in entry]  # fmt: skip
        if not losses or not metrics["eval_loss"] < losses[-1]:
            return False
        self.state.best_global_step = self.state.global_step
        return True

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self.args.should_save:
            folder = Path(self._get_output_dir(trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            (folder / STATE_FILE).unlink(missing_ok=True)
        super()._save_checkpoint(model, trial)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.experts is None:
            super()._save_optimizer_and_scheduler(output_dir)
        else:
            self.experts.save_progress(self.optimizer, self.lr_scheduler, output_dir, writes=self.args.should_save)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        with self._config_for_use():
            super().save_model(output_dir, _internal_call)

    @contextlib.contextmanager
    def _config_for_use(self) -> Iterator[None]:
        config = getattr(self.accelerator.unwrap_model(self.model), "config", None)
        if config is None or self._use_cache is None:
            yield
            return
        training, config.use_cache = config.use_cache, self._use_cache
        try:
            yield
        finally:
            config.use_cache = training

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self.segments is not None:
            self.segments.save(output_dir, self.args.process_index)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        epoch = self.state.epoch
        if self.segments is not None and checkpoint is not None and epoch is not None and epoch != int(epoch):
            self.segments.load(checkpoint, self.args.process_index, self.args.device)
