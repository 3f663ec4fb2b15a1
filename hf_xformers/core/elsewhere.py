# SPDX-License-Identifier: Apache-2.0
"""A call's context on another device, for models whose layers are divided over several (Accelerate's `device_map`).

Accelerate moves the arguments of every layer to the layer's device, the context by its `to`. What layers put into
a call there is found by later layers, wherever these are.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import field
from typing import Any

import torch
from torch import Tensor, nn

from .prepared import Prepared
from .reading_weights import weight_of


class Moved(Prepared):
    """Of a call that has been on two devices: (value, its twin) by the value's id and the device."""

    twins: dict[tuple[int, torch.device], tuple[Any, Any]] = field(default_factory=dict)


class Elsewhere(MutableMapping):
    """Another mapping, whose values are read on `device` and written as they are."""

    def __init__(self, kept: MutableMapping[Any, Any], device: torch.device, moved: dict) -> None:
        self.kept, self.device, self.moved = kept, device, moved

    def __getitem__(self, key: Any) -> Any:
        return _on(self.kept[key], self.device, self.moved)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.kept[key] = value

    def __delitem__(self, key: Any) -> None:
        del self.kept[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.kept)

    def __len__(self) -> int:
        return len(self.kept)


def context_on(context: Any, device: torch.device) -> Any:
    """The copy of a `Call` on a device."""
    made = context.made.kept if isinstance(context.made, Elsewhere) else context.made
    moved = made.setdefault((Moved, None), Moved()).twins
    twin = copy.copy(context)
    for name, value in vars(context).items():
        setattr(twin, name, _on(value, device, moved) if name != "made" else Elsewhere(made, device, moved))
    return twin


def result_on(result: Any, device: torch.device) -> Any:
    """A `SublayerOutput` on a device; this very object, if it is there."""
    return result if result.output.device == device else _on(result, device, {})


def _on(value: Any, device: torch.device, moved: dict) -> Any:
    """`value` with the tensors in it on `device`; a copy is made once, unless gradients go through it: those belong to
    the layer that reads it, which may run again for them."""
    if isinstance(value, Tensor):
        if value.device == device:
            return value
        if value.requires_grad:
            return value.to(device)
    elif isinstance(value, nn.Module):
        return _module_on(value, device)
    elif isinstance(value, (MutableMapping, Elsewhere)):
        return Elsewhere(value, device, moved)
    elif isinstance(value, Prepared):  # it may hold modules
        return _twin(value, device, moved)
    elif not isinstance(value, (tuple, list)) and not type(value).__module__.startswith("hf_xformers."):
        return value
    key = (id(value), device)
    if key not in moved:
        moved[key] = value, _twin(value, device, moved)
    return moved[key][1]


def _twin(value: Any, device: torch.device, moved: dict) -> Any:
    if isinstance(value, Tensor) or hasattr(value, "to"):
        return value.to(device)
    if isinstance(value, (tuple, list)):
        parts = [_on(part, device, moved) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    twin = copy.copy(value)
    for name, part in vars(value).items() if hasattr(value, "__dict__") else ():
        object.__setattr__(twin, name, _on(part, device, moved))
    return twin


def _module_on(module: nn.Module, device: torch.device) -> nn.Module:
    """A module that computes the same on a device, with parameters that hand their gradients to the module's own."""
    own: Mapping[str, Any] = {**module._parameters, **module._buffers}
    own = {name: None if tensor is None else weight_of(module, name).to(device) for name, tensor in own.items()}
    twin = copy.copy(module)
    for name in ("forward", "_hf_hook", "_old_forward"):  # Accelerate's, which would go back
        twin.__dict__.pop(name, None)
    inner = {name: None if part is None else _module_on(part, device) for name, part in module._modules.items()}
    twin.__dict__.update(_parameters={}, _buffers={}, _modules=inner, **own)
    return twin
