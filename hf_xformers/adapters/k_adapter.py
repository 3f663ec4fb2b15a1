# SPDX-License-Identifier: Apache-2.0
"""K-Adapter (Wang et al. 2021, arXiv 2002.01808, section 3.1): a small network next to a frozen encoder, reading the
states of some of its layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..blocks.base import XFormerLayer
from ..core.evaluating import evaluating
from ..stacks.driver import Pass

INIT_STD = 2e-4  # of the maps into and out of the small encoders


@dataclass(frozen=True)
class KAdapterConfig:
    """Settings of a side network.

    Args:
        layers: states that it reads, ascending: 0 is the embedding, 1 the first layer; None: the first, the middle and
            the last one (the paper: 0, 11 and 23 of 24 layers).
        adapter_hidden: width of the small encoders; None: three quarters of the model's (the paper: 768 of 1024).
        adapter_layers: their layers.
        adapter_heads: their heads; None: the model's.

    Raises ValueError for values out of range.
    """

    layers: list[int] | None = None
    adapter_hidden: int | None = None
    adapter_layers: int = 2
    adapter_heads: int | None = None
    kind: str = "k_adapter"

    def __post_init__(self) -> None:
        for name in ("adapter_hidden", "adapter_layers", "adapter_heads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` of a K-Adapter must be at least 1, got {value}")
        if self.layers is not None and (not self.layers or self.layers != sorted(set(self.layers))):
            raise ValueError(f"`layers` of a K-Adapter are states in ascending order, got {self.layers}")

    @property
    def trains_norms(self) -> bool:
        return False

    def places(self, steps: int) -> list[int]:
        """The states read of a model of so many layers. Raises ValueError for one that is not there."""
        places = sorted({0, steps // 2, steps}) if self.layers is None else self.layers
        if places[0] < 0 or places[-1] > steps:
            raise ValueError(
                f"a K-Adapter is to read the states {places}, and the model has 0 (the embedding) to {steps}; correct"
                " `layers`"
            )
        return places

    def shape(self, hidden_size: int, heads: int) -> tuple[int, int]:
        """(width, heads) of the small encoders. Raises ValueError for a width that heads do not divide."""
        heads = self.adapter_heads or heads
        width = self.adapter_hidden or max(heads, 3 * hidden_size // 4 // heads * heads)
        if width % heads:
            raise ValueError(f"a K-Adapter's `adapter_hidden` {width} is not divided by its {heads} heads; change one")
        return width, heads


class KAdapter(nn.Module):
    """x_i = h_{k_i} + a_{i-1}, a_i = x_i + Up(Encoder(Down(x_i))) over the states h_k that are read (a_0 = 0), and the
    output C [h_last; a_last].

    C begins as h_last alone, so that a fresh adapter changes nothing. Padding is masked in the small encoders (the
    published code lets it in).
    """

    def __init__(self, model_config: Any, config: KAdapterConfig, steps: int):
        super().__init__()
        outer = model_config.hidden_size
        width, heads = config.shape(outer, model_config.num_attention_heads)
        self.places = config.places(steps)
        self.downs = nn.ModuleList(nn.Linear(outer, width) for _ in self.places)
        self.ups = nn.ModuleList(nn.Linear(width, outer) for _ in self.places)
        self.encoders = nn.ModuleList(
            nn.ModuleList(
                nn.TransformerEncoderLayer(
                    width,
                    heads,
                    4 * width,
                    dropout=model_config.hidden_dropout_prob,
                    activation="gelu",
                    batch_first=True,
                )
                for _ in range(config.adapter_layers)
            )
            for _ in self.places
        )
        self.combine = nn.Linear(2 * outer, outer)
        for linear in (*self.downs, *self.ups):
            nn.init.normal_(linear.weight, std=INIT_STD)
            nn.init.zeros_(linear.bias)
        with torch.no_grad():
            self.combine.weight.copy_(torch.cat([torch.eye(outer), torch.zeros(outer, outer)], dim=1))
            self.combine.bias.zero_()

    def knowledge(self, states: list[Tensor], padding_mask: Tensor | None) -> Tensor:
        """a_last, [B, T, D]; padding_mask boolean [B, T], true for real tokens."""
        hidden: Tensor | None = None
        left_out = None
        if padding_mask is not None:  # a row of padding alone reads itself: a softmax over nothing is no number
            left_out = ~padding_mask & padding_mask.any(1, keepdim=True)
        encoders: Any = self.encoders
        for place, down, layers, up in zip(self.places, self.downs, encoders, self.ups):
            x = states[place] if hidden is None else states[place] + hidden
            inner = down(x)
            for layer in layers:
                inner = layer(inner, src_key_padding_mask=left_out)
            hidden = x + up(inner)
        return hidden  # type: ignore[return-value]

    def forward(self, states: list[Tensor], last: Tensor, padding_mask: Tensor | None) -> Tensor:
        return self.combine(torch.cat([last, self.knowledge(states, padding_mask)], dim=-1))


class SideHooks:
    """Gathers the states of a tower's layers and puts what the active side network makes of them in place of its last
    ones. An object, so that copies of a model have their own."""

    def __init__(self, tower: Any) -> None:
        self.tower = tower
        self.states: list[Tensor] = []
        tower.stack.register_forward_pre_hook(self.begin)
        for layer in tower.layers:
            layer.register_forward_hook(self.collect)
        tower.register_forward_hook(self.finish)

    @property
    def active(self) -> KAdapter | None:
        name = self.tower.active_side_adapter
        return self.tower.side_adapters[name] if name in self.tower.side_adapters else None

    def begin(self, stack: nn.Module, args: tuple[Pass]) -> None:
        self.states = [args[0].hidden_states]

    def collect(self, layer: nn.Module, args: tuple, output: Any) -> None:
        self.states.append(output[0])

    def finish(self, tower: nn.Module, args: tuple, output: Any) -> Any:
        adapter = self.active
        if adapter is not None:
            output.last_hidden_state = adapter(self.states, output.last_hidden_state, output.padding_mask)
        self.states = []
        return output


def _is_tower(module: nn.Module) -> bool:
    layers = getattr(module, "layers", None)
    return hasattr(module, "stack") and isinstance(layers, nn.ModuleList) and isinstance(layers[0], XFormerLayer)


def check_encoder(model: Any) -> Any:
    """The tower of an encoder that a side network can be put next to.

    Raises ValueError for decoders, for two towers, and for layers that do not have a state of every token.
    """
    towers = [module for module in model.modules() if _is_tower(module)]
    config = model.config
    if len(towers) != 1 or config.is_decoder or config.is_encoder_decoder:
        raise ValueError(
            f"a K-Adapter reads whole texts next to an encoder, and {type(model).__name__} is a decoder or has more"
            " than one tower; take Houlsby's or Pfeiffer's adapters"
        )
    if config.unpad_inputs:
        raise ValueError("a K-Adapter reads rows of one length, and `unpad_inputs` takes padding out; switch it off")
    return towers[0]


def count_layers(model: Any, tower: Any) -> int:
    """How many layers the tower runs, by running it on a text of eight tokens.

    Raises ValueError for layers whose states are not of all tokens.
    """
    seen: list[tuple[int, ...]] = []
    hooks = [layer.register_forward_hook(lambda m, a, out: seen.append(tuple(out[0].shape))) for layer in tower.layers]
    place = next(model.parameters()).device
    try:
        with torch.no_grad(), evaluating(model):
            model.base_model(input_ids=torch.zeros(1, 8, dtype=torch.long, device=place))
    finally:
        for hook in hooks:
            hook.remove()
    if not seen or any(shape != (1, 8, model.config.hidden_size) for shape in seen):
        raise ValueError(
            f"a K-Adapter adds up the states of layers, and those of {type(model).__name__} differ in length or width;"
            " take Houlsby's or Pfeiffer's adapters"
        )
    return len(seen)
