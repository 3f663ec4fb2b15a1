# SPDX-License-Identifier: Apache-2.0
"""Sources that are refused before a weight of theirs is read: nothing here looks further than names, config.json and
the headers of files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..core.saved_files import WEIGHTS, read_object, stored_types, weight_files
from .base import converters

ADAPTER = "adapter_config.json"
# Formats of numbers in which a trained weight is only ever packed.
_PACKED = ("I8", "U8", "I16", "U16", "I32", "U32", "F8_", "F4", "F6_")
_FULL = "convert the model that it was made of, in full precision (float32, bfloat16 or float16)"
_WRAPPED = (".base_layer", ".original_module")  # what peft's layers keep of the model
_FRAMEWORKS = {"*.h5": "TensorFlow", "*.ckpt.index": "TensorFlow", "*.msgpack": "Flax", "*.onnx": "ONNX"}


def refuse_place(name: str, local: Path) -> None:
    """Refuses a place on the disk that is no folder of a whole model: nothing, a file, an adapter, another format.

    Raises:
        ValueError: it is one of these; the message says which, and what to give instead.
    """
    gguf = next(iter([local] if local.suffix == ".gguf" else sorted(local.glob("*.gguf"))), None)
    if gguf is not None and gguf.exists() and not (local.is_dir() and _has_weights(local)):
        raise ValueError(
            f"{str(gguf)!r} is a GGUF file, whose weights are packed for inference; {_FULL}, as safetensors with its"
            f" config.json, or give the folder {str(gguf.parent)!r} and `gguf_file` {gguf.name!r} for what"
            " transformers unpacks of it."
        )
    if local.is_file():
        raise ValueError(f"{name!r} is a file; give the folder that holds it, with its config.json.")
    if not local.is_dir():
        if local.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
            raise ValueError(f"There is no folder {name!r}; give a folder with a config.json, or a Hub id.")
        return
    if (local / ADAPTER).is_file():  # next to a model too: its base would be loaded instead of what is here
        base = read_object(local / ADAPTER).get("base_model_name_or_path")
        refuse_adapter(name, base)
    if not (local / "config.json").is_file():
        raise ValueError(f"The folder {name!r} has no config.json; give one that `save_pretrained` wrote.")


def refuse_adapter(name: str, base: Any = None) -> None:
    """Raises `ValueError`: what stands at `name` is an adapter of the model `base`."""
    made_for = f" (of {base!r})" if base else ""
    raise ValueError(
        f"{name!r} is a PEFT adapter{made_for} and no model: load it on its base with peft, `merge_and_unload()`, and"
        " convert the folder that `save_pretrained` then writes."
    )


def refuse_quantized(what: str, fields: Mapping[str, Any]) -> None:
    """Raises `ValueError` where a config says that the weights of `what` are quantized."""
    quantized = fields.get("quantization_config")
    if quantized:
        said = quantized if isinstance(quantized, dict) else {}
        loads = next((key for key in ("load_in_4bit", "load_in_8bit") if said.get(key)), "quantization_config")
        raise ValueError(f"{what} is quantized ({said.get('quant_method') or loads}); {_FULL}.")


def refuse_loaded(model: Any) -> None:
    """Refuses a loaded model whose tensors are not those of its class.

    Raises:
        ValueError: its weights are quantized or not in memory, or an adapter stands in it.
    """
    refuse_quantized(type(model).__name__, model.config.to_dict())
    found = (name.rpartition(".")[0] for name, _ in model.named_modules() if name.endswith(_WRAPPED))
    place = next(found, None)
    if place is not None:
        raise ValueError(
            f"{type(model).__name__} has a PEFT adapter in {place!r}; merge it first"
            " (`merge_and_unload()` of the model that peft gave), or load the model without it."
        )
    absent = next((name for name, tensor in model.named_parameters() if tensor.is_meta), None)
    if absent is not None:
        raise ValueError(
            f"{absent!r} of {type(model).__name__} is not in memory, as `device_map` left it elsewhere; give the"
            " folder or Hub id in place of the loaded model, or load it whole."
        )


def refuse_config(name: str, fields: Mapping[str, Any]) -> None:
    """Refuses what a config.json says of a model that cannot be read as it stands.

    Raises:
        ValueError: quantized weights, a model type that is no name, or one that only code in the repository knows.
    """
    refuse_quantized(repr(name), fields)
    model_type = fields.get("model_type")
    if not isinstance(model_type, (str, type(None))):
        raise ValueError(
            f"The config.json of {name!r} has the model type {model_type!r}, which is no name; correct it, or copy or"
            " download it again."
        )
    if fields.get("auto_map") and model_type not in CONFIG_MAPPING and model_type not in converters():
        raise ValueError(
            f"{name!r} has the model type {model_type!r}, which only code of its own knows (`auto_map`), and such code"
            f" is never run; these model types convert: {', '.join(sorted(converters()))}."
        )


def refuse_weights(name: str, local: Path) -> None:
    """Refuses the weights of a folder by their files' names and headers, after `refuse_damaged_weights`.

    Raises:
        ValueError: there are none, or they are packed integers or 8-bit numbers.
    """
    if not local.is_dir():
        return
    if not _has_weights(local):
        for pattern, framework in _FRAMEWORKS.items():
            found = next(iter(sorted(local.glob(pattern))), None)
            if found is not None:
                raise ValueError(
                    f"The folder {name!r} holds {found.name}, weights of {framework}, which are not read; take the"
                    " model as safetensors, or save it with PyTorch."
                )
        raise ValueError(
            f"The folder {name!r} has no weights ({' or '.join(WEIGHTS)}, or the index of several); copy or download"
            " it again."
        )
    for path in weight_files(local):
        types = stored_types(path) if path.suffix == ".safetensors" else {}
        for tensor, stored in types.items():
            if tensor.endswith("weight") and stored.startswith(_PACKED):
                raise ValueError(f"{tensor!r} in {str(path)!r} is quantized (its numbers are {stored}); {_FULL}.")


def _has_weights(local: Path) -> bool:
    return any((local / file).is_file() for name in WEIGHTS for file in (name, f"{name}.index.json"))
