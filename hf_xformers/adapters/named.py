# SPDX-License-Identifier: Apache-2.0
"""The adapters of a model by name: added, activated, saved, loaded and removed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..core.saved_files import read_object, saving_into, write_json
from .bottleneck import HOLDERS, AdapterConfig, AdapterState, Bottleneck, belongs, frames_of, owns, state_of, towers_of
from .fusion import Fusion, FusionConfig, check_members
from .k_adapter import KAdapter, KAdapterConfig, SideHooks, check_encoder, count_layers

CONFIG_FILE, WEIGHTS_FILE = "bottleneck_config.json", "bottleneck.safetensors"
# What a saved configuration has to hold, of which types.
_SAVED = {
    "name": str,
    "adapter": dict,
    "members": dict,
    "model_type": str,
    "architecture": str,
    "id2label": dict,
}


def add_adapter(model: Any, name: str, kind: str | AdapterConfig | KAdapterConfig = "houlsby", **fields: Any) -> Any:
    """Adds a fresh adapter under a name, activates it, and freezes everything but what it trains: itself, the norms
    (if its configuration says so) and the head.

    Raises:
        ValueError: a name that is taken or is no identifier, a model without this package's layers, or settings that
            `AdapterConfig` (or, with kind `k_adapter`, `KAdapterConfig`) refuses.
    """
    config: Any = _settings({"kind": kind, **fields}) if isinstance(kind, str) else kind
    state = state_of(model)
    _check_name(state, name)
    if isinstance(config, KAdapterConfig):
        return _add_side(model, name, config)
    activate(model, None)
    place = next(filter(Tensor.is_floating_point, model.parameters()))
    for frame, entry in frames_of(model):
        after_norm = _is_after_norm(frame, config)
        if config.kind == "pfeiffer" and entry.kind != "feedforward":
            continue
        adapter = Bottleneck(model.config.hidden_size, config).to(place.device, place.dtype)
        (frame.norm_adapters if after_norm else frame.sublayer_adapters)[name] = adapter
    state.configs[name] = config
    state.parked[name] = {key: tensor.clone() for key, tensor in state.base.items() if owns(key, config)}
    activate(model, name)
    return model


def _settings(about: Mapping[str, Any]) -> Any:
    """The settings of an adapter of any kind but a fusion."""
    return (KAdapterConfig if about.get("kind") == "k_adapter" else AdapterConfig)(**about)


def _add_side(model: Any, name: str, config: KAdapterConfig) -> Any:
    state, tower = state_of(model), check_encoder(model)
    activate(model, None)
    adapter = KAdapter(model.config, config, count_layers(model, tower))
    if not hasattr(tower, "side_adapters"):
        tower.side_adapters, tower.active_side_adapter = nn.ModuleDict(), None
        SideHooks(tower)
    place = next(filter(Tensor.is_floating_point, model.parameters()))
    tower.side_adapters[name] = adapter.to(place.device, place.dtype).train(model.training)
    state.configs[name] = config
    state.parked[name] = {key: tensor.clone() for key, tensor in state.base.items() if owns(key, config)}
    activate(model, name)
    return model


def add_fusion(model: Any, name: str, adapters: Sequence[str | Path]) -> Any:
    """Adds a fresh fusion of adapters, by their names in the model or from folders, whose heads play no part;
    activates it, and freezes everything but the fusion and the head.

    Raises ValueError as [`FusionConfig`], for adapters other than Pfeiffer's, and as [`add_adapter`] and
    [`load_adapter`]. The model is then as it was before.
    """
    given = FusionConfig(list(map(str, adapters)))
    state = state_of(model)
    _check_name(state, name)
    before, loaded = state.active, []
    members = []
    try:
        for index, entry in enumerate(given.adapters):
            if entry not in state.configs and Path(entry).expanduser().is_dir():
                loaded.append(load_adapter(model, Path(entry).expanduser(), f"{name}_{index}", head=False))
                entry = loaded[-1]
            members.append(entry)
        check_members(state.configs, members)
    except ValueError:
        for member in loaded:
            remove_adapter(model, member)
        activate(model, before)
        raise
    activate(model, None)
    place = next(filter(Tensor.is_floating_point, model.parameters()))
    for frame, _ in frames_of(model):
        if any(members[0] in found for found in (frame.sublayer_adapters, frame.norm_adapters)):
            fusion = Fusion(model.config.hidden_size, members)
            frame.adapter_fusions[name] = fusion.to(place.device, place.dtype)
    config = FusionConfig(members)
    state.configs[name] = config
    state.parked[name] = {key: tensor.clone() for key, tensor in state.base.items() if owns(key, config)}
    activate(model, name)
    return model


def _check_name(state: AdapterState, name: str) -> None:
    if name in state.configs:
        raise ValueError(f"the model has an adapter {name!r} already; remove it first, or take another name")
    if not name.isidentifier() or hasattr(nn.ModuleDict(), name):
        raise ValueError(
            f"an adapter's name is a part of tensor names, so {name!r} cannot be one; use other letters and digits"
        )


def activate(model: Any, name: str | None) -> None:
    """Makes the adapter `name` the active one, with its norms and head, or with None restores the base. Only what
    belongs to the active adapter is trainable; without one, everything is.

    Raises ValueError for an unknown name.
    """
    state = state_of(model)
    if name is not None and name not in state.configs:
        raise ValueError(f"the model has no adapter {name!r}; its adapters are: {', '.join(state.configs) or 'none'}")
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        leaving = state.base if state.active is None else state.parked[state.active]
        for key in leaving:
            leaving[key] = parameters[key].detach().clone()
        for key, tensor in {**state.base, **({} if name is None else state.parked[name])}.items():
            if state.active is not None or name is not None:
                parameters[key].copy_(tensor)
    state.active = name
    for frame, _ in frames_of(model):
        frame.active_adapter = name
    for tower in towers_of(model):
        tower.active_side_adapter = name
    for key, parameter in parameters.items():
        parts = key.split(".")
        of_adapter = any(room in parts for room in HOLDERS)
        own = name is not None and (belongs(key, name) if of_adapter else key in state.parked[name])
        # Those of a quantized base may be integers, which cannot learn.
        trains = parameter.is_floating_point() and (own or (name is None and not of_adapter))
        parameter.requires_grad_(trains)


def active_adapter(model: Any) -> str | None:
    return state_of(model).active


def adapter_names(model: Any) -> list[str]:
    return list(state_of(model).configs)


def remove_adapter(model: Any, name: str) -> None:
    """Takes an adapter out of the model; the base is active if it was. Raises ValueError for an unknown name, and for
    an adapter that a fusion reads."""
    state = state_of(model)
    for other, config in state.configs.items():
        if isinstance(config, FusionConfig) and name in config.adapters:
            raise ValueError(f"the fusion {other!r} reads the adapter {name!r}; remove the fusion first")
    if name not in state.configs or state.active == name:
        activate(model, None if name in state.configs else name)
    del state.configs[name], state.parked[name]
    for frame, _ in frames_of(model):
        for adapters in (frame.sublayer_adapters, frame.norm_adapters, frame.adapter_fusions):
            if name in adapters:
                del adapters[name]
    for tower in towers_of(model):
        if name in tower.side_adapters:
            del tower.side_adapters[name]


def save_adapter(model: Any, folder: str | Path, name: str | None = None) -> None:
    """Writes one adapter (default: the active one), its norms and its head, and nothing of the base, into a folder.

    Raises ValueError for an unknown name, or without a name if none is active.
    """
    state = state_of(model)
    name = state.active if name is None else name
    if name not in state.configs:
        raise ValueError(
            f"there is no adapter {name!r} to save; the adapters are: {', '.join(state.configs) or 'none'}"
        )
    config = state.configs[str(name)]
    members = list(config.adapters) if isinstance(config, FusionConfig) else []
    names = [str(name), *members]
    tensors = {key: value for key, value in model.state_dict().items() if any(belongs(key, one) for one in names)}
    parameters = dict(model.named_parameters())
    owned = {key: parameters[key] if state.active == name else tensor for key, tensor in state.parked[name].items()}
    folder = Path(folder)
    saved = {key: tensor.detach().cpu().contiguous() for key, tensor in {**tensors, **owned}.items()}
    about = {
        "name": name,
        "adapter": dataclasses.asdict(config),
        "base_model": model.name_or_path or None,
        "model_type": model.config.model_type,
        "architecture": type(model).__name__,
        "id2label": model.config.id2label,
    }
    if members:
        about["members"] = {member: dataclasses.asdict(state.configs[member]) for member in members}
    with saving_into(folder) as staging:
        save_file(saved, staging / WEIGHTS_FILE, metadata={"format": "pt"})
        write_json(staging / CONFIG_FILE, about)


def load_adapter(model: Any, folder: str | Path, name: str | None = None, *, head: bool = True) -> str:
    """Adds the adapter (or fusion, with its adapters) of a folder under `name` (default: the one it was saved under),
    activates it, returns the name.

    head: take its head and norms, too; without them it goes into any class of its family.

    Raises ValueError for a folder without an adapter, a damaged file, a model of another class or shape than it was
    trained on, and a name that is taken. The model is then as it was before.
    """
    from safetensors import SafetensorError

    folder = Path(folder)
    try:
        about = {"base_model": None, "members": {}, **read_object(folder / CONFIG_FILE)}
        saved = load_file(folder / WEIGHTS_FILE)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(
            f"{str(folder)!r} holds no bottleneck adapter that can be read ({error}); give a folder that save_adapter"
            " wrote"
        ) from error
    settings = _saved_settings(about, folder)
    if head and about["architecture"] != type(model).__name__:
        raise ValueError(
            f"the adapter in {str(folder)!r} is for {about['architecture']}, not {type(model).__name__}; load that"
            " class"
        )
    if about["model_type"] != model.config.model_type:
        raise ValueError(
            f"the adapter in {str(folder)!r} is for models of type {about['model_type']!r}, not"
            f" {model.config.model_type!r}; load its base ({about['base_model']})"
        )
    before, state = active_adapter(model), state_of(model)
    name = name or about["name"]
    names = {about["name"]: name}  # as saved -> in the model
    names |= {member: _free_name(state, member, name) for member in about["members"]}
    added: list[str] = []
    try:
        for member in about["members"]:
            add_adapter(model, names[member], settings[member])
            added.append(names[member])
        if added:
            add_fusion(model, name, added)
        else:
            add_adapter(model, name, settings[about["name"]])
        added.append(name)
        parameters = dict(model.named_parameters())
        renamed = {_renamed(key, names): tensor for key, tensor in saved.items()}
        if not head:
            renamed = {key: value for key, value in renamed.items() if any(belongs(key, one) for one in added)}
        _check_fit(model, name, added, renamed, parameters, about, folder, head)
    except ValueError:
        for one in reversed(added):
            remove_adapter(model, one)
        activate(model, before)
        raise
    with torch.no_grad():
        for key, tensor in renamed.items():
            parameters[key].copy_(tensor)
    return name


def _saved_settings(about: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The settings of the adapters of a folder by name, of a fusion those of its members."""
    wrong = next((key for key, kind in _SAVED.items() if not isinstance(about.get(key), kind)), None)
    reason = f"its {wrong!r} is {about.get(wrong)!r}" if wrong else ""
    if not wrong:
        try:
            parts = about["members"] or {about["name"]: about["adapter"]}
            return {name: _settings(fields) for name, fields in parts.items()}
        except (ValueError, TypeError, AttributeError) as error:
            reason = str(error)
    raise ValueError(
        f"the adapter in {str(folder)!r} is of a newer version, or damaged ({reason}); update this package, or save or"
        " download the adapter again"
    )


def _free_name(state: AdapterState, member: str, name: str) -> str:
    """What a fusion's adapter is called in the model: as it was saved, if that is free."""
    return f"{name}_{member}" if member in state.configs or member == name else member


def _renamed(key: str, names: Mapping[str, str]) -> str:
    for old, new in names.items():
        for room in HOLDERS:
            if f".{room}.{old}." in key:
                return key.replace(f".{room}.{old}.", f".{room}.{new}.")
    return key


def _check_fit(
    model: Any,
    name: str,
    added: Sequence[str],
    saved: Mapping[str, Tensor],
    parameters: Mapping[str, nn.Parameter],
    about: Mapping[str, Any],
    folder: Path,
    head: bool,
) -> None:
    """Refuses tensors of an adapter that have no place in the model, are missing, or of another shape."""
    owned = state_of(model).parked[name] if head else {}
    expected = {key for key in parameters if any(belongs(key, one) for one in added) or key in owned}
    wrong = sorted(expected ^ set(saved)) or [
        key for key in sorted(expected) if parameters[key].shape != saved[key].shape
    ]
    if not wrong:
        return
    down = next((tensor for key, tensor in saved.items() if key.endswith((".down.weight", ".downs.0.weight"))), None)
    width = model.config.hidden_size
    if down is not None and down.shape[-1] != width:
        raise ValueError(
            f"the adapter in {str(folder)!r} is for a model of width {down.shape[-1]}, and this one's is {width}; load"
            f" its base ({about['base_model']})"
        )
    raise ValueError(
        f"the adapter in {str(folder)!r} does not fit the model at {wrong[0]!r}; load its base "
        f"({about['base_model']}) with num_labels={len(about['id2label'])}"
    )


def _is_after_norm(frame: nn.Module, config: AdapterConfig) -> bool:
    from ..normalization.residual import PostNorm

    return config.kind == "pfeiffer" and isinstance(frame, PostNorm)
