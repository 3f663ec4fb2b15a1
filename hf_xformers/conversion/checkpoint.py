# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: folders or Hub ids in, a complete folder out, or nothing at all."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, cast

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME, cached_file

from ..compat import has_adapter
from ..configuration_xformer import XFormerConfig
from ..core.components import SLOTS
from ..core.finite import refuse_non_finite
from ..core.saved_files import (
    SUMMARY_FILE,
    read_object,
    refuse_damaged_weights,
    replacing,
    tensors_of,
    weight_files,
)
from ..variants import config_class, family, model_types
from .base import Converter, converters, first_line, one_line
from .free_mix import as_variant
from .gguf import unpacked
from .image_processors import open_image_processor, reads_images, save_image_processor
from .lookup import converter_back, converter_for
from .provenance import read_provenance, write_provenance
from .quiet import quiet
from .refusals import refuse_adapter, refuse_config, refuse_place, refuse_weights
from .report import Report
from .sentence_files import model_place, open_sentence_files
from .tokenizer_files import open_tokenizer
from .transfer import Source, check_head, needed_beside, to_ours, to_theirs

Direction = Literal["auto", "to_ours", "to_theirs"]


def model_type_of(source: str | Path) -> str | None:
    """What the config of a folder or Hub id says.

    Raises:
        ValueError: there is no such folder or repository, it has no config, or it holds no whole model whose weights
            can be read: an adapter, quantized weights, a GGUF file, a model that only code of its own knows.
    """
    name = os.fspath(source)
    local = Path(name).expanduser()
    refuse_place(name, local)
    fields = read_object(local / "config.json") if local.is_dir() else _remote_config(name)
    refuse_config(name, fields)
    return fields.get("model_type")


def _remote_config(name: str) -> dict[str, Any]:
    try:
        fields, _ = PreTrainedConfig.get_config_dict(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{name!r} is neither a folder nor a Hub repository that can be read: {first_line(error)} Correct the"
            " name, or copy or download it again."
        ) from error
    return fields


def open_config(source: str | Path) -> PreTrainedConfig:
    """The config of a folder or Hub id, by the class that this process has for its model type; no code of a
    repository is run.

    Raises:
        ValueError: a field has a value that the class does not take.
    """
    name = os.path.expanduser(os.fspath(source))
    converter = converters().get(str(model_type_of(source)))
    try:
        if converter is not None and converter.layouts:
            return converter.their_config.from_pretrained(name)
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, TypeError, AttributeError, KeyError, StrictDataclassError) as error:
        raise ValueError(
            f"The config.json of {name!r} cannot be used: {one_line(error)}; correct it, or copy or download it again."
        ) from error


def read_model_type(source: str | Path, wanted: str | None = None) -> tuple[Converter, bool]:
    """The converter for a folder or Hub id, and whether it holds one of our models; wanted: transformers' model type
    that one of ours shall become.

    Raises:
        ValueError: there is no such folder or repository, it has no config, or nothing converts its model type.
    """
    model_type = model_type_of(source)
    if model_type not in model_types():
        converter = converter_for(model_type)
        if wanted not in (None, model_type):
            raise ValueError(
                f"`model_type` {wanted!r} says what a model of this package shall become, and {os.fspath(source)!r}"
                f" holds a {model_type!r} model of transformers; leave it out."
            )
        return converter, False
    origin = read_provenance(source)
    made_of = None if origin is None else origin.steps()[0].classes[0]
    if model_type == XFormerConfig.model_type:  # of a swap; it may have the components of its source again
        model_type = _variant_again(source, wanted)
    if model_type == XFormerConfig.model_type:
        return converter_back(cast(XFormerConfig, open_config(source)), wanted, made_of), True
    return converter_back(config_class(str(model_type))(), wanted, made_of), True


def goes_back(source: str | Path, head: str) -> bool:
    """Whether transformers has a class with `head` for one of our models, a folder or Hub id."""
    try:
        converter, ours = read_model_type(source)
    except ValueError:
        return False
    return ours and converter.head_of_ours(head, cast(XFormerConfig, open_config(source))) is not None


def _variant_again(source: str | Path, wanted: str | None) -> str:
    """The variant whose components a swapped model has: that of the family that is `wanted`, the one that the model
    was made of, or another that says what it is; the free mix if nothing says which.

    Raises:
        ValueError: it has another component, which the family that it came from does not.
    """
    origin = read_provenance(source)
    if wanted in converters():
        return converters()[wanted].variant
    if origin is None:
        return XFormerConfig.model_type
    variant = origin.steps()[0].variants[0]
    if variant == XFormerConfig.model_type:
        return variant
    config, preset = open_config(source), config_class(variant)()
    said = [entry.components for entry in converters().values() if entry.variant == variant]
    for layer in config.layer_configs():
        for slot in SLOTS:
            there, own = getattr(layer, slot).type, getattr(preset, slot).type
            if there != own and not any(there in components.get(slot, ()) for components in said):
                if (other := _other_variant(config)) is not None:
                    return other
                raise ValueError(
                    f"{os.fspath(source)!r} came from {variant!r} and has {slot} {there!r}, which that family does"
                    f" not have; swap it back first (`hf-xformers convert --{slot} {own}`), or keep the model as it"
                    " is."
                )
    return variant


def _other_variant(config: PreTrainedConfig) -> str | None:
    """The one variant with a family of its own in transformers whose config can say what the free mix `config` is."""
    found = {entry.variant for entry in converters().values() if entry.native and not entry.layouts}
    fitting = [variant for variant in sorted(found) if _fits(variant, cast(XFormerConfig, config))]
    return fitting[0] if len(fitting) == 1 else None


def _fits(variant: str, config: XFormerConfig) -> bool:
    try:
        converter_for(variant).config_to_theirs(as_variant(config, variant))
    except (TypeError, ValueError):
        return False
    return True


def load(source: str | Path, converter: Converter, ours: bool, head: str | None) -> Source:
    """Loads the model of a folder or Hub id in the class that its config names, or in the one that has `head`.

    Raises:
        ValueError: the class has no counterpart, or the weights are missing, damaged or of other sizes.
    """
    name = os.path.expanduser(os.fspath(source))
    config = open_config(name)
    if ours and config.model_type != converter.variant:  # the free mix with this variant's components
        config = as_variant(cast(XFormerConfig, config), converter.variant)
    if head is not None:
        check_head(converter, head)
    found = _loaded(_class_of(config, converter, ours, head), name, config)
    if not ours and any(key in converter.renamed for key in found.extra):
        for key, value in converter.layout.items():
            setattr(config, key, value)
        found = _loaded(_class_of(config, converter, ours, head), name, config)
    if not ours and found.extra:
        _keep_needed(found, converter, name)
    if head is None:
        _refuse_without_output(found, name)
    return found


def _refuse_without_output(found: Source, name: str) -> None:
    """Refuses a language model whose output projection is neither in the checkpoint nor tied to its token table."""
    output = found.model.get_output_embeddings()
    weight = None if output is None else output.weight
    absent = next(
        (key for key, kept in found.model.named_parameters() if kept is weight and key in found.absent), None
    )
    if absent is not None:
        raise ValueError(
            f"The checkpoint {name!r} lacks {absent!r}, what {type(found.model).__name__} predicts tokens with; copy"
            " or download it again, set `tie_word_embeddings` in its config.json to true if that is its token table,"
            " or give `head='Model'` to convert the model without it."
        )


def _keep_needed(found: Source, converter: Converter, name: str) -> None:
    """Reads what the rules need and the loaded class has no place for. Names in files may lack the base model's
    prefix, or have it where the class does not."""
    pair = converter.head_of_theirs(type(found.model).__name__)
    prefixes = {head.prefix for head in converter.heads}
    needed = needed_beside(converter, found.model)
    if pair is None or not needed:
        return
    wanted = {prefix + key.removeprefix(pair.prefix): key for key in needed for prefix in prefixes}
    folder = Path(name).expanduser()
    if not folder.is_dir():  # loading has brought the files
        folder = Path(str(cached_file(name, CONFIG_NAME))).parent
    for path in weight_files(folder):
        for key, tensor in tensors_of(path, wanted).items():
            found.kept[wanted[key]] = tensor
    found.extra = tuple(key for key in found.extra if key not in wanted)


def _loaded(model_class: Any, name: str, config: PreTrainedConfig) -> Source:
    refuse_damaged_weights(name)
    refuse_weights(name, Path(name).expanduser())
    try:
        with quiet(bars=True):  # what is missing, unexpected or of another size is told below, and in reports
            model, info = model_class.from_pretrained(
                name, config=config, output_loading_info=True, ignore_mismatched_sizes=True
            )
    except pickle.UnpicklingError as error:  # of a Hub id; a folder was looked into before
        raise ValueError(
            f"The weights of {name!r} hold code next to tensors, which is not run; take a model that has them as"
            " safetensors."
        ) from error
    except (OSError, RuntimeError, ValueError, TypeError, ZeroDivisionError, SafetensorError) as error:
        raise ValueError(
            f"Cannot load {model_class.__name__} from {name!r}: {first_line(error)}; copy or download the "
            "checkpoint again, or save it with `save_pretrained`."
        ) from error
    if has_adapter(model):  # of a Hub id; a folder was looked into before
        refuse_adapter(name)
    _refuse_other_sizes(info["mismatched_keys"], name)
    refuse_non_finite(model, name)
    return Source(model, frozenset(info["missing_keys"]), tuple(sorted(info["unexpected_keys"])))


def _refuse_other_sizes(mismatched: Iterable[tuple[str, Any, Any]], name: str) -> None:
    """mismatched: (tensor, its shape in the file, the shape that the config says), as transformers lists them."""
    wrong = [f"{key!r} {list(found)} instead of {list(wanted)}" for key, found, wanted in sorted(mismatched)]
    if wrong:
        shown = ", ".join(wrong[:4]) + (f" and {len(wrong) - 4} more" if len(wrong) > 4 else "")
        raise ValueError(
            f"The weights of {name!r} have other sizes than its config.json says: {shown}; copy or download both again"
            " from one place."
        )


def open_ours(source: str | Path, model_type: str, head: str | None) -> Source:
    """One of this package's models, whole, in the class that its config names or in the one that has `head`; of
    another head than the saved one the tensors start anew, and are what is `absent`.

    Raises:
        ValueError: there is no such head, or the weights are missing, damaged, of other sizes or not those of the
            class.
    """
    name = os.path.expanduser(os.fspath(source))
    config = open_config(name)
    classes = family(model_type)
    named = config.architectures[0] if config.architectures else None
    saved = next((key for key, made in classes.items() if made.__name__ == named), None)
    chosen = head or saved
    if chosen not in classes:
        raise ValueError(
            f"{name!r} holds {named!r}, and {model_type} has no such class or head {chosen!r}; say which `head` it"
            f" has: {', '.join(classes)}."
        )
    found = _loaded(classes[chosen], name, config)
    absent, extra = sorted(found.absent), list(found.extra)
    if chosen != saved:  # one of the two is the bare model, or they share it
        absent = [key for key in absent if key.startswith(("model.trunk.", "model.decoder.", "trunk.", "decoder."))]
        extra = [key for key in extra if key.startswith(("model.trunk.", "model.decoder.", "trunk.", "decoder."))]
    for keys, what in ((absent, "lacks"), (extra, "holds, beyond what its config describes,")):
        if keys:
            shown = ", ".join(map(repr, keys[:6])) + (f" and {len(keys) - 6} more" if len(keys) > 6 else "")
            raise ValueError(
                f"The checkpoint {name!r} {what} {shown}; copy or download weights and config.json again from one"
                " place."
            )
    return found


def _class_of(config: PreTrainedConfig, converter: Converter, ours: bool, head: str | None) -> Any:
    named: str | None = config.architectures[0] if config.architectures else None
    if ours:
        classes = family(converter.variant)
        named = next((name for name, made in classes.items() if made.__name__ == named), named)
        chosen = head or named or "Model"
        if chosen not in classes:
            raise ValueError(
                f"{converter.variant} has no class {named!r}; say which head to convert: {', '.join(classes)}."
            )
        return classes[chosen]
    found = None if named is None else converter.head_of_theirs(named)
    if head is not None or named is None:
        pair = converter.head_of_ours(head or "Model", config) or converter.base_head(config)
        if found is not None and found.prefix and pair.prefix not in ("", found.prefix):
            return converter.their_class(found.theirs)  # the other class looks for its tensors under other names
        return converter.their_class(pair.theirs)
    if found is None:
        known = ", ".join(entry.theirs for entry in converter.heads)
        raise ValueError(
            f"{named} has no counterpart ({known} do); give `head`, e.g. 'Model' for the model without its head."
        )
    return converter.their_class(found.theirs)


def convert_checkpoint(
    source: str | Path,
    target: str | Path,
    *,
    direction: Direction = "auto",
    head: str | None = None,
    model_type: str | None = None,
    gguf_file: str | None = None,
    overwrite: bool = False,
) -> Report:
    """Converts a saved model, with its tokenizer or image processor, its generation settings, what
    sentence-transformers keeps with it and the record of its training, into a new folder.

    Args:
        source: a folder that `save_pretrained` wrote, or a Hub id.
        target: a folder that does not exist or is empty; with `overwrite`, one that is replaced when, and only when,
            everything is written.
        direction: `to_ours`, `to_theirs`, or `auto` by the source's model type.
        head: our name of the head to make (`Model`, `ForMaskedLM`, ...); by default the one that the source has.
        gguf_file: the name of a GGUF file in the source that is to be read.
        model_type: of transformers' family to make, where several have what the source is; by default the one that it
            came from.

    Raises:
        ValueError: nothing to read, nothing that converts it, a tensor or setting without a counterpart, a damaged
            file, or a target that is in use; the target is then what it was before.
    """
    if direction not in ("auto", "to_ours", "to_theirs"):
        raise ValueError(f"`direction` is 'auto', 'to_ours' or 'to_theirs', got {direction!r}.")
    check_target(Path(target).expanduser(), source, overwrite)
    with unpacked(source, gguf_file) as place:
        return _converted(place, source, Path(target).expanduser(), direction, head, model_type)


def _converted(
    source: str | Path,
    named: str | Path,
    folder: Path,
    direction: Direction,
    head: str | None,
    model_type: str | None,
) -> Report:
    """named: what the account of the conversion calls the source."""
    sentence = open_sentence_files(source)
    source = model_place(source, sentence)
    converter, ours = read_model_type(source, model_type)
    found = "to_theirs" if ours else "to_ours"
    if direction not in ("auto", found):
        kind = converter.variant if ours else converter.model_type
        raise ValueError(
            f"`direction` {direction!r} does not fit {os.fspath(source)!r}, which holds a {kind!r} model."
        )
    if head is None and not ours and sentence is not None and sentence.reads_states:
        head = "Model"
    change = to_theirs if ours else to_ours
    of_images = reads_images(config_class(converter.variant))
    tokenizer = open_tokenizer(source)
    processor = open_image_processor(source) if of_images else None
    model, report = change(load(source, converter, ours, head), converter, head)
    with replacing(folder) as scratch:
        save(model, scratch)
        if of_images:
            save_image_processor(processor, scratch, model.config, report.notes)
        elif tokenizer is None:
            report.notes.append("the source has no tokenizer")
        if tokenizer is not None:
            tokenizer.save_pretrained(scratch)
        if sentence is not None:
            sentence.save(scratch, None, report.notes)
        if not ours:
            write_provenance(scratch, named, report, (converter.variant, converter.variant))
        record = Path(source).expanduser() / SUMMARY_FILE
        if head is None and record.is_file():  # outputs are equal: so is what was measured
            shutil.copyfile(record, scratch / SUMMARY_FILE)
    return report


def save(model: PreTrainedModel, folder: Path) -> None:
    """Config, weights as safetensors, generation settings."""
    model.save_pretrained(folder)


# ---------------------------------------------------------------------------------------------------- folders


def check_target(folder: Path, source: str | Path, overwrite: bool) -> None:
    """Raises `ValueError` for a target that is a file, is the source, or holds something that may not be replaced."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"The target {str(folder)!r} is a file; give a folder.")
    origin = Path(os.fspath(source)).expanduser()
    if folder.is_dir() and origin.is_dir() and folder.samefile(origin):
        raise ValueError(f"Source and target are the same folder {str(folder)!r}; convert into another one.")
    if folder.is_dir() and origin.exists() and folder.resolve() in origin.resolve().parents:
        raise ValueError(
            f"The source {os.fspath(source)!r} lies in the target {str(folder)!r}, which would be replaced with it;"
            " give another target."
        )
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise ValueError(f"The target {str(folder)!r} is not empty; give another folder, or `overwrite=True`.")
