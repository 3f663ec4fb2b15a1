# SPDX-License-Identifier: Apache-2.0
"""A layer is an ordered list of sublayers; a block component says which."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_layers import GradientCheckpointingLayer

from ..compat import parameters_of
from ..core.call import Call, Sublayer, SublayerOutput, add_losses
from ..core.components import Spec
from ..core.elsewhere import result_on
from ..core.prepared import Key, Prepared, State, States, one_state
from ..normalization.residual import Residual


class Partner(State):
    """The other half of a pair of residual streams."""

    states: Tensor


class RunningTokens(Prepared):
    """Which tokens [B, T] a stack still runs. Of the others it keeps the states as they are, so that feed-forward
    sublayers of single tokens leave them out."""

    mask: Tensor


Names: TypeAlias = dict[tuple[Key, str], None]  # keys of it, as FSDP looks into all else for dataclasses to copy
Kind = Literal["attention", "cross_attention", "feedforward"]
Reads = Literal["stream", "same_stream", "same_input", "layer_input"]


@dataclass(frozen=True)
class SublayerPlan:
    """One sublayer of a layer: its attribute name, what it does, the factor on its output, a feed-forward's part of
    `intermediate_size`, and what it reads: the residual `stream`, the `same_stream` as the sublayer before it (the two
    are added together), the `same_input`, which that sublayer's frame has made of it, or the `layer_input`, the stream
    as the layer was given it."""

    name: str
    kind: Kind
    residual_scale: float = 1.0
    inner_scale: float = 1.0
    reads: Reads = "stream"


class BlockSpec(Spec):
    """Base of block specs.

    Attributes:
        mixes: what of it looks at other tokens besides its attentions, such as a convolution; empty: nothing. It does
            so in sublayers, which are given rows where states are those of real tokens alone (`unpadding`); if not,
            `why_not` says what is not.
        passes_states: it carries what the attentions of several layers share.
        in_sequence: every sublayer reads what the one before it has added to.
        additive: where the config's residual adds to the stream, nothing else is done to it.
    """

    mixes: ClassVar[str] = ""
    supports: ClassVar[frozenset[str]] = frozenset({"unpadding"})
    passes_states: ClassVar[bool] = True
    in_sequence: ClassVar[bool] = True
    additive: ClassVar[bool] = True

    def plan(self, config: Any, layer_idx: int, cross: bool) -> list[SublayerPlan]:
        """The sublayers of layer `layer_idx`, in order; `cross`: the tower reads a memory."""
        raise NotImplementedError

    def cache_layer(self, config: Any) -> CacheLayerMixin | None:
        """A new layer of a generation cache that holds what the block keeps of one layer besides keys and values
        (`AttentionSpec.keeps_keys_alone`); None: nothing."""
        return None

    def build(self, config: Any, **where: Any) -> XFormerLayer:
        return XFormerLayer(config, self, **where)


def flattened(states: Mapping[Key, State]) -> tuple[Names, list[Tensor]]:
    """The tensors in `states`, with what [`unflattened`] needs to know of them."""
    names: Names = {}
    tensors: list[Tensor] = []
    for key, state in states.items():
        fields: tuple[str, ...] = state.__match_args__
        for name in fields:
            tensor = getattr(state, name)
            if tensor is not None:
                names[key, name] = None
                tensors.append(tensor)
    return names, tensors


def unflattened(names: Iterable[tuple[Key, str]], tensors: Sequence[Tensor]) -> States:
    """The states whose tensors these are."""
    found: dict[Key, dict[str, Tensor]] = {}
    for (key, name), tensor in zip(names, tensors, strict=True):
        found.setdefault(key, {})[name] = tensor
    return {key: key[0](**fields) for key, fields in found.items()}


class LayerOutput(NamedTuple):
    """What a layer gives: hidden_states [B, T, D], what the next layer is given besides them, and auxiliary losses by
    name."""

    hidden_states: Tensor
    states: States
    losses: dict[str, Tensor]


class XFormerLayer(GradientCheckpointingLayer):
    """One layer: for each planned sublayer f, `x = leave(x, f(enter(x)))` with the config's residual frame.

    Sublayer functions stand under their planned names (`attention.q_proj`, `feedforward.up_proj`), their frames next
    to them (`attention_residual.norm`). The layer knows nothing about its depth: `step` is an argument, so one layer
    can run at many depths.
    """

    def __init__(self, config: Any, block: BlockSpec, *, layer_idx: int, cross: bool = False):
        super().__init__()
        self.plan = tuple(block.plan(config, layer_idx, cross))
        self.plan_alone = tuple(entry for entry in self.plan if entry.kind != "cross_attention")
        self.lenders: dict[str, XFormerLayer] = {}  # plain: shared sublayers register once
        self.layer_drop = config.layer_drop
        if self.layer_drop and type(self).run is not XFormerLayer.run:
            raise ValueError(
                f"block {block.type!r} runs its layers in a way of its own, in which none can be left out"
                " (`layer_drop`); set it to 0, or use the block 'vanilla'."
            )
        frames: list = []
        for entry in self.plan:
            function = self._build(config, entry, layer_idx)
            if not isinstance(function, Sublayer):
                raise TypeError(
                    f"{entry.name} of layer {layer_idx} is a {type(function).__name__}, which a layer cannot prepare;"
                    " let it derive from `hf_xformers.core.call.Sublayer` (attention: `Attention`, feed-forward:"
                    " `FeedForward`)."
                )
            self.add_module(entry.name, function)
            where = {"scale": entry.residual_scale, "layer_idx": layer_idx, "siblings": frames}
            frames.append(config.residual.build(config, **where, entered=entry.reads == "same_input"))
            self.add_module(f"{entry.name}_residual", frames[-1])

    @staticmethod
    def _build(config: Any, entry: SublayerPlan, layer_idx: int):
        if entry.kind == "feedforward":
            if entry.inner_scale != 1.0:
                config = copy.copy(config)
                config.intermediate_size = int(config.intermediate_size * entry.inner_scale)
            return config.feedforward.build(config, layer_idx=layer_idx)
        if entry.kind == "cross_attention":
            return config.cross_attention.build(config, layer_idx=layer_idx, cross=True)
        return config.attention.build(config, layer_idx=layer_idx)

    def __call__(
        self, hidden_states: Tensor, memory: Tensor | None = None, states: States | None = None, **given: Any
    ) -> LayerOutput:
        """[`XFormerLayer.run`], through whatever hooks the call of a module or recomputes its activations."""
        return self._called(super().__call__, hidden_states, memory, states or {}, given)

    def unrecorded(
        self, hidden_states: Tensor, memory: Tensor | None = None, states: States | None = None, **given: Any
    ) -> LayerOutput:
        """The same past the hooks that record a layer's output."""
        return self._called(self.forward, hidden_states, memory, states or {}, given)

    @staticmethod
    def _called(
        function: Callable[..., tuple], hidden_states: Tensor, memory: Tensor | None, states: States, given: dict
    ) -> LayerOutput:
        """The results come back to where `hidden_states` are from the device that the layer is on."""
        names, tensors = flattened(states)
        output, device = function(hidden_states, memory, *tensors, names=names, **given), hidden_states.device
        if output[0].device != device:
            output = tuple(part.to(device) if isinstance(part, Tensor) else part for part in output)
        hidden_states, names, loss_names, *tensors = output
        losses = dict(zip(loss_names, tensors[len(names) :], strict=True))
        return LayerOutput(hidden_states, unflattened(names, tensors[: len(names)]), losses)

    def prepare(self, context: Call, past_key_values: Cache | None) -> None:
        """Lets every sublayer put what can be shared into the context."""
        for entry in self.plan:
            self.function(entry).prepare(context, past_key_values)

    def forward(
        self, hidden_states: Tensor, memory: Tensor | None, *tensors: Tensor, names: Names | None = None, **given: Any
    ) -> tuple:
        """[`XFormerLayer.run`] with states as tensors and their names -> a flat tuple `(hidden_states, names, names of
        losses, *tensors, *losses)`: reentrant checkpointing follows only tensors that are positional on the way in and
        flat on the way out."""
        hidden_states, states, losses = self.run(hidden_states, memory, unflattened(names or {}, tensors), **given)
        names, passed = flattened(states)
        return (hidden_states, names, tuple(losses), *passed, *losses.values())

    def run(
        self,
        hidden_states: Tensor,
        memory: Tensor | None,
        states: States,
        *,
        context: Call,
        step: int,
        past_key_values: Cache | None = None,
        before_sublayer: Callable[[], None] | None = None,
    ) -> LayerOutput:
        """hidden_states [B, T, D], memory [B, S, D] and the states of the layer below -> those of this layer.

        With a [`Partner`] the residual stream is a pair: each sublayer reads the partner and adds to `hidden_states`,
        then the two change roles (reversible layers).
        """
        if self.training and self.layer_drop and float(torch.rand(())) < self.layer_drop:  # LayerDrop
            return LayerOutput(hidden_states, states, {})
        other = states.pop((Partner, None), None)
        partner = None if other is None else other.states
        context = context.passing(states)
        around = self.around(context)
        losses: dict[str, Tensor] = {}
        read = entered = begun = hidden_states
        for entry in self.sublayers(memory):
            if before_sublayer is not None:
                before_sublayer()
            frame = self.frame(entry)
            if entry.reads == "stream":
                read = hidden_states if partner is None else partner
            elif entry.reads == "layer_input":
                read = begun
            inputs = frame.inputs(around)
            if entry.reads != "same_input":
                entered = frame.enter(read, **inputs)
            result = self.run_entered(entry, entered, context, memory, past_key_values, step)
            result = result_on(result, hidden_states.device)  # a function of another layer may be elsewhere
            written = frame.leave(hidden_states, result.output, result.gate, **inputs)
            hidden_states, partner = (written, None) if partner is None else (partner, written)
            if result.aux_losses:
                add_losses(losses, result.aux_losses)
            if result.states:
                states = {**states, **result.states}
                context = context.passing(states)
                around = self.around(context)
        if partner is not None:
            states = {**states, **one_state(Partner(partner))}
        return LayerOutput(hidden_states, states, losses)

    def remember(self, hidden_states: Tensor, context: Call, past_key_values: Cache, step: int) -> None:
        """Puts the keys and values of tokens [B, T, D] into the cache that no sublayer of this layer works on any
        more. It has one attention, which comes first."""
        frame = self.frame(self.plan[0])
        function: Any = self.function(self.plan[0])
        entered = frame.enter(hidden_states, **frame.inputs(self.around(context)))
        function.project_self(entered, function.of_states(entered, context), past_key_values, step)

    def memory_of(self, entry: SublayerPlan, memory: Tensor | None) -> Tensor | None:
        """What a sublayer of a type of attention is given of the memory."""
        return memory if entry.kind == "cross_attention" else None

    def sublayers(self, memory: Tensor | None) -> Sequence[SublayerPlan]:
        """What runs: no cross-attention in a decoder that is used without an encoder."""
        return self.plan_alone if memory is None else self.plan

    def around(self, context: Call) -> Call:
        """The call as frames and feed-forwards see it."""
        return context if context.unpadding is None else context.of_tokens()

    def function(self, entry: SublayerPlan) -> Sublayer:
        """The function of a sublayer: the layer's own, or that of the layer it borrows it from."""
        owner = self.lenders[entry.name] if entry.name in self.lenders else self
        return owner._modules[entry.name]  # type: ignore[return-value]  # skips getattr (hot path)

    def borrow(self, entry: SublayerPlan, lender: XFormerLayer) -> None:
        """Shares another layer's function from now on and drops its own (`share`)."""
        self.lenders[entry.name] = lender
        delattr(self, entry.name)

    def used_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that a call reads: the layer's own, and those of what it borrows."""
        yield from parameters_of(self)
        for name, lender in self.lenders.items():
            yield from parameters_of(getattr(lender, name))

    def frame(self, entry: SublayerPlan) -> Residual:
        """The residual frame of a sublayer."""
        return self._modules[f"{entry.name}_residual"]  # type: ignore[return-value]  # as above

    def run_sublayer(
        self,
        entry: SublayerPlan,
        hidden_states: Tensor,
        context: Call,
        memory: Tensor | None,
        past_key_values: Cache | None,
        step: int,
    ) -> SublayerOutput:
        """f(enter(x)) of one sublayer by itself, before its residual sum, on the device of x."""
        frame = self.frame(entry)
        around = self.around(context)
        entered = frame.enter(hidden_states, **frame.inputs(around))
        result = self.run_entered(entry, entered, context, memory, past_key_values, step)
        return result_on(result, hidden_states.device)

    def run_entered(
        self,
        entry: SublayerPlan,
        entered: Tensor,
        context: Call,
        memory: Tensor | None,
        past_key_values: Cache | None,
        step: int,
    ) -> SublayerOutput:
        """f of one sublayer for the input [B, T, D] that its frame, or another's, has made."""
        function, unpadding = self.function(entry), context.unpadding
        alone = None if unpadding is None or function.takes_unpadded else unpadding
        seen = context if alone is None else context.of_padded()
        if alone is not None:
            entered = alone.pad(entered)
        if entry.kind != "feedforward":
            read = self.memory_of(entry, memory)
            result = function(entered, seen, memory=read, past_key_values=past_key_values, step=step)
        elif (some := context.find(RunningTokens)) is not None and function.takes_unpadded:
            running = context.packed(some.mask)
            mapped = function(entered[running][None], context.of_tokens()).output
            result = SublayerOutput(torch.zeros_like(entered).masked_scatter(running[..., None], mapped))
        else:
            result = function(entered, self.around(context) if alone is None else seen)
        if alone is None:
            return result
        gate = None if result.gate is None else alone.pack(result.gate)
        return result._replace(output=alone.pack(result.output), gate=gate)
