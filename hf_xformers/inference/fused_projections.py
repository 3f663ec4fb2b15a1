# SPDX-License-Identifier: Apache-2.0
"""Queries, keys and values from one matrix product in place of three (FasterTransformer, section "encoder").

```python
fuse_projections(model)  # in place; `split_projections(model)` undoes it
```

One large product keeps a device busier than three small ones. The model computes the same and is saved as before:
state dicts have the three projections apart, and load into models of both kinds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..attention.shared.base import Attention
from ..core.linear_maps import is_plain_linear

_NAMES = ("q_proj", "k_proj", "v_proj")


class JoinedLinear(nn.Linear):
    """x -> (q, k, v) side by side, [..., D] -> [..., H d + 2 K d]. In state dicts its rows have the names of the
    projections that they were, which stand next to it in the model. widths: rows of each."""

    def __init__(self, parts: list[nn.Linear]):
        first = parts[0]
        self.widths = [part.out_features for part in parts]
        bias, place = first.bias is not None, {"device": "meta", "dtype": first.weight.dtype}
        super().__init__(first.in_features, sum(self.widths), bias=bias, **place)
        with torch.no_grad():
            self.weight = _parameter([part.weight for part in parts])
            self.bias = _parameter([part.bias for part in parts]) if bias else None  # type: ignore[assignment]
        self.train(first.training)

    def rows(self, index: int) -> slice:
        """Where projection `index` stands."""
        begin = sum(self.widths[:index])
        return slice(begin, begin + self.widths[index])

    def _kept(self) -> list[str]:
        return ["weight"] if self.bias is None else ["weight", "bias"]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        around = prefix.removesuffix("qkv_proj.")
        for kind in self._kept():
            whole = getattr(self, kind)
            whole = whole if keep_vars else whole.detach()
            for index, name in enumerate(_NAMES):
                destination[f"{around}{name}.{kind}"] = whole[self.rows(index)]

    def join(self, state_dict: dict[str, Tensor], around: str) -> None:
        """Puts this one's tensors into `state_dict`, where it has those of all projections under `around`."""
        for kind in self._kept():
            names = [f"{around}{name}.{kind}" for name in _NAMES]
            if all(name in state_dict for name in names):
                state_dict[f"{around}qkv_proj.{kind}"] = torch.cat([state_dict[name] for name in names])


class JoinedPart(nn.Module):
    """One of the projections by itself, for what asks for it alone; its numbers are those of the joined one."""

    def __init__(self, attention: Attention, index: int):
        super().__init__()
        self._owner, self.index = (attention,), index  # in a tuple: no module of this one

    @property
    def whole(self) -> Any:
        return self._owner[0].qkv_proj

    @property
    def weight(self) -> Tensor:
        return self.whole.weight[self.whole.rows(self.index)]

    @property
    def bias(self) -> Tensor | None:
        bias = self.whole.bias
        return None if bias is None else bias[self.whole.rows(self.index)]

    @property
    def in_features(self) -> int:
        return self.whole.in_features

    @property
    def out_features(self) -> int:
        return self.whole.widths[self.index]

    def forward(self, states: Tensor) -> Tensor:
        return F.linear(states, self.weight, self.bias)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """The joined projection reads what has this one's names."""


def _parameter(parts: list[Any]) -> nn.Parameter:
    return nn.Parameter(torch.cat([part.detach() for part in parts]), requires_grad=parts[0].requires_grad)


def fuse_projections(model: nn.Module) -> int:
    """Joins the projections of every self-attention of `model`, in place; those of cross-attention read two texts and
    stay. Returns how many attentions have joined projections now.

    Adapters, quantization and sharding know the projections by their names: they come first, and are merged or left
    alone; gradients reach a joined projection as any other.

    Raises:
        ValueError: no self-attention in `model`, or one whose queries, keys and values are not three plain projections
            of one input; nothing is changed then.
    """
    found = [module for module in model.modules() if isinstance(module, Attention) and not module.cross]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no self-attention of this package, whose projections could join."
        )
    apart = [attention for attention in found if _joined(attention) is None]
    for attention in apart:
        if reason := _why_not(attention):
            raise ValueError(
                f"attention {attention.spec.type!r} of layer {attention.layer_idx} {reason}; leave its model as it is."
            )
    for attention in apart:
        attention.qkv_proj = JoinedLinear([getattr(attention, name) for name in _NAMES])
        for index, name in enumerate(_NAMES):
            setattr(attention, name, JoinedPart(attention, index))
    return len(found)


def split_projections(model: nn.Module) -> int:
    """Undoes [`fuse_projections`], in place. Returns how many attentions had joined projections.

    Raises `ValueError` for a joined projection that is no plain one any more.
    """
    found = [module for module in model.modules() if isinstance(module, Attention) and _joined(module) is not None]
    for attention in found:
        if type(attention.qkv_proj) is not JoinedLinear:
            raise ValueError(
                f"the joined projection of layer {attention.layer_idx} has become a"
                f" {type(attention.qkv_proj).__name__}; merge or remove what was put on it first."
            )
    for attention in found:
        whole: Any = attention.qkv_proj
        for index, name in enumerate(_NAMES):
            bias = whole.bias is not None
            linear = nn.Linear(whole.in_features, whole.widths[index], bias=bias, device="meta")
            for kind in ("weight", "bias") if bias else ("weight",):
                kept = getattr(whole, kind)
                part = kept.detach()[whole.rows(index)].clone()
                setattr(linear, kind, nn.Parameter(part, requires_grad=kept.requires_grad))
            setattr(attention, name, linear.train(whole.training))
        attention.qkv_proj = None
    return len(found)


def _joined(attention: Attention) -> Any:
    return getattr(attention, "qkv_proj", None)  # a mechanism without projections of heads does not have it


def _why_not(attention: Attention) -> str:
    if not type(attention).joins_projections:
        return "makes queries, keys and values in a way of its own, not by three projections of one input"
    parts = [getattr(attention, name) for name in _NAMES]
    if not all(isinstance(part, nn.Linear) for part in parts):
        return "does not have three projections of one input"
    if not all(is_plain_linear(part) for part in parts):
        return "has projections with an adapter, a hook, quantized or divided weights, which know them one by one"
    first = parts[0].weight
    tensors = [(part.weight, part.bias) for part in parts]
    alike = [[None if x is None else (x.dtype, x.device, x.requires_grad) for x in each] for each in tensors]
    if any(each != alike[0] for each in alike) or any(part.in_features != first.shape[1] for part in parts):
        return "has projections of different kinds (types, devices, biases, or some of them frozen)"
    return ""
