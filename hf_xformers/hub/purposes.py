# SPDX-License-Identifier: Apache-2.0
"""What each variant is for, in sentences, from `variants.toml`."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("variants.toml")


@dataclass(frozen=True)
class Purpose:
    """A variant's sentences, and the names of its nearest relatives. symbols: what the equation's letters mean."""

    problem: str
    gives_up: str
    take_it_when: str
    relatives: tuple[str, ...]
    symbols: str

    def markdown(self, link: Callable[[str], str]) -> str:
        """A list of them. link: a relative's name -> Markdown."""
        facts = {
            "The problem": self.problem,
            "What it gives up": self.gives_up,
            "Take it when": self.take_it_when[:1].lower() + self.take_it_when[1:],
            "Nearest relatives": ", ".join(map(link, self.relatives)) + ".",
        }
        return "\n".join(f"- **{name}:** {text}" for name, text in facts.items())


@functools.cache
def purposes() -> dict[str, Purpose]:
    """By short name (`luna`) of all variants of this package; a variant from elsewhere has none."""
    content = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return {name: Purpose(**{**entry, "relatives": tuple(entry["relatives"])}) for name, entry in content.items()}
