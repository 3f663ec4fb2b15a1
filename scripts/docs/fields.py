"""What the fields of configs, components and objectives mean, as tables: name, default, meaning."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from typing import Any

from hf_xformers.configuration_xformer import XFormerConfig
from hf_xformers.core.components import SLOTS, field_aliases
from hf_xformers.core.field_docs import meanings
from hf_xformers.core.specs import default_of

from .markup import code, literal, prose, table

# What the docstring takes as known, because transformers' configs have the same names.
_KNOWN = {
    "vocab_size": "tokens in the vocabulary",
    "hidden_size": "width D of the states of a token",
    "num_hidden_layers": "layers (of an encoder-decoder: of the encoder)",
    "num_attention_heads": "heads of attention",
    "intermediate_size": "inner width of the feed-forward",
    "max_position_embeddings": "tokens of the longest text that learned positions are made for",
    "hidden_dropout_prob": "dropout of embeddings and of sublayers' outputs",
    "attention_probs_dropout_prob": "dropout of attention weights",
    "activation_dropout_prob": "dropout inside the feed-forward",
    "pad_token_id": "id of the padding token; `None`: there is none",
    "bos_token_id": "id of the token that begins a text",
    "eos_token_id": "id of the token that ends a text, or several",
}


def spec_fields(cls: type, values: Any = None, only: set[str] | None = None) -> str:
    """The fields of a spec class as a table; empty where it has none. values: a spec whose values are shown in place
    of the defaults. only: fields that are shown."""
    explained, aliases = meanings(cls), field_aliases(cls)
    rows = []
    for field in dataclasses.fields(cls):
        if only is not None and field.name not in only:
            continue
        also = [alias for alias, name in aliases.items() if name == field.name]
        given = getattr(values, field.name) if values is not None else default_of(cls, field.name)
        needed = field.default is field.default_factory is dataclasses.MISSING
        rows.append(
            {
                "field": code(field.name) + "".join(f" (or {code(alias)})" for alias in also),
                "default": "required" if needed and values is None else literal(given),
                "meaning": prose(explained.get(field.name, "")),
            }
        )
    return table(rows) if rows else ""


def config_fields(cls: Any, names: list[str] | None = None) -> str:
    """Fields of a config (by default all but the slots) as a table."""
    explained = config_meanings(cls)
    rows = [
        {
            "field": code(field.name),
            "default": literal(default_of(cls, field.name)),
            "meaning": prose(explained.get(field.name, "")),
        }
        for field in dataclasses.fields(cls)
        if (field.name in names if names is not None else field.name in explained and field.name not in SLOTS)
    ]
    return table(rows) if rows else ""


@functools.cache
def config_meanings(cls: Any) -> dict[str, str]:
    """What a config's fields mean: the variant's own as its docstring says, the others as that of `XFormerConfig`."""
    own = {} if cls is XFormerConfig else _of_bases(cls)
    return {**general_meanings(), **own}


def _of_bases(cls: Any) -> dict[str, str]:
    general = {field.name for field in dataclasses.fields(XFormerConfig)}
    return {name: text for name, text in meanings(cls).items() if name not in general}


@functools.cache
def general_meanings() -> dict[str, str]:
    """Field -> meaning, of `XFormerConfig`: its docstring has a paragraph for each group of fields, "Group (about
    them): field (meaning), field, ...; field: meaning"."""
    text = inspect.cleandoc(XFormerConfig.__doc__ or "")
    names = {field.name for field in dataclasses.fields(XFormerConfig)} | {
        "is_decoder",
        "is_encoder_decoder",
        "per_layer_config",
        "eos_token_id",
    }
    found: dict[str, str] = {}
    for paragraph in re.split(r"\n(?=\S)", text):
        match = re.match(r"(?P<head>\w[^:(]*?)(?: \((?P<about>[^)]*)\))?:(?P<body>.*)", paragraph, re.S)
        if match is None or match["head"] in ("Raises", "Slots"):
            continue
        head, about, body = match["head"], match["about"], " ".join(match["body"].split())
        if head in names:
            found[head] = body
            continue
        for name, meaning in _items(body, names):
            meaning = meaning or _KNOWN.get(name) or (f"{head.lower()}: {about}" if about else head.lower())
            found.setdefault(name, meaning)
    for slot in SLOTS:
        found[slot] = "component of the slot: a name, a dict or a spec"
    return found


def _items(body: str, names: set[str]) -> list[tuple[str, str]]:
    """(field, what its parentheses say) in a list of fields; "a and b (meaning)" tells both."""
    items: list[tuple[str, str]] = []
    waiting: list[str] = []
    place, depth, opened = 0, 0, 0
    for match in re.finditer(r"`[^`]*`|[()]|\w+", body):
        sign = match[0]
        if sign == "(":
            opened, depth = (match.end(), 1) if depth == 0 else (opened, depth + 1)
        elif sign == ")":
            depth -= 1
            if depth == 0 and waiting:
                meaning = body[opened : match.start()]
                items += [(name, meaning) for name in waiting]
                waiting = []
        elif depth == 0 and sign in names:
            between = body[place : match.start()].strip()
            if waiting and between != "and":
                items += [(name, "") for name in waiting]
                waiting = []
            waiting.append(sign)
        if sign == ")" or (depth == 0 and sign in names):
            place = match.end()
    return items + [(name, "") for name in waiting]
