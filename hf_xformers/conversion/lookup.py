# SPDX-License-Identifier: Apache-2.0
"""Which converter a model type or a configuration goes with."""

from __future__ import annotations

import difflib

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..configuration_xformer import XFormerConfig
from .base import Converter, converters
from .near import nearest

# Related families of transformers that have no converter, and why.
_WITHOUT = {
    "nllb-moe": "transformers' layers send every token to its first two experts, whichever the router chooses",
    "mega": "transformers has no model of it any more, and its moving averages are no component here",
}


def converter_for(model_type: str | None) -> Converter:
    """The converter of a model type of transformers, or the native one of a variant of ours.

    Raises:
        ValueError: no converter; the message lists what there is, the nearest first.
    """
    known = converters()
    if model_type in known:
        return known[model_type]
    found = next((entry for entry in known.values() if entry.variant == model_type and entry.native), None)
    if found is None and model_type in _WITHOUT:
        raise ValueError(
            f"No conversion for model type {model_type!r}: {_WITHOUT[model_type]}. `hf-xformers list --families` shows"
            " what converts."
        )
    if found is None and model_type is None:
        raise ValueError(
            "the config.json of the model names no model_type, as transformers does; give the folder of a model that"
            " `save_pretrained` wrote"
        )
    name = str(model_type)
    if found is None and name in CONFIG_MAPPING and not issubclass(CONFIG_MAPPING[name], XFormerConfig):
        near = nearest(name, [entry.model_type for entry in known.values() if not entry.layouts])
        hint = f"these are nearest to it by their configs: {', '.join(near)}" if near else "none is near to it"
        raise ValueError(
            f"No conversion for model type {model_type!r}; of the families that convert, {hint}. `hf-xformers list"
            " --families` shows all of them, and `hf-xformers list --components` what a model can be made of."
        )
    if found is None:
        names = sorted({name for entry in known.values() for name in (entry.model_type, entry.variant)})
        close = difflib.get_close_matches(str(model_type), names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise ValueError(f"No conversion for model type {model_type!r}{hint} These convert: {', '.join(names)}.")
    return found


def converter_back(config: XFormerConfig, model_type: str | None = None, origin: str | None = None) -> Converter:
    """The converter that leads a model of ours to transformers.

    model_type: transformers' family that is wanted. origin: transformers' class that the model was made of, where that
    is known. Without either it is the family that the variant is named after, or the one whose config can say what
    this one does; of several, a forerunner that the others were made after (a plain Llama is a Mistral, too).

    Raises:
        ValueError: no family fits, or several do.
    """
    known = converters()
    of_variant = [entry for entry in known.values() if entry.variant == config.model_type and not entry.layouts]
    if model_type is not None:
        found = known.get(model_type)
        if found is None or found not in of_variant:
            names = ", ".join(sorted(entry.model_type for entry in of_variant)) or "none"
            raise ValueError(
                f"A {config.model_type!r} model has no counterpart of model type {model_type!r}; it converts to:"
                f" {names}."
            )
        return found
    made_of = next((entry for entry in of_variant if origin is not None and entry.head_of_theirs(origin)), None)
    if made_of is not None:
        return made_of
    if not of_variant or any(entry.native for entry in of_variant):
        return converter_for(config.model_type)
    fitting = [entry for entry in of_variant if _says(entry, config)]
    fitting = [known[name] for name in _FORERUNNERS if known[name] in fitting][:1] or fitting
    if len(fitting) == 1:
        return fitting[0]
    names = ", ".join(sorted(entry.model_type for entry in fitting or of_variant))
    raise ValueError(
        f"Several families of transformers have these components; say which `model_type` to make: {names}."
        if fitting
        else f"No family of transformers has these components; give a `model_type` to be told why: {names}."
    )


# Families of decoders that later ones are like, from the first on; all heads of those have counterparts in theirs.
_FORERUNNERS = ("gpt_neox", "llama", "falcon", "mistral")


def _says(converter: Converter, config: XFormerConfig) -> bool:
    try:
        converter.config_to_theirs(config)
    except ValueError:
        return False
    return True
