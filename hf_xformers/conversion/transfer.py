# SPDX-License-Identifier: Apache-2.0
"""Builds the counterpart of a loaded model: its config, its tensors, its generation settings, and the account of
it."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..compat import chosen, left_on_load
from ..configuration_xformer import XFormerConfig
from ..variants import config_class, family
from .base import Converter, Head
from .quiet import quiet
from .refusals import refuse_loaded
from .report import Report
from .rules import FIRST, NONE, ZERO, Entry

# Our heads that may have a hidden layer before their labels.
CLASSIFIERS = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForReplacedTokenDetection",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForImageClassification",
)
MADE_OF = "_made_of"  # attribute of a converted model: the class that it was
_CHAIN = "crf."  # scores of sequences of tags
_FEW = 0.2  # of a model's bytes
# Buffers of older releases that hold no weights.
_NO_WEIGHTS = re.compile(r"(^|\.)(position_ids|token_type_ids|(attn|attention)\.(masked_)?bias)$")


@dataclass
class Source:
    """A loaded model and what its checkpoint had with it.

    Args:
        absent: tensors of the model that the checkpoint lacks.
        extra: tensors of the checkpoint that the model has no place for.
        kept: those of them that a conversion needs, under the names that they would have in the model.
        borrowed: the model is the caller's.
    """

    model: PreTrainedModel
    absent: frozenset[str] = frozenset()
    extra: tuple[str, ...] = ()
    kept: dict[str, Tensor] = field(default_factory=dict)
    borrowed: bool = False


@dataclass
class _Side:
    """One side's class and the rule groups that make it up; pair: None where only we have such a class."""

    model_class: Any
    pair: Head | None
    groups: tuple[str, ...]
    prefix: str
    head: str
    arguments: dict[str, Any] = field(default_factory=dict)


def our_head_of(model: PreTrainedModel) -> str:
    """The head name of one of this package's models.

    Raises:
        TypeError: it is an instance of no variant's own class.
    """
    for name, made in family(model.config.model_type).items():
        if type(model) is made:
            return name
    raise TypeError(f"{type(model).__name__} is no class of {model.config.model_type}; give one of its own classes.")


def check_head(converter: Converter, head: str) -> None:
    """Raises `ValueError` for a head that the variant does not have."""
    known = config_class(converter.variant).heads
    if head not in known:
        raise ValueError(f"{converter.variant} has no head {head!r}; it has: {', '.join(known)}.")


def to_ours(source: Source, converter: Converter, head: str | None = None) -> tuple[PreTrainedModel, Report]:
    """Our model for a loaded model of transformers; head: ours, by default the one that fits its class.

    Raises:
        ValueError: the config or a tensor has no counterpart; the message names it.
    """
    model = source.model
    refuse_loaded(model)
    pair = converter.head_of_theirs(type(model).__name__)
    if pair is None:
        raise ValueError(
            f"{type(model).__name__} has no counterpart; these do:"
            f" {', '.join(entry.theirs for entry in converter.heads)}."
        )
    name = head or pair.ours
    check_head(converter, name)
    notes: list[str] = []
    config = converter.config_to_ours(model.config, notes)
    fewer = getattr(config.head, "unpredicted", 0) > 0  # rows than the token table
    config.tie_word_embeddings = not fewer and _tied(model)
    known = {*converter.renamed, *_known_names(converter, config, 0)}  # of the layers that any of the classes has
    wanted = pair if name == pair.ours else converter.head_of_ours(name, model.config)
    if wanted is None:
        _check_towers(converter, model, name)
    if wanted is pair:
        wanted.check_config(config)
    if wanted is not None:
        for key, value in wanted.settings_for(config).items():
            setattr(config, key, value)
    if wanted is pair and pair.causal is not None and bool(config.is_decoder) != pair.causal:
        raise ValueError(
            f"{pair.theirs} with is_decoder={config.is_decoder!r} does not convert: {converter.variant}'s {pair.ours}"
            f" attends {'to earlier tokens alone' if pair.causal else 'to both sides'}; set `is_decoder={pair.causal}`"
            " in its config."
        )
    left = _Side(type(model), pair, pair.groups, pair.prefix, pair.ours)
    groups = converter.required if wanted is None else wanted.groups
    right = _Side(family(converter.variant)[name], wanted, groups, "" if name == "Model" else "model.", name)
    if name == "Model" and "pooler" in groups and not _has_pooler(source, converter, left, config, True):
        config.add_pooler = False
        right.groups = tuple(group for group in groups if group != "pooler")
    return _transfer(source, converter, left, right, config, config, notes, known, True)


def to_theirs(source: Source, converter: Converter, head: str | None = None) -> tuple[PreTrainedModel, Report]:
    """transformers' model for one of ours; head: ours, by default the model's own. Where transformers has no such
    class, the bare model is made.

    Raises:
        ValueError: the config or a tensor has no counterpart; the message names it.
    """
    model, config = source.model, cast(XFormerConfig, source.model.config)
    refuse_loaded(model)
    own = our_head_of(model)
    pair = converter.head_of_ours(own, config)
    if head is not None:
        check_head(converter, head)
    wanted = converter.head_of_ours(head or own, config)
    if wanted is None and head is not None:
        raise ValueError(f"transformers has no {converter.model_type!r} class for the head {head!r}.")
    wanted = wanted or converter.base_head(config)
    if wanted is pair:
        wanted.check_config(config)
    notes: list[str] = []
    theirs = converter.config_to_theirs(config, notes)
    tied = _tied(model)  # models of images have no tables to tie
    if not converter.ties_by_weights and getattr(theirs, "tie_word_embeddings", tied) != tied:
        theirs.tie_word_embeddings = tied
    groups = converter.required if pair is None else pair.groups
    left = _Side(type(model), pair, groups, "" if own == "Model" else "model.", own)
    right = _Side(converter.their_class(wanted.theirs), wanted, wanted.groups, wanted.prefix, wanted.ours)
    _check_pooling(converter, config, left, wanted)
    _check_transform(converter, config, theirs, left, wanted)
    if (
        wanted.ours == "Model"
        and "pooler" in wanted.groups
        and not _has_pooler(source, converter, left, config, False)
    ):
        right.groups = tuple(group for group in wanted.groups if group != "pooler")
        right.arguments["add_pooling_layer"] = False
        notes.append(
            "the model has no pooler: load it with `add_pooling_layer=False`, or transformers starts a new one"
        )
    if hasattr(theirs, "forced_eos_token_id") and model.can_generate():
        theirs.forced_eos_token_id = model.generation_config.forced_eos_token_id
    return _transfer(source, converter, left, right, config, theirs, notes, _known_names(converter, config, 1), False)


def _check_towers(converter: Converter, model: PreTrainedModel, name: str) -> None:
    """Refuses a head of one tower for a model of two, and the reverse, where transformers has both kinds."""
    other = next((head for head in converter.heads if head.ours == name and head.two_towers is not None), None)
    if other is not None and other.two_towers != model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} does not convert to the head {name!r}, which has"
            f" {'two towers' if other.two_towers else 'one tower'}; load the checkpoint as {other.theirs} and convert"
            " that."
        )


def _tied(model: PreTrainedModel) -> bool:
    """Whether the output projection is the token table; what the config says where there is no output."""
    output = model.get_output_embeddings()
    if output is None:  # models of images say nothing of it
        return getattr(model.config, "tie_word_embeddings", True)
    one = "shares_token_table" if isinstance(model.config, XFormerConfig) else "share_encoder_decoder_embeddings"
    read: Any = model if getattr(model.config, one, True) else model.get_decoder()  # what the output may be tied to
    projection, table = cast(Tensor, output.weight), cast(Tensor, read.get_input_embeddings().weight)
    if projection.shape != table.shape:
        if isinstance(model.config, XFormerConfig):
            return model.config.tie_word_embeddings
        # Either a projection of wider states, or what only leads to a product with the table.
        return projection.shape[0] != table.shape[0]
    if not model.config.tie_word_embeddings:
        return False
    return projection is table or torch.equal(projection, table)


def _has_pooler(source: Source, converter: Converter, side: _Side, config: XFormerConfig, to_ours: bool) -> bool:
    if "pooler" not in side.groups:
        return False
    entries = converter.entries(("pooler",), (side.prefix, side.prefix), config)
    names = {name for entry in entries for name in entry.ends(to_ours)[0]}
    return names <= source.model.state_dict().keys() - source.absent


def _check_pooling(converter: Converter, config: XFormerConfig, left: _Side, wanted: Head) -> None:
    """Refuses a classifier that reads other states than the class of transformers does."""
    if wanted.ours != left.head:
        return
    if wanted.pooling is not None and config.classifier_pooling not in ("auto", wanted.pooling):
        raise ValueError(
            f"classifier_pooling={config.classifier_pooling!r} has no counterpart: {wanted.theirs} reads the "
            f"{wanted.pooling} token. Convert the bare model with `head='Model'`."
        )
    for name, value in wanted.settings_for(config).items():
        if getattr(config, name) != value:
            raise ValueError(
                f"{name}={getattr(config, name)!r} has no counterpart: {wanted.theirs} does what {name}={value!r}"
                " says. Convert the bare model with `head='Model'`."
            )
    entries = converter.entries(wanted.groups, ("", ""), config)
    pooled = any("pooler." in name for entry in entries for name in entry.ours)
    if pooled and wanted.ours != "Model" and not config.add_pooler:
        raise ValueError(
            f"A classifier without a pooler (`add_pooler=False`) has no counterpart: {wanted.theirs} reads the first"
            " token through one. Convert the bare model with `head='Model'`."
        )


def _check_transform(
    converter: Converter, config: XFormerConfig, theirs: PreTrainedConfig, left: _Side, wanted: Head
) -> None:
    """Refuses a classifier with another hidden layer before its labels than the class of transformers has, and one
    whose labels hang together."""
    if wanted.ours != left.head or wanted.ours not in CLASSIFIERS:
        return
    if wanted.ours == "ForTokenClassification" and config.tag_decoder != "softmax":
        raise ValueError(
            f"tag_decoder={config.tag_decoder!r} has no counterpart: {wanted.theirs} labels every token by itself."
            " Convert the bare model with `head='Model'`."
        )
    back, settings = converter.config_to_ours(theirs), wanted.settings_for(config)
    for name in ("classifier_transform", "classifier_activation", "classifier_bias"):
        value, kept = getattr(config, name), settings.get(name, getattr(back, name))
        if value != kept:
            raise ValueError(
                f"{name}={value!r} has no counterpart: {wanted.theirs} does what {name}={kept!r} says. Convert the"
                " bare model with `head='Model'`."
            )
        if config.classifier_transform == "none":
            return


# ---------------------------------------------------------------------------------------------------- tensors


def _transfer(
    source: Source,
    converter: Converter,
    left: _Side,
    right: _Side,
    our_config: XFormerConfig,
    target_config: Any,
    notes: list[str],
    known: set[str],
    to_ours: bool,
) -> tuple[PreTrainedModel, Report]:
    model = source.model
    report = Report(type(model).__name__, right.model_class.__name__, notes=notes)
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in source.absent}
    state |= {name: tensor.to(model.dtype) for name, tensor in source.kept.items()}
    if to_ours:
        state = {new: state[name] for name in state for new in converter.renamed.get(name, (name,))}
    with torch.device("meta"):
        skeleton = right.model_class(copy.deepcopy(target_config), **right.arguments)
    shapes = {name: tensor.shape for name, tensor in skeleton.state_dict().items()}
    prefixes = (left.prefix, right.prefix) if to_ours else (right.prefix, left.prefix)
    groups = [group for group in left.groups if group in right.groups]
    entries = [entry for entry in converter.entries(groups, prefixes, our_config) if entry.operation is not NONE]
    made = _apply(entries, converter, state, shapes, report, to_ours, source.borrowed)

    used = {name for entry in entries for name in entry.ends(to_ours)[0]}
    unmapped = []
    for name in [*(name for name in state if name not in used), *source.extra]:
        headed = left.pair is None and not name.startswith(left.prefix)
        chained = not to_ours and name.startswith(_CHAIN)  # of a head; converting that is refused before
        if name in known or headed or chained or _NO_WEIGHTS.search(name) or _left_behind(converter, name):
            report.dropped.append(name)
        else:
            unmapped.append(name)
    if unmapped:
        raise ValueError(
            f"{report.source} holds tensors that {report.target} has no place for: {_listed(unmapped)}. Nothing was"
            " converted, so that nothing is lost unnoticed; copy or download weights and config.json again from one"
            " place, or load and save the model to leave these tensors behind."
        )
    if source.borrowed:  # loading takes tensors as they are; the two models must not share memory
        made = {name: tensor.detach().clone() for name, tensor in made.items()}
    else:
        _let_go(made, state)
    with quiet():
        target, info = right.model_class.from_pretrained(
            None, config=target_config, state_dict=made, dtype=model.dtype, output_loading_info=True, **right.arguments
        )
    report.new = sorted(info["missing_keys"])
    optional = _known_names(converter, our_config, 1 if to_ours else 0, optional=True)
    empty = [
        name
        for name in report.new
        if name not in optional and not (right.pair is None and not name.startswith(right.prefix))
    ]
    if empty:
        raise ValueError(f"No tensor of {report.source} fills {_listed(empty)} of {report.target}.")
    carry_generation(model, target)
    setattr(target, MADE_OF, report.source)
    return target.to(model.device), report


def _left_behind(converter: Converter, name: str) -> bool:
    """Whether a class of the family leaves a tensor of a checkpoint behind without a word."""
    classes = (converter.their_class(head.theirs) for head in converter.heads)
    patterns = {pattern for made in classes for pattern in left_on_load(made)}
    return any(re.search(pattern, name) for pattern in patterns)


def _let_go(made: dict[str, Tensor], state: dict[str, Tensor]) -> None:
    """Copies the tensors that were taken as they are, where they are few: they would keep their whole file mapped."""
    old = {tensor.untyped_storage().data_ptr() for tensor in state.values()}
    taken = {id(tensor): tensor for tensor in made.values() if tensor.untyped_storage().data_ptr() in old}
    if sum(tensor.nbytes for tensor in taken.values()) < _FEW * sum(tensor.nbytes for tensor in made.values()):
        copies = {key: tensor.clone() for key, tensor in taken.items()}
        made.update((name, copies[id(tensor)]) for name, tensor in made.items() if id(tensor) in copies)


def needed_beside(converter: Converter, model: PreTrainedModel) -> list[str]:
    """Names of tensors that the required rules read for this model's config and that its class has no place for.

    Raises:
        ValueError: the config has no counterpart.
    """
    pair = converter.head_of_theirs(type(model).__name__)
    if pair is None:
        return []
    entries = converter.entries(converter.required, (pair.prefix, ""), converter.config_to_ours(model.config))
    places = {new for name in model.state_dict() for new in converter.renamed.get(name, (name,))}
    return [name for entry in entries for name in entry.theirs if name not in places]


def _apply(
    entries: list[Entry],
    converter: Converter,
    state: dict[str, Tensor],
    shapes: dict[str, torch.Size],
    report: Report,
    to_ours: bool,
    borrowed: bool,
) -> dict[str, Tensor]:
    """The target's tensors by name. Parts that the source lacks altogether are left out unless they are required."""
    lacking: dict[str, list[str]] = {}
    for entry in entries:
        lacking.setdefault(entry.group, []).extend(name for name in entry.ends(to_ours)[0] if name not in state)
    reading = [(entry.group, names) for entry in entries if (names := entry.ends(to_ours)[0])]
    present = {group for group, names in reading if all(name in state for name in names)}
    present |= {entry.group for entry in entries} - {group for group, _ in reading}
    missing = [name for group, names in lacking.items() if group in present | {*converter.required} for name in names]
    if missing and borrowed and to_ours:
        raise ValueError(
            f"The {report.source} lacks {_listed(missing)}, which its config asks for and transformers may have left"
            " behind when it was loaded; give the folder or Hub id in place of the loaded model."
        )
    if missing:
        raise ValueError(
            f"The {report.source} checkpoint lacks {_listed(missing)}; copy or download it again, or save the whole"
            " model."
        )
    made: dict[str, Tensor] = {}
    for entry in entries:
        if entry.group not in present:
            continue
        reads, writes = entry.ends(to_ours)
        strangers = [name for name in writes if name not in shapes]
        if strangers:
            raise ValueError(f"{report.target} has no tensor {_listed(strangers)} for {_listed(list(reads))}.")
        if reads or entry.operation is not ZERO:
            change = entry.operation.to_ours if to_ours else entry.operation.to_theirs
            try:
                tensors = change([state[name] for name in reads])
            except ValueError as error:
                raise ValueError(f"{_listed(list(reads))} cannot be converted: {error}.") from None
            dtype = next(iter(state.values())).dtype
            tensors = tensors if reads else [tensor.to(dtype) for tensor in tensors]
        else:
            tensors = [torch.zeros(shapes[name], dtype=next(iter(state.values())).dtype) for name in writes]
        if len(tensors) == 1:
            tensors = tensors * len(writes)
        if entry.operation is FIRST and to_ours:  # the others are lost where they differ
            report.dropped += [name for name in reads[1:] if not torch.equal(state[name], tensors[0])]
        for name, tensor in zip(writes, tensors, strict=True):
            if tensor.shape != shapes[name]:
                raise ValueError(
                    f"{_listed(list(reads))} gives {name} the shape {list(tensor.shape)}, but {report.target} has "
                    f"{list(shapes[name])} there."
                )
            made[name] = tensor
        if entry.operation.plain:
            report.mapped.append((reads[0], writes[0]))
        else:
            report.derived.append((reads, writes, entry.operation.name))
    return made


def _known_names(converter: Converter, config: XFormerConfig, side: int, *, optional: bool = False) -> set[str]:
    """Names of the tensors of any class of one side (0: theirs, 1: ours) that a rule speaks of; optional: without
    those of required groups."""
    groups = [group for group in converter.groups if not (optional and group in converter.required)]
    names: set[str] = set()
    for head in converter.heads:
        for entry in converter.entries(groups, (head.prefix, head.our_prefix), config):
            names.update(entry.theirs if side == 0 else entry.ours)
    return names


def carry_generation(source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Generation settings travel too; special tokens that the source does not know stay the target's."""
    if not (source.can_generate() and target.can_generate()):
        return
    settings = chosen(copy.deepcopy(source.generation_config))
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
        if getattr(settings, name) is None:
            setattr(settings, name, getattr(target.generation_config, name))
    target.generation_config = settings


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:6])
    return shown + (f" and {len(names) - 6} more" if len(names) > 6 else "")
