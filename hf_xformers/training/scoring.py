# SPDX-License-Identifier: Apache-2.0
"""Loss, perplexity and accuracy of a saved language model on text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.finite import refuse_non_finite
from ..core.saved_files import refuse_damaged_weights
from ..objectives import Objective, build_objective
from .building import (
    choose_block_size,
    language_objective,
    language_objectives,
    longest_input,
    refuse_other_component,
)
from .checkpoints import misfit
from .run_folder import read_summary, saved_config
from .segments import choose_streams
from .text import TextData, load_splits, make_rows

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, TrainingArguments

# Ends of class names -> the head; the last two are how older families of transformers call theirs.
_HEADS = {
    **{f"For{cls.head}": cls.head for cls in language_objectives().values()},
    "ForPreTraining": "PreTraining",
    "LMHeadModel": "CausalLM",
    "ForConditionalGeneration": "Seq2SeqLM",
}
_LONGEST_DEFAULT = 512


@dataclass
class Score:
    """What to evaluate."""

    _argument_group_name = "evaluation"

    model: str = field(metadata={"help": "Folder of a saved model, or a Hub id."})
    objective: str | None = field(
        default=None,
        metadata={
            "help": "{objectives}; settings as --objective.FIELD VALUE. Default: what the model was trained on."
        },
    )
    split: str = field(
        default="validation",
        metadata={
            "help": "'validation' (what pretraining holds out), another split of the data, or 'all' of a source."
        },
    )
    block_size: int | None = field(
        default=None, metadata={"help": "Tokens of a model input. Default: that of the training."}
    )
    tokenizer: str | None = field(default=None, metadata={"help": "Default: the tokenizer saved with the model."})
    segment_streams: bool | None = field(
        default=None,
        metadata={
            "nargs": "?",
            "const": True,
            "help": (
                "Read the text in streams, as many as rows in a batch, and carry the segment memory. Default: as in "
                "the training, or true for a causal model with such a memory."
            ),
        },
    )
    json: bool = field(default=False, metadata={"help": "Print JSON instead of a table."})


def training_of(model: str) -> dict[str, Any]:
    """The summary of the run that made a model; empty for a model from elsewhere."""
    return read_summary(model) if Path(model).is_dir() else {}


def text_of(trained: Mapping[str, Any]) -> dict[str, Any]:
    """Where the text of a run came from, as the fields of [`TextData`], to be read whole; empty where that is not
    known. A document was a line before that could be none."""
    return {"sample_by": "line", **trained["data"], "streaming": False} if "data" in trained else {}


def load_config(model: str) -> PreTrainedConfig:
    """The configuration of a saved model. Raises ValueError with what to do where there is none."""
    from transformers import AutoConfig

    if Path(model).is_dir():
        saved_config(model)
    elif model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ValueError(f"there is no folder {model!r}; give the folder of a saved model, or a Hub id")
    try:
        return AutoConfig.from_pretrained(model)
    except OSError as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"no model could be loaded from {model!r} ({reason}); give the folder of a saved model, or check the"
            " Hub id"
        ) from error
    except ValueError as error:
        unknown = _without_class(model, saved_config(model).get("model_type")) if Path(model).is_dir() else None
        if unknown is None:
            raise
        raise ValueError(unknown) from error


def refuse_reader_of_images(model: str, config: PreTrainedConfig, trained: Mapping[str, Any]) -> None:
    """Raises ValueError for a model that was pretrained on images."""
    if trained.get("reads") == "images" or getattr(config, "modality", "text") == "image":
        raise ValueError(
            f"{model!r} reads images, and language models are measured on text; its held-out figures stand in"
            " training_summary.json, `hf-xformers features --probe` measures what it knows of images, and"
            " `hf-xformers finetune` gives it a task, on whose images it is evaluated, pruned and quantized"
        )


def _without_class(model: str, model_type: Any) -> str | None:
    """Why a folder's config.json is one of no known class; None if there is one."""
    import transformers

    if model_type is None:
        return (
            f"{model!r} has a config.json without a model_type, which transformers writes; give the folder of a model"
            " that `save_pretrained` wrote"
        )
    if model_type in transformers.CONFIG_MAPPING:
        return None
    return (
        f"{model!r} is of model type {model_type!r}, which neither this package nor transformers"
        f" {transformers.__version__} knows; correct model_type in its config.json, or install a transformers that has"
        " it"
    )


def choose_objective(
    config: PreTrainedConfig, name: str | None, settings: Mapping[str, Any], trained: Mapping[str, Any]
) -> Objective:
    """The objective to evaluate: the one named, else the one trained, else the one of the model's head.

    Settings of the training are kept where the objective is the same. Raises ValueError when the model's head does not
    fit.
    """
    known = language_objectives()
    if name is not None:
        name = language_objective(name).type
    architecture = (config.architectures or [""])[0]
    head = next((head for end, head in _HEADS.items() if architecture.endswith(end)), None)
    before = trained.get("objective") or {}
    if name is None and before.get("type") in known and head in (None, build_objective(before).head):
        name = before["type"]
    if name is None:
        name = next((key for key, cls in known.items() if cls.head == head), None)
    if name is None:
        raise ValueError(
            f"the model is saved as {architecture or 'no class'}, which no objective can evaluate; choose a model with"
            " a language model head"
        )
    start = dict(before) if before.get("type") == name else {"type": name}
    objective = build_objective({**start, **settings})
    if head is not None and objective.head != head:
        fitting = [key for key, cls in known.items() if cls.head == head]
        raise ValueError(
            f"objective {name!r} evaluates a For{objective.head} class, and the model is saved as {architecture};"
            f" take --objective {' or '.join(fitting) or 'with other settings'}, or another model"
        )
    refuse_other_component(config, objective)
    return objective


def evaluate(
    score: Score, source: TextData, args: TrainingArguments, *, objective_fields: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The figures of a saved model on text, by name. Noise (masks, spans) is the same in every call.

    Raises ValueError for a model, tokenizer, objective, split or text that does not fit.
    """
    from ..configuration_xformer import XFormerConfig
    from ..data import check_tokenizer, load_tokenizer
    from .trainer import XFormerTrainer
    from .trainer_evaluation import FURTHER_LABELS

    trained = training_of(score.model)
    config = load_config(score.model)
    refuse_reader_of_images(score.model, config, trained)
    objective = choose_objective(config, score.objective, objective_fields or {}, trained).bound_to(config)
    source = source.named_for(objective)
    tokenizer = load_tokenizer(score.tokenizer or score.model)
    check_tokenizer(tokenizer, config)
    block_size = trained.get("block_size") if score.block_size is None else score.block_size
    if block_size is not None and block_size < 1:
        raise ValueError(f"--block_size {block_size} must be at least 1 token")
    if isinstance(config, XFormerConfig):
        block_size = choose_block_size(config, objective, "base", block_size)
    elif block_size is None:
        block_size = min(_LONGEST_DEFAULT, longest_input(config) or _LONGEST_DEFAULT)
    streams = score.segment_streams
    if streams is None and "eval_streams" in trained:
        streams = trained["eval_streams"] is not None
    streams = choose_streams(streams, config, objective.shape)
    with args.main_process_first(local=True, desc="preparing the data"):
        rows = make_rows(_texts(source, score.split, objective), tokenizer, objective, block_size, whole=True)
    model = load_model(score.model, objective)
    collator = objective.collator(tokenizer, seed=args.seed, static=True)
    trainer = XFormerTrainer(
        model=model, args=args, data_collator=collator, eval_dataset=rows, segment_streams=streams
    )
    from transformers.trainer_callback import PrinterCallback

    trainer.remove_callback(PrinterCallback)  # the caller prints, perhaps JSON
    metrics = trainer.evaluate(metric_key_prefix="eval")
    if args.world_size > 1:
        trainer.accelerator.end_training()
    figures = {name.removeprefix("eval_"): value for name, value in metrics.items()}
    beside = ("aux_", *(f"{before}{name}_" for name in FURTHER_LABELS for before in ("", "baseline_")))
    kept = {name: value for name, value in figures.items() if name.startswith(beside)}
    return {
        "model": score.model,
        "variant": config.model_type,
        "objective": objective.to_dict(),
        "data": source.data,
        "split": score.split,
        "block_size": block_size,
        "rows": len(rows),
        "tokens": figures["tokens"],
        "loss": figures["loss"],
        "perplexity": figures["perplexity"],
        "accuracy": figures["accuracy"],
        "baseline_loss": figures["baseline_loss"],
        "baseline_accuracy": figures["baseline_accuracy"],
        **kept,
        "seconds": figures["runtime"],
    }


def _texts(source: TextData, split: str, objective: Objective) -> Any:
    if source.streaming:
        raise ValueError("an evaluation reads all of its text; leave --streaming out")
    if split == "all":
        source = TextData(**{**vars(source), "validation_fraction": 0.0})
    splits = load_splits(source, objective)
    if split == "all":
        from datasets import concatenate_datasets

        return concatenate_datasets(list(splits.values()))
    if split not in splits:
        raise ValueError(f"the data has no split {split!r}: choose one of {', '.join(splits)} or all with --split")
    return splits[split]


def load_model(name: str, objective: Objective) -> PreTrainedModel:
    """A saved model with the head that the objective needs. Raises ValueError for weights that are damaged or not its
    own."""
    import transformers

    from ..configuration_xformer import XFormerConfig
    from ..conversion.quiet import quiet
    from ..variants import family

    refuse_damaged_weights(name)
    config = load_config(name)
    if isinstance(config, XFormerConfig):  # several heads may stand behind one Auto class
        cls = family(config.model_type)[f"For{objective.head}"]
    else:
        cls = getattr(transformers, f"AutoModelFor{objective.head}")
    try:
        with quiet():  # what does not fit is refused below
            model, report = cls.from_pretrained(name, output_loading_info=True, ignore_mismatched_sizes=True)
    except OSError as error:
        raise ValueError(f"{name!r} holds no weights ({str(error).splitlines()[0]}); give a saved model") from error
    unread: Any = () if isinstance(model.config, XFormerConfig) else report["unexpected_keys"]  # others drop old parts
    wrong = misfit(report, lambda key: key not in unread)
    if wrong:
        raise ValueError(
            f"the checkpoint {name!r} {wrong}: it is incomplete, of another config.json or of another head; save the"
            " whole model again, or take another"
        )
    refuse_non_finite(model, name)
    return model
