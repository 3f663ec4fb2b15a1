# SPDX-License-Identifier: Apache-2.0
"""Models for a task: a saved one with its head or a new one, or a variant from random weights; and their
tokenizers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..compat import class_for
from ..configuration_xformer import XFormerConfig
from ..conversion.quiet import quiet
from ..core.changes import merge_changes
from ..core.finite import refuse_non_finite
from ..core.head_names import LABEL_HEADS
from ..core.saved_files import refuse_damaged_weights
from ..training.building import longest_input, shape_of_head, with_changes
from ..training.checkpoints import misfit
from ..training.presets import size_fields, size_named
from .tasks import LanguageModeling, Task

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from .options import ModelOptions


def open_config(name: str) -> PreTrainedConfig:
    """The configuration of a saved model. Raises ValueError for a name that is neither a folder nor a Hub id that
    exists, and for a config.json that no class reads."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    from ..training.scoring import load_config

    folder = Path(name).expanduser()
    if not folder.is_dir():
        try:
            validate_repo_id(name)
        except HFValidationError as error:
            raise ValueError(
                f"--model {name!r} is neither a folder nor a repository id of the Hub (owner/name); give one of these,"
                " or --variant to start from random weights"
            ) from error
    bare = not (folder / "config.json").is_file()
    if (folder / "adapter_config.json").is_file() or (bare and (folder / "bottleneck_config.json").is_file()):
        raise ValueError(
            f"--model {name!r} holds an adapter alone; give the model that it adapts, or merge the two (LoRA, IA3) and"
            " save the result"
        )
    return load_config(name)


def model_class(config: PreTrainedConfig, head: str) -> Any:
    """The class `For<head>` of a configuration's model type. Raises ValueError where there is none."""
    if isinstance(config, XFormerConfig):
        from ..variants import family

        check_head(type(config), head)
        return family(config.model_type)[f"For{head}"]
    found = class_for(f"AutoModelFor{head}", type(config))
    if found is None:
        raise ValueError(f"model type {config.model_type!r} has no class For{head}; choose another model or task")
    return found


def check_head(config_class: type[XFormerConfig], head: str) -> None:
    """Refuses a variant that has no class `For<head>`; the message lists those that have one."""
    if f"For{head}" in config_class.heads:
        return
    from ..variants import config_class as named
    from ..variants import model_types

    able = [name for name in model_types() if f"For{head}" in named(name).heads]
    raise ValueError(
        f"variant {config_class.model_type!r} has no For{head} class, which the task needs; choose one of"
        f" {', '.join(able)}"
    )


def architecture_of(config: PreTrainedConfig) -> str | None:
    return config.architectures[0] if config.architectures else None


def has_head(config: PreTrainedConfig, head: str) -> bool:
    """Whether a model was saved with this head."""
    return (architecture_of(config) or "").endswith(f"For{head}")


def fresh_config(
    config_class: type[XFormerConfig],
    size: str,
    task: Task,
    components: Mapping[str, Any],
    fields: Mapping[str, Any],
    settled: Mapping[str, Any],
) -> XFormerConfig:
    """A variant's configuration at a size in the shape that the task's head needs, or its own.

    settled: fields that task and tokenizer decide. Raises ValueError and TypeError as the configuration does.
    """
    check_head(config_class, task.head)
    shape: dict[str, Any] = dict(shape_of_head(task.head))
    if not shape:  # these read one sequence
        shape = {"is_encoder_decoder": False} if task.head in ("TokenClassification", "MultipleChoice") else {}
    two_towers = shape.get("is_encoder_decoder", config_class().is_encoder_decoder)
    values: dict[str, Any] = {"vocab_size": size_named(size).vocab_size, "bos_token_id": None, "eos_token_id": None}
    values |= size_fields(config_class, size, two_towers=two_towers)
    return config_class(**{**values, **settled, **with_changes(config_class, components, fields), **shape})


def saved_config_with(
    config: PreTrainedConfig, head: str, components: Mapping[str, Any], fields: Mapping[str, Any], settled: Mapping
) -> PreTrainedConfig:
    """A saved configuration with the options on top. Raises ValueError for components: weights belong to their own."""
    if components:
        slot = next(iter(components))
        raise ValueError(
            f"--{slot} would change the mechanism of a saved model, whose weights belong to its own; leave it out, or "
            "start from random weights with --variant"
        )
    values = config.to_dict()
    if isinstance(config, XFormerConfig):
        fields = merge_changes(values, fields)
    values |= {**settled, **fields, **shape_of_head(head)}
    if "id2label" in settled:
        values.pop("num_labels", None)
    elif "num_labels" in settled:
        values.pop("id2label", None)
        values.pop("label2id", None)
    for key in ("model_type", "transformers_version", "architectures"):
        values.pop(key, None)
    if not isinstance(config, XFormerConfig):  # other families keep their shape
        for key in shape_of_head(head):
            values[key] = getattr(config, key)
    return type(config)(**values)


# ------------------------------------------------------------------------------------------------ weights


def load_model(
    name: str, config: PreTrainedConfig, head: str, *, has_head: bool, new_head: bool
) -> tuple[PreTrainedModel, list[str]]:
    """(model, names of its parameters without trained weights) of a folder or Hub id with the task's head: its own, or
    a new one.

    Raises:
        ValueError: damaged or missing weights, weights of other sizes than the configuration says, tensors missing
            from the checkpoint or left over next to the head.
    """
    from safetensors import SafetensorError

    cls = model_class(config, head)
    refuse_damaged_weights(name)
    # Heads of different tasks have layers of the same name and, by chance, of the same size.
    new_head = new_head if has_head else (architecture_of(open_config(name)) or "").endswith(LABEL_HEADS)
    try:
        with quiet():  # what an adapter or a new head brings is missing, and the rest is refused below
            model, report = cls.from_pretrained(
                name, config=config, output_loading_info=True, ignore_mismatched_sizes=new_head
            )
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"the weights of {name!r} do not load into {cls.__name__} ({reason}); leave out options that change the "
            "shape of the model, and take --new_head for other labels than it was trained on"
        ) from error
    base = model.base_model_prefix + "."
    keeps_head = has_head and not new_head
    wrong = misfit(report, lambda key: keeps_head or (key.startswith(base) and not key.startswith(f"{base}pooler")))
    if wrong:
        raise ValueError(
            f"the checkpoint {name!r} {wrong}; it is incomplete or of another configuration: save it again with its "
            "config.json, or take another checkpoint"
        )
    refuse_non_finite(model, name)
    new = sorted(report["missing_keys"])
    if new_head:
        fresh = dict(cls(config).named_parameters())
        for key, parameter in model.named_parameters():
            if not key.startswith(base):
                parameter.data.copy_(fresh[key].data)
                new.append(key)
    return model, new


def load_trunk(name: str) -> tuple[Any, list[str]]:
    """(model, names of its parameters without trained weights) of a folder or Hub id without a head.

    Raises ValueError for damaged weights, and where more than a pooler is missing.
    """
    from transformers import AutoModel

    refuse_damaged_weights(name)
    with quiet():
        model, report = AutoModel.from_pretrained(name, output_loading_info=True)
    wrong = misfit({**report, "unexpected_keys": []}, lambda key: not key.startswith("pooler"))
    if wrong:
        raise ValueError(f"the checkpoint {name!r} {wrong}; it is incomplete: save it again, or take another")
    return model, sorted(report["missing_keys"])


# ------------------------------------------------------------------------------------------------ tokenizers


def choose_tokenizer(
    options: ModelOptions, task: Task, texts: Any, vocab_size: int, config: PreTrainedConfig
) -> PreTrainedTokenizerBase:
    """The tokenizer asked for, the model's own, or one trained on `texts`.

    Raises ValueError when the model has none, with the ways to come by one.
    """
    from ..data import load_tokenizer, train_tokenizer
    from ..training.text import open_tokenizer, train_tokenizer_for

    name = options.tokenizer or (None if options.train_tokenizer else options.model)
    spelt = reads_characters(config)
    if spelt and options.tokenizer_type not in ("bpe", "words"):
        raise ValueError(
            f"--tokenizer_type {options.tokenizer_type} makes pieces of words, and the embedding"
            f" {config.embedding.type!r} reads words and their characters; take --tokenizer_type words"
        )
    if name is not None and options.train_tokenizer:
        raise ValueError(f"--tokenizer {name!r} and --train_tokenizer exclude each other; leave one out")
    if name is not None:
        try:
            if isinstance(task, LanguageModeling):
                return open_tokenizer(name, task.objective)
            return _with_characters(load_tokenizer(name), spelt, config)
        except ValueError as error:
            if options.tokenizer is not None:
                raise
            raise ValueError(
                f"the model {name!r} comes without a tokenizer that loads; name one with --tokenizer, or train one on "
                f"the rows with --train_tokenizer ({error})"
            ) from error
    limit = longest_input(config) if isinstance(config, XFormerConfig) else None
    if isinstance(task, LanguageModeling):
        return train_tokenizer_for(
            task.objective, texts, kind=options.tokenizer_type, vocab_size=vocab_size, max_length=limit
        )
    if spelt or options.tokenizer_type == "words":
        from ..data.word_characters import train_word_tokenizer

        # Words seen once are left to their characters, so that the model learns to do without a word's vector.
        return train_word_tokenizer(texts, vocab_size, min_frequency=2, model_max_length=limit)
    return train_tokenizer(
        list(texts),
        kind=options.tokenizer_type,  # type: ignore[arg-type]
        vocab_size=vocab_size,
        num_sentinels=0,
        style="t5" if config.is_encoder_decoder else "bert",
        model_max_length=limit,
    )


def reads_characters(config: PreTrainedConfig) -> bool:
    """Whether a model reads the characters of its tokens."""
    return isinstance(config, XFormerConfig) and "character_ids" in config.embedding.inputs


def _with_characters(tokenizer: PreTrainedTokenizerBase, wanted: bool, config: Any) -> PreTrainedTokenizerBase:
    """The tokenizer, if it gives characters or they are not wanted."""
    if wanted and "character_ids" not in tokenizer.model_input_names:
        raise ValueError(
            f"the embedding {config.embedding.type!r} reads the characters of words, which a"
            f" {type(tokenizer).__name__} does not give; leave --tokenizer out to train one of words, or take the"
            " embedding 'token'"
        )
    return tokenizer


def fit_tokenizer(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
    """Makes the tokenizer pad, and leave out token types where the model has no table for them."""
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ValueError(
                "the tokenizer has neither a padding nor an end token, so rows cannot be batched; add one with "
                "load_tokenizer(..., add_missing=['pad']) and save it"
            )
        tokenizer.pad_token = tokenizer.eos_token
    if not reads_characters(config):
        tokenizer.model_input_names = [name for name in tokenizer.model_input_names if name != "character_ids"]
    if isinstance(config, XFormerConfig) and config.type_vocab_size < 2:
        tokenizer.model_input_names = [name for name in tokenizer.model_input_names if name != "token_type_ids"]


def check_lengths(task: Task, config: PreTrainedConfig, given: int | None, reserved: int = 0) -> None:
    """Sets `task.max_length` to what positions cover. Raises ValueError if the user asked for more.

    reserved: positions that virtual tokens take.
    """
    limit = longest_input(config)
    if limit is None:
        return
    limit -= reserved
    if limit < 1:
        raise ValueError(
            f"--peft.num_virtual_tokens {reserved} leaves no position for text, of the {limit + reserved} that the"
            " model has; take fewer"
        )
    wanted = {"max_length": given, "max_target_length": task.options.max_target_length if task.generates else None}
    for name, length in wanted.items():
        if length is not None and length > limit:
            raise ValueError(
                f"--{name} {length} is more than the {limit} tokens that the model's positions cover; take at most "
                f"{limit}, or a model with a larger max_position_embeddings"
            )
    task.max_length = min(task.max_length, limit)
    if task.generates:
        task.max_target_length = min(task.max_target_length, limit)  # type: ignore[attr-defined]
    if task.one_row:
        _share_positions(task, limit, given)


def _share_positions(task: Any, limit: int, given: int | None) -> None:
    """Divides `limit` positions between a source, of `given` tokens if somebody said so, and its target."""
    target = task.options.max_target_length
    if (given or 1) + (target or 1) > limit:
        raise ValueError(
            f"--max_length {given or 1} and --max_target_length {target or 1} are more than the {limit} tokens that"
            " the model's positions cover, as source and target stand in one row; shorten one of them, or take a model"
            " with a larger max_position_embeddings"
        )
    if target is None:
        target = min(task.max_target_length, limit // 2 if given is None else limit - given)
    task.max_target_length, task.max_length = target, min(task.max_length, limit - target)
