# SPDX-License-Identifier: Apache-2.0
"""Parameter-efficient fine-tuning through `peft`, with target modules that fit this package's models, and bottleneck
adapters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from .._registration import PROJECTIONS
from ..attention.shared.base import Attention
from ..blocks.base import XFormerLayer
from ..modeling.told_adapters import TASK_TYPES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_OF_TEXT = (*TASK_TYPES, "MultipleChoice", "MaskedLM", "ClozeWriting")
_OF_IMAGES = ("ImageClassification",)
_OF_ALL = (*_OF_TEXT, *_OF_IMAGES, "CTC")
BOTTLENECKS = ("houlsby", "pfeiffer", "fusion", "k_adapter")  # this package's own
# method -> (its configuration in peft or here, the heads that it works with)
PEFT_METHODS: dict[str, tuple[str, tuple[str, ...]]] = {
    "lora": ("LoraConfig", _OF_ALL),
    "ia3": ("IA3Config", _OF_ALL),
    # Prefixes are keys and values in a cache, which only decoders read; prompts are tokens before the text, for which
    # per-token heads would give logits that no label belongs to.
    "prefix": ("PrefixTuningConfig", ("CausalLM", "Seq2SeqLM")),
    "prompt": ("PromptTuningConfig", ("SequenceClassification", "CausalLM", "Seq2SeqLM")),
    # Those of CTC have layers of four sublayers, in which bottlenecks have no place of their own.
    **dict.fromkeys(("houlsby", "pfeiffer"), ("AdapterConfig", (*_OF_TEXT, *_OF_IMAGES))),
    "fusion": ("FusionConfig", (*_OF_TEXT, *_OF_IMAGES)),
    "k_adapter": ("KAdapterConfig", tuple(head for head in _OF_TEXT if head not in ("CausalLM", "Seq2SeqLM"))),
}
VIRTUAL_TOKENS = 20
ADAPTER_NAME = "default"


def check_method(method: str, head: str) -> None:
    """Refuses an unknown method, and one that does not work with the head."""
    if method not in PEFT_METHODS:
        raise ValueError(f"unknown PEFT method {method!r}: choose one of {', '.join(PEFT_METHODS)}")
    if head not in PEFT_METHODS[method][1]:
        able = [name for name, (_, heads) in PEFT_METHODS.items() if head in heads]
        remedy = f"choose one of {', '.join(able)}" if able else "no method does, so leave --peft out"
        raise ValueError(f"--peft {method} does not work with a For{head} class; {remedy}")


def config_type(method: str) -> type[Any]:
    """The configuration class of a method. Raises ValueError for an unknown one."""
    import peft

    from .. import adapters

    if method not in PEFT_METHODS:
        raise ValueError(f"unknown PEFT method {method!r}: choose one of {', '.join(PEFT_METHODS)}")
    return getattr(adapters if method in BOTTLENECKS else peft, PEFT_METHODS[method][0])


def virtual_tokens(method: str | None, fields: Mapping[str, Any]) -> int:
    """Positions that the method takes from the text."""
    return fields.get("num_virtual_tokens", VIRTUAL_TOKENS) if method in ("prefix", "prompt") else 0


def add_adapter(model: PreTrainedModel, method: str, head: str, new: Iterable[str] = (), **fields: Any) -> Any:
    """The model with its weights frozen and the method's few parameters to train: a `peft.PeftModel`, or for
    bottleneck adapters (`hf_xformers.adapters`) the model itself.

    head: as in For<head>. new: names of parameters without trained weights (a new head, a pooler), whose modules are
    trained and saved in whole. fields: of the method's configuration in peft.

    Raises:
        ValueError: unknown method or field, a method that does not work with the head, or a target module that the
            model does not have; the message lists those it has.
    """
    import dataclasses

    import peft

    check_method(method, head)
    cls = config_type(method)
    known = {field.name for field in dataclasses.fields(cls)} - {"kind"}
    unknown = sorted(set(fields) - known)
    if unknown:
        raise ValueError(f"--peft {method} has no field {unknown[0]!r}; its fields are {', '.join(sorted(known))}")
    if method == "fusion":
        from ..adapters import add_fusion

        return add_fusion(model, ADAPTER_NAME, fields.get("adapters", ()))
    if method in BOTTLENECKS:
        from ..adapters import add_adapter as add_bottleneck

        return add_bottleneck(model, ADAPTER_NAME, method, **fields)
    if "target_modules" in known:
        fields["target_modules"] = targets(model, method, fields.get("target_modules"))
        fields.setdefault("modules_to_save", _modules_to_save(model, new))
        if method == "ia3":
            scaled_before = _matching(model, fields["target_modules"], ("down_proj", "fc2", "output.dense", "wo"))
            fields.setdefault("feedforward_modules", scaled_before)
    else:
        fields.setdefault("num_virtual_tokens", VIRTUAL_TOKENS)
        if head == "SequenceClassification":  # a new pooler is part of what was trained, and of what is saved
            fields.setdefault("modules_to_save", _modules_to_save(model, new))
        if method == "prefix":
            fields = {**_cache_shape(model), **fields}
        elif isinstance(table := model.get_input_embeddings(), nn.Embedding):
            fields.setdefault("token_dim", table.embedding_dim)  # which a factorized table has below the hidden size
    config = cls(task_type=TASK_TYPES.get(head), **fields)
    try:
        return peft.get_peft_model(model, config)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"--peft {method} cannot be put on {type(model).__name__} ({error}); choose another"
        ) from error


def targets(model: nn.Module, method: str, given: list[str] | str | None) -> list[str] | str:
    """The modules to adapt: `given`, checked, or the method's usual ones of this package's layers.

    LoRA adapts the projections by which a mechanism mixes tokens, IA3 keys, values and the input of the second
    feed-forward layer; a mechanism without these has all its linear maps adapted.
    """
    leaves = linear_names(model)
    names = sorted({name.rpartition(".")[2] for name in leaves})
    if isinstance(given, list) and len(given) == 1 and (given[0] == "all-linear" or re.search(r"[*+()|\\]", given[0])):
        given = given[0]
    if given is not None:
        if given == "all-linear":
            return given
        if isinstance(given, str):
            missing = [] if any(map(_pattern(given).fullmatch, leaves)) else [given]
        else:
            missing = [t for t in given if not any(name == t or name.endswith(f".{t}") for name in leaves)]
        if missing or not given:
            raise ValueError(
                f"--peft.target_modules names {(missing or [''])[0]!r}, which no linear map of the model is called;"
                f" its linear maps are called {', '.join(names)}"
            )
        return given
    return _mixing_maps(model, leaves) if method == "lora" else _rescaled_maps(model, names)


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(
            f"--peft.target_modules {text!r} is no regular expression ({error}); write '.*' for any beginning"
        ) from error


def _mixing_maps(model: nn.Module, leaves: Iterable[str]) -> list[str]:
    """Last names of the maps by which layers mix tokens; of a mechanism or a layer that has none, of all its maps."""
    last = {name: name.rpartition(".")[2] for name in leaves}
    found = set(last.values()) & set(PROJECTIONS)
    for place, part in model.named_modules():
        if isinstance(part, (XFormerLayer, Attention)):
            own = {short for name, short in last.items() if name.startswith(f"{place}.")}
            found |= set() if own & found else own
    return sorted(found)


def _rescaled_maps(model: nn.Module, names: list[str]) -> list[str]:
    """What IA3 puts factors on."""
    if {"k_proj", "v_proj"} <= set(names):
        return [name for name in ("k_proj", "v_proj", "down_proj") if name in names]
    from ..compat import IA3_TARGETS

    model_type = getattr(getattr(model, "config", None), "model_type", "")
    return list(IA3_TARGETS[model_type]) if model_type in IA3_TARGETS else names


def reach(model: nn.Module) -> dict[str, int]:
    """How many layers of an adapted model have an adapter, of how many, and how many of their linear maps."""
    from ..compat import BaseTunerLayer

    layers = [part for part in model.modules() if isinstance(part, XFormerLayer)]
    adapted, maps = [], set()
    for layer in layers:
        found = {part for part in layer.modules() if isinstance(part, BaseTunerLayer)}
        inside = {child for part in found for child in part.modules()}
        adapted.append(found)
        maps |= {part for part in layer.modules() if isinstance(part, nn.Linear) and part not in inside} | found
    reached = set().union(*adapted)
    return {
        "adapted_layers": sum(map(bool, adapted)),
        "layers": len(layers),
        "adapted_maps": len(reached),
        "maps": len(maps),
    }


def linear_names(model: nn.Module) -> list[str]:
    """Full names of the linear maps inside the layers: not those of heads and poolers."""
    base = getattr(model, "base_model_prefix", "") + "."
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.startswith(base) and "pooler" not in name
    ]


def _matching(model: nn.Module, chosen: list[str] | str, ends: tuple[str, ...]) -> list[str]:
    if isinstance(chosen, str):
        return sorted({name.rpartition(".")[2] for name in linear_names(model) if name.endswith(ends)})
    return [name for name in chosen if name.endswith(ends)]


def _modules_to_save(model: PreTrainedModel, new: Iterable[str]) -> list[str] | None:
    """Top modules of the parameters without trained weights, and a classifier always: it belongs to the task."""
    base = model.base_model_prefix + "."
    names = {name.removeprefix(base).partition(".")[0] for name in new}
    names |= {name for name, _ in model.named_children() if name in ("classifier", "score", "qa_outputs")}
    return sorted(names) or None


def _cache_shape(model: Any) -> dict[str, int]:
    """Number and shape of the keys and values that a prefix puts before those of the text.

    Raises ValueError for a model that keeps another state than keys and values.
    """
    from ..configuration_xformer import XFormerConfig

    config = model.config
    if getattr(model, "_is_stateful", False):
        raise ValueError(
            f"--peft prefix puts keys and values before the text, and {type(model).__name__} keeps another state;"
            " choose lora, ia3 or prompt"
        )
    if not isinstance(config, XFormerConfig):
        return {}
    tower = config.tower("decoder") if config.is_encoder_decoder else config
    heads = tower.key_value_heads
    return {
        "num_layers": tower.stack.num_steps(tower),
        "num_attention_heads": heads,
        "token_dim": heads * tower.head_width,
    }
