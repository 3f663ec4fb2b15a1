"""From what a user asks for (variant, objective, size, options) to a configuration and a model that can be trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..core.components import SLOTS, build_spec, canonical_fields
from ..objectives import OBJECTIVES, Objective
from .presets import size_fields, size_named

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..configuration_xformer import XFormerConfig

SHAPE_OF_HEAD = {
    "MaskedLM": {"is_decoder": False, "is_encoder_decoder": False},
    "CausalLM": {"is_decoder": True, "is_encoder_decoder": False},
    "Seq2SeqLM": {"is_decoder": False, "is_encoder_decoder": True},
}


def language_objectives() -> dict[str, type[Objective]]:
    """The objectives that train a language model on packed rows, by id: those that `pretrain` and `evaluate` offer."""
    return {name: cls for name, cls in OBJECTIVES.items() if cls.packed and cls.head in SHAPE_OF_HEAD}


def objectives_for(config_class: type[XFormerConfig]) -> list[str]:
    """Ids of the language objectives that a variant has the head for."""
    heads = config_class.heads
    return [name for name, cls in language_objectives().items() if f"For{cls.head}" in heads]


def check_objective(config_class: type[XFormerConfig], objective: str) -> None:
    """Refuses an objective that is unknown or that the variant has no head for; the message says what would fit."""
    known = language_objectives()
    if objective not in known:
        raise ValueError(f"unknown objective {objective!r}: choose one of {', '.join(known)}")
    fitting = objectives_for(config_class)
    if objective in fitting:
        return
    from ..variants import config_class as config_class_named
    from ..variants import model_types

    head = f"For{known[objective].head}"
    model_type = config_class.model_type
    able = [name for name in model_types() if head in config_class_named(name).heads]
    raise ValueError(
        f"variant {model_type!r} cannot be trained with objective {objective!r}, which needs a {head} class; "
        + (f"take objective {' or '.join(map(repr, fitting))}, or " if fitting else "take ")
        + f"another variant: {', '.join(able)}"
    )


def default_objective(config_class: type[XFormerConfig]) -> str:
    """The first of mlm, clm and span (and what else is registered) that the variant can do."""
    fitting = objectives_for(config_class)
    if not fitting:
        model_type = config_class.model_type
        raise ValueError(f"variant {model_type!r} has no language model head; choose another variant")
    preferred = [name for name in ("mlm", "clm", "span") if name in fitting]
    return (preferred or fitting)[0]


def component(config_class: type[XFormerConfig], slot: str, given: str | Mapping[str, Any]) -> dict[str, Any]:
    """The component of `slot` as a dict: a new one where `given` names its type, else the variant's with changes.

    Raises ValueError for an unknown slot, component or field, TypeError for a value of the wrong type.
    """
    if slot not in SLOTS:
        raise ValueError(f"unknown slot {slot!r}: the slots are {', '.join(SLOTS)}")
    changes = {"type": given} if isinstance(given, str) else dict(given)
    own = build_spec(slot, _default(config_class, slot)).to_dict()
    if changes.get("type") in (None, own["type"]):
        changes = {**own, **canonical_fields(SLOTS[slot].get(own["type"]), changes), "type": own["type"]}
    return build_spec(slot, changes).to_dict()


def _default(config_class: type[XFormerConfig], name: str) -> Any:
    field = next(field for field in dataclasses.fields(config_class) if field.name == name)
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def build_config(
    config_class: type[XFormerConfig],
    size: str,
    objective: Objective,
    *,
    components: Mapping[str, str | Mapping[str, Any]] | None = None,
    fields: Mapping[str, Any] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> XFormerConfig:
    """A variant's configuration at a size, in the shape that the objective's head needs.

    Later ones win: the variant's defaults, the size, the tokenizer's ids, `components`, `fields`. Without a tokenizer
    the vocabulary is the size's; that is enough to find out whether the parts fit together.

    Raises ValueError and TypeError as the configuration does, and ValueError for a field that it does not have.
    """
    shape = SHAPE_OF_HEAD[objective.head]
    given = dict(fields or {})
    valid = {field.name for field in dataclasses.fields(config_class)}
    unknown = [name for name in given if name not in valid]
    if unknown:
        raise ValueError(f"{config_class.__name__} has no field {unknown[0]!r}; see `hf-xformers pretrain --help`")
    values: dict[str, Any] = {"vocab_size": size_named(size).vocab_size, **shape}
    values.update(size_fields(config_class, size, two_towers=shape["is_encoder_decoder"]))
    # The variant's own ids belong to the vocabulary of its paper.
    values.update(
        {"bos_token_id": None, "eos_token_id": None} if tokenizer is None else vocabulary(tokenizer, objective)
    )
    values.update(own_ids(config_class, tokenizer))
    values.update({slot: component(config_class, slot, entry) for slot, entry in (components or {}).items()})
    values.update(given)
    values.update(shape)
    return config_class(**values)


def own_ids(config_class: type[Any], tokenizer: PreTrainedTokenizerBase | None) -> dict[str, int | None]:
    """The ids of special tokens that only some variants read, those that this one has a field for."""
    names = {field.name for field in dataclasses.fields(config_class)}
    wanted = (f"{role}_token_id" for role in ("sep", "cls", "mask"))
    return {name: getattr(tokenizer, name, None) for name in wanted if name in names}


def vocabulary(tokenizer: PreTrainedTokenizerBase, objective: Objective) -> dict[str, int | None]:
    """The configuration fields that tokenizer and objective decide: vocabulary size and special ids."""
    from ..data import vocabulary_fields

    fields = vocabulary_fields(tokenizer)
    # The collator starts decoder inputs with padding, so generation has to start there, too.
    fields["decoder_start_token_id"] = fields["pad_token_id"] if objective.head == "Seq2SeqLM" else None
    return fields


def build_model(config: XFormerConfig, objective: Objective) -> PreTrainedModel:
    """A model with fresh weights (from torch's global generator) and the head that the objective trains."""
    from ..variants import family

    return family(config.model_type)[f"For{objective.head}"](config)


def longest_input(config: XFormerConfig) -> int | None:
    """Tokens up to which every tower of a configuration has positions; None without a limit."""
    limits = [view.position.max_length(view) for view in config.tower_configs()]
    limits = [limit for limit in limits if limit is not None]
    return min(limits) if limits else None


def longest_sequence(objective: Objective, block_size: int) -> int:
    """Tokens of the longest sequence that rows of `block_size` tokens give a model: its inputs or its targets."""
    return max(block_size, objective.target_length(block_size))


def grown_positions(config: XFormerConfig, length: int) -> dict[str, int]:
    """The field `max_position_embeddings` of a model that starts from nothing and shall read texts of `length` tokens.

    Empty where the configuration covers them already. For models whose number of positions nobody chose: a number that
    the user gave, or that weights were trained with, stays and is held against the text's length.
    """
    positions = config.max_position_embeddings
    limit = longest_input(config)
    if length <= (positions if limit is None else min(positions, limit)):
        return {}
    kept_back = 0 if limit is None else max(positions - limit, 0)  # places that the model keeps for itself
    return {"max_position_embeddings": max(positions, length + kept_back)}


def choose_block_size(config: XFormerConfig, objective: Objective, size: str, given: int | None) -> int:
    """Tokens of a model input: `given`, or the size's own as far as positions go.

    Raises ValueError when inputs (or, for span corruption, targets) would be longer than the positions allow.
    """
    limit = longest_input(config)
    if given is None:
        given = min(size_named(size).block_size, config.max_position_embeddings if limit is None else limit)
    if given < 1:
        raise ValueError(f"--block_size {given} must be at least 1 token")
    longest = longest_sequence(objective, given)
    if limit is not None and longest > limit:
        raise ValueError(
            f"rows of --block_size {given} make sequences of {longest} tokens, and position {config.position.type!r}"
            f" covers only {limit} (--max_position_embeddings {config.max_position_embeddings}); raise"
            f" --max_position_embeddings to at least {longest}, shorten --block_size, or take a --position that"
            " extrapolates (rotary, sinusoidal_absolute, ...)"
        )
    return given
