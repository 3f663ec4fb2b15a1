# SPDX-License-Identifier: Apache-2.0
"""Module replacing: while a student learns, its layers take the place of blocks of a frozen teacher's by chance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.cache_utils import Cache

from ..blocks.base import LayerOutput, XFormerLayer
from ..core.call import Call
from ..core.prepared import States
from .methods.theseus import Theseus


class Replacing:
    """The teacher's layers around a student's ([`Theseus`], Xu et al. 2020, arXiv 2002.02925, algorithm 1).

    In training each of the student's layers runs with probability `rate`, and else the block of L_T / L_S layers of
    the teacher in whose place it stands, without dropout, through which gradients flow. In evaluation the student runs
    alone, and with rate 1 as well: nothing is drawn then. Draws come from torch's global generator, which checkpoints
    hold.
    """

    def __init__(self, method: Theseus, teacher: Any) -> None:
        self.method, self.teacher = method, teacher
        self.rate = method.rate(0.0)
        self.drawn: list[bool] = []  # of the last pass, by layer: whether the student's ran

    # --------------------------------------------------------------------------------------------- around a run

    def check(self, student: Any) -> None:
        """Refuses models whose layers cannot stand in each other's place. Raises `ValueError`."""
        teacher = self.teacher
        for who, model in (("student", student), ("teacher", teacher)):
            config = model.config
            if config.is_encoder_decoder:
                raise ValueError(
                    f"--method theseus replaces the layers of one tower, and the {who} is an encoder-decoder; take"
                    " --method sequence_level, or distilbert with --method.cosine_weight 0"
                )
            stack = config.stack
            if stack.num_layers(config) != config.num_hidden_layers or stack.num_steps(config) != stack.num_layers(
                config
            ):
                raise ValueError(
                    f"--method theseus replaces layers that run once each, and stack {stack.type!r} of the {who} runs"
                    " them in another way; take --method distilbert"
                )
        own, theirs = student.config, teacher.config
        if theirs.stack.type not in ("plain", own.stack.type):
            raise ValueError(
                f"--method theseus lets the student's stack {own.stack.type!r} run the teacher's layers, which its"
                f" stack {theirs.stack.type!r} runs in another way; give both the same (--student.stack"
                f" {theirs.stack.type})"
            )
        if own.hidden_size != theirs.hidden_size:
            raise ValueError(
                f"--method theseus puts layers in each other's place, and the student has width {own.hidden_size}"
                f" where the teacher has {theirs.hidden_size}; leave --student.hidden_size out, or take --method"
                " distilbert"
            )
        if theirs.num_hidden_layers % own.num_hidden_layers:
            raise ValueError(
                f"--method theseus replaces equal blocks, and {theirs.num_hidden_layers} layers of the teacher cannot"
                f" be divided among {own.num_hidden_layers}; give --student.num_hidden_layers a divisor"
            )
        for slot in ("embedding", "position"):
            first, second = (getattr(config, slot).to_dict() for config in (own, theirs))
            if first != second:
                raise ValueError(
                    f"--method theseus keeps the teacher's {slot}, and the student's is {first['type']!r} in place of"
                    f" {second['type']!r} or has other settings; leave --student.{slot} out"
                )

    def put(self, student: Any) -> None:
        """Puts the teacher's layers around the student's, gives it the teacher's embedding and position, and freezes
        these."""
        self.check(student)
        own, theirs = _tower(student), _tower(self.teacher)
        self.teacher.requires_grad_(False).eval()
        for part in ("embedding", "position"):
            module = getattr(own, part)
            module.load_state_dict(getattr(theirs, part).state_dict())
            module.requires_grad_(False)
        size = len(theirs.layers) // len(own.layers)
        self.drawn = [True] * len(own.layers)
        for number, layer in enumerate(own.layers):
            block = [cast(XFormerLayer, old) for old in theirs.layers[number * size : (number + 1) * size]]
            self._wrap(layer, number, block)

    def merge(self, student: Any) -> None:
        """Takes the teacher's layers away; all of the student learns again."""
        for layer in _tower(student).layers:
            for name in ("run", "prepare"):
                vars(layer).pop(name, None)
        student.requires_grad_(True)

    # --------------------------------------------------------------------------------------------- in a pass

    def takes_own(self, layer: nn.Module) -> bool:
        """Whether the student's layer runs this time."""
        if not layer.training or self.rate >= 1.0:
            return True
        return bool(torch.rand(()) < self.rate)

    def _wrap(self, layer: XFormerLayer, number: int, block: Sequence[XFormerLayer]) -> None:
        own, prepare = layer.run, layer.prepare

        def prepared(context: Call, past_key_values: Cache | None) -> None:
            prepare(context, past_key_values)
            if layer.training and self.rate < 1.0:
                for old in block:
                    old.prepare(context, past_key_values)

        def run(hidden_states: Tensor, memory: Tensor | None, states: States, **given: Any) -> LayerOutput:
            self.drawn[number] = self.takes_own(layer)
            if self.drawn[number]:
                return own(hidden_states, memory, states, **given)
            given.pop("step")
            for place, old in enumerate(block):  # as one layer; its auxiliary losses are nobody's
                step = number * len(block) + place
                hidden_states, states, _ = old(hidden_states, memory, states, step=step, **given)
            return LayerOutput(hidden_states, states, {})

        layer.run = run  # type: ignore[method-assign]
        layer.prepare = prepared  # type: ignore[method-assign]


def _tower(model: Any) -> Any:
    return getattr(model, "model", model).trunk


class ReplacingSchedule(TrainerCallback):
    """Sets the rate before each step."""

    def __init__(self, replacing: Replacing) -> None:
        self.replacing = replacing

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.replacing.teacher.to(args.device)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.replacing.rate = self.replacing.method.rate(state.global_step / max(1, state.max_steps))
