# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning layer by layer, as ULMFiT does (Howard and Ruder 2018, arXiv 1801.06146, sections 3.2 and 3.3): rates
that fall from layer to layer, layers that join from the top, and the slanted triangular schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState

from ..core.given_options import refuse_alone

if TYPE_CHECKING:
    from transformers import TrainingArguments

# Words in the names of what stands below the layers, in any tower.
_BELOW = ("embed", "position", "wte", "wpe", "shared")


@dataclass
class LayerwiseOptions:
    """Which layers learn when, and how fast."""

    layer_decay: float | None = field(
        default=None,
        metadata={
            "help": (
                "Divide the learning rate by this from each layer to the one below it, the embeddings last; the head"
                " keeps --learning_rate. ULMFiT: 2.6."
            )
        },
    )
    unfreeze_every: float | None = field(
        default=None,
        metadata={
            "help": (
                "Train the head alone at first, and every X epochs one layer more, from the top; the embeddings last."
                " ULMFiT: 1; parts of an epoch where all layers are to learn in few."
            )
        },
    )
    slanted_triangular: bool = field(
        default=False,
        metadata={
            "help": (
                "ULMFiT's schedule in place of --lr_scheduler_type and its warm-up: a steep linear rise over"
                " --cut_frac of the steps, then a linear fall, from and to 1/--slanted_ratio of the rate."
            )
        },
    )
    cut_frac: float = field(
        default=0.1, metadata={"help": "Share of the steps in which the slanted triangular rate rises."}
    )
    slanted_ratio: float = field(
        default=32.0, metadata={"help": "How many times lower than its peak the slanted triangular rate begins."}
    )

    def check_layerwise(self, args: TrainingArguments, peft: str | None) -> None:
        """Raises ValueError for values out of range and for company that has no meaning."""
        if self.layer_decay is not None and not 1 <= self.layer_decay < math.inf:
            inverse = f", such as {1 / self.layer_decay:.3g}" if 0 < self.layer_decay < 1 else ""
            raise ValueError(
                f"--layer_decay {self.layer_decay:g} divides the rate from layer to layer downwards, so it must be at"
                f" least 1; give what to divide by{inverse}"
            )
        if self.unfreeze_every is not None:
            if not 0 < self.unfreeze_every < math.inf:
                raise ValueError(
                    f"--unfreeze_every {self.unfreeze_every:g} is a number of epochs; give one above 0, such as 1, or"
                    " 0.25 for a quarter of an epoch"
                )
            if peft is not None:
                raise ValueError(
                    f"--peft {peft} keeps all layers frozen, and --unfreeze_every lets them learn one after the other;"
                    " drop one"
                )
            if args.world_size > 1:
                raise ValueError(
                    "--unfreeze_every changes what is trained, which processes settle when they start; run it in one"
                    " process, without a launcher"
                )
        if not 0 < self.cut_frac < 1:
            raise ValueError(f"--cut_frac {self.cut_frac:g} is a share of the steps; give one between 0 and 1")
        if not 1 <= self.slanted_ratio < math.inf:
            raise ValueError(f"--slanted_ratio {self.slanted_ratio:g} must be at least 1; ULMFiT's is 32")
        if not self.slanted_triangular:
            refuse_alone(self, ("cut_frac", "slanted_ratio"), "--slanted_triangular")
        if self.slanted_triangular and getattr(self, "vaswani_lr_scale", None) is not None:
            raise ValueError("--slanted_triangular and --vaswani_lr_scale are two schedules of the rate; drop one")

    @property
    def goes_by_layers(self) -> bool:
        return self.unfreeze_every is not None or self.layer_decay not in (None, 1)

    def layerwise_record(self) -> dict[str, Any]:
        """What was chosen, for the record of a run."""
        found: dict[str, Any] = {"layer_decay": self.layer_decay, "unfreeze_every": self.unfreeze_every}
        if self.slanted_triangular:
            found["slanted_triangular"] = {"cut_frac": self.cut_frac, "ratio": self.slanted_ratio}
        return {name: value for name, value in found.items() if value is not None}


# ------------------------------------------------------------------------------------------------ the schedule


def slanted_share(step: int, steps: int, cut_frac: float = 0.1, ratio: float = 32.0) -> float:
    """The rate at a step, counted from 0, as a share of the highest (equation 3 of the paper).

    cut = floor(steps * cut_frac); p = step / cut before it, then 1 - (step - cut) / (cut * (1 / cut_frac - 1)); the
    share is (1 + p (ratio - 1)) / ratio. The denominator of the fall is written as steps - cut, which is the same
    number where steps * cut_frac is whole; elsewhere the paper's would let the rate pass below its end, and below 0.
    """
    cut = math.floor(steps * cut_frac + 1e-9)
    share = step / cut if step < cut else 1.0 - (step - cut) / max(steps - cut, 1)
    return (1.0 + max(share, 0.0) * (ratio - 1.0)) / ratio


def slanted_schedule(
    optimizer: torch.optim.Optimizer, steps: int, cut_frac: float, ratio: float
) -> torch.optim.lr_scheduler.LambdaLR:
    """[`slanted_share`] of every group's own rate."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: slanted_share(done, steps, cut_frac, ratio))


# ------------------------------------------------------------------------------------------------ layers


class LayerGroups:
    """The parameters of a model by depth: 0 for the embeddings, then a group for each layer (an encoder's before a
    decoder's), and the head on top with what stands between it and the last layer.

    A parameter that is used at several depths, such as that of shared layers or of an embedding that is the head's,
    too, belongs to the highest.

    Raises ValueError for a model without a list of layers.
    """

    def __init__(self, model: nn.Module) -> None:
        lists = _layer_lists(model)
        if not lists:
            raise ValueError(
                f"{type(model).__name__} has no list of layers, which --layer_decay and --unfreeze_every go by; leave"
                " them out"
            )
        starts, count = {}, 0
        for name, layers in lists:
            starts[name] = count
            count += len(layers)
        self.top = count + 1
        self._depth: dict[nn.Parameter, int] = {}
        passed: list[str] = []  # lists of which a parameter was seen
        for name, parameter in model.named_parameters(remove_duplicate=False):
            inside = next((entry for entry in starts if name.startswith(f"{entry}.")), None)
            if inside is not None:
                passed += [inside] if inside not in passed else []
                depth = 1 + starts[inside] + int(name.removeprefix(f"{inside}.").partition(".")[0])
            elif not passed or (len(passed) < len(lists) and any(word in name for word in _BELOW)):
                depth = 0
            elif len(passed) < len(lists):  # such as the norm at the end of an encoder
                depth = starts[passed[-1]] + len(dict(lists)[passed[-1]])
            else:
                depth = self.top
            self._depth[parameter] = max(depth, self._depth.get(parameter, 0))

    def depth(self, parameter: nn.Parameter) -> int:
        return self._depth[parameter]

    def parameters(self) -> list[nn.Parameter]:
        return list(self._depth)


def _layer_lists(model: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """(name, layers) of every tower, in the order in which a text passes them."""
    from ..modeling_tower import XFormerTower

    towers: list[tuple[str, Any]] = []
    for name, module in model.named_modules():
        if isinstance(module, XFormerTower) and not any(name.startswith(f"{outer}.") for outer, _ in towers):
            towers.append((name, module))
    if towers:
        return [(f"{name}.layers" if name else "layers", tower.layers) for name, tower in towers]
    found: list[tuple[str, nn.ModuleList]] = []
    for name, module in model.named_modules():  # of other families: the lists that are in no other list
        if isinstance(module, nn.ModuleList) and (len(module) > 1 or _is_named_like_layers(name)):
            if not any(name.startswith(f"{outer}.") for outer, _ in found):
                found.append((name, module))
    return found


def _is_named_like_layers(name: str) -> bool:
    return name.rpartition(".")[2] in ("layer", "layers", "h", "block")


def spread_rates(optimizer: torch.optim.Optimizer, groups: LayerGroups, decay: float) -> None:
    """Divides the groups of a fresh optimizer by depth, the highest first, and gives each the rate of its depth:
    rate_l = rate_top / decay^(top - l)."""
    spread = []
    for order, group in enumerate(optimizer.param_groups):
        by_depth: dict[int, list[Any]] = {}
        for parameter in group["params"]:
            by_depth.setdefault(groups.depth(parameter), []).append(parameter)
        for depth, parameters in by_depth.items():
            rate = group["lr"] / decay ** (groups.top - depth)
            spread.append((-depth, order, {**group, "params": parameters, "lr": rate}))
    optimizer.param_groups[:] = [group for _, _, group in sorted(spread, key=lambda entry: entry[:2])]


class GradualUnfreezing(TrainerCallback):
    """Lets one group of [`LayerGroups`] more learn every few epochs, or parts of one, the head first.

    What is frozen stands in the optimizer without a gradient, so that it has no state there, does not decay, and needs
    no new optimizer when its time comes. Which groups learn follows from the epoch, also after a resume.
    """

    def __init__(self, groups: LayerGroups, every: float) -> None:
        self.groups, self.every = groups, every
        self._learning = [parameter for parameter in groups.parameters() if parameter.requires_grad]
        self.lowest = groups.top  # depth of the lowest group that has learned

    def trained(self) -> int:
        """How many parameters have learned so far."""
        return sum(p.numel() for p in self._learning if self.groups.depth(p) >= self.lowest)

    def _unfreeze(self, state: TrainerState) -> None:
        # Epochs are counted in steps' shares of one, whose sum may lie a rounding below a whole number of `every`.
        joined = math.floor((state.epoch or 0) / self.every + 1e-6)
        self.lowest = max(0, self.groups.top - joined)
        for parameter in self._learning:
            parameter.requires_grad_(self.groups.depth(parameter) >= self.lowest)
            if not parameter.requires_grad:
                parameter.grad = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._unfreeze(state)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._unfreeze(state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        for parameter in self._learning:
            parameter.requires_grad_(True)
