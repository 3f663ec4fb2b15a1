# SPDX-License-Identifier: Apache-2.0
"""Converters: how the config and the tensors of one of transformers' families correspond to one of our variants."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..configuration_xformer import XFormerConfig
from ..core.components import SLOTS, Spec
from ..core.discovery import import_plugins
from ..variants import config_class
from .rules import Entry, Rule, expand

# Fields with the same name and meaning everywhere.
_COMMON = (
    "vocab_size",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "use_cache",
    "tie_word_embeddings",
    "chunk_size_feed_forward",
    "output_hidden_states",
    "id2label",
    "label2id",
    "problem_type",
    "dtype",
)
# What one tower computes, as far as a config says it.
_GEOMETRY = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "distinct_layers",
    "layer_map",
    "share",
    "num_attention_heads",
    "key_value_heads",
    "head_width",
    "intermediate_size",
    "max_position_embeddings",
    "type_vocab_size",
    "layer_norm_eps",
    "is_decoder",
)
_DROPOUTS = (
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "activation_dropout_prob", "classifier_dropout"),
    "layer_drop",
)

# What inputs mean, by the field of ours that says it.
_MEANINGS = {"first_position": "`position_ids`", "labels_in_place": "`labels`"}

Rules = tuple[Rule, ...]
Groups = Rules | Callable[[XFormerConfig], Rules]  # a part's rules, or what makes them for our config


@dataclass(frozen=True)
class Head:
    """One of transformers' classes and our head for the same task.

    Args:
        theirs: class name.
        ours: head name.
        prefix: of the base model's tensors in their class.
        groups: the rule groups that make up the model.
        pooling: what `classifier_pooling` has to come to for the two to agree.
        two_towers: whether this pair is an encoder-decoder, where a family has both kinds.
        causal: what their `is_decoder` has to be, where that is not free.
        settings: fields of our config that this class of theirs comes to, and needs on the way back; values, or
            functions of our config to them.
        refuses: why a model with this config of ours has no counterpart with this head, or None.
    """

    theirs: str
    ours: str
    prefix: str
    groups: tuple[str, ...]
    pooling: str | None = None
    two_towers: bool | None = None
    causal: bool | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    refuses: Callable[[XFormerConfig], str | None] | None = None

    def check_config(self, config: XFormerConfig) -> None:
        """Raises `ValueError` where the two classes compute different things for this config of ours."""
        reason = None if self.refuses is None else self.refuses(config)
        if reason is not None:
            raise ValueError(
                f"{self.theirs} has no counterpart here: {reason}; convert the bare model with `head='Model'`."
            )

    def settings_for(self, config: XFormerConfig) -> dict[str, Any]:
        """`settings` as they are for a model of ours."""
        return {name: value(config) if callable(value) else value for name, value in self.settings.items()}

    def fits(self, config: XFormerConfig) -> bool:
        """Whether a model of ours has these settings."""
        return all(getattr(config, name) == value for name, value in self.settings_for(config).items())

    def renamed(self, old: str, new: str, prefix: str) -> Head:
        """The pair of a relative: `new` for `old` in its class's name, and the `prefix` of the model inside it."""
        theirs = self.theirs.replace(old, new).replace("LMHeadModel", "ForCausalLM")
        return replace(self, theirs=theirs, prefix=prefix if self.prefix else "")

    @property
    def our_prefix(self) -> str:
        return "" if self.ours == "Model" else "model."


def decoder_heads(
    name: str,
    prefix: str = "model.",
    *,
    sequence: bool = True,
    token: bool = True,
    spans: str | None = "",
    stem: str | None = None,
) -> tuple[Head, ...]:
    """The usual classes of a decoder family called `name`.

    Args:
        prefix: of the model inside them.
        sequence: it classifies texts.
        token: it classifies tokens.
        spans: the prefix inside its class for questions, "" for the usual one, None where there is none.
        stem: the name of its classes without language model.
    """
    stem = name if stem is None else stem
    found = [
        Head(f"{stem}Model", "Model", "", ("backbone",)),
        Head(f"{name}ForCausalLM", "ForCausalLM", prefix, ("backbone", "lm")),
    ]
    if sequence:
        theirs = f"{stem}ForSequenceClassification"
        found.append(Head(theirs, "ForSequenceClassification", prefix, ("backbone", "sequence"), pooling="last"))
    if token:
        found.append(Head(f"{name}ForTokenClassification", "ForTokenClassification", prefix, ("backbone", "token")))
    if spans is not None:
        inside = spans or prefix
        found.append(Head(f"{name}ForQuestionAnswering", "ForQuestionAnswering", inside, ("backbone", "spans")))
    return tuple(found)


@dataclass(frozen=True)
class Converter:
    """One family of transformers (`model_type`) and one of our variants, in both directions.

    Several families may share one variant.

    Args:
        fields: our config field -> theirs (the first of several is read, all are written).
        to_ours, to_theirs: the fields that need more than a new name.
        groups: weight rules by part of the model, or a function from our config to them.
        required: the parts that a checkpoint cannot lack.
        heads: class pairs, the best first where several share a side.
        training_only: their fields that act in training alone, so that a loss there is a note.
        unread: their fields that nothing listed here reads, or that `to_ours` checks by itself.
        unread_ours: the same for ours.
        ties_by_weights: their config cannot untie the output projection; a checkpoint with two tables does.
        unread_alone: their fields that a model of one tower does not read, where the family has both kinds.
        idle: those that a model with their config does not read because of other fields of it.
        renamed: other names that a layout of theirs has for tensors, and those of the rules.
        layout: the fields of their config with which their class has a place for these names.
        native: this one is what a model of the variant goes back to unless another is asked for.
        components: by slot, the component types that the family's config can say; needed where the variant is the free
            mix, which may have any.
        remarks: what the report says of a model with their config, with what gets lost.
        per_layer: layers may differ; `to_ours` gives a `per_layer_config` then, and `to_theirs` reads the views of the
            layers.
        layouts: this package's own classes for the tensors of files that transformers has no class for any more; such
            a family converts to this package alone.
    """

    model_type: str
    variant: str
    fields: Mapping[str, str | tuple[str, ...]]
    to_ours: Callable[[PreTrainedConfig], dict[str, Any]]
    to_theirs: Callable[[XFormerConfig], dict[str, Any]]
    groups: Mapping[str, Groups]
    heads: tuple[Head, ...]
    required: tuple[str, ...] = ("backbone",)
    training_only: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    unread_ours: tuple[str, ...] = ()
    ties_by_weights: bool = False
    unread_alone: tuple[str, ...] = ()
    idle: Callable[[PreTrainedConfig], tuple[str, ...]] | None = None
    renamed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    layout: Mapping[str, Any] = field(default_factory=dict)
    native: bool = True
    components: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    per_layer: bool = False
    remarks: Callable[[PreTrainedConfig], tuple[str, ...]] | None = None
    layouts: tuple[Any, ...] = ()

    # ------------------------------------------------------------------------------------------------ their classes

    @property
    def their_config(self) -> Any:
        """Their config's class."""
        return self.layouts[0].config_class if self.layouts else CONFIG_MAPPING[self.model_type]

    def their_class(self, name: str) -> Any:
        """Their class of this name."""
        found = [made for made in self.layouts if made.__name__ == name]
        return found[0] if found else getattr(transformers, name)

    # ------------------------------------------------------------------------------------------------ configs

    def config_to_ours(self, config: PreTrainedConfig, notes: list[str] | None = None) -> XFormerConfig:
        """Our config for one of transformers'. Settings that only matter in training and get lost are added to
        `notes`.

        Raises:
            ValueError: the config says something that the variant cannot express.
        """
        ours = self._our_config(config)
        back = self._their_config(ours)
        causal, own = getattr(config, "is_causal", None), None if ours.is_encoder_decoder else ours.is_decoder
        if causal not in (None, own):  # no field of any config, but the makers of their masks read it
            raise ValueError(
                f"A {self.model_type!r} model with is_causal={causal!r} does not convert: {self.variant} computes what"
                f" is_causal={own!r} does."
            )
        base = {entry.name for entry in dataclasses.fields(PreTrainedConfig)}
        unread = self.unread if config.is_encoder_decoder else (*self.unread, *self.unread_alone)
        unread = (*unread, *(() if self.idle is None else self.idle(config)))
        for entry in dataclasses.fields(type(config)):
            name = entry.name
            if name in base or name in unread:
                continue
            value, carried = getattr(config, name), getattr(back, name)
            if value == carried:
                continue
            if name not in self.training_only:
                raise ValueError(
                    f"A {self.model_type!r} model with {name}={value!r} does not convert: {self.variant} computes what"
                    f" {name}={carried!r} does."
                )
            if notes is not None:
                notes.append(f"{name}={value!r} becomes {carried!r} (it acts in training only)")
        if notes is not None and self.remarks is not None:
            notes.extend(self.remarks(config))
        return ours

    def config_to_theirs(self, config: XFormerConfig, notes: list[str] | None = None) -> PreTrainedConfig:
        """transformers' config for one of ours; the counterpart of [`Converter.config_to_ours`].

        Raises:
            ValueError: the config says something that the other side cannot express, such as another component.
        """
        if not self.per_layer and any(tower.is_heterogeneous for tower in config.tower_configs()):
            raise ValueError(
                f"`per_layer_config` cannot be converted: all layers of a {self.model_type!r} model are alike."
            )
        self._check_components(config)
        if not any(head.two_towers in (None, config.is_encoder_decoder) for head in self.heads):
            self.base_head(config)
        theirs = self._their_config(config)
        back = self._our_config(theirs)
        if config.is_encoder_decoder != back.is_encoder_decoder:
            raise ValueError(
                f"is_encoder_decoder={config.is_encoder_decoder!r} has no counterpart in transformers for"
                f" {self.model_type!r} models."
            )
        if config.shares_token_table != back.shares_token_table:
            raise ValueError(
                f"decoder_vocab_size={config.decoder_vocab_size!r} has no counterpart in transformers: both towers of"
                f" a {self.model_type!r} model read one token table."
            )
        for name, what in _MEANINGS.items():
            value, kept = getattr(config, name), getattr(back, name)
            if value != kept and notes is not None:
                notes.append(f"{what} mean what {name}={kept!r} says in transformers; here it was {value!r}")
        for mine, carried in zip(config.tower_configs(), back.tower_configs(), strict=True):
            slots = [
                slot for slot in SLOTS if slot != "cross_attention" or (mine.is_decoder and config.is_encoder_decoder)
            ]
            for index in range(mine.num_hidden_layers if self.per_layer else 1):
                view, other = (tower.layer(index) if self.per_layer else tower for tower in (mine, carried))
                for name in (*_GEOMETRY, *slots):
                    value, kept = getattr(view, name), getattr(other, name)
                    if value != kept and name not in self.unread_ours:
                        where = f" in layer {index}" if self.per_layer and mine.is_heterogeneous else ""
                        raise ValueError(
                            f"{name}={shown(value)}{where} has no counterpart in transformers: every"
                            f" {self.model_type!r} model of this size has {shown(kept)} there."
                        )
            pooler, kept = mine.pooler_activation, carried.pooler_activation
            if mine.add_pooler and pooler != kept and "pooler_activation" not in self.unread_ours:
                raise ValueError(
                    f"pooler_activation={pooler!r} has no counterpart: the pooler of this {self.model_type!r} model"
                    f" has {kept!r}."
                )
            pairs = (
                zip(mine.layer_configs(), carried.layer_configs(), strict=False)
                if self.per_layer
                else [(mine, carried)]
            )
            for (view, other), name in itertools.product(pairs, _DROPOUTS):
                value, kept = _dropout(view, name), _dropout(other, name)
                if value != kept and notes is not None:
                    note = f"{name}={value!r} becomes {kept!r} (it acts in training only)"
                    notes.extend([note] if note not in notes else [])
        return theirs

    def _check_components(self, config: XFormerConfig) -> None:
        for tower in config.tower_configs():
            for slot, types in self.components.items():
                if slot == "cross_attention" and not (tower.is_decoder and config.is_encoder_decoder):
                    continue
                for view in tower.layer_configs():
                    found = getattr(view, slot).type
                    if found not in types:
                        raise ValueError(
                            f"{slot} {found!r} has no counterpart in transformers: {self.model_type!r} models have"
                            f" {' or '.join(map(repr, types))} there."
                        )

    def _our_config(self, config: PreTrainedConfig) -> XFormerConfig:
        values = {name: getattr(config, name) for name in _COMMON if hasattr(config, name)}
        for mine, names in self.fields.items():
            values[mine] = getattr(config, names if isinstance(names, str) else names[0])
        values["name_or_path"] = config.name_or_path
        values |= {name: getattr(config, name) for name in self._further_ids() if name not in values}
        return config_class(self.variant)(**{**values, **self.to_ours(config)})

    def _their_config(self, config: XFormerConfig) -> PreTrainedConfig:
        declared = {entry.name for entry in dataclasses.fields(self.their_config)}
        values = {name: getattr(config, name) for name in _COMMON if name in declared}
        for mine, names in self.fields.items():
            for name in (names,) if isinstance(names, str) else names:
                values[name] = getattr(config, mine)
        values["name_or_path"] = config.name_or_path
        values |= {name: getattr(config, name) for name in self._further_ids() if hasattr(config, name)}
        try:
            values |= self.to_theirs(config)
        except RuntimeError as error:  # transformers', where one value is asked for of layers that differ
            raise ValueError(
                f"`per_layer_config` cannot be converted: layers of a {self.model_type!r} model do not differ in one"
                f" of {', '.join(sorted(config.per_layer_attributes or ()))}."
            ) from error
        try:
            return self.their_config(**values)
        except (StrictDataclassError, KeyError) as error:  # checks of rotations end in the latter
            raise ValueError(f"No {self.model_type!r} config says what this model is: {one_line(error)}.") from error

    def _further_ids(self) -> list[str]:
        """Fields of their config that name a special token which no model of ours reads; they are kept for the way
        back. What generation is forced to write stands in the generation config."""
        own = {entry.name for entry in dataclasses.fields(XFormerConfig)}
        names = [entry.name for entry in dataclasses.fields(self.their_config) if entry.name not in own]
        return [name for name in names if name.endswith("_token_id") and not name.startswith("forced_")]

    # ------------------------------------------------------------------------------------------------ heads and rules

    def head_of_theirs(self, class_name: str) -> Head | None:
        """The pair of a transformers class, or None for a class that no pair names."""
        return next((head for head in self.heads if head.theirs == class_name), None)

    def head_of_ours(self, name: str, config: XFormerConfig | PreTrainedConfig) -> Head | None:
        """The pair of one of our heads, or None where transformers has no such class. Of several that differ in their
        settings it is the one that a config of ours fits."""
        found = [
            head for head in self.heads if head.ours == name and head.two_towers in (None, config.is_encoder_decoder)
        ]
        if isinstance(config, XFormerConfig):
            found.sort(key=lambda head: not head.fits(config))
        return found[0] if found else None

    def base_head(self, config: XFormerConfig | PreTrainedConfig) -> Head:
        """The pair of bare models."""
        head = self.head_of_ours("Model", config)
        if head is None:
            kind = "an encoder-decoder" if config.is_encoder_decoder else "one tower"
            raise ValueError(f"{self.model_type!r} has no model of {kind}, so this config does not convert.")
        return head

    def entries(self, groups: Iterable[str], prefixes: tuple[str, str], config: XFormerConfig) -> list[Entry]:
        """The concrete weight table of `groups` for our `config`; prefixes: of (their, our) base models."""
        towers = config.tower_configs()
        layers = (towers[0].num_hidden_layers, towers[1].num_hidden_layers if len(towers) > 1 else 0)
        entries = []
        for group in groups:
            rules = self.groups[group]
            entries += expand(rules(config) if callable(rules) else rules, group, prefixes, layers)
        return entries


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def one_line(error: BaseException) -> str:
    """An error's text without line breaks and full stop."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _dropout(config: XFormerConfig, name: str) -> float:
    """A rate as it acts: a classifier without one of its own has that of the hidden states."""
    value = getattr(config, name)
    return config.hidden_dropout_prob if value is None else value


def shown(value: Any) -> str:
    if isinstance(value, Spec):
        fields = {key: entry for key, entry in value.to_dict().items() if key != "type"}
        return f"{value.type!r} {fields}" if fields else repr(value.type)
    return repr(value)


# ---------------------------------------------------------------------------------------------------- registry

_CONVERTERS: dict[str, Converter] = {}  # by transformers' model type


def register(converter: Converter) -> Converter:
    """Enters a converter under its model type."""
    _CONVERTERS[converter.model_type] = converter
    return converter


def converters() -> dict[str, Converter]:
    """All converters by transformers' model type; every file of `families/` is read, and modules of other packages."""
    import_plugins()
    package = importlib.import_module(f"{__package__}.families")
    for info in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{info.name}")
    return _CONVERTERS


# ---------------------------------------------------------------------------------------------------- shared tables
