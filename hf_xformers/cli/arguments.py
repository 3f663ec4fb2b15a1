# SPDX-License-Identifier: Apache-2.0
"""Command lines of the training commands: every Trainer flag, dotted component options, and YAML files.

A YAML file is turned into the command line that says the same, so that both are checked by the same rules. What stands
on the command line wins over the file.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from transformers.hf_argparser import HfArgumentParser

from ..core.changes import class_of_change, components_of, merge_changes
from ..core.components import SLOTS, SpecLike, build_spec, did_you_mean
from ..core.precision import allow_tf32
from ..core.specs import TypedSpec, default_of, field_aliases
from .options_file import file_tokens, take_file
from .parser import RefusingParser
from .values import annotation, parse

if TYPE_CHECKING:
    from ..configuration_xformer import XFormerConfig

# Fields that the objective, Trainer or a dotted option decides.
_NOT_OFFERED = ("is_decoder", "is_encoder_decoder", "use_cache", "decoder", "pretraining", *SLOTS)
# Of Trainer's options the ones that a help names.
USUAL = (
    "learning_rate",
    "num_train_epochs",
    "max_steps",
    "per_device_train_batch_size",
    "resume_from_checkpoint",
)


class _HelpAll(argparse.Action):
    def __call__(self, parser: Any, *_: Any) -> None:
        print(parser.format_help(full=True), end="")
        parser.exit()


def _in_a_sentence(action: argparse.Action) -> argparse.Action:
    """An option with the beginning of what explains it."""
    short = copy.copy(action)
    short.help = re.split(r"(?<=[.;])\s", action.help or "")[0].rstrip(";")
    return short


class Parser(RefusingParser, HfArgumentParser):
    """HfArgumentParser whose help has the command's own options first, and Trainer's under `--help-all`.

    Args:
        kinds: the command's dataclasses, each a group of options.
        trainer: the class of Trainer's arguments, read last (None: the command reads none).
        read: those of its options that the command reads (None: all); there are no others then.
        folder: what --output_dir is for, which the command needs.
        usage: what follows the command's name.
        brief: the options that the help explains, where all of the command's own are more than a screen.
    """

    def __init__(
        self,
        kinds: Sequence[type],
        trainer: type | None = None,
        *,
        read: Collection[str] | None = None,
        folder: str | None = None,
        brief: Collection[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__([*kinds, *([] if trainer is None else [trainer])], **kwargs)
        self._trainer = set() if trainer is None else {field.name for field in dataclasses.fields(trainer)}
        self._trainer_name = "" if trainer is None else trainer.__name__
        self._read = () if trainer is None else read
        self._brief = brief
        self.more_groups: list[Any] = []
        for action in self._actions:
            if action.dest == "objective" and action.help:
                action.help = action.help.replace("{objectives}", _objectives())
            if action.dest == "output_dir" and folder is not None:
                action.required, action.help, action.metavar = True, folder, "DIR"
        if self._read is None:
            self.add_argument(
                "--help-all", nargs=0, action=_HelpAll, help="also explain the options of Trainer and model"
            )
        else:
            for action in [action for action in self._actions if action.dest in self._trainer - set(self._read)]:
                self._drop(action)

    def _drop(self, action: argparse.Action) -> None:
        self.set_defaults(**{action.dest: action.default})
        self._remove_action(action)
        for group in self._action_groups:
            if action in group._group_actions:
                group._group_actions.remove(action)
        for flag in action.option_strings:
            del self._option_string_actions[flag]

    def into_dataclasses(self, tokens: Sequence[str]) -> tuple[Any, ...]:
        """The dataclasses and, where the parser has other options, their namespace.

        Raises ValueError for an option that nobody knows, with the closest that somebody does.
        """
        *found, rest = self.parse_args_into_dataclasses(
            list(tokens), return_remaining_strings=True, look_for_args_file=False
        )
        self.refuse_unknown(rest)
        return tuple(found)

    def format_help(self, full: bool = False) -> str:
        """The command's own options by group; full: Trainer's and the model's fields, too."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        if self._brief and not full:
            chosen = [action for action in self._actions if action.dest in (*self._brief, "help", "help_all")]
            formatter.start_section("options")
            formatter.add_arguments(map(_in_a_sentence, chosen))
            formatter.end_section()
            others = len(self._actions) - len(chosen)
            formatter.add_text(f"--help-all explains {others} others, those of transformers' Trainer among them.")
            return formatter.format_help()
        usual = self._optionals._group_actions
        groups = [group for group in self._action_groups if group not in (self._positionals, self._optionals)]
        sections = [
            (group.title, group.description, group._group_actions)
            for group in groups
            if full or group not in self.more_groups
        ]
        every = full or self._read is not None
        own = [action for action in usual if action.dest not in self._trainer]
        flags = [action for action in usual if action.dest in self._trainer]
        needed = [action for action in flags if action.dest == "output_dir" and action.required]
        sections.append(("other options", None, [*needed, *own]))
        if every and self._trainer:
            rest = [action for action in flags if action not in needed]
            sections.append(("options of transformers' Trainer", None, rest))
        for title, description, actions in sections:
            formatter.start_section(title)
            formatter.add_text(description)
            formatter.add_arguments(actions)
            formatter.end_section()
        if not every:
            shown = {action.dest for action in flags if action.help != argparse.SUPPRESS}
            usually = ", ".join(self._with_default(name) for name in USUAL if name in shown)
            formatter.add_text(
                f"Every option of transformers' {self._trainer_name} works too; the most usual: {usually}."
            )
            for group in self.more_groups:
                names = ", ".join(action.option_strings[0] for action in group._group_actions)
                formatter.add_text(f"{group.title.capitalize()}: {names}.")
            formatter.add_text("--help-all explains these. In names of options - is the same as _.")
        return formatter.format_help()

    def _with_default(self, name: str) -> str:
        default = self.get_default(name)
        return f"--{name}" + (f" (default {default})" if default not in (None, -1) else "")


# ------------------------------------------------------------------------------------------------ dotted options


def split_dotted(tokens: Sequence[str], groups: Iterable[str]) -> tuple[list[str], dict[str, dict[str, str]]]:
    """Takes `--<group> NAME` and `--<group>.<field> VALUE` out of a command line.

    Returns the other tokens, and for each group its fields as text, the name under `type`. An option without a value
    is true.
    """
    groups = set(groups)
    rest: list[str] = []
    found: dict[str, dict[str, str]] = {}
    index = 0
    while index < len(tokens):
        token = tokens[index]
        index += 1
        option, equals, value = token.partition("=")
        name, dot, path = option.removeprefix("--").replace("-", "_").partition(".")
        if not option.startswith("--") or not (name in groups or dot):
            rest.append(token)
            continue
        if name not in groups:
            hint = did_you_mean(f"--{name}.{path}", [f"--{group}.{path}" for group in groups]).replace("'", "")
            raise ValueError(
                f"there is no option {option}.{hint} Dotted options begin with {', '.join(sorted(groups))}"
            )
        if not equals:
            if index < len(tokens) and not tokens[index].startswith("--"):
                value = tokens[index]
                index += 1
            elif dot:
                value = "true"
            else:
                raise ValueError(f"argument {option}: expected a name")
        found.setdefault(name, {})[path if dot else "type"] = value
    return rest, found


def overlay(
    below: Mapping[str, Mapping[str, str]], above: Mapping[str, Mapping[str, str]]
) -> dict[str, dict[str, str]]:
    """Dotted options of two sources; a name in `above` that differs from `below`'s drops the fields that went with
    it."""
    merged: dict[str, dict[str, str]] = {name: dict(fields) for name, fields in below.items()}
    for name, fields in above.items():
        old = merged.get(name, {})
        other = "type" in fields and fields["type"] != old.get("type")
        merged[name] = dict(fields) if other else {**old, **fields}
    return merged


def parse_fields_of(spec_class: type[TypedSpec], texts: Mapping[str, Any], option: str) -> dict[str, Any]:
    """Texts of a spec's fields as typed values under the fields' own names; of two names of one field the last counts,
    as of an option that is given twice. Unknown fields stay, for the spec itself to refuse.

    option: what stands before the field's name on the command line.
    """
    known = {field.name for field in dataclasses.fields(spec_class)}  # type: ignore[arg-type]
    aliases = field_aliases(spec_class)
    typed = {}
    for given, text in texts.items():
        field = aliases.get(given, given)
        typed[field] = parse(text, annotation(spec_class, field), f"{option}.{given}") if field in known else text
    return typed


def parse_component(slot: str, texts: Mapping[str, Any], before: SpecLike, prefix: str = "") -> dict[str, Any]:
    """Texts of a component's fields, and perhaps its name, as typed changes to the one that is there."""
    return parse_fields_of(class_of_change(slot, texts, before), texts, f"--{prefix}{slot}")


def parse_objective(name: str, texts: Mapping[str, Any]) -> dict[str, Any]:
    """Texts of an objective's settings as typed values. Raises `ValueError` for an unknown objective."""
    from ..training.building import language_objective

    settings = {field: text for field, text in texts.items() if field != "type"}
    return parse_fields_of(language_objective(name), settings, "--objective")


def _objectives() -> str:
    """What `--objective` takes, in words."""
    from ..training.building import language_objectives

    usual = [name for name, cls in language_objectives().items() if cls.preferred]
    return f"{', '.join(usual)}, or another one of `hf-xformers list --objectives`"


def parse_changes(
    base: XFormerConfig | type[XFormerConfig], groups: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Dotted options by slot and of `decoder` as typed changes to a config, or to the defaults of a variant: what was
    given and no more.

    Raises `ValueError` for what the components refuse.
    """
    there = components_of(base)
    changes = {slot: parse_component(slot, texts, there[slot]) for slot, texts in groups.items() if slot != "decoder"}
    if groups.get("decoder"):
        below = {**there, **merge_changes(there, changes)}
        config_class = base if isinstance(base, type) else type(base)
        changes["decoder"] = _parse_decoder(config_class, groups["decoder"], {**below, **(below["decoder"] or {})})
    return changes


def _parse_decoder(
    config_class: type[XFormerConfig], texts: Mapping[str, str], there: Mapping[str, Any]
) -> dict[str, Any]:
    """`--decoder.attention dense --decoder.attention.window 64 --decoder.hidden_dropout_prob 0` as the field
    `decoder`. there: the components of the decoder as it is."""
    nested: dict[str, dict[str, str]] = {}
    overrides: dict[str, Any] = {}
    for path, text in texts.items():
        head, _, field = path.partition(".")
        if path == "type":
            raise ValueError(
                f"--decoder {text!r} has no meaning of its own; give fields, as in --decoder.attention dense"
            )
        if head in SLOTS:
            nested.setdefault(head, {})[field or "type"] = text
        else:
            overrides[head] = parse(text, annotation(config_class, head), f"--decoder.{head}")
    for slot, fields in nested.items():
        overrides[slot] = parse_component(slot, fields, there[slot], "decoder.")
    return overrides


# ------------------------------------------------------------------------------------------------ configuration fields


def offered_fields(config_class: type[XFormerConfig]) -> list[str]:
    """Fields of a variant's configuration that are options of their own; those of an objective are `--objective.X`."""
    from transformers import PreTrainedConfig

    from ..objectives import OBJECTIVES

    own = config_class.__mro__[: config_class.__mro__.index(PreTrainedConfig)]
    declared = {name for owner in own for name in inspect.get_annotations(owner)}
    names = [field.name for field in dataclasses.fields(config_class)]
    withheld = {*_NOT_OFFERED} | {name for cls in OBJECTIVES.values() for name in cls().config_fields()}
    return [name for name in names if name in declared and name not in withheld] + ["per_layer_config"]


def add_model_options(parser: Parser, config_class: type[XFormerConfig]) -> None:
    """Adds the slots (for the help; they are taken out before) and the configuration fields, as text."""
    slots = parser.add_argument_group(
        "components", "A name, and fields as --SLOT.FIELD VALUE; see `hf-xformers list --components SLOT`."
    )
    for slot in SLOTS:
        own = build_spec(slot, default_of(config_class, slot)).type
        slots.add_argument(f"--{slot}", metavar="NAME", default=argparse.SUPPRESS, help=f"default: {own}")
    slots.add_argument(
        "--decoder.FIELD",
        metavar="VALUE",
        default=argparse.SUPPRESS,
        help="what an encoder-decoder's decoder has instead",
    )
    fields = parser.add_argument_group(
        "fields of the model's configuration",
        f"Defaults of {config_class.model_type}; --size decides widths, layers, heads and the vocabulary of a new"
        " model.",
    )
    parser.more_groups.append(fields)
    taken = parser._option_string_actions
    for name in offered_fields(config_class):
        flags = [flag for flag in dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")) if flag not in taken]
        if flags:
            text = "by layer, as JSON" if name == "per_layer_config" else f"default: {default_of(config_class, name)}"
            text = text.replace("%", "%%")
            fields.add_argument(*flags, dest=f"field:{name}", metavar="VALUE", default=argparse.SUPPRESS, help=text)


def parse_fields(config_class: type[XFormerConfig], namespace: Any) -> dict[str, Any]:
    """The configuration fields among the options, as typed values."""
    fields = {}
    for key, text in vars(namespace or argparse.Namespace()).items():
        name = key.removeprefix("field:")
        if name == "per_layer_config":
            fields[name] = parse_layers(text, f"--{name}")
        elif name != key:
            fields[name] = parse(text, annotation(config_class, name), f"--{name}")
    return fields


def parse_layers(text: Any, option: str) -> dict[int, Any]:
    """What single layers have instead, JSON by layer. Raises ValueError for a key that is no number of a layer."""
    layers = parse(text, dict[str, Any], option)
    if not all(layer.isdecimal() for layer in layers):
        raise ValueError(f'{option} {text!r} is keyed by layer: {{"0": {{...}}}}')
    return {int(layer): changes for layer, changes in layers.items()}


# ------------------------------------------------------------------------------------------------ everything at once


@dataclasses.dataclass
class Parsed:
    """A command line, typed: the dataclasses asked for, and what belongs to the model."""

    dataclasses: tuple[Any, ...]
    groups: dict[str, dict[str, str]]
    namespace: Any


def parse_command(
    argv: Sequence[str],
    groups: Iterable[str],
    make_parser: Callable[[Mapping[str, Any]], Parser],
    options: Mapping[str, Any] | None = None,
) -> Parsed:
    """Reads file and command line.

    groups: names of dotted options. make_parser: makes the parser from a first look at the plain options (text by
    name), on which its defaults and further options may depend. options: those of a file that was read already.
    What a command does from here on may use TF32 on a GPU, unless the command line says `--tf32 false`.
    """
    read, rest = take_file(argv) if options is None else ({}, list(argv))
    options = read if options is None else options
    groups = list(groups)
    plain, dotted = split_dotted(_bare_resume(rest), groups)
    file_plain, file_dotted = split_dotted(file_tokens(options, groups), groups)
    merged = overlay(file_dotted, dotted)
    first_look = {**_glance(file_plain), **_glance(plain)}
    first_look |= {f"{name}": fields["type"] for name, fields in merged.items() if "type" in fields}
    parser = make_parser(first_look)
    rows = first_look.get("per_device_train_batch_size", "")
    if rows.isdecimal():  # what training has the memory for, evaluation has, too
        parser.set_defaults(per_device_eval_batch_size=int(rows))
    typed = _glance(plain)  # an option of several values would have those of the file, too
    others = {name: value for name, value in options.items() if name.replace("-", "_") not in typed}
    file_plain, _ = split_dotted(file_tokens(others, groups, parser), groups)
    tokens = [*file_plain, *plain]
    if "objective" in merged and "type" in merged["objective"]:
        tokens.append(f"--objective={merged['objective']['type']}")
    found = list(parser.into_dataclasses(tokens))
    namespace = found.pop() if len(found) > len(list(parser.dataclass_types)) else None
    if not any(getattr(chosen, "tf32", None) is False for chosen in found):
        allow_tf32()
    return Parsed(tuple(found), merged, namespace)


def named_option(argv: Sequence[str], name: str) -> str | None:
    """The text of a plain option of a command line, or else of its file; None where it is not given."""
    options, rest = take_file(argv)
    given = _glance(rest).get(name) or options.get(name)
    return None if given is None else str(given)


def _bare_resume(tokens: Sequence[str]) -> list[str]:
    """`--resume_from_checkpoint` without a value means the newest checkpoint."""
    names = ("--resume_from_checkpoint", "--resume-from-checkpoint")
    return [
        (
            f"{token}=True"
            if token in names and (index + 1 == len(tokens) or tokens[index + 1].startswith("--"))
            else token
        )
        for index, token in enumerate(tokens)
    ]


def _glance(tokens: Sequence[str]) -> dict[str, str]:
    """Plain options with one value, as text, without knowing what they mean."""
    seen: dict[str, str] = {}
    for index, token in enumerate(tokens):
        option, equals, value = token.partition("=")
        if not option.startswith("--"):
            continue
        if not equals and index + 1 < len(tokens) and not tokens[index + 1].startswith("--"):
            value = tokens[index + 1]
        seen[option.removeprefix("--").replace("-", "_")] = value
    return seen
