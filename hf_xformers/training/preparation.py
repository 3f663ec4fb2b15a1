# SPDX-License-Identifier: Apache-2.0
"""What a pretraining is asked for, and what is settled before a weight is made: configuration, tokenizer, rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from ..core.changes import merge_changes
from ..core.saved_files import refuse_damaged_weights
from ..objectives import Objective, build_objective
from .building import (
    SHAPES,
    build_config,
    check_objective,
    choose_block_size,
    decided_fields,
    default_objective,
    grown_positions,
    longest_input,
    longest_sequence,
    refuse_other_component,
)
from .new_head import new_head
from .presets import nearest_size
from .randomness import data_seed
from .run import Run
from .run_folder import check_same_model, read_summary, saved_config
from .segments import choose_streams
from .text import (
    STREAM_SHUFFLE_ROWS,
    STREAM_VALIDATION_DOCUMENTS,
    TextData,
    load_splits,
    make_rows,
    open_tokenizer,
    train_tokenizer_for,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, TrainingArguments

    from ..configuration_xformer import XFormerConfig


# Heads whose loss is not made of `labels` and `logits` alone.
_OWN_LOSS = frozenset(
    {
        "BidirectionalLM",
        "MaskedImageModeling",
        "MaskedSentences",
        "MultiTokenPrediction",
        "PreTraining",
        "ReplacedTokenPreTraining",
        "TextContrast",
    }
)


@dataclass
class ModelChoice:
    """What to train; component and configuration options come besides it."""

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
        default=None,
        metadata={"help": "Tokenizer, a folder or a Hub id. Default: that of --init_from, or trained on the data."},
    )
    tokenizer_type: str = field(
        default="bpe",
        metadata={
            "aliases": ["--tokenizer_kind"],
            "help": "Type of a tokenizer that is trained: bpe, wordpiece or unigram.",
        },
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
        default=False, metadata={"help": "Replace what an earlier run has left in --output_dir."}
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
    """What a request has besides its dataclasses: by slot a component's name or its fields, fields of the
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
            self.this_run.refuse_own_source(choice.init_from, "the model")
            variant = self._variant_of_start(choice.init_from, variant)
            refuse_damaged_weights(choice.init_from)
        self.config_class = config_class(resolve(variant or "xformer"))
        objective = choice.objective or usual(self.config_class)
        check_objective(self.config_class, objective)
        self.objective = build_objective({"type": objective, **(further.get("objective_fields") or {})})
        own = self.objective.head in _OWN_LOSS or self.objective.component == ("head", "insertion")
        own = own or getattr(self.objective, "mlm_weight", 1) != 1  # which only the model's own loss reads
        if args.label_smoothing_factor and own:
            raise ValueError(
                f"--label_smoothing_factor smooths a loss of one class for each token, and objective {objective!r} has"
                " another one; leave it out"
            )
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
            "train_rows": rows_of(train),
            "validation_rows": rows_of(validation),
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
        brought = next((name for name in ("tokenizer", "init_from") if getattr(choice, name) is not None), None)
        if brought is not None and choice.tokenizer_type != "bpe":
            raise ValueError(
                f"--tokenizer_type {choice.tokenizer_type} is of a tokenizer that is trained, and --{brought} has one;"
                " leave one of them out"
            )
        check_rows_at_once(self.objective, args.train_batch_size * args.world_size)
        self.source = source.named_for(self.objective)
        if source.streaming and args.max_steps <= 0:
            raise ValueError("--streaming reads text of unknown length; say how long to train with --max_steps")
        self.config = self._config(None)
        refuse_other_component(self.config, self.objective)
        if args.label_smoothing_factor and self.config.tower_configs()[-1].stack.exits == "decoder":
            raise ValueError(
                "--label_smoothing_factor makes the loss of a model's last logits, and"
                f" {self.config.model_type} learns from those of every exit; leave it out"
            )
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

        with self.this_run.turns("preparing the data"), self.this_run.preparing() as place:
            splits = load_splits(self.source, self.objective)
            tokenizer = self._tokenizer(splits["train"], place)
            config = self._config(tokenizer)
            check_tokenizer(tokenizer, config)
            common = {"num_proc": self.source.num_proc}
            train = make_rows(splits["train"], tokenizer, self.objective, self.block_size, whole=False, **common)
            self.objective = self.objective.fitted(train, tokenizer)
            validation = None
            if "validation" in splits:
                held_out = splits["validation"]
                if self.source.streaming:
                    held_out = held_out.take(STREAM_VALIDATION_DOCUMENTS)
                validation = make_rows(held_out, tokenizer, self.objective, self.block_size, whole=True, **common)
            plan = self._plan(config, tokenizer, train, validation)
            if plan["train_streams"] is not None and len(train) < plan["train_streams"]:
                raise ValueError(
                    f"{len(train)} rows cannot be laid out in {plan['train_streams']} streams, one for each row of a"
                    " batch; take a smaller --per_device_train_batch_size, a shorter --block_size, more text, or"
                    " --segment_streams false"
                )
        tokenizer = open_tokenizer(str(self.checkpoint or self.folder), self.objective)  # which knows that place
        if self.source.streaming:
            train = train.shuffle(seed=data_seed(self.args), buffer_size=STREAM_SHUFFLE_ROWS)
        if self.checkpoint is not None:
            check_same_model(config, self.checkpoint)
        self.this_run.check_same(plan)
        return Prepared(config, self.objective, tokenizer, train, validation, plan, self.checkpoint)

    def _tokenizer(self, texts: Any, place: Path) -> PreTrainedTokenizerBase:
        """The tokenizer as it is loaded from what the run keeps, so that a resumed run has the very same."""
        if self.checkpoint is None and self.args.should_save:
            name = self.choice.tokenizer or self.choice.init_from
            if name is not None:
                tokenizer = open_tokenizer(name, self.objective)
            else:
                tokenizer = train_tokenizer_for(
                    self.objective,
                    texts,
                    kind=self.choice.tokenizer_type,
                    vocab_size=self.config.vocab_size,
                    max_length=longest_input(self.config),
                )
            tokenizer.save_pretrained(place)
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

    if objective.rows == "images" or config_class.reads_colors == "only":
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


def rows_of(dataset: Any) -> int | None:
    """How many rows a dataset has; None for a stream, 0 for none at all."""
    if dataset is None:
        return 0
    return len(dataset) if hasattr(dataset, "__len__") else None


def check_arguments(args: TrainingArguments) -> None:
    """Raises ValueError for a run without a step (Trainer reads `max_steps` 0 as `num_train_epochs` whole epochs), for
    numbers that torch would refuse, without their names, once all is prepared, and for uploads of the run's folder."""
    if args.max_steps == 0 or args.max_steps < -1:
        raise ValueError(
            f"--max_steps {args.max_steps} trains nothing; give at least 1, or leave it out to train for "
            "--num_train_epochs"
        )
    if args.max_steps < 0 and not args.num_train_epochs > 0:
        raise ValueError(
            f"--num_train_epochs {args.num_train_epochs:g} trains nothing; give a number above 0, or --max_steps"
        )
    if args.push_to_hub:
        raise ValueError(
            "--push_to_hub uploads the whole folder of the run, local paths and pickled options among it; leave it"
            " out, and push the result with `hf-xformers push`"
        )
    if args.batch_eval_metrics:
        raise ValueError("--batch_eval_metrics is for metrics of your own in Python; leave it out")
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)} must be at least 1")
    for name in ("learning_rate", "weight_decay", "adam_epsilon", "dataloader_num_workers"):
        if not 0 <= getattr(args, name) < math.inf:
            raise ValueError(f"--{name} {getattr(args, name):g} must be a number of at least 0")
    for name in ("adam_beta1", "adam_beta2", "label_smoothing_factor"):
        if not 0 <= getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name):g} must be at least 0 and below 1")


def head_class(config: XFormerConfig, objective: Objective) -> Any:
    """The class of a variant that an objective trains."""
    from ..variants import family

    return family(config.model_type)[f"For{objective.head}"]
