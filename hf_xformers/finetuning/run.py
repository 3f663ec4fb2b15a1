# SPDX-License-Identifier: Apache-2.0
"""A fine-tuning from start to finish: data, labels, tokenizer, model, Trainer, predictions, results."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.saved_files import write_text
from ..objectives.base import SeededCollator
from ..training.run import Run
from ..training.run_folder import read_summary, remove_results, save_final
from . import loading
from .class_balance import BalancedLoss, class_weights, weigh_sequences
from .exit_curve import exit_curve, has_exit_curve
from .label_unit import begin_in_unit
from .layerwise import LayerGroups
from .options import ModelOptions, RunOptions, TaskData, TaskOptions
from .peft_methods import BOTTLENECKS, add_adapter, reach
from .request import TaskRequest
from .self_ensemble import SelfEnsemble
from .tasks import Encoded, LanguageModeling, Task

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase, Seq2SeqTrainingArguments, TrainerCallback

    from ..training.loss_terms import LossTerms
    from ..training.merged_adapters import PutIn
    from .trainer import TaskTrainer

PREDICTIONS = "predictions_{split}.jsonl"
METHODS = ("layer_decay", "unfreeze_every", "slanted_triangular", "self_ensemble")  # of training, as recorded


@dataclass
class Prepared:
    """Everything of a run that is settled before a weight is made or read."""

    task: Task
    config: PreTrainedConfig
    tokenizer: Any  # what makes inputs of rows; None where the task does so itself
    splits: dict[str, Encoded]
    plan: dict[str, Any]
    checkpoint: Path | None

    @property
    def sizes(self) -> str:
        return ", ".join(f"{len(split.rows):,} {name}" for name, split in self.splits.items())


class FineTuning(TaskRequest):
    """Checks a request, then prepares its data, and trains. What can be refused without reading data is refused first,
    and nothing is written before everything is checked. The options are those of [`TaskRequest`].

    What compression sets: `guest` is put into the model and taken out before it is saved, `terms` are added to
    the loss, `rows` gives other features of the training rows, with the collator of the run.

    Raises ValueError and TypeError that name the value and the remedy.
    """

    guest: PutIn | None = None
    terms: LossTerms | None = None
    rows: Callable[[Prepared], Any] | None = None

    # ------------------------------------------------------------------------------------------------ data

    def prepare(self) -> Prepared:
        """Reads the data, settles labels and tokenizer, encodes. Processes take turns, the main one first."""
        from ..data import check_tokenizer

        with self.this_run.turns("preparing the data"):
            splits = self.task.load(self.source)
            self.task.settle(splits, self.start if self.keeps_head else None)
            self.task.open_processor(splits, self.model.model, self.args.seed)
            if self.start is None:
                given = self._config_class(), self.components, self.fields
                self.components, self.fields = self.task.decided_fields(*given)
            first = self._config({})
            tokenizer: Any = None
            ids: dict[str, Any] = {}
            if self.task.reads_text:
                tokenizer = self.tokenizer or self._tokenizer(splits["train"], first)
                loading.fit_tokenizer(tokenizer, first)
                ids = self._vocabulary(tokenizer)
            config = self._config({**self.task.config_fields(), **ids})
            if self.task.reads_text:
                check_tokenizer(tokenizer, config)
            else:
                tokenizer = self.task.processor(config, self.model.model)
            self.task.read_config(config)
            encoded = {name: self.task.encode(rows, tokenizer, name) for name, rows in splits.items()}
        self.this_run.make_room(removes=False)
        self._check_splits(encoded)
        plan = self._plan(config, tokenizer, encoded)
        if self.checkpoint is not None:
            self.this_run.check_same(plan)
            check_same_methods(plan, self.checkpoint)
        return Prepared(self.task, config, tokenizer, encoded, plan, self.checkpoint)

    def _tokenizer(self, rows: Any, config: PreTrainedConfig) -> PreTrainedTokenizerBase:
        options = self.model
        if self.checkpoint is not None:  # the very same as before
            options = dataclasses.replace(options, tokenizer=str(self.folder), train_tokenizer=False)
        return loading.choose_tokenizer(options, self.task, self.task.texts(rows), config.vocab_size, config)

    def _vocabulary(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """The configuration's ids that follow from the tokenizer: all of them where it is new to the model."""
        from ..data import vocabulary_fields
        from ..training.building import own_ids
        from ..variants import config_class

        fields: dict[str, Any] = dict(vocabulary_fields(tokenizer))
        known = config_class(self.variant) if self.start is None else type(self.start)
        fields.update(own_ids(known, tokenizer))
        if self.start is None:
            fields["decoder_start_token_id"] = fields["pad_token_id"] if self.task.head == "Seq2SeqLM" else None
            return fields
        fields.pop("vocab_size")  # the saved embedding has its size
        if self.model.train_tokenizer:
            return fields
        if self.start.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
            return {"pad_token_id": fields["pad_token_id"]}
        return {}

    def _plan(self, config: PreTrainedConfig, tokenizer: Any, encoded: Mapping[str, Encoded]) -> dict[str, Any]:
        language = isinstance(self.task, LanguageModeling)
        plan: dict[str, Any] = {
            "status": "running",
            "task": self.task.id,
            "variant": config.model_type,
            "init_from": self.model.model,
            "peft": self.run_options.peft,
            "vocabulary": len(tokenizer) if self.task.reads_text else None,
            "max_length": self.task.max_length,
            **{f"{split}_rows": len(part.rows) for split, part in encoded.items()},
            "seed": self.args.seed,
            "dataset": dataclasses.asdict(self.source),
            # What `hf-xformers predict` and `evaluate` read, so that another file means the same to the model.
            "task_options": self.task.recorded(),
            "task_facts": self.task.facts(),
            "task_config": {**self.task.config_fields(), "pad_token_id": config.pad_token_id},
        }
        trivial = self.task.trivial(encoded["train"])
        if trivial is not None:
            plan["trivial"] = dataclasses.asdict(trivial)
        if self.start is None:
            plan["size"] = self.size
        classes = self.task.class_names()
        if classes is not None:
            plan["labels"] = classes
        if "f1" in self.task.metric_names:
            plan["f1_name"] = self.task.f1_name()
        if self.options.class_balance:
            plan["class_balance"] = self.options.class_balance
        plan |= self.run_options.layerwise_record() | self.run_options.self_ensemble_record()
        plan |= self.run_options.devices()
        if language:  # what `hf-xformers evaluate` looks for
            plan["objective"] = self.task.objective.to_dict()  # type: ignore[attr-defined]
            plan["block_size"] = self.task.max_length
            sampling = {"sample_by": self.task.objective.sample_by}  # type: ignore[attr-defined]
            plan["data"] = {
                "data": self.source.data,
                "validation_fraction": self.source.validation_fraction,
                **sampling,
            }
        return plan

    def _check_splits(self, encoded: Mapping[str, Encoded]) -> None:
        validation = encoded.get("validation")
        if self.run_options.early_stopping_patience is not None and (validation is None or not validation.labelled):
            raise ValueError(
                "--early_stopping_patience needs validation rows; raise --validation_fraction above 0, or give "
                "--validation_data"
            )
        test = encoded.get("test")
        if self.task.generates and test is not None and not (test.labelled or self.args.predict_with_generate):
            raise ValueError(
                "the test rows have no targets to measure with, and without --predict_with_generate none are written;"
                " give targets, or leave one of the two options out"
            )

    # ------------------------------------------------------------------------------------------------ training

    def train(self, prepared: Prepared, callbacks: Sequence[TrainerCallback] = ()) -> dict[str, Any]:
        """Trains, takes the best checkpoint, evaluates and predicts all splits but the training rows, saves
        everything.

        Returns the content of `training_summary.json`.
        """
        from .trainer import TaskTrainer

        args, task, run = self.args, prepared.task, self.this_run
        validation = prepared.splits.get("validation")
        if validation is None or not validation.labelled:
            run.go_without_evaluation()
        model = self._model(prepared)
        if self.rows is not None:
            prepared.splits["train"].features = self.rows(prepared)
        run.put(self.guest, model)
        groups = LayerGroups(model) if self.run_options.goes_by_layers else None
        ensemble = SelfEnsemble(model, self.run_options) if self.run_options.self_ensemble is not None else None
        self._begin(prepared)
        collator = task.collator(prepared.tokenizer, model, args.seed)
        static = collator.as_static() if isinstance(collator, SeededCollator) else collator
        trainer = TaskTrainer(
            model=model,
            args=args,
            task=task,
            validation=validation,
            data_collator=collator,
            eval_collator=static,
            train_dataset=prepared.splits["train"].features,
            eval_dataset=None if validation is None else validation.features,
            processing_class=prepared.tokenizer,
            callbacks=[*self._callbacks(collator), run.timer, *callbacks],
            recipe=self.run_options,
            layerwise=self.run_options,
            groups=groups,
            ensemble=ensemble,
            compute_loss_func=self._loss(prepared, model),
            terms=self.terms,
            **self.run_options.devices(),
        )
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        facts = {"parameters": model.num_parameters(), "trained_parameters": trainable}
        facts |= {"learning_rate": args.learning_rate, "rows_per_step": trainer.rows_per_step}
        if self.run_options.peft in ("lora", "ia3"):
            facts["adapter_reach"] = reach(model)
        run.begin(trainer, {**prepared.plan, **facts}, {"f1": task.f1_name()})
        fit(run, trainer, self.run_options)
        run.summary |= measured(trainer, prepared, self.folder)
        return run.finish(trainer, self.model.model, lambda trainer: self._save(trainer, model))

    def _begin(self, prepared: Prepared) -> None:
        """The first that is written, once nothing is left to refuse."""
        if self.checkpoint is not None:
            return
        with self.this_run.turns("preparing the folder"):
            if self.args.should_save:
                self.this_run.make_room()
                self.this_run.keep(*([] if prepared.tokenizer is None else [prepared.tokenizer]))

    def _save(self, trainer: Any, model: Any) -> None:
        """The model, or the adapter alone, into the run's folder."""
        if self.run_options.peft not in BOTTLENECKS:
            save_final(trainer)
        elif self.args.should_save:
            from ..adapters.named import CONFIG_FILE, WEIGHTS_FILE, save_adapter

            save_adapter(model, self.folder)
            remove_results(self.folder, (CONFIG_FILE, WEIGHTS_FILE))
            trainer.save_state()

    def _loss(self, prepared: Prepared, model: Any) -> BalancedLoss | None:
        """What makes the loss in place of the model's head, if anything does. A chain of tags makes its own, of the
        weights that it is given here."""
        balance = self.options.class_balance
        if not balance:
            return None
        classes = len(self.task.class_names() or ())
        weights = class_weights(prepared.splits["train"].features["labels"], classes, balance)
        return None if weigh_sequences(model, weights) else BalancedLoss(weights)

    def _callbacks(self, collator: Any) -> list[TrainerCallback]:
        from transformers import EarlyStoppingCallback

        from ..training.callbacks import EpochCallback, ExactSaves

        found: list[TrainerCallback] = [ExactSaves()]
        if isinstance(collator, SeededCollator):
            found.append(EpochCallback(collator))
        run = self.run_options
        if run.early_stopping_patience is not None:
            found.append(EarlyStoppingCallback(run.early_stopping_patience, run.early_stopping_threshold))
        return found

    def _model(self, prepared: Prepared) -> Any:
        """Fresh weights under the run's seed, or the saved ones, with an adapter if one is asked for."""
        self.this_run.seed()
        task, config = prepared.task, prepared.config
        if self.model.model is None:
            model = loading.model_class(config, task.head)(config)
            begin_in_unit(model, *task.unit)
            return model
        has_head = loading.has_head(self.start, task.head)  # type: ignore[arg-type]
        kept = {"has_head": has_head, "new_head": self.model.new_head}
        model, new = loading.load_model(self.model.model, config, task.head, **kept)
        if not self.keeps_head:
            begin_in_unit(model, *task.unit)
        if self.run_options.peft is None:
            return model
        return add_adapter(model, self.run_options.peft, task.head, new, **self.peft_fields)


def finetune(
    model: ModelOptions,
    source: TaskData,
    task: TaskOptions,
    run: RunOptions,
    args: Seq2SeqTrainingArguments,
    *,
    callbacks: Sequence[TrainerCallback] = (),
    **options: Any,
) -> dict[str, Any]:
    """[`FineTuning`], its `prepare` and its `train` in one call; what `hf-xformers finetune` does."""
    made = FineTuning(model, source, task, run, args, **options)
    with made.this_run.lock():
        return made.train(made.prepare(), callbacks)


def fit(run: Run, trainer: TaskTrainer, options: RunOptions) -> None:
    """Trains, and takes the weights that the options say: the best, an ensemble's, or a mean."""
    done = run.has_all_steps and not (trainer.unfreezing or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled)
    if done and trainer.ensemble is not None:
        trainer.ensemble.load(str(run.checkpoint))
    run.fit(trainer, average=options.average_checkpoints, done=done)
    best = trainer.state.best_model_checkpoint
    if trainer.unfreezing is not None:
        run.summary["trained_parameters"] = trainer.unfreezing.trained()
    if trainer.ensemble is not None:
        trainer.ensemble.settle(best if run.args.load_best_model_at_end else None)
    run.summary["best_checkpoint"] = best


def measured(
    trainer: TaskTrainer,
    prepared: Prepared,
    folder: Path,
    predict: Callable[[Encoded, str], tuple[list[dict[str, Any]], dict[str, float]]] | None = None,
) -> dict[str, Any]:
    """Metrics and baselines of every split of a task but the training rows, whose predictions are written into
    `folder`. predict: gives the rows and the metrics of a split, under a prefix, where the trainer has several
    tasks."""
    found: dict[str, Any] = {}
    args = trainer.args
    task, trivial = prepared.task, prepared.task.trivial(prepared.splits["train"])
    for name in ("validation", "test"):
        if name not in prepared.splits:
            continue
        split, prefix = prepared.splits[name], "eval" if name == "validation" else name
        rows, metrics = (predict or trainer.predict_rows)(split, prefix)
        if args.should_save and rows:
            folder.mkdir(exist_ok=True)
            write_lines(folder / PREDICTIONS.format(split=name), rows)
        known = ("loss", "tokens", *task.metric_names)
        found |= {key: value for key, value in metrics.items() if key.removeprefix(f"{prefix}_") in known}
        if rows and split.labelled and trivial is not None:
            found[f"baseline_{name}"] = task.baseline(trivial, rows, split)
        alone = predict is None and args.world_size == 1
        if rows and split.labelled and alone and has_exit_curve(prepared.config, task):
            found[f"exits_{name}"] = exit_curve(trainer, split, task)
    return found


def check_same_methods(plan: Mapping[str, Any], checkpoint: Path) -> None:
    """Refuses to continue a checkpoint with other ways to train, which its optimizer does not fit."""
    before = read_summary(checkpoint.parent)
    for name in METHODS:
        if before and before.get(name) != plan.get(name):
            raise ValueError(
                f"the run of {str(checkpoint)!r} had {name} {before.get(name)}, and this command gives"
                f" {plan.get(name)}; resume with the options of the first start, or start a new run in another"
                " --output_dir"
            )


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Replaces a JSONL file at once, so that no reader finds half of it."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
