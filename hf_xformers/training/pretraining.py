"""Pretraining from start to finish: data, tokenizer, configuration, model, Trainer, results."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from ..core.changes import merge_changes
from ..core.finite import refuse_non_finite
from ..core.saved_files import STATE_FILE, refuse_damaged_weights
from ..feedforward.hash_layers import make_maps
from ..objectives import Objective, build_objective
from .building import (
    SHAPES,
    build_config,
    build_model,
    check_objective,
    choose_block_size,
    decided_fields,
    default_objective,
    grown_positions,
    longest_input,
    longest_sequence,
    refuse_other_component,
)
from .checkpoints import misfit
from .new_head import new_head
from .presets import nearest_size
from .randomness import data_seed
from .recipe import Recipe
from .run import Run
from .run_folder import check_same_model, read_summary, saved_config
from .segments import choose_streams
from .text import (
    STREAM_SHUFFLE_ROWS,
    TextData,
    load_splits,
    make_rows,
    open_tokenizer,
    train_tokenizer_for,
)

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainingArguments

    from ..configuration_xformer import XFormerConfig
    from .merged_adapters import PutIn


@dataclass
class ModelChoice:
    """What to train; component and configuration options come beside it."""

    _argument_group_name = "model"

    variant: str | None = field(
        default=None,
        metadata={"help": "Variant, with or without 'xf_' (see `hf-xformers list`). Default: xformer, the free mix."},
    )
    objective: str | None = field(
        default=None,
        metadata={"help": "{objectives}; settings as --objective.FIELD VALUE. Default: the first that fits."},
    )
    size: str | None = field(
        default=None, metadata={"help": "tiny, small, base or large. Default: tiny, or that of --init_from."}
    )
    block_size: int | None = field(
        default=None, metadata={"help": "Tokens of a model input. Default: by size, at most what positions cover."}
    )
    tokenizer: str | None = field(
        default=None, metadata={"help": "Tokenizer to use, a folder or a Hub id. Default: trained on the data."}
    )
    tokenizer_kind: str = field(
        default="bpe", metadata={"help": "Kind of a tokenizer that is trained: bpe, wordpiece or unigram."}
    )
    init_from: str | None = field(
        default=None, metadata={"help": "Folder of a saved model of the same variant to take the weights from."}
    )
    segment_streams: bool | None = field(
        default=None,
        metadata={
            "nargs": "?",
            "const": True,
            "help": (
                "Train and evaluate on contiguous streams of text, with the segment memory carried from row to row."
                " Default: true for a causal model that has such a memory (transformer_xl, compressive_transformer),"
                " unless --streaming."
            ),
        },
    )
    overwrite_output_dir: bool = field(
        default=False, metadata={"help": "Remove the checkpoints of an earlier run in --output_dir."}
    )


def chosen_size(choice: ModelChoice) -> str:
    """The size asked for, or that of the model to start from, or tiny."""
    if choice.size is not None or choice.init_from is None:
        return choice.size or "tiny"
    return read_summary(choice.init_from).get("size") or nearest_size(
        saved_config(choice.init_from).get("hidden_size")
    )


@dataclass
class Prepared:
    """Everything of a run that is settled before a weight is made."""

    config: XFormerConfig
    objective: Objective
    tokenizer: PreTrainedTokenizerBase
    train: Any
    validation: Any
    plan: dict[str, Any]
    checkpoint: Path | None

    def collator(self, seed: int) -> Any:
        """What makes batches of rows."""
        return self.objective.collator(self.tokenizer, seed=seed)


class Further(TypedDict, total=False):
    """What a request has beside its dataclasses: by slot a component's name or its fields, fields of the
    configuration, and settings of the objective."""

    components: Mapping[str, Any] | None
    fields: Mapping[str, Any] | None
    objective_fields: Mapping[str, Any] | None


class Request:
    """What to train, before any data is read.

    usual: the name of the objective where none is chosen. further: see [`Further`].

    Raises ValueError and TypeError that name the value and the remedy.
    """

    def __init__(
        self,
        choice: ModelChoice,
        args: TrainingArguments,
        *,
        usual: Callable[[type[XFormerConfig]], str] = default_objective,
        **further: Unpack[Further],
    ) -> None:
        from ..variants import config_class, resolve

        check_arguments(args)
        self.choice, self.args = choice, args
        self.components = dict(further.get("components") or {})
        self.fields = dict(further.get("fields") or {})
        self.this_run = Run(args, overwrite=choice.overwrite_output_dir)
        self.folder = self.this_run.folder
        self.size = chosen_size(choice)
        variant = choice.variant
        if choice.init_from is not None:
            variant = self._variant_of_start(choice.init_from, variant)
            refuse_damaged_weights(choice.init_from)
        self.config_class = config_class(resolve(variant or "xformer"))
        objective = choice.objective or usual(self.config_class)
        check_objective(self.config_class, objective)
        self.objective = build_objective({"type": objective, **(further.get("objective_fields") or {})})
        self.checkpoint = self.this_run.checkpoint

    def _variant_of_start(self, folder: str, variant: str | None) -> str:
        from ..variants import model_types, resolve

        saved = saved_config(folder).get("model_type")
        if saved not in model_types():
            raise ValueError(
                f"--init_from {folder!r} is a checkpoint of model type {saved!r}, which is none of this package's "
                "variants; convert it first with `hf-xformers convert --from ... --to ...`"
            )
        if variant is not None and resolve(variant) != saved:
            raise ValueError(
                f"--init_from {folder!r} is a checkpoint of variant {saved!r}, not {resolve(variant)!r}; leave"
                " --variant out, or give a checkpoint of that variant"
            )
        return str(saved)

    def _config(self, tokenizer: PreTrainedTokenizerBase | None) -> XFormerConfig:
        if self.choice.init_from is not None:
            return self._config_of_start(self.choice.init_from)
        return build_config(
            self.config_class,
            self.size,
            self.objective,
            components=self.components,
            fields=self.fields,
            tokenizer=tokenizer,
        )

    def base_plan(self, config: XFormerConfig, train: Any, validation: Any) -> dict[str, Any]:
        """What the summary of any run has, whatever it reads."""
        return {
            "status": "running",
            "variant": config.model_type,
            "size": self.size,
            "objective": self.objective.to_dict(),
            "train_rows": _rows(train),
            "validation_rows": _rows(validation),
            "seed": self.args.seed,
            "init_from": self.choice.init_from,
        }

    def _config_of_start(self, folder: str) -> XFormerConfig:
        """The saved configuration with the options on top, in the objective's shape."""
        saved = self.config_class.from_pretrained(folder).to_dict()
        for key in ("model_type", "transformers_version", "architectures", "dtype"):
            saved.pop(key, None)
        changes = merge_changes(saved, {**self.components, **self.fields})
        shape = {**decided_fields(self.objective, {**saved, **changes}), **SHAPES[self.objective.shape]}
        return self.config_class(**{**saved, **changes, **shape})


class Preparation(Request):
    """Checks a request about text and prepares its data. What can be refused without reading data is refused first.

    The options are those of [`Request`]. Raises ValueError and TypeError that name the value and the remedy.
    """

    def __init__(
        self, choice: ModelChoice, source: TextData, args: TrainingArguments, **further: Unpack[Further]
    ) -> None:
        super().__init__(choice, args, **further)
        refuse_images(self.config_class, self.objective, source.data)
        check_rows_at_once(self.objective, args.train_batch_size * args.world_size)
        self.source = source.named_for(self.objective)
        if source.streaming and args.max_steps <= 0:
            raise ValueError("--streaming reads text of unknown length; say how long to train with --max_steps")
        self.config = self._config(None)
        refuse_other_component(self.config, self.objective)
        if choice.init_from is None and choice.block_size and "max_position_embeddings" not in self.fields:
            self.fields |= grown_positions(self.config, longest_sequence(self.objective, choice.block_size))
            self.config = self._config(None)
        self.objective = self.objective.bound_to(self.config)
        self.new_head = []
        if choice.init_from is not None:
            self.new_head = new_head(choice.init_from, head_class(self.config, self.objective), self.config)
        self.block_size = choose_block_size(self.config, self.objective, self.size, choice.block_size)
        self.segment_streams = choose_streams(
            choice.segment_streams, self.config, self.objective.shape, streaming=source.streaming
        )

    def run(self) -> Prepared:
        """Reads the data, trains or loads the tokenizer, cuts the rows. Processes take turns, the main one first."""
        from ..data import check_tokenizer

        with self.this_run.turns("preparing the data"):
            self.this_run.make_room()
            splits = load_splits(self.source, self.objective)
            tokenizer = self._tokenizer(splits["train"])
            config = self._config(tokenizer)
            check_tokenizer(tokenizer, config)
            common = {"num_proc": self.source.num_proc}
            train = make_rows(splits["train"], tokenizer, self.objective, self.block_size, whole=False, **common)
            self.objective = self.objective.fitted(train, tokenizer)
            validation = None
            if "validation" in splits:
                validation = make_rows(
                    splits["validation"], tokenizer, self.objective, self.block_size, whole=True, **common
                )
        if self.source.streaming:
            train = train.shuffle(seed=data_seed(self.args), buffer_size=STREAM_SHUFFLE_ROWS)
        plan = self._plan(config, tokenizer, train, validation)
        if plan["train_streams"] is not None and len(train) < plan["train_streams"]:
            raise ValueError(
                f"{len(train)} rows cannot be laid out in {plan['train_streams']} streams, one for each row of a"
                " batch; take a smaller --per_device_train_batch_size, a shorter --block_size, more text, or"
                " --segment_streams false"
            )
        if self.checkpoint is not None:
            check_same_model(config, self.checkpoint)
        self.this_run.check_same(plan)
        return Prepared(config, self.objective, tokenizer, train, validation, plan, self.checkpoint)

    def _tokenizer(self, texts: Any) -> PreTrainedTokenizerBase:
        """The tokenizer as it is loaded from the run's folder, so that a resumed run has the very same."""
        place = self.checkpoint or self.folder
        if self.checkpoint is None and self.args.should_save:
            name = self.choice.tokenizer or self.choice.init_from
            if name is not None:
                tokenizer = open_tokenizer(name, self.objective)
            else:
                tokenizer = train_tokenizer_for(
                    self.objective,
                    texts,
                    kind=self.choice.tokenizer_kind,
                    vocab_size=self.config.vocab_size,
                    max_length=longest_input(self.config),
                )
            self.this_run.keep(tokenizer)
        return open_tokenizer(str(place), self.objective)

    def _plan(self, config: XFormerConfig, tokenizer: Any, train: Any, validation: Any) -> dict[str, Any]:
        args, sample_by = self.args, self.source.sample_by or self.objective.sample_by
        return {
            **self.base_plan(config, train, validation),
            "data": {**dataclasses.asdict(self.source), "sample_by": sample_by},
            "block_size": self.block_size,
            "vocabulary": len(tokenizer),
            "train_streams": args.train_batch_size * args.world_size if self.segment_streams else None,
            "eval_streams": args.eval_batch_size * args.world_size if self.segment_streams else None,
            **({"new_head": self.new_head} if self.new_head else {}),
        }


def refuse_images(config_class: type[XFormerConfig], objective: Objective, names: Sequence[str]) -> None:
    """Refuses to read text for models of images, and images for models of text."""
    from ..data.images import has_images
    from ..data.local_files import holds_text

    if objective.rows == "images" or config_class.reads_colours == "only":
        raise ValueError(
            f"variant {config_class.model_type!r} reads images and not text; `hf-xformers pretrain --data FOLDER`"
            " trains it on a folder of them, or take a variant that reads text"
        )
    pictures = [name for name in names if has_images(name) and not holds_text(name)]
    if pictures:
        raise ValueError(
            f"{pictures[0]!r} is a folder of images, and variant {config_class.model_type!r} reads text; take"
            " --variant vision_transformer, image_gpt or image_transformer, or give text"
        )


def check_rows_at_once(objective: Objective, rows: int) -> None:
    """Refuses batches of fewer rows than an objective compares with each other."""
    if rows < objective.rows_at_once:
        raise ValueError(
            f"objective {objective.id!r} tells the rows of a batch apart, and one of {rows} has nothing to tell it"
            f" from; take --per_device_train_batch_size of at least {objective.rows_at_once} (accumulated batches do"
            " not see each other)"
        )


def train(
    prepared: Prepared,
    args: TrainingArguments,
    callbacks: Sequence[TrainerCallback] = (),
    make_trainer: Callable[..., Any] | None = None,
    adapters: PutIn | None = None,
    last: bool = True,
    recipe: Recipe | None = None,
    partial: bool = False,
    devices: Mapping[str, bool | int] | None = None,
) -> dict[str, Any]:
    """Trains, evaluates and saves; returns the content of `training_summary.json`.

    callbacks: further Trainer callbacks. make_trainer: a subclass of `XFormerTrainer`, or what calls one. adapters:
    what is put into the model, trained with it or in place of its own weights, and merged into them before it is
    saved. last: whether the processes of the run have nothing more to do together. recipe: further options of
    training. partial: checkpoints hold a part of the model ([`TrainedAlone`]), the rest is that of `init_from`.
    devices: options of the trainer that divide the run over processes (`sequence_parallel`, `expert_parallel`).
    Resumes from `prepared.checkpoint` where there is one.
    """
    from .callbacks import EpochCallback, ExactSaves
    from .trainer import XFormerTrainer

    recipe = recipe or Recipe()
    recipe.check(args)
    if recipe.average_checkpoints and adapters is not None:
        raise ValueError("--average_checkpoints is of whole models; leave it or the adapters out")
    if recipe.max_tokens and prepared.plan["train_streams"] is not None:
        raise ValueError(
            "--max_tokens sorts rows by length, and streams need their order; add --segment_streams false"
        )
    if recipe.chosen():
        prepared.plan = {**prepared.plan, "recipe": recipe.chosen()}
    prepared.plan = {**prepared.plan, **(devices or {})}
    run = Run(args)
    run.checkpoint = prepared.checkpoint
    model = start_model(prepared, args, adapted=adapters is not None, partial=partial)
    if prepared.checkpoint is None:
        make_maps(model, _token_counts(prepared))
    run.put(adapters, model)
    if prepared.validation is None:
        if args.load_best_model_at_end:
            raise ValueError("--load_best_model_at_end needs validation text; raise --validation_fraction above 0")
        run.go_without_evaluation()
        args.eval_on_start = False
    if prepared.checkpoint is not None:
        args.eval_on_start = False  # the start was evaluated when it was the start
    collator = prepared.collator(args.seed)
    chosen: dict[str, Any] = {**({"recipe": recipe} if recipe.chosen() else {}), **(devices or {})}
    trainer = (make_trainer or XFormerTrainer)(
        model=model,
        args=args,
        data_collator=collator,
        eval_collator=collator.as_static(),
        train_dataset=prepared.train,
        eval_dataset=prepared.validation,
        processing_class=prepared.tokenizer,
        callbacks=[EpochCallback(collator), ExactSaves(), run.timer, *callbacks],
        segment_streams=prepared.plan["train_streams"] is not None,
        **chosen,
    )
    size, trained = model.num_parameters(), model.num_parameters(only_trainable=True)
    facts = {"learning_rate": args.learning_rate, "rows_per_step": trainer.rows_per_step, "processes": args.world_size}
    part = {"trained_parameters": trained} if trained < size else {}
    run.begin(trainer, {**prepared.plan, "parameters": size, **facts, **part})
    done = is_finished(prepared, args)
    run.fit(trainer, average=recipe.average_checkpoints, done=done)
    if done and (adapters is not None or partial):
        trainer._load_from_checkpoint(str(prepared.checkpoint))
    evaluated = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    up_to_date = evaluated and evaluated[-1]["step"] == trainer.state.global_step and not args.load_best_model_at_end
    up_to_date = up_to_date and not recipe.average_checkpoints
    if prepared.validation is not None and not up_to_date:
        trainer.evaluate()
    run.summary |= results(trainer.state.log_history)
    return run.finish(trainer, prepared.plan["init_from"], last=last)


def is_finished(prepared: Prepared, args: TrainingArguments) -> bool:
    """Whether the checkpoint to resume from is the end of the run. (Trainer would take one step more.)"""
    if prepared.checkpoint is None:
        return False
    if args.max_steps <= 0 and prepared.plan.get("recipe", {}).get(
        "max_tokens"
    ):  # how many batches there are is for the sampler to say
        state = json.loads((prepared.checkpoint / STATE_FILE).read_text())
        return state["global_step"] >= state["max_steps"]
    return json.loads((prepared.checkpoint / STATE_FILE).read_text())["global_step"] >= planned_steps(
        args, _rows(prepared.train) or 0, whole_batches=prepared.plan["train_streams"] is not None
    )


def _rows(dataset: Any) -> int | None:
    """How many rows a dataset has; None for a stream, 0 for none at all."""
    if dataset is None:
        return 0
    return len(dataset) if hasattr(dataset, "__len__") else None


def _token_counts(prepared: Prepared) -> Callable[[], Tensor] | None:
    """What counts how often each id of the vocabulary occurs in the rows to train on, [V]; None for a stream."""
    if _rows(prepared.train) is None:
        return None

    def count() -> Tensor:
        import torch

        counts = torch.zeros(prepared.config.vocab_size, dtype=torch.long)
        for row in prepared.train:
            ids = torch.as_tensor(row["input_ids"])
            counts.index_add_(0, ids, torch.ones_like(ids))
        return counts

    return count


def check_arguments(args: TrainingArguments) -> None:
    """Raises ValueError for a run without a step (Trainer reads `max_steps` 0 as `num_train_epochs` whole epochs), and
    for numbers that torch would refuse, without their names, once all is prepared."""
    if args.max_steps == 0 or args.max_steps < -1:
        raise ValueError(
            f"--max_steps {args.max_steps} trains nothing; give at least 1, or leave it out to train for "
            "--num_train_epochs"
        )
    if args.max_steps < 0 and not args.num_train_epochs > 0:
        raise ValueError(
            f"--num_train_epochs {args.num_train_epochs:g} trains nothing; give a number above 0, or --max_steps"
        )
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)} must be at least 1")
    for name in ("learning_rate", "weight_decay", "adam_epsilon", "dataloader_num_workers"):
        if not 0 <= getattr(args, name) < math.inf:
            raise ValueError(f"--{name} {getattr(args, name):g} must be a number of at least 0")
    for name in ("adam_beta1", "adam_beta2", "label_smoothing_factor"):
        if not 0 <= getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name):g} must be at least 0 and below 1")


def planned_steps(args: TrainingArguments, rows: int, *, whole_batches: bool = False) -> int:
    """Optimizer steps of a whole run over that many rows; whole_batches: rows that do not fill a batch are left
    out."""
    if args.max_steps > 0:
        return args.max_steps
    batch = args.train_batch_size * args.world_size
    batches = rows // batch if whole_batches or args.dataloader_drop_last else math.ceil(rows / batch)
    return math.ceil(args.num_train_epochs * max(1, math.ceil(batches / args.gradient_accumulation_steps)))


def start_model(
    prepared: Prepared, args: TrainingArguments, *, adapted: bool = False, partial: bool = False
) -> PreTrainedModel:
    """Fresh weights under the run's seed, or the weights of `init_from`, or those of a finished run. adapted: its
    checkpoints hold adapters, too, and are read when these are there. partial: they hold a part of the model."""
    Run(args).seed()
    from ..conversion.transfer import quiet

    cls = head_class(prepared.config, prepared.objective)
    start = prepared.plan["init_from"]
    if is_finished(prepared, args) and not adapted and not partial:
        return cls.from_pretrained(prepared.checkpoint)
    if start is None or (prepared.checkpoint is not None and not partial):  # Trainer loads the weights of a checkpoint
        return build_model(prepared.config, prepared.objective)
    try:
        with quiet():  # what does not fit is refused below
            model, report = cls.from_pretrained(
                start, config=prepared.config, output_loading_info=True, ignore_mismatched_sizes=True
            )
    except (RuntimeError, OSError) as error:
        raise ValueError(
            f"--init_from {start!r} does not load into the model asked for ({str(error).splitlines()[0]}); leave out"
            " the options that change its shape"
        ) from error
    new = prepared.plan.get("new_head", ())
    wrong = misfit(
        report,
        lambda key: (
            key not in new and (key not in report["unexpected_keys"] or key.startswith(f"{cls.base_model_prefix}."))
        ),
    )
    if wrong:
        raise ValueError(
            f"the checkpoint {start!r} {wrong}; leave out options that change the model, or save the whole model again"
        )
    refuse_non_finite(model, str(start))
    return model


def head_class(config: XFormerConfig, objective: Objective) -> Any:
    """The class of a variant that an objective trains."""
    from ..variants import family

    return family(config.model_type)[f"For{objective.head}"]


def results(history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The losses of a run, and what was measured at its end, from Trainer's log."""
    losses = [entry["loss"] for entry in history if "loss" in entry]
    evaluations = [entry for entry in history if "eval_loss" in entry]
    figures: dict[str, Any] = {"train_loss": losses[-1] if losses else None}
    for name in ("loss", "accuracy"):  # of what a run starts from, where it was evaluated
        if evaluations and evaluations[0]["step"] == 0 and f"eval_{name}" in evaluations[0]:
            figures[f"start_{name}"] = evaluations[0][f"eval_{name}"]
    if evaluations:
        last = evaluations[-1]
        figures |= {
            key: value for key, value in last.items() if key.startswith("eval_") and not key.endswith("_per_second")
        }
    return figures


def pretrain(
    choice: ModelChoice,
    source: TextData,
    args: TrainingArguments,
    *,
    callbacks: Sequence[TrainerCallback] = (),
    **further: Unpack[Further],
) -> dict[str, Any]:
    """[`Preparation`] and [`train`] in one call; what `hf-xformers pretrain` does."""
    preparation = Preparation(choice, source, args, **further)
    with preparation.this_run.lock():
        return train(preparation.run(), args, callbacks)
