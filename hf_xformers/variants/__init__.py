# SPDX-License-Identifier: Apache-2.0
"""Named X-formers: one file each, holding a config preset, its family and its citation.

The file name is the ledger id; the model type is `xf_<file name>` (the free mix is `xformer` itself).
"""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..core import head_names
from ..core.components import did_you_mean
from ..core.other_families import FAMILIES


def model_types() -> dict[str, str]:
    """Model type -> module of every variant, without importing any; and of families that other packages have made."""
    return {**packaged_types(), **FAMILIES}


def packaged_types() -> dict[str, str]:
    """The same without families of other packages."""
    return _model_types(tuple((folder, os.stat(folder).st_mtime_ns) for folder in __path__))


@functools.lru_cache(maxsize=1)
def _model_types(folders: tuple[tuple[str, int], ...]) -> dict[str, str]:
    """As in these folders at these times: a file that is dropped in is found, and a scan is made once."""
    found = pkgutil.iter_modules(folder for folder, _ in folders)
    names = sorted(info.name for info in found if not info.name.startswith("_"))
    return {name if name == "xformer" else f"xf_{name}": f"{__name__}.{name}" for name in names}


def public_names() -> dict[str, list[str]]:
    """Model type -> the public classes that its file defines, read from the files: none is imported."""
    found = {}
    for model_type, module in packaged_types().items():
        name = module.rpartition(".")[2]
        text = (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")
        names = re.findall(r"^class (XF\w+)\(", text, re.MULTILINE)
        for prefix, heads in _FAMILY.findall(text):
            names += [prefix + head for head in _heads_in(heads)]
        found[model_type] = list(dict.fromkeys(names))
    return found


# Of a call of `make_family`: the prefix, and the heads, as a tuple or by the name of one in `head_names`.
_FAMILY = re.compile(r'^(?:_family = )?make_family\(\s*\w+,\s*"(\w+)",\s*(\w+|\([^()]*\)),', re.MULTILINE)


def _heads_in(text: str) -> Iterator[str]:
    for word in re.findall(r'"?\w+"?', text):
        if word.startswith('"'):
            yield word.strip('"')
        else:
            yield from getattr(head_names, word)


def resolve(name: str) -> str:
    """The model type that `name` stands for, with or without the prefix `xf_`.

    Raises:
        ValueError: no such variant; the message names the nearest one.
    """
    known = model_types()
    for candidate in (name, f"xf_{name}"):
        if candidate in known:
            return candidate
    hint = did_you_mean(name.removeprefix("xf_"), [key.removeprefix("xf_") for key in known])
    raise ValueError(f"Unknown variant {name!r}.{hint} `hf-xformers list` shows all {len(known)}.")


def config_class(name: str) -> Any:
    """The config class of a variant (its family is registered by the import)."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = resolve(name)
    if model_type not in FAMILIES:  # which their modules have registered
        importlib.import_module(model_types()[model_type])
    return CONFIG_MAPPING[model_type]


def family(name: str) -> dict[str, Any]:
    """The model classes of a variant by head name ("Model", "ForMaskedLM", ...)."""
    from ..auto_classes import registered

    config = config_class(name)
    if config.model_type in FAMILIES:
        found = {head: registered(head_names.HEADS[head], config) for head in config.heads}
        return {head: next(made for made in found[head] if made.__name__.endswith(head)) for head in config.heads}
    module = importlib.import_module(model_types()[config.model_type])
    prefix = config.__name__.removesuffix("Config")
    return {head: getattr(module, prefix + head) for head in config.heads}


__all__ = ["config_class", "family", "model_types", "public_names", "resolve"]
