# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: what it is, so that a resume cannot silently be another run, and saves that are whole or not
there.

training_summary.json   what is trained on what, and at the end the results
tokenizer.json, ...     written before training starts
checkpoint-<step>/      written by Trainer
model.safetensors, config.json, generation_config.json, trainer_state.json   the end result
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Container, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.saved_files import (
    CHECKPOINT,
    STAGING,
    STATE_FILE,
    SUMMARY_FILE,
    read_object,
    saving_into,
    stored_weights,
)
from ..core.specs import default_of
from ..objectives import OBJECTIVES

if TYPE_CHECKING:
    from transformers import Trainer

    from ..configuration_xformer import XFormerConfig

# A resumed run must agree in these with the run it continues, or its rows are others.
_SAME = {
    "objective": "--objective",
    "block_size": "--block_size",
    "train_rows": "--data",
    "train_streams": "--segment_streams, batch size and number of processes",
}
# What a model, a PEFT adapter and a bottleneck adapter are saved in, besides a model's weights.
_RESULTS = (
    *("config.json", "generation_config.json"),
    *("adapter_config.json", "adapter_model.safetensors"),
    *("bottleneck_config.json", "bottleneck.safetensors"),
)


def read_summary(folder: str | Path) -> dict[str, Any]:
    """`training_summary.json` of a run, or of the run that a checkpoint folder belongs to; empty if there is none.
    Raises ValueError for one that is damaged: the run would continue with other settings."""
    own = Path(folder).absolute()
    run = [own.parent] if CHECKPOINT.fullmatch(own.name) else []  # the folder of a stage has its own summary
    for place in (own, *run):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return read_object(place / SUMMARY_FILE)
    return {}


def refuse_own_source(folder: Path, source: str, option: str, made: Iterable[str] = ()) -> None:
    """Raises ValueError where a run into `folder` would replace what it reads. made: folders in it that it makes."""
    own, place = Path(source).expanduser().resolve(), folder.expanduser().resolve()
    if own == place or any(own.is_relative_to(place / name) for name in made):
        raise ValueError(
            f"--output_dir {str(folder)!r} would replace {option} {source!r}, which stays as it is; take another"
        )


def check_same_run(plan: dict[str, Any], checkpoint: Path) -> None:
    """Refuses to continue `checkpoint` with other rows than it was trained on."""
    before = read_summary(checkpoint.parent)
    if "objective" in before:
        before["objective"] = _with_settings_since(before["objective"])
    for key, option in _SAME.items():
        if key in before and before[key] != plan.get(key):
            raise ValueError(
                f"the run of {str(checkpoint)!r} had {key} {before[key]!r}, and this command gives {plan.get(key)!r};"
                f" resume with the same {option} (and the same data and tokenizer), or start a new run in another"
                " --output_dir"
            )


def _with_settings_since(objective: dict[str, Any]) -> dict[str, Any]:
    """A recorded objective with the settings that it has come to have since, at their defaults."""
    found = OBJECTIVES.get(str(objective.get("type")))
    if found is None:
        return objective
    since = {entry.name: default_of(found, entry.name) for entry in dataclasses.fields(found)}
    return {**since, **objective}


def saved_config(folder: str | Path) -> dict[str, Any]:
    """The folder's config.json as it is. Raises ValueError where there is no readable one."""
    try:
        return read_object(Path(folder) / "config.json")
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{str(folder)!r} holds no config.json; give the folder of a saved model") from None


def check_same_model(config: XFormerConfig, checkpoint: Path) -> None:
    """Refuses to continue `checkpoint` with a model of another variant or of other fields."""
    model_type = saved_config(checkpoint).get("model_type")
    if model_type != config.model_type:
        raise ValueError(
            f"the checkpoint {str(checkpoint)!r} is of variant {model_type!r}, and this command asks for "
            f"{config.model_type!r}; resume with --variant {model_type}, or start a new run in another --output_dir"
        )
    saved = type(config).from_pretrained(checkpoint).to_dict()
    wanted = config.to_dict()
    for name in sorted(field.name for field in dataclasses.fields(config)):
        if name in ("use_cache", "architectures", "dtype", "transformers_version"):
            continue
        if saved.get(name) != wanted.get(name):
            raise ValueError(
                f"the checkpoint {str(checkpoint)!r} has {name} {saved.get(name)!r}, and this command asks for "
                f"{wanted.get(name)!r}; resume with the options of the first start, or start a new run in another "
                "--output_dir"
            )


def save_final(trainer: Trainer) -> None:
    """Writes model, config, generation config and tokenizer into the run's folder, each file whole or not at all."""
    folder = Path(str(trainer.args.output_dir))
    # Every process takes part in a save, and the one that writes moves the files when all are there.
    scratch = saving_into(folder) if trainer.args.should_save else contextlib.nullcontext(folder / STAGING)
    saved: set[str] = set()
    with scratch as staging:
        trainer.accelerator.wait_for_everyone()  # of a split model all make the folder, and the writer has to be first
        trainer.save_model(str(staging))
        trainer.accelerator.wait_for_everyone()
        if trainer.args.should_save:
            (staging / "training_args.bin").unlink(missing_ok=True)  # a pickle has no place in a model to share
            trainer.state.save_to_json(str(staging / STATE_FILE))
            saved = {path.name for path in staging.iterdir()}
    if trainer.args.should_save:
        remove_results(folder, saved)


def result_in(folder: Path) -> str | None:
    """The file that says which model or adapter a folder holds, if it holds one."""
    return next((name for name in _RESULTS if name.endswith("config.json") and (folder / name).is_file()), None)


def remove_results(folder: Path, kept: Container[str]) -> None:
    """Removes the models and adapters of a run's folder but the files that are `kept`. An adapter that an earlier run
    has left would be read in place of a model that is saved next to it."""
    for name in (*stored_weights(folder), *_RESULTS):
        if name not in kept:
            (folder / name).unlink(missing_ok=True)
