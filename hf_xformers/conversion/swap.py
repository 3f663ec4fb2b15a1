# SPDX-License-Identifier: Apache-2.0
"""Other components for a trained model: what still has a meaning is kept, the rest starts anew, and a report says
what.

```python
>>> from hf_xformers.conversion import swap_components

>>> model, report = swap_components("path/to/bert", attention={"type": "longformer", "attention_window": 256},
max_length=4096)
>>> print(report.summary())
```
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..blocks.base import SublayerPlan, XFormerLayer
from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike
from ..core.evaluating import evaluating
from ..core.saved_files import replacing
from ..modeling_base import XFormerPreTrainedModel
from ..modeling_tower import XFormerTower
from ..modeling_xformer import XFormerModel
from ..position.combined import CombinedSpec
from ..variants import family, model_types
from .checkpoint import check_target, load, model_type_of, open_config, open_ours, save
from .derivations import Derived, Part, derive
from .gguf import gguf_config, unpacked
from .image_processors import open_image_processor, reads_images, save_image_processor
from .lookup import converter_for
from .movement import Movement, movement
from .provenance import write_provenance
from .quiet import quiet
from .refusals import refuse_loaded
from .report import Report
from .sentence_files import model_place, open_sentence_files
from .shared_heads import shared_factors as _  # noqa: F401  its file enters the rule of collaborative attention
from .swap_config import Layers, changed_slots, settings_left_behind, swapped_config
from .swap_report import SwapReport
from .tokenizer_files import open_tokenizer
from .transfer import Source, carry_generation, check_head, our_head_of, to_ours

_NORMS = ("weight", "bias")


def swap_components(
    source: PreTrainedModel | str | Path,
    *,
    max_length: int | None = None,
    head: str | None = None,
    texts: Iterable[str] | None = None,
    tokenizer: Any | None = None,
    measure: bool = True,
    seed: int = 0,
    layers: Mapping[str, Layers] | None = None,
    **changes: SpecLike | int | Mapping[str, Any] | None,
) -> tuple[PreTrainedModel, SwapReport]:
    """A trained model with other components, and the account of every tensor.

    Args:
        source: a model of this package or one that converts (a loaded one stays as it is and shares no memory with the
            result), a folder, or a Hub id.
        changes: components by slot (`attention="longformer"`, or a dict whose fields without a `type` change the
            component that is there), `num_key_value_heads`, `decoder` (fields of an encoder-decoder's decoder) and
            `per_layer_config`.
        max_length: tokens that positions shall cover.
        head: our head's name, by default the source's; one that the source lacks starts anew.
        texts, tokenizer: the sample on which the movement of the outputs is measured (`measure=False`: not at all), by
            default the help texts that come with Python and the source's own tokenizer.
        seed: of what starts anew.
        layers: by slot, the layers that change (`{"attention": "0-9,12"}`); the others stay as they are.

    A component keeps the settings that it shares with the one it replaces (say, `bias` of any attention). The result
    is of the source's variant while no component changes its type, and of the free mix (`XFormer...`) from then on,
    where that has such a head; it is in evaluation mode.

    Raises:
        TypeError: `source` is neither a model nor a path.
        ValueError: nothing to change, a change that no weight would survive, components that cannot work together, or
            a checkpoint that is damaged or incomplete.
    """
    if max_length is not None:
        changes["max_length"] = max_length
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # a head that the source lacks starts anew, too
        model, conversion, borrowed, fresh = _opened(source, head)
    if tokenizer is None and not isinstance(source, PreTrainedModel):
        tokenizer = open_tokenizer(source)
    if changes or not fresh:
        config = swapped_config(cast(XFormerConfig, model.config), changes, layers, our_head_of(model))
    else:  # another head is all that changes
        config = cast(XFormerConfig, copy.deepcopy(model.config))
    target, report = _swapped(model, config, borrowed, seed)
    report.kept = [name for name in report.kept if name not in fresh]
    report.new = sorted({*report.new, *fresh})
    if fresh and conversion is None:
        report.source = (open_config(cast(str, source)).architectures or [report.source])[0]
    report.conversion = conversion
    if measure and changes:  # what a head that has learned nothing predicts says nothing
        before, after = (cast(PreTrainedModel, each.base_model) if fresh else each for each in (model, target))
        with evaluating(before):  # the caller's may be in training
            report.movement = movement(before, after, tokenizer, texts)
    return target, report


def swap_checkpoint(
    source: str | Path,
    target: str | Path,
    *,
    overwrite: bool = False,
    gguf_file: str | None = None,
    **options: Any,
) -> SwapReport:
    """[`swap_components`] from a folder or Hub id into a new folder, with tokenizer, generation settings and what
    sentence-transformers keeps with the model.

    target: a folder that does not exist or is empty; with `overwrite`, one that is replaced when, and only when,
    everything is written. gguf_file: the name of a GGUF file in the source that is to be read. options: as for
    [`swap_components`].

    Raises:
        ValueError: as [`swap_components`], or for a target that is in use; the target is then what it was before.
    """
    check_target(Path(target).expanduser(), source, overwrite)
    with unpacked(source, gguf_file) as place:
        return _swapped_checkpoint(place, source, Path(target).expanduser(), options)


def _swapped_checkpoint(source: str | Path, named: str | Path, folder: Path, options: dict[str, Any]) -> SwapReport:
    """named: what the account of the swap calls the source."""
    sentence = open_sentence_files(source)
    source = model_place(source, sentence)
    model_type = model_type_of(source)  # a source without a readable config has no tokenizer to look for
    if sentence is not None and sentence.reads_states and model_type not in model_types() and not options.get("head"):
        options["head"] = "Model"
    tokenizer = open_tokenizer(source)
    of_images = reads_images(type(source_config(source)))
    processor = open_image_processor(source) if of_images else None
    model, report = swap_components(source, tokenizer=tokenizer, **options)
    if tokenizer is None and not of_images:
        report.notes.append("the source has no tokenizer")
    length = options.get("max_length")
    if tokenizer is not None:
        limits = [tower.max_length for tower in _towers(model).values() if tower.max_length is not None]
        longest = min([*limits, length or tokenizer.model_max_length])
        tokenizer.model_max_length = longest
    with replacing(folder) as scratch:
        save(model, scratch)
        if tokenizer is not None:
            tokenizer.save_pretrained(scratch)
        if sentence is not None:
            sentence.save(scratch, length, report.notes)
        if of_images:
            save_image_processor(processor, scratch, model.config, report.notes)
        before = str(model_type) if model_type in model_types() else converter_for(model_type).variant
        write_provenance(scratch, named, report, (before, model.config.model_type))
    return report


def source_config(source: str | Path, gguf_file: str | None = None) -> XFormerConfig:
    """Our configuration of what a folder or Hub id holds, or a GGUF file there, without reading weights.

    Raises:
        ValueError: it cannot be read, or does not convert.
    """
    if gguf_file is not None:
        found = gguf_config(source, gguf_file)
        return converter_for(found.model_type).config_to_ours(found)
    source = model_place(source, open_sentence_files(source))
    model_type = model_type_of(source)
    converter = None if model_type in model_types() else converter_for(model_type)
    config = open_config(source)
    return cast(XFormerConfig, config) if converter is None else converter.config_to_ours(config)


def open_model(
    source: PreTrainedModel | str | Path, head: str | None = None
) -> tuple[PreTrainedModel, frozenset[str]]:
    """Our model of a loaded one, a folder or a Hub id, ours or of transformers, and which of its tensors started anew
    because the source has none of that head. What is loaded is in evaluation mode.

    Raises:
        TypeError, ValueError: as [`swap_components`].
    """
    found = _opened(source, head)
    return found[0], found[3]


def _opened(
    source: PreTrainedModel | str | Path, head: str | None
) -> tuple[PreTrainedModel, Report | None, bool, frozenset[str]]:
    """The model of [`open_model`], how it was converted, whether its tensors are the caller's, and what is new."""
    if isinstance(source, XFormerPreTrainedModel):
        if head not in (None, our_head_of(source)):
            raise ValueError(
                f"{type(source).__name__} is swapped as it is; leave `head` out, or load the class that has it first."
            )
        refuse_loaded(source)
        return source, None, True, frozenset()
    if isinstance(source, PreTrainedModel):
        model, report = to_ours(Source(source, borrowed=True), converter_for(source.config.model_type), head)
        return model.eval(), report, False, frozenset(report.new)
    if not isinstance(source, (str, Path)):
        raise TypeError(f"Give a model, a folder or a Hub id, got {type(source).__name__}: {source!r}.")
    model_type = model_type_of(source)
    if model_type in model_types():
        found = open_ours(source, model_type, head)
        return found.model.eval(), None, False, found.absent
    converter = converter_for(model_type)
    if head is not None:
        check_head(converter, head)
    model, report = to_ours(load(source, converter, False, head), converter, head)
    return model.eval(), report, False, frozenset(report.new)


# ---------------------------------------------------------------------------------------------------- tensors


def _swapped(
    model: PreTrainedModel, config: XFormerConfig, borrowed: bool, seed: int
) -> tuple[PreTrainedModel, SwapReport]:
    head = our_head_of(model)
    target_class = family(config.model_type)[head]
    with torch.device("meta"):
        skeleton = target_class(copy.deepcopy(config))
    state, wanted = model.state_dict(), skeleton.state_dict()
    made, forgotten = _derived(model, skeleton)
    report = SwapReport(
        type(model).__name__, target_class.__name__, changes=changed_slots(cast(XFormerConfig, model.config), config)
    )
    report.notes += settings_left_behind(cast(XFormerConfig, model.config), config)
    tensors: dict[str, Tensor] = {}
    used: set[str] = set()
    for name, shape in ((name, tensor.shape) for name, tensor in wanted.items()):
        if name in made:
            entry = made[name]
            tensors[name] = entry.tensor
            used.update(entry.sources)
            report.derived.append((entry.sources, name, entry.how))
        elif name in state and state[name].shape == shape and name not in forgotten:
            tensors[name] = state[name].detach().clone() if borrowed else state[name]
            used.add(name)
            report.kept.append(name)
    report.dropped = [name for name in state if name not in used]
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        target, info = target_class.from_pretrained(
            None, config=config, state_dict=tensors, dtype=model.dtype, output_loading_info=True
        )
    report.new = sorted(info["missing_keys"])
    carry_generation(model, target)
    return target.to(model.device).eval(), report


def _derived(model: PreTrainedModel, skeleton: PreTrainedModel) -> tuple[dict[str, Derived], set[str]]:
    """Derived tensors of the new model by full name, and names that have lost their meaning."""
    made: dict[str, Derived] = {}
    forgotten: set[str] = set()
    new_towers = _towers(skeleton)
    for tower_name, old_tower in _towers(model).items():
        new_tower = new_towers[tower_name]
        old_parts, new_parts = _parts(old_tower), _parts(new_tower)
        for path, (slot, new) in new_parts.items():
            if path not in old_parts or old_parts[path][0] != slot:
                continue
            old = old_parts[path][1]
            prefix = f"{tower_name}.{path}."
            if slot == "position" and old.spec.type != new.spec.type:
                forgotten.update(prefix + name for name in new.tensors)
            for name, entry in derive(slot, old, new).items():
                sources = tuple(prefix + source for source in entry.sources)
                made[prefix + name] = Derived(entry.tensor, sources, entry.how)
        norms, lost = _moved_norms(old_tower, new_tower)
        made.update({f"{tower_name}.{name}": _prefixed(entry, f"{tower_name}.") for name, entry in norms.items()})
        forgotten.update(f"{tower_name}.{name}" for name in lost)
    return made, forgotten


def _prefixed(entry: Derived, prefix: str) -> Derived:
    return Derived(entry.tensor, tuple(prefix + name for name in entry.sources), entry.how)


def _towers(model: PreTrainedModel) -> dict[str, XFormerTower]:
    """The towers by the names that their tensors begin with."""
    base, prefix = (model, "") if isinstance(model, XFormerModel) else (model.model, "model.")
    towers = {f"{prefix}trunk": base.trunk}
    return towers if base.decoder is None else {**towers, f"{prefix}decoder": base.decoder}


def _parts(tower: XFormerTower) -> dict[str, tuple[str, Part]]:
    """The components of a tower that rules exist for, by path: (slot, part)."""
    config = cast(XFormerConfig, tower.config)
    parts = _positions(config, tower.position)
    for index, layer in enumerate(cast("Iterable[XFormerLayer]", tower.layers)):
        view = config.layer(index)
        for entry in _plan(layer):
            if entry.name in layer.lenders:  # another layer's, where it was listed
                continue
            tensors = layer.function(entry).state_dict()
            parts[f"layers.{index}.{entry.name}"] = (entry.kind, Part(getattr(view, entry.kind), view, tensors))
    return parts


def _positions(config: XFormerConfig, module: Any) -> dict[str, tuple[str, Part]]:
    """The position, or those that it is combined of, by path."""
    spec = config.position
    if not isinstance(spec, CombinedSpec):
        return {"position": ("position", Part(spec, config, module.state_dict()))}
    return {
        f"position.parts.{index}": ("position", Part(part, config, module.parts[index].state_dict()))
        for index, part in enumerate(spec.parts)
    }


def _plan(layer: Any) -> tuple[SublayerPlan, ...]:
    return layer.plan


def _moved_norms(old: XFormerTower, new: XFormerTower) -> tuple[dict[str, Derived], set[str]]:
    """Post-LN to pre-LN and back. What normalized the output of a sublayer now normalizes the input of the next: the
    norm after sublayer s and the one before sublayer s + 1 see the same states (Xiong et al. 2020, figure 1)."""
    kinds = tuple({view.residual.type for view in tower.config.layer_configs()} for tower in (old, new))
    alike = [entry.name for layer in old.layers for entry in _plan(layer)] == [
        entry.name for layer in new.layers for entry in _plan(layer)
    ]
    in_sequence = old.config.block.in_sequence and new.config.block.in_sequence
    if kinds not in (({"post_ln"}, {"pre_ln"}), ({"pre_ln"}, {"post_ln"})) or not alike or not in_sequence:
        return {}, set()
    sites = [f"layers.{i}.{entry.name}_residual.norm" for i, layer in enumerate(old.layers) for entry in _plan(layer)]
    before, after = old.state_dict(), new.state_dict()
    final = {"old": _final_norm(before), "new": _final_norm(after)}
    if kinds[0] == {"post_ln"}:
        pairs = list(zip(sites, [*sites[1:], final["new"]]))
    else:
        pairs = list(zip([*sites[1:], final["old"]], sites))
    made = {}
    for source, target in pairs:
        for part in _NORMS:
            read, written = f"{source}.{part}", f"{target}.{part}"
            if read in before and written in after and before[read].shape == after[written].shape:
                made[written] = Derived(before[read].clone(), (read,), "the norm of the same states")
    names = [f"{site}.{part}" for site in (*sites, final["new"]) for part in _NORMS]
    return made, {name for name in names if name in after and name not in made}


def _final_norm(state: Mapping[str, Tensor]) -> str:
    return next((name.rpartition(".")[0] for name in state if name.startswith("final_norm.")), "final_norm")


__all__ = ["Movement", "SwapReport", "open_model", "source_config", "swap_checkpoint", "swap_components"]
