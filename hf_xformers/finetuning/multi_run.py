# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning on several tasks at once: a request for each task, one tokenizer, one encoder, one Trainer.

RUN/checkpoint-<step>/     encoder and heads, as Trainer continues from them
RUN/training_summary.json  the tasks and what was measured of each
RUN/<task>/                that task's whole model, as a run of it alone would have left it
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from ..conversion.provenance import carry_provenance
from ..core.saved_files import SUMMARY_FILE, saving_into, write_json
from ..training.run import Run
from ..training.run_folder import read_summary, remove_results
from . import loading
from .layerwise import LayerGroups
from .multi_task import (
    HEADS,
    TASKS,
    JoinedRows,
    MultiTaskModel,
    MultiTaskOptions,
    NamedRows,
    TaskCollator,
    WithTaskNumber,
    number_of_tasks,
)
from .multi_trainer import MEAN, MultiTaskTrainer
from .options import ModelOptions, RunOptions, TaskData, TaskOptions
from .peft_methods import BOTTLENECKS
from .run import METHODS, FineTuning, Prepared, fit, measured
from .self_ensemble import SelfEnsemble
from .tasks.classification import Regression
from .uncertainty import UNCERTAINTY

if TYPE_CHECKING:
    from transformers import Seq2SeqTrainingArguments, TrainerCallback


class MultiTaskTuning:
    """Checks the requests of several tasks, prepares their data, and trains one encoder on all of them.

    requests: by task, (source, task). options: of [`FineTuning`] besides its dataclasses.

    Raises ValueError and TypeError that name the value and the remedy.
    """

    def __init__(
        self,
        model: ModelOptions,
        requests: Mapping[str, tuple[TaskData, TaskOptions]],
        run: RunOptions,
        args: Seq2SeqTrainingArguments,
        several: MultiTaskOptions,
        **options: Any,
    ) -> None:
        several.check()
        self.model, self.run_options, self.args, self.several = model, run, args, several
        self.this_run = Run(args, overwrite=run.overwrite_output_dir)
        self.folder = self.this_run.folder
        self.this_run.refuse_own_source(model.model, "the model", requests)
        self._check(requests)
        self.parts: dict[str, FineTuning] = {}
        for name, (source, task) in requests.items():
            own = copy.copy(args)
            own.metric_for_best_model = None
            self.parts[name] = FineTuning(model, source, task, run, own, **options)
        for name, part in self.parts.items():
            if part.task.head not in HEADS or not part.task.reads_text:
                raise ValueError(
                    f"--task {name}={part.task.id} does not read a text once to classify it, its words, spans or"
                    " choices, which several tasks at once are for; train it by itself"
                )
        self._check_sampling()
        self._share_positions()
        self._check_task_numbers()
        self._choose_metric()
        self.checkpoint = self.this_run.checkpoint = next(iter(self.parts.values())).checkpoint

    def _check(self, requests: Mapping[str, tuple[TaskData, TaskOptions]]) -> None:
        run, args = self.run_options, self.args
        for name, (source, _) in requests.items():
            if not source.data:
                raise ValueError(f"task {name!r} has no rows; give them with --data {name}=FILE")
        alone = {
            "max_tokens": run.max_tokens,
            "expert_parallel": run.devices(),
            "label_smoothing_factor": args.label_smoothing_factor,
            "group_by_length": args.train_sampling_strategy == "group_by_length",
        }
        for option, value in alone.items():
            if value:
                raise ValueError(f"--{option} is for one task at a time; leave it out, or train the tasks apart")
        if run.peft in ("prefix", "prompt"):
            raise ValueError(
                f"--peft {run.peft} is put before the text of one task; take lora, ia3 or a bottleneck, which all"
                " tasks share, or train the tasks apart"
            )
        if args.world_size > 1 and self.several.sampling == UNCERTAINTY:
            raise ValueError(
                f"--sampling uncertainty compares rows in one process, got {args.world_size}; start the command"
                " without a launcher, or take another --sampling"
            )
        if args.world_size > 1 and args.ddp_find_unused_parameters is None:
            args.ddp_find_unused_parameters = True  # a step trains one of the heads

    def _check_sampling(self) -> None:
        """Uncertainty is that of what a head says of a choice."""
        for name, part in self.parts.items() if self.several.sampling == UNCERTAINTY else ():
            if isinstance(part.task, Regression):
                raise ValueError(
                    f"--sampling uncertainty reads probabilities, and --task {name}={part.task.id} has none; take"
                    " another --sampling, as sqrt is"
                )
            if getattr(part._config({}), "tag_decoder", "softmax") != "softmax":
                raise ValueError(
                    "--sampling uncertainty reads the probabilities of single tags, which tag_decoder 'crf' does not"
                    " have; take --tag_decoder softmax, or another --sampling"
                )
            if self.run_options.self_ensemble is not None:
                raise ValueError(
                    "--sampling uncertainty trains on rows of several tasks in a step, and --self_ensemble compares"
                    " one answer; drop one"
                )

    def _share_positions(self) -> None:
        """New models cover the longest row of any task."""
        key = "max_position_embeddings"
        longest = max((part.fields.get(key, 0) for part in self.parts.values()), default=0)
        for part in self.parts.values():
            if part.start is None and longest:
                part.fields[key] = longest

    def _check_task_numbers(self) -> None:
        """A model that is told the task needs a vector for each."""
        for name, part in self.parts.items():
            known = number_of_tasks(part._config({}))
            if known is not None and part.task.head == "MultipleChoice":
                raise ValueError(
                    f"--task {name}={part.task.id} reads several texts for a row, and a model that is told the task of"
                    " each row does not; take another --attention and --stack, or train it by itself"
                )
            if known is not None and known < len(self.parts):
                raise ValueError(
                    f"the model knows {known} tasks, and {len(self.parts)} are named; give"
                    f" --{_slot_of_tasks(part)}.num_tasks {len(self.parts)}"
                )

    def _choose_metric(self) -> None:
        args = self.args
        measured = {
            f"{name}_{metric}": part.task.is_error(metric)
            for name, part in self.parts.items()
            for metric in (*part.task.metric_names, "loss")
        }
        wanted = (args.metric_for_best_model or MEAN).removeprefix("eval_")
        if wanted in {part.task.metric for part in self.parts.values()}:
            wanted = MEAN  # the default of the task that was named last
        known = {MEAN: False, "loss": True, **measured}
        if wanted not in known:
            raise ValueError(f"--metric_for_best_model {wanted!r} is not measured; choose one of {', '.join(known)}")
        args.metric_for_best_model, args.greater_is_better = wanted, not known[wanted]

    # ------------------------------------------------------------------------------------------------ data

    def prepare(self) -> dict[str, Prepared]:
        """Reads all data; one tokenizer serves all tasks."""
        first = next(iter(self.parts.values()))
        self.this_run.make_room(removes=False)
        tokenizer = self._tokenizer(first)
        prepared = {}
        for name, part in self.parts.items():
            part.tokenizer = tokenizer
            prepared[name] = part.prepare()
        sizes = {(one.config.vocab_size, one.config.hidden_size) for one in prepared.values()}
        if len(sizes) > 1:
            raise ValueError(f"the tasks' models differ in vocabulary or width {sorted(sizes)}; give them one --model")
        self._check_same(prepared)
        return prepared

    def _tokenizer(self, first: FineTuning) -> Any:
        """Trained on the rows of all tasks, where it is new."""
        if self.checkpoint is not None or not (self.model.train_tokenizer or self.model.model is None):
            return None
        if self.model.tokenizer is not None:
            return None
        texts = []
        for part in self.parts.values():
            splits = part.task.load(part.source)
            part.task.settle(splits, None)
            texts.append(part.task.texts(splits["train"]))
        config = first._config({})
        return loading.choose_tokenizer(
            self.model, first.task, list(itertools.chain.from_iterable(texts)), config.vocab_size, config
        )

    def _check_same(self, prepared: Mapping[str, Prepared]) -> None:
        if self.checkpoint is None:
            return
        before = read_summary(self.checkpoint.parent).get("tasks", {})
        now = {name: (one.plan["task"], one.plan["train_rows"]) for name, one in prepared.items()}
        then = {name: (about["task"], about["train_rows"]) for name, about in before.items()}
        if now != then:
            raise ValueError(
                f"the run of {str(self.checkpoint)!r} had the tasks {then} (kind and training rows), and this command"
                f" gives {now}; resume with the same --task and --data, or start a new run in another --output_dir"
            )

    # ------------------------------------------------------------------------------------------------ training

    def train(self, prepared: Mapping[str, Prepared], callbacks: Sequence[TrainerCallback] = ()) -> dict[str, Any]:
        """Trains, takes the best checkpoint, evaluates and predicts every task, saves every task's model; the content
        of `training_summary.json`."""
        args, options, run = self.args, self.run_options, self.this_run
        first = next(iter(self.parts))
        validations = {
            name: one.splits["validation"]
            for name, one in prepared.items()
            if "validation" in one.splits and one.splits["validation"].labelled
        }
        if not validations:
            run.go_without_evaluation()
        models = {name: part._model(prepared[name]) for name, part in self.parts.items()}
        losses = {name: part._loss(prepared[name], models[name]) for name, part in self.parts.items()}
        model = MultiTaskModel(models, bottleneck=options.peft in BOTTLENECKS)
        groups = LayerGroups(model) if options.goes_by_layers else None
        ensemble: Any = SelfEnsemble(model, options) if options.self_ensemble else None  # type: ignore[arg-type]
        self.parts[first]._begin(prepared[first])
        collators = {}
        for number, (name, one) in enumerate(prepared.items()):
            collators[name] = one.task.collator(one.tokenizer, model.heads[name], args.seed)
            if number_of_tasks(one.config) is not None:
                one.plan["task_number"] = number
                collators[name] = WithTaskNumber(collators[name], number)
        rows = JoinedRows([NamedRows(one.splits["train"].features, name) for name, one in prepared.items()])
        trainer = MultiTaskTrainer(
            model=model,
            args=args,
            tasks={name: one.task for name, one in prepared.items()},
            validations=validations,
            options=self.several,
            losses={name: loss for name, loss in losses.items() if loss is not None},
            data_collator=TaskCollator(collators),
            train_dataset=rows,
            eval_dataset=rows if validations else None,  # there has to be one; `evaluate` has its own
            processing_class=prepared[first].tokenizer,
            callbacks=[*self.parts[first]._callbacks(None), run.timer, *callbacks],
            recipe=options,
            layerwise=options,
            groups=groups,
            ensemble=ensemble,
        )
        called = {f"{name}_f1": f"{name} {part.task.f1_name()}" for name, part in self.parts.items()}
        run.begin(trainer, self._plan(prepared, model), called)
        fit(run, trainer, options)
        for name, one in prepared.items():
            predict = functools.partial(trainer.predict_task, name)
            run.summary["tasks"][name] |= measured(trainer, one, self.folder / name, predict)

        def save(trainer: Any) -> None:
            for name, one in prepared.items() if args.should_save else ():
                self._save(model, name, one, run.summary)
            if args.should_save:
                remove_results(self.folder, ())  # of an earlier run of one task
            trainer.save_state()

        return run.finish(trainer, None, save)

    def _plan(self, prepared: Mapping[str, Prepared], model: MultiTaskModel) -> dict[str, Any]:
        sampling: dict[str, Any] = {"sampling": self.several.sampling}
        if self.several.sampling == "temperature":
            sampling["temperature"] = self.several.sampling_temperature
        some = next(iter(prepared.values())).plan
        tasks = {name: {**one.plan, "head": one.task.head} for name, one in prepared.items()}
        for about in tasks.values():
            del about["status"]  # which is the run's
        return {
            "status": "running",
            "variant": some["variant"],
            "init_from": self.model.model,
            "peft": self.run_options.peft,
            "seed": self.args.seed,
            **sampling,
            **{name: some[name] for name in METHODS if name in some},
            "parameters": model.num_parameters(),
            "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "tasks": tasks,
        }

    def _save(self, model: MultiTaskModel, name: str, one: Prepared, summary: Mapping[str, Any]) -> None:
        """A task's model, with all that `predict`, `evaluate` and `push` look for."""
        folder = self.folder / name
        with saving_into(folder) as staging:
            model.save_task(name, staging)
            one.tokenizer.save_pretrained(staging)
            saved = {path.name for path in staging.iterdir()}
        remove_results(folder, saved)
        carry_provenance(self.model.model, folder)
        shared = {key: summary[key] for key in ("status", "steps", "epochs", "seconds")}
        head = model.heads[name]
        size = model.encoder.num_parameters() + sum(p.numel() for p in head.parameters())
        trained = sum(p.numel() for part in (model.encoder, head) for p in part.parameters() if p.requires_grad)
        trained = trained if self.run_options.peft is not None else size
        about = {**summary["tasks"][name], **shared, "parameters": size, "trained_parameters": trained}
        about["trained_with"] = [other for other in self.parts if other != name]
        write_json(folder / SUMMARY_FILE, about)


def _slot_of_tasks(part: FineTuning) -> str:
    """The component that has a vector for each task."""
    return "stack" if TASKS in cast(Any, part._config({})).stack.inputs else "attention"


def run_tasks(
    made: MultiTaskTuning, say: Callable[[str], None], callbacks: Sequence[TrainerCallback] = ()
) -> dict[str, Any]:
    """Prepares and trains, and says how many rows there are."""
    prepared = made.prepare()
    for name, one in prepared.items():
        say(f"{name}: {one.config.model_type}, {one.task.id}: {one.sizes} rows {one.task.extent()}")
    if made.checkpoint is not None:
        say(f"resuming from {made.checkpoint}")
    return made.train(prepared, callbacks)
