# SPDX-License-Identifier: Apache-2.0
"""What all runs do alike, whatever they train or make: take a folder, continue where it was stopped, train, finish."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..conversion.provenance import carry_provenance
from ..core.saved_files import STATE_FILE, SUMMARY_FILE, read_object, saving_into, write_json
from .checkpoints import NEWEST, NO_CHECKPOINT, checkpoint_to_resume, checkpoints, defect, newest_complete
from .earlier_stages import in_place_of
from .folder_lock import folder_lock
from .recipe import average_last_checkpoints
from .run_folder import check_same_run, refuse_own_source, save_final

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from .callbacks import TrainedSeconds
    from .merged_adapters import PutIn

_RESULTS = ("*.safetensors", "pytorch_model*.bin")  # what a run ends with


class Run:
    """A run in the folder `args.output_dir`, whole at every moment.

    overwrite: whether what an earlier run has left there may go. summary: the content of `training_summary.json`.
    """

    def __init__(self, args: TrainingArguments, *, overwrite: bool = False) -> None:
        self.args, self.overwrite = args, overwrite
        self.folder = Path(str(args.output_dir))
        self.summary: dict[str, Any] = {}
        self.guest: PutIn | None = None

    @property
    def resumes(self) -> bool:
        """Whether a run that is there continues."""
        return str(self.args.resume_from_checkpoint).lower() not in NO_CHECKPOINT

    def refuse_named_checkpoint(self) -> None:
        """Raises ValueError where a run of stages, which continue with their newest checkpoints, is given another."""
        value = str(self.args.resume_from_checkpoint)
        if self.resumes and value.lower() not in NEWEST:
            raise ValueError(
                f"--resume_from_checkpoint {value!r} names a checkpoint, and this command continues where it was"
                " stopped; give --resume_from_checkpoint without a value"
            )

    @property
    def writes(self) -> bool:
        """Whether this process is the one that writes."""
        return self.args.should_save

    @cached_property
    def checkpoint(self) -> Path | None:
        """What training continues from. Raises ValueError as [`checkpoint_to_resume`] does."""
        return checkpoint_to_resume(self.args.resume_from_checkpoint, self.folder, self.args.world_size)

    @cached_property
    def timer(self) -> TrainedSeconds:
        """A callback, which every trainer of the run is given."""
        from .callbacks import TrainedSeconds

        return TrainedSeconds()

    # ------------------------------------------------------------------------------------------------ the folder

    def lock(self) -> AbstractContextManager[None]:
        """Keeps other runs out of the folder."""
        return folder_lock(self.folder, writes=self.writes)

    def turns(self, what: str) -> AbstractContextManager[None]:
        """Processes take turns, the main one first."""
        return self.args.main_process_first(local=self.args.save_on_each_node, desc=what)

    def make_room(self, *, removes: bool = True) -> None:
        """Removes what an earlier run has left, unless it continues. Raises ValueError where that may not be lost; a
        checkpoint whose save was interrupted may. removes: whether all that is refused has been."""
        if self.checkpoint is not None or (self.overwrite and not removes):
            return
        old = checkpoints(self.folder)
        saved = [path for path in old if (path / STATE_FILE).is_file()]
        if saved and not (self.overwrite and self.writes):
            whole = any(defect(path, self.args.world_size) is None for path in saved)
            raise ValueError(
                f"{str(self.folder)!r} already holds {saved[0].name} of an earlier run;"
                f"{' continue that run with --resume_from_checkpoint,' if whole else ''} remove its checkpoints with"
                " --overwrite_output_dir, or take another --output_dir"
            )
        result = sorted(path.name for pattern in _RESULTS for path in self.folder.glob(pattern))
        if result and not self.overwrite:
            raise ValueError(
                f"{str(self.folder)!r} already holds a model ({result[0]}); replace it with --overwrite_output_dir, or"
                " take another --output_dir"
            )
        for checkpoint in old if removes and self.writes else ():
            shutil.rmtree(checkpoint)

    def refuse_own_source(self, source: str | None, option: str, made: Iterable[str] = ()) -> None:
        """Raises ValueError where the run would replace the model that it starts from. made: folders that it makes."""
        if source is not None and not self.resumes:
            made = [*made, *(place.name for place in checkpoints(self.folder))]
            refuse_own_source(self.folder, source, option, made)

    def refuse_loss(self, what: str) -> None:
        """Raises ValueError where the folder holds something that neither continues nor may go."""
        if not self.resumes and not self.overwrite:
            raise ValueError(
                f"{str(self.folder)!r} holds {what} already; continue it with --resume_from_checkpoint, replace it"
                " with --overwrite_output_dir, or take another --output_dir"
            )

    def in_place_of(self, account: str, names: Sequence[str]) -> AbstractContextManager[None]:
        """[`in_place_of`], of the process that writes."""
        return in_place_of(self.folder, account, names) if self.writes else nullcontext()

    def keep(self, *parts: Any) -> None:
        """Writes what a resumed run needs the same of: a tokenizer, an image processor."""
        if self.checkpoint is None and self.writes:
            with saving_into(self.folder) as staging:
                for part in parts:
                    part.save_pretrained(staging)

    @contextmanager
    def preparing(self) -> Iterator[Path]:
        """Room for what a resumed run needs the same of, which the block writes and reads there, if this run writes
        it: it goes to the folder at the end, in place of what an earlier run has left. A block that fails leaves that
        as it was."""
        self.make_room(removes=False)
        begins = self.checkpoint is None and self.writes
        with saving_into(self.folder) if begins else nullcontext(self.checkpoint or self.folder) as place:
            yield place
            self.make_room()

    def check_same(self, plan: dict[str, Any]) -> None:
        """Raises ValueError where the checkpoint is of a run on other rows."""
        if self.checkpoint is not None:
            check_same_run(plan, self.checkpoint)

    def check_settings(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        """Raises ValueError for another setting than the run that continues was started with."""
        for name, value in now.items():
            if before.get(name) != value:
                raise ValueError(
                    f"the run in {str(self.folder)!r} had {name} {before.get(name)!r}, and this command gives"
                    f" {value!r}; resume with the options of the first start, or take another --output_dir"
                )

    def stage(self, name: str, **changes: Any) -> Any:
        """The arguments, with `changes`, of a run in a folder of this one that continues where this one does."""
        args = copy.copy(self.args)
        place = self.folder / name
        args.output_dir = str(place)
        found = newest_complete(place, args.world_size) if self.resumes and place.is_dir() else None
        args.resume_from_checkpoint = None if found is None else str(found)
        for setting, value in changes.items():
            setattr(args, setting, value)
        return args

    def write(self) -> None:
        if self.writes:
            write_json(self.folder / SUMMARY_FILE, self.summary)

    def wait(self) -> None:
        """Until all processes of the run are here."""
        if self.args.world_size > 1:
            self.args.distributed_state.wait_for_everyone()

    # ------------------------------------------------------------------------------------------------ training

    def seed(self) -> None:
        """Before weights are made."""
        from transformers import enable_full_determinism, set_seed

        (enable_full_determinism if self.args.full_determinism else set_seed)(self.args.seed)

    def put(self, guest: PutIn | None, model: Any) -> None:
        """Puts something into the model that is taken out of it before it is saved."""
        self.guest = guest
        if guest is not None:
            guest.put(model)

    def go_without_evaluation(self) -> None:
        """There is nothing held out, and so no best checkpoint either."""
        from transformers.trainer_utils import IntervalStrategy, SaveStrategy

        args = self.args
        args.eval_strategy, args.load_best_model_at_end = IntervalStrategy.NO, False
        args.save_strategy = SaveStrategy.EPOCH if args.save_strategy == SaveStrategy.BEST else args.save_strategy

    def begin(self, trainer: Any, plan: Mapping[str, Any], called: Mapping[str, str] | None = None) -> None:
        """Writes what is trained on what. called: names of figures, as lines about them show them."""
        from .callbacks import speak_plainly

        speak_plainly(trainer, called)
        self.model = trainer.model
        self.summary = dict(plan)
        self.write()

    @property
    def has_all_steps(self) -> bool:
        """Whether the checkpoint has come to `max_steps`. (Trainer would take one step more.)"""
        if self.checkpoint is None or self.args.max_steps <= 0:
            return False
        return read_object(self.checkpoint / STATE_FILE)["global_step"] >= self.args.max_steps

    def fit(self, trainer: Any, *, average: int | None = None, done: bool = False, has_weights: bool = False) -> None:
        """Trains. average: so many of the last checkpoints give the weights. done: the checkpoint is the end of the
        run, of which the model has the weights already (`has_weights`) or is given them."""
        if done:
            from transformers.trainer_callback import TrainerState

            trainer.state = TrainerState.load_from_json(str(self.checkpoint / STATE_FILE))  # type: ignore[operator]
            self.timer.resume(trainer.state)
            if not has_weights:
                trainer._load_from_checkpoint(str(self.checkpoint))
            if self.args.load_best_model_at_end and trainer.state.best_model_checkpoint is not None:
                trainer._load_best_model()
        else:
            trainer.train(resume_from_checkpoint=None if self.checkpoint is None else str(self.checkpoint))
        state = trainer.state
        self.summary |= {"status": "finished", "steps": state.global_step, "epochs": state.epoch}
        self.summary["seconds"] = round(self.timer.seconds, 2)
        if average:
            self.summary["averaged"] = average_last_checkpoints(self.model, self.folder, average, self.args.world_size)

    def finish(
        self, trainer: Any, source: str | None, save: Callable[[Any], None] = save_final, *, last: bool = True
    ) -> dict[str, Any]:
        """Saves the model and the results, which it returns. source: the model that training started from. last:
        whether the processes of the run have nothing more to do together."""
        if self.guest is not None:
            self.guest.merge(self.model)
        save(trainer)
        if self.writes:
            carry_provenance(source, self.folder)
        self.write()
        if self.args.world_size > 1 and last:
            trainer.accelerator.end_training()
        return self.summary
