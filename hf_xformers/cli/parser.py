# SPDX-License-Identifier: Apache-2.0
"""How all commands read and explain their options."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from ..core.components import SLOTS, did_you_mean, field_aliases

_NOTHING = (None, False, "", argparse.SUPPRESS)


class HelpFormatter(argparse.HelpFormatter):
    """One spelling of each option, the defaults, and paragraphs: indented lines of a text are examples, each on lines
    of its own with space around them."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts: list[str] = []
        whole = re.sub(r" *\\\n *", " ", text)  # a command that is continued on a further line
        for example, group in itertools.groupby(whole.splitlines(), key=lambda line: line.startswith("  ")):
            lines = list(group)
            if example:
                parts.append("\n".join(_shell_lines(line.strip(), width) for line in lines))
            else:
                blocks = re.split(r"\n\s*\n", "\n".join(lines).strip())
                parts += [textwrap.fill(" ".join(b.split()), width, break_on_hyphens=False) for b in blocks if b]
        return "\n\n".join(parts)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if len(action.option_strings) < 2 or action.option_strings[0] == "-h":
            return super()._format_action_invocation(action)
        flag = action.option_strings[0]
        value = (
            ""
            if action.nargs == 0
            else f" {self._format_args(action, self._get_default_metavar_for_optional(action))}"
        )
        return f"{flag}{value}"

    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Any:
        if self._many(action):
            return lambda size: ("NAME",) * size
        return super()._metavar_formatter(action, default_metavar)

    @staticmethod
    def _many(action: argparse.Action) -> bool:
        """Whether an option has too many choices to stand behind it; they are then named in its help."""
        return action.metavar is None and action.choices is not None and len(",".join(map(str, action.choices))) > 40

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        kinds: dict[Any, str] = {int: "N", float: "X", str: "TEXT"}
        return kinds.get(action.type, "BOOL" if action.nargs == "?" else "VALUE")

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if self._many(action):
            text = f"{text.rstrip('.')}: {', '.join(map(str, action.choices or ()))}"
        listed = isinstance(action.default, (list, tuple))
        if "default" in text.lower() or action.required or (listed and not action.default) or action.nargs == 0:
            return text
        if not listed and action.default in _NOTHING:
            return text
        shown = " ".join(map(str, action.default)) if listed else str(action.default)
        return (
            f"{text} (default: {shown})".strip().replace("%", "%%") if "%" in shown else f"{text} (default: {shown})"
        )


def _shell_lines(command: str, width: int) -> str:
    """An example, indented, and continued on further lines before an option where one line is too short."""
    lines = [""]
    for part in re.split(r" (?=--)", command):
        longer = f"{lines[-1]} {part}".strip()
        if lines[-1] and len(longer) > width - 6:  # the indentation, and the mark of a continued line
            lines.append(part)
        else:
            lines[-1] = longer
    return "  " + " \\\n    ".join(lines)


def _of_a_component(option: str) -> str:
    """The hint that an option is a field of components, or nothing."""
    field = option.removeprefix("--").replace("-", "_")
    for slot, registry in SLOTS.items():
        specs = [registry.get(name) for name in registry]
        names = {known.name for spec in specs for known in dataclasses.fields(spec)}
        if field in names.union(*map(field_aliases, specs)):
            return f" Did you mean --{slot}.{field}?"
    return ""


class _Store(argparse.Action):
    """Stores the values of an option, and where it takes several, those of each time that it is given."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        earlier = getattr(namespace, self.dest, self.default)
        again = self.nargs == "+" and earlier is not self.default
        setattr(namespace, self.dest, [*earlier, *values] if again else values)


class RefusingParser(argparse.ArgumentParser):
    """ArgumentParser that raises ValueError, the nearest known word first, where argparse would print its usage and
    exit."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", HelpFormatter)
        kwargs["allow_abbrev"] = False
        super().__init__(*args, **kwargs)
        self._typed: list[str] = []

    def register(self, registry_name: str, value: Any, object: Any) -> None:
        stores = registry_name == "action" and value in (None, "store")
        super().register(registry_name, value, _Store if stores else object)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        self._typed = [token.split("=")[0] for token in args or ()]
        return super().parse_known_args(args, namespace)

    def error(self, message: str):
        # An option with two spellings is called by the one that was typed.
        def spelling(match: re.Match[str]) -> str:
            names = match[0].split("/")
            return next((name for name in names if name in self._typed), names[0])

        message = re.sub(r"--[\w.-]+(?:/--[\w.-]+)+", spelling, message)
        raise ValueError(f"{message} (see `{self.prog} --help`)")

    def refuse_unknown(self, rest: Sequence[str], more: Iterable[str] = ()) -> None:
        """Raises ValueError for the first of the tokens that nobody read. more: options that are not the parser's
        own."""
        if rest:
            unknown = rest[0].split("=")[0]
            kind = "option" if unknown.startswith("-") else "argument"
            known = [*self._option_string_actions, *more]  # long names have much in common by chance
            hint = did_you_mean(unknown, known, cutoff=0.75) if kind == "option" else ""
            if kind == "option" and not hint and "--attention" in known:
                hint = _of_a_component(unknown)
            raise ValueError(f"there is no {kind} {unknown}.{hint.replace(chr(39), '')} See `{self.prog} --help`")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(
                action, f"there is no {value!r}.{did_you_mean(str(value), known)} Choose from {', '.join(known)}"
            )


class CommandParser(RefusingParser):
    """The parser of the commands without Trainer flags."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        found, rest = self.parse_known_args(args, namespace)
        self.refuse_unknown(rest)
        return found
