# SPDX-License-Identifier: Apache-2.0
"""Bottleneck adapters inside the residual frames of layers, one of several active at a time.

An adapter is a(h) = h + act(h W_d + b_d) W_u + b_u. It is hooked into a layer's residual frames, so that neither the
model's code nor the names of its tensors change: a base checkpoint loads into an adapted model and the other way
round.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2FN

from ..blocks.base import SublayerPlan, XFormerLayer
from .fusion import FusionConfig
from .k_adapter import KAdapterConfig

KINDS = ("houlsby", "pfeiffer")
STATE = "_bottleneck_adapters"
# Of a residual frame, and of a tower.
HOLDERS = ("sublayer_adapters", "norm_adapters", "adapter_fusions", "side_adapters")


@dataclass(frozen=True)
class AdapterConfig:
    """Settings of an adapter.

    Args:
        kind: `houlsby`, one after every sublayer before the residual sum, with the norms trained along (Houlsby et al.
            2019, section 2.1: LN(x + a(f(x)))); `pfeiffer`, one per layer after the feed-forward: with the sum s = x +
            f(x), y = LN(s + act(LN(s) W_d) W_u), the norm used twice as it is (Pfeiffer et al. 2021, appendix); in
            frames without a norm after the sum it stands where Houlsby's does.
        bottleneck: inner width; None: hidden width / reduction_factor.
        act: activation; None: gelu (houlsby), relu (pfeiffer).
        init_scale: standard deviation of the fresh maps, so that a fresh adapter hardly changes anything.
        train_norms: train the layers' norms along; None: as the paper of `kind`.

    Raises ValueError for an unknown type or activation, a width below 1, and an `init_scale` that is not above 0.
    """

    kind: str = "houlsby"
    bottleneck: int | None = None
    reduction_factor: float | int = 16
    act: str | None = None
    init_scale: float | int = 1e-3
    train_norms: bool | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown type of adapter {self.kind!r}: choose one of {', '.join(KINDS)}")
        if self.activation not in ACT2FN:
            raise ValueError(
                f"unknown activation act={self.act!r} of an adapter; take gelu, relu, silu or another one"
            )
        if (self.bottleneck is not None and self.bottleneck < 1) or self.reduction_factor <= 0:
            raise ValueError(
                f"an adapter's width must be at least 1; got bottleneck={self.bottleneck}, "
                f"reduction_factor={self.reduction_factor}"
            )
        if not self.init_scale > 0:
            raise ValueError(f"`init_scale` of an adapter must be above 0, or nothing learns; got {self.init_scale}")

    @property
    def activation(self) -> str:
        return self.act or {"houlsby": "gelu", "pfeiffer": "relu"}[self.kind]

    @property
    def trains_norms(self) -> bool:
        return self.kind == "houlsby" if self.train_norms is None else self.train_norms

    def width(self, hidden_size: int) -> int:
        return self.bottleneck or max(1, int(hidden_size / self.reduction_factor))


class Bottleneck(nn.Module):
    """[..., D] -> [..., D]: act(h W_d + b_d) W_u + b_u, what an adapter adds."""

    def __init__(self, hidden_size: int, config: AdapterConfig):
        super().__init__()
        width = config.width(hidden_size)
        self.down, self.up = nn.Linear(hidden_size, width), nn.Linear(width, hidden_size)
        self.activation = ACT2FN[config.activation]
        for linear in (self.down, self.up):
            nn.init.trunc_normal_(
                linear.weight, std=config.init_scale, a=-2 * config.init_scale, b=2 * config.init_scale
            )
            nn.init.zeros_(linear.bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.up(self.activation(self.down(hidden_states)))


class _Hook:
    """Runs the active adapter of a residual frame. An object, not a function, so that copies of a model have their
    own."""

    def __init__(self, frame: Any, after_norm: bool):
        self.frame, self.after_norm = frame, after_norm

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Tensor) -> Tensor:
        name = self.frame.active_adapter
        fusion = self.frame.adapter_fusions[name] if name in self.frame.adapter_fusions else None
        if (name if fusion is None else fusion.members[0]) not in self._adapters:
            return output
        added = self._adapters[name](output) if fusion is None else fusion(output, self._adapters)
        if not self.after_norm:  # the module is the frame's dropout
            return output + added
        return module.forward(args[0] + added, *args[1:], **kwargs)

    @property
    def _adapters(self) -> nn.ModuleDict:
        return self.frame.norm_adapters if self.after_norm else self.frame.sublayer_adapters


Settings = AdapterConfig | FusionConfig | KAdapterConfig


@dataclass
class AdapterState:
    """Of an adapted model: the adapters' settings, which one is active, and the tensors that belong to an adapter but
    stand in the model (norms, head): those of the base and those of each adapter that is not active."""

    configs: dict[str, Settings]
    active: str | None
    base: dict[str, Tensor]
    parked: dict[str, dict[str, Tensor]]


# ------------------------------------------------------------------------------------------------ inside


def frames_of(model: nn.Module) -> Iterator[tuple[Any, SublayerPlan]]:
    """Every residual frame of every layer with its sublayer's plan; a frame that is shared comes once."""
    seen: set[int] = set()
    for layer in model.modules():
        if isinstance(layer, XFormerLayer):
            for entry in layer.plan:
                frame = layer.frame(entry)
                if id(frame) not in seen:
                    seen.add(id(frame))
                    yield frame, entry


def towers_of(model: nn.Module) -> list[Any]:
    """The towers that side networks were put next to."""
    return [module for module in model.modules() if isinstance(getattr(module, "side_adapters", None), nn.ModuleDict)]


def state_of(model: Any) -> AdapterState:
    """The model's adapters; hooks are put in the first time. Raises ValueError for a model without layers of ours."""
    found = getattr(model, STATE, None)
    if found is not None:
        return found
    frames = list(frames_of(model))
    if not frames:
        raise ValueError(f"{type(model).__name__} has no layers of this package; bottleneck adapters go into those")
    base = {key: tensor.detach().clone() for key, tensor in model.named_parameters() if _may_own(key, model)}
    for frame, _ in frames:
        frame.sublayer_adapters, frame.norm_adapters, frame.active_adapter = nn.ModuleDict(), nn.ModuleDict(), None
        frame.adapter_fusions = nn.ModuleDict()
        frame.dropout.register_forward_hook(_Hook(frame, after_norm=False), with_kwargs=True)
        if isinstance(getattr(frame, "norm", None), nn.Module):
            frame.norm.register_forward_hook(_Hook(frame, after_norm=True), with_kwargs=True)
    state = AdapterState({}, None, base, {})
    setattr(model, STATE, state)
    return state


def _may_own(key: str, model: Any) -> bool:
    """Norms of the layers, a pooler, and the parameters of the head, which stand outside the base model."""
    in_base = model.base_model is model or key.startswith(f"{model.base_model_prefix}.")
    return not in_base or _is_norm(key) or ".pooler." in f".{key}"


def owns(key: str, config: Settings) -> bool:
    return config.trains_norms or not _is_norm(key)


def _is_norm(key: str) -> bool:
    return any("norm" in part for part in key.split(".")[:-1])


def belongs(key: str, name: str) -> bool:
    return any(f".{room}.{name}." in key for room in HOLDERS)
