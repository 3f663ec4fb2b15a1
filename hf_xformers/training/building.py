# SPDX-License-Identifier: Apache-2.0
"""From what a user asks for (variant, objective, size, options) to a configuration and a model that can be trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..configuration_xformer import XFormerConfig
from ..core.call_features import features_of
from ..core.changes import changed_component, components_of, merge_changes
from ..core.components import SLOTS, Spec, build_spec, did_you_mean
from ..objectives import OBJECTIVES, Objective
from ..stacks.text_windows import RestartingPositions
from .presets import size_fields, size_named

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# Shape of a model -> the configuration fields that say so; in the order in which a variant's default is chosen.
SHAPES = {
    "encoder": {"is_decoder": False, "is_encoder_decoder": False},
    "decoder": {"is_decoder": True, "is_encoder_decoder": False},
    "seq2seq": {"is_decoder": False, "is_encoder_decoder": True},
}


# Of transformers: their positions start behind the padding id, so that some rows of the table are for no token.
_BEHIND_PADDING = frozenset(
    ("camembert", "data2vec-text", "esm", "ibert", "lilt", "longformer", "luke", "markuplm", "mpnet", "roberta")
    + ("roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod")
)


def language_objectives() -> dict[str, type[Objective]]:
    """The objectives by name, as `pretrain` and `evaluate` offer them: the usual ones of the shapes come first."""
    order = list(SHAPES)
    ranked = sorted(OBJECTIVES.items(), key=lambda item: (not item[1].preferred, order.index(item[1].shape), item[0]))
    return dict(ranked)


def language_objective(name: str) -> type[Objective]:
    """The objective of that name, or with that alias. Raises `ValueError` for one that there is not."""
    found = OBJECTIVES.get(name)
    if found is None:
        known = language_objectives()
        raise ValueError(f"unknown objective {name!r}: choose one of {', '.join(known)}.{did_you_mean(name, known)}")
    return found


def objectives_for_heads(heads: Iterable[str], rows: str | None = None) -> list[str]:
    """Names of the objectives that train one of these heads (`ForMaskedLM`, ...) and need nothing besides, the usual
    ones first. rows: those alone whose rows are of this kind."""
    heads = list(heads)
    return [
        name
        for name, cls in language_objectives().items()
        if f"For{cls.head}" in heads and cls.component is None and rows in (None, cls.rows)
    ]


def objective_of_shape(shape: str) -> type[Objective]:
    """What a model of a shape is trained on where nobody says."""
    return next(cls for cls in language_objectives().values() if cls.shape == shape)


def shape_of_head(head: str) -> dict[str, bool]:
    """The configuration fields that a language model's head needs; empty for a head that fits several shapes."""
    return next((SHAPES[cls.shape] for cls in language_objectives().values() if cls.head == head), {})


def objectives_for(config_class: type[XFormerConfig]) -> list[str]:
    """Names of the language objectives that a variant has the head for, and what they need besides."""
    return [name for name, cls in language_objectives().items() if _serves(config_class, cls)]


def _serves(config_class: type[XFormerConfig], objective: type[Objective]) -> bool:
    if f"For{objective.head}" not in config_class.heads:
        return False
    components = components_of(config_class)
    decided = objective().component_fields()
    if any(_lacking(build_spec(slot, components[slot]), fields) for slot, fields in decided.items()):
        return False
    if objective.component is None:
        return True
    slot, name = objective.component
    return build_spec(slot, components[slot]).type == name


def _lacking(spec: Spec, fields: Mapping[str, Any]) -> list[str]:
    """Which of these fields a component does not have."""
    return sorted(set(fields) - {field.name for field in dataclasses.fields(spec)})


def refuse_other_component(config: Any, objective: Objective) -> None:
    """Raises `ValueError` where a configuration lacks the component that an objective needs."""
    if objective.component is None:
        return
    slot, name = objective.component
    found = getattr(getattr(config, slot, None), "type", None)
    if found != name:
        raise ValueError(
            f"objective {objective.id!r} needs {slot} {name!r}, and {config.model_type!r} has {found!r}; take variant"
            f" {' or '.join(_able(type(objective)))}, or --{slot} {name}"
        )


def _able(objective: type[Objective]) -> list[str]:
    """The variants that have what an objective needs, the plain ones first."""
    from ..variants import config_class, model_types

    able = [name for name in model_types() if _serves(config_class(name), objective)]
    return sorted(able, key=lambda name: name not in ("xf_bert", "xf_gpt2", "xf_t5"))


def check_objective(config_class: type[XFormerConfig], objective: str) -> None:
    """Refuses an objective that is unknown or that the variant has no head for; the message says what would fit."""
    wanted = language_objective(objective)
    if f"For{wanted.head}" in config_class.heads:  # of components `refuse_other_component` asks the config itself
        return
    fitting, able = objectives_for(config_class), _able(wanted)
    others = ", ".join(able[:6]) + (f" or one of {len(able) - 6} others" if len(able) > 6 else "")
    raise ValueError(
        f"variant {config_class.model_type!r} cannot be trained with objective {objective!r}, which needs a"
        f" For{wanted.head} class; "
        + (f"take objective {' or '.join(map(repr, fitting))}, or " if fitting else "take ")
        + f"another variant: {others}"
    )


def default_objective(config_class: type[XFormerConfig]) -> str:
    """The objective that a variant is trained on where nobody says: the usual one of the first shape it has."""
    fitting = objectives_for(config_class)
    if not fitting:
        model_type = config_class.model_type
        raise ValueError(f"variant {model_type!r} has no language model head; choose another variant")
    return fitting[0]


def with_changes(
    config_class: type[XFormerConfig], components: Mapping[str, Any], fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Components and fields for a variant, complete: on top of its defaults ([`merge_changes`]).

    Raises ValueError for an unknown slot, component or field, TypeError for a value of the wrong type.
    """
    unknown = [slot for slot in components if slot not in SLOTS]
    if unknown:
        raise ValueError(f"unknown slot {unknown[0]!r}: the slots are {', '.join(SLOTS)}")
    return merge_changes(components_of(config_class), {**components, **fields})


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
    shape = SHAPES[objective.shape]
    given = dict(fields or {})
    valid = {"per_layer_config", *(field.name for field in dataclasses.fields(config_class))}
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
    values.update(with_changes(config_class, components or {}, given))
    for slot, decided in objective.component_fields().items():
        before = build_spec(slot, values.get(slot, components_of(config_class)[slot]))
        lacking = _lacking(before, decided)
        if lacking:
            raise ValueError(
                f"objective {objective.id!r} sets --{slot}.{lacking[0]}, which {slot} {before.type!r} does not have;"
                f" take another {slot}, or an objective without it (`hf-xformers list --objectives`)"
            )
        own = {name: value for name, value in decided.items() if not _chosen(components, slot, name)}
        values[slot] = changed_component(slot, own, before)
    values.update(decided_fields(objective, {**components_of(config_class), **values}))
    values.update(shape)
    return config_class(**values)


def decided_fields(objective: Objective, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that an objective decides for a model with these config fields, each as its whole value: what it says
    of `pretraining` goes on top of what stands there."""
    return merge_changes(fields, objective.config_fields())


def _chosen(components: Mapping[str, Any] | None, slot: str, field: str) -> bool:
    """Whether the user has given this field of a component."""
    given = (components or {}).get(slot)
    return isinstance(given, Mapping) and field in given


def own_ids(config_class: type[Any], tokenizer: PreTrainedTokenizerBase | None) -> dict[str, int | None]:
    """The ids of special tokens that only some variants read, those that this one has a field for."""
    names = {field.name for field in dataclasses.fields(config_class)}
    wanted = (f"{role}_token_id" for role in ("sep", "cls", "mask"))
    return {name: getattr(tokenizer, name, None) for name in wanted if name in names}


def vocabulary(tokenizer: PreTrainedTokenizerBase, objective: Objective) -> dict[str, int | None]:
    """The configuration fields that tokenizer and objective decide: vocabulary size and special ids."""
    from ..data import vocabulary_fields

    fields = vocabulary_fields(tokenizer)
    # Generation has to start where the collator starts decoder inputs.
    start = getattr(tokenizer, f"{objective.decoder_starts_with}_token_id")
    fields["decoder_start_token_id"] = start if objective.shape == "seq2seq" else None
    return fields


def build_model(config: XFormerConfig, objective: Objective) -> PreTrainedModel:
    """A model with fresh weights (from torch's global generator) and the head that the objective trains."""
    from ..variants import family

    return family(config.model_type)[f"For{objective.head}"](config)


def _smallest(limits: Iterable[int | None]) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _longest_by_position(config: XFormerConfig) -> int | None:
    return _smallest(
        view.position.max_length(view)
        for view in config.tower_configs()
        if not any(isinstance(feature, RestartingPositions) for feature in features_of(view))
    )


def _shortest_attention(config: XFormerConfig) -> tuple[int, str] | None:
    """(tokens, name) of the attention that has places for the fewest tokens; None where none counts places."""
    layers = [layer for view in config.tower_configs() for layer in view.layer_configs()]
    cross = config.tower("decoder").layer_configs() if config.is_encoder_decoder else []
    found = [(layer.attention.places(layer), layer.attention.type) for layer in layers]
    found += [(layer.cross_attention.places(layer), layer.cross_attention.type) for layer in cross]
    return min(((places, name) for places, name in found if places is not None), default=None)


def longest_input(config: PreTrainedConfig) -> int | None:
    """Tokens up to which every tower of a configuration has positions, and every attention places; None without a
    limit. Of a configuration of transformers, what its position table is for."""
    if not isinstance(config, XFormerConfig):
        rows: int | None = getattr(config, "max_position_embeddings", None)
        if rows is None or config.model_type not in _BEHIND_PADDING:
            return rows
        return rows - (config.pad_token_id or 0) - 1
    attention = _shortest_attention(config)
    return _smallest((_longest_by_position(config), None if attention is None else attention[0]))


def longest_sequence(objective: Objective, block_size: int) -> int:
    """Tokens of the longest sequence that rows of `block_size` tokens give a model: its inputs or its targets."""
    return max(block_size, objective.target_length(block_size))


def grown_positions(config: XFormerConfig, length: int) -> dict[str, int]:
    """The field `max_position_embeddings` of a model that starts from nothing and shall read texts of `length` tokens.

    Empty where the configuration covers them already. For models whose number of positions nobody chose: a number that
    the user gave, or that weights were trained with, stays and is held against the text's length.
    """
    positions = config.max_position_embeddings
    limit = _longest_by_position(config)
    if length <= (positions if limit is None else min(positions, limit)):
        return {}
    kept_back = 0 if limit is None else max(positions - limit, 0)  # places that the model keeps for itself
    return {"max_position_embeddings": max(positions, length + kept_back)}


def choose_block_size(config: XFormerConfig, objective: Objective, size: str, given: int | None) -> int:
    """Tokens of a model input: `given`, or the size's own as far as positions go.

    Raises ValueError when inputs (or, for span corruption, targets) would be longer than positions or attention
    allow.
    """
    limit = longest_input(config)
    if given is None:
        given = min(size_named(size).block_size, config.max_position_embeddings if limit is None else limit)
    if given < 1:
        raise ValueError(f"--block_size {given} must be at least 1 token")
    longest = longest_sequence(objective, given)
    attention = _shortest_attention(config)
    if attention is not None and longest > attention[0]:
        raise ValueError(
            f"rows of --block_size {given} make sequences of {longest} tokens, and attention {attention[1]!r} has"
            f" places for only {attention[0]} (--max_position_embeddings {config.max_position_embeddings}, or its own"
            f" `max_length`); raise that to at least {longest}, or shorten --block_size"
        )
    if limit is not None and longest > limit:
        raise ValueError(
            f"rows of --block_size {given} make sequences of {longest} tokens, and position {config.position.type!r}"
            f" covers only {limit} (--max_position_embeddings {config.max_position_embeddings}); raise"
            f" --max_position_embeddings to at least {longest}, shorten --block_size, or take a --position that"
            " extrapolates (rotary, sinusoidal_absolute, ...)"
        )
    return given
