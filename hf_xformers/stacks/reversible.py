# SPDX-License-Identifier: Apache-2.0
"""Reversible residual layers: activations are computed again from the outputs instead of being kept."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.utils import logging

from ..blocks.base import Names, Partner, SublayerPlan, XFormerLayer, flattened, unflattened
from ..compat import parameters_of
from ..core.call import Call, add_losses, can_inspect
from ..core.components import register
from ..core.hand_overs import HandOver
from ..core.prepared import States, one_state
from ..ops.common.derivatives import first_derivative_only
from ..ops.common.products import autocast_state
from ..position.base import Position
from .base import Stack, StackSpec
from .driver import Pass, StackOutput, memory_by_step

logger = logging.get_logger(__name__)

RandomState = tuple[Tensor, Tensor | None]


class ReversibleStack(Stack):
    """y1 = x1 + f(x2), y2 = x2 + g(y1), with f and g one layer's attention and feed-forward sublayers.

    Gomez et al. 2017 (arXiv 1707.04585), eq. 6; Kitaev et al. 2020 (arXiv 2001.04451), section 3. Both streams start
    as the embedding. The inverse x2 = y2 - g(y1), x1 = y1 - f(x2) gives the backward pass every sublayer's input, so
    that activations take memory for one sublayer, whatever the depth, at the price of running each twice. A layer with
    other sublayers (cross-attention, two feed-forwards) keeps alternating the streams. The result is (y1 + y2) / 2,
    or [y1; y2] of twice the width, as in the released code (`output`); the paper does not say.

    Random states are kept, so that dropout falls on the same places; mechanisms that decide discretely (buckets) keep
    their decisions in the context. Nothing is rebuilt, and memory grows with depth as usual, where it cannot be: with
    a cache that holds tokens, in a traced graph, when hidden states or attention weights are returned, or when the
    layers are checkpointed anyway. In bfloat16 parameters and streams, inputs are rebuilt only up to rounding;
    autocast keeps the streams in float32.
    """

    def __init__(self, spec: ReversibleStackSpec):
        super().__init__()
        self.concatenates = spec.output == "concatenation"

    def forward(self, run: Pass) -> StackOutput:
        layers, context, memory, past_key_values = run.layers, run.context, run.memory, run.past_key_values
        if past_key_values is not None and self.training and torch.is_grad_enabled() and context.fresh:
            logger.warning_once("Reversible layers compute their inputs again, so training fills no cache.")
            past_key_values = None
        for layer in layers:
            layer.prepare(context, past_key_values)
        course = _Run(layers, context, past_key_values, run.position)
        hidden_states = context.packed(run.hidden_states)
        if len(layers) == 0 or not self._rebuilds(layers, context, past_key_values):
            first, second, losses = course.forward(hidden_states, hidden_states, memory, context.states)
        else:
            course.names, tensors = flattened(context.states)
            course.reads_memory = memory is not None
            given = ([memory] if course.reads_memory else []) + tensors
            first, second, *values = _Reversible.apply(course, hidden_states, *given, *course.parameters)
            losses = dict(zip(course.loss_names, values, strict=True))
        joined = torch.cat([first, second], dim=-1) if self.concatenates else (first + second) / 2
        return StackOutput(context.padded(joined), context, losses)

    @staticmethod
    def _rebuilds(layers: Sequence[XFormerLayer], context: Call, past_key_values: Cache | None) -> bool:
        if not torch.is_grad_enabled() or past_key_values is not None or not can_inspect():
            return False
        if context.output_attentions or context.output_hidden_states:
            return False
        return not any(layer.gradient_checkpointing and layer.training for layer in layers)


@dataclass
class _Run:
    """One forward call: what its backward pass needs besides the tensors that autograd keeps."""

    layers: Sequence[XFormerLayer]
    context: Call
    past_key_values: Cache | None
    position: Position
    names: Names = field(default_factory=dict)
    reads_memory: bool = False
    loss_names: tuple[str, ...] = ()
    states: list[RandomState] = field(default_factory=list)
    parameters: list[nn.Parameter] = field(init=False)
    of_position: list[nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        # Layers read tables of the position module (`PositionTables`): they are inputs like their own.
        self.of_position = [parameter for parameter in parameters_of(self.position) if parameter.requires_grad]
        own = [x for layer in self.layers for x in parameters_of(layer) if x.requires_grad]
        self.parameters = [*dict.fromkeys(own), *self.of_position]  # a layer may run at several depths

    def forward(
        self, first: Tensor, second: Tensor, memory: Tensor | None, passed: States, record: bool = False
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Both streams through all layers; the auxiliary losses by name. record: keep the random states."""
        losses: dict[str, Tensor] = {}
        memories = memory_by_step(memory, len(self.layers))
        device = first.device
        keep = (
            (lambda: self.states.append(_random_state(device)))
            if record and any(layer.training for layer in self.layers)
            else None
        )
        for step, layer in enumerate(self.layers):
            first, above, found = layer(
                first,
                memories[step],
                {**passed, **one_state(Partner(second))},
                context=self.context,
                step=step,
                past_key_values=self.past_key_values,
                before_sublayer=keep,
            )
            second = above[Partner, None].states
            add_losses(losses, found)
        return first, second, losses


class _Reversible(torch.autograd.Function):
    """Inputs: the embedding, the memory, the states, all parameters of the layers and of the position. Outputs: both
    streams, the losses."""

    @staticmethod
    def forward(ctx, run: _Run, hidden_states: Tensor, *given: Tensor):
        memory, passed, _ = _split(run, given)
        first, second, losses = run.forward(hidden_states, hidden_states, memory, passed, record=True)
        run.loss_names = tuple(losses)
        ctx.run, ctx.autocast = run, autocast_state(hidden_states.device.type)
        ctx.extra = len(given) - len(run.parameters)
        ctx.save_for_backward(first, second, *given[: ctx.extra])
        return first, second, *losses.values()

    @staticmethod
    @first_derivative_only("A reversible stack")
    def backward(ctx, to_first: Tensor, to_second: Tensor, *to_losses: Tensor):
        run, (first, second, *extra) = ctx.run, ctx.saved_tensors
        wanted = ctx.needs_input_grad[2 : 2 + ctx.extra]
        extra = [x.detach().requires_grad_(wants) for x, wants in zip(extra, wanted, strict=True)]
        memory, passed, _ = _split(run, extra)
        context = run.context.passing(passed)
        grads: dict[int, Tensor] = {}
        loss_grads, states = dict(zip(run.loss_names, to_losses, strict=True)), reversed(run.states)
        for step, layer, entry in _backwards(run.layers, memory):
            state = next(states, None)
            # The sublayer read what is now first, and added to what is now second.
            with torch.enable_grad(), _replayed(state, first.device), torch.autocast(**ctx.autocast):
                read = first.detach().requires_grad_()
                memories = memory_by_step(memory, len(run.layers))
                result = layer.run_sublayer(entry, read, context, memories[step], None, step)
                added = layer.frame(entry).leave(result.output.new_zeros(()), result.output, result.gate)
                targets, slopes = [added], [to_second]
                for name, loss in (result.aux_losses or {}).items():
                    if loss.requires_grad:
                        targets.append(loss)
                        slopes.append(loss_grads[name])
                inputs = [x for x in (*extra, *layer.used_parameters(), *run.of_position) if x.requires_grad]
                to_read, *found = torch.autograd.grad(targets, [read, *inputs], slopes, allow_unused=True)
            for tensor, grad in zip(inputs, found, strict=True):
                if grad is not None:
                    grads[id(tensor)] = grads[id(tensor)] + grad if id(tensor) in grads else grad
            first, second = second - added.detach(), first
            to_first, to_second = to_second, to_first if to_read is None else to_first + to_read
        return None, to_first + to_second, *(grads.get(id(x)) for x in (*extra, *run.parameters))


def _split(run: _Run, given: tuple[Tensor, ...] | list[Tensor]) -> tuple[Tensor | None, States, list[Tensor]]:
    """The memory, the states, and the rest."""
    rest = list(given)
    memory = rest.pop(0) if run.reads_memory else None
    count = len(run.names)
    return memory, unflattened(run.names, rest[:count]), rest[count:]


def _backwards(
    layers: Sequence[XFormerLayer], memory: Tensor | None
) -> Iterator[tuple[int, XFormerLayer, SublayerPlan]]:
    for step in reversed(range(len(layers))):
        for entry in reversed(layers[step].sublayers(memory)):
            yield step, layers[step], entry


def _random_state(device: torch.device) -> RandomState:
    module = getattr(torch, device.type, None) if device.type != "cpu" else None
    return torch.get_rng_state(), None if module is None else module.get_rng_state(device)


@contextlib.contextmanager
def _replayed(state: RandomState | None, device: torch.device) -> Iterator[None]:
    """Random numbers as they were in the forward pass; afterwards as if none had been drawn."""
    if state is None:
        yield
        return
    devices = [] if state[1] is None else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.set_rng_state(state[0])
        if devices:
            getattr(torch, device.type).set_rng_state(state[1], device)
        yield


@register("stack", "reversible", aliases=("revnet",))
class ReversibleStackSpec(StackSpec):
    """Layers whose inputs follow from their outputs (Gomez et al. 2017; Kitaev et al. 2020, section 3).

    output: what is made of the two streams at the end, their `mean` [B, T, D] or their `concatenation` [B, T, 2 D],
    which the final norm and the heads then read (the released code).
    """

    supports = frozenset({"packed_rows", "unpadding"})
    summary = "reversible residual layers: activation memory does not grow with depth"
    shares = "prepared"  # a stream would have to be rebuilt like the layers' inputs
    layers_apart = False  # the backward pass runs a layer's sublayers one by one
    gives = frozenset({HandOver.EARLIER_IDS})

    output: Literal["mean", "concatenation"] = "mean"

    def check(self, config) -> None:
        if not config.residual.additive:
            raise ValueError(
                "stack 'reversible' recovers a sublayer's input by a subtraction, which residual"
                f" {config.residual.type!r} does not allow; use 'pre_ln' or another one that adds to the stream."
            )
        if not config.block.additive:
            raise ValueError(
                "stack 'reversible' recovers a sublayer's input by a subtraction, and block"
                f" {config.block.type!r} normalizes the stream at the end of a layer; use the block 'vanilla'."
            )
        if not config.block.in_sequence:
            raise ValueError(
                "stack 'reversible' gives two streams to sublayers in turn, which block"
                f" {config.block.type!r} runs side by side; use the block 'vanilla'."
            )
        if "layer_input" in config.position.acts:
            raise ValueError(
                f"stack 'reversible' has no place for position {config.position.type!r}, which adds to the input of"
                " every layer; use one that acts once, such as 'sinusoidal_absolute'."
            )
        if self.output == "concatenation":
            self._check_width(config)

    @staticmethod
    def _check_width(config) -> None:
        """What reads last states of twice the width. Raises `ValueError` where something cannot."""
        if config.is_encoder_decoder:
            raise ValueError(
                "stack 'reversible' with `output='concatenation'` gives states of twice the width, which"
                " cross-attention does not read; use output='mean' in an encoder-decoder."
            )
        if not config.head.any_width:
            raise ValueError(
                "stack 'reversible' with `output='concatenation'` gives states of twice the width, which head"
                f" {config.head.type!r} does not read; use head 'linear', 'transform' or 'factorized'."
            )
        if config.tie_word_embeddings and not config.head.leads_back:
            raise ValueError(
                "stack 'reversible' with `output='concatenation'` gives states of twice the width of the token table,"
                f" which head {config.head.type!r} cannot be tied to; set `tie_word_embeddings=False`."
            )

    def output_width(self, config) -> int:
        return (2 if self.output == "concatenation" else 1) * config.hidden_size

    def build(self, config, **where) -> ReversibleStack:
        return ReversibleStack(self)
