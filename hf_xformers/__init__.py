# SPDX-License-Identifier: Apache-2.0
"""Transformer variants of *A Survey of Transformers* as first-class citizens of the Hugging Face ecosystem.

Importing this package makes all variants known to transformers' Auto classes. Names are loaded when they are first
used.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

from . import _registration

__version__ = "0.1.0"

_registration.install()

# public name -> module that defines it; names of variants are found by their prefix
_NAMES = {
    "sequence_parallel": "core.sequence_parallel",
    "part_of_batch": "core.sequence_parallel",
    "sequence_groups": "core.sequence_parallel",
    "XFormerConfig": "variants.xformer",  # which registers its classes with the Auto classes
    "Spec": "core.components",
    "register": "core.components",
    "build_spec": "core.components",
    "make_family": "families",
    "VariantInfo": "families",
    "from_transformers": "conversion",
    "to_transformers": "conversion",
    "convert_checkpoint": "conversion",
}
# public sub-packages, which `import hf_xformers` alone makes reachable
_PACKAGES = (
    *("adapters", "benchmark", "compression", "conversion", "data", "export", "extend", "finetuning", "hub"),
    *("inference", "objectives", "training", "variants"),
)


def _variant_module(name: str) -> str | None:
    """The variant file that defines a class such as `XFBertForMaskedLM`, by the name alone."""
    from .variants import packaged_types

    if name.startswith("XFormer"):
        return "hf_xformers.variants.xformer"
    if not name.startswith("XF"):
        return None
    lowered = name[2:].lower()
    fits = [
        (len(model_type), module)
        for model_type, module in packaged_types().items()
        if lowered.startswith(model_type.removeprefix("xf_").replace("_", ""))
    ]
    return max(fits)[1] if fits else None


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name == "__all__":
        return _public()
    module = None if name.startswith("_") else _variant_module(name)
    if module is not None:
        found = getattr(importlib.import_module(module), name, None)
        if found is not None:
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _public() -> list[str]:
    """What this package exports; sub-packages have names of their own."""
    from .variants import public_names

    return sorted({*_NAMES, *(name for names in public_names().values() for name in names)})


def __dir__() -> list[str]:
    return sorted({*globals(), *_PACKAGES, *_public()})


class _Package(types.ModuleType):
    """This package as `help` sees it: with the classes of all variants, which nothing has loaded yet."""

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        from .variants import public_names

        families = "\n".join(f"    {', '.join(names)}" for names in public_names().values())
        general = ", ".join(name for name in _NAMES if not name.startswith("XF"))
        return f"{vars(self)['__doc__']}\nFunctions and base classes: {general}.\n\nVariants:\n{families}\n"


sys.modules[__name__].__class__ = _Package
