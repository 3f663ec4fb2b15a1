# SPDX-License-Identifier: Apache-2.0
"""A call of one tower: where its tokens stand among all that it may read, which of these are real, what is prepared
once for all layers, and what a sublayer is given and returns.

Bundling these lets length, positions and mask change inside a stack (pooling, hierarchies), and lets a layer be called
many times (shared weights): nothing that depends on the call lives on a module.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.utils import logging

from ..ops.common.real_tokens import real_places
from .elsewhere import Moved, context_on
from .prepared import Key, P, Prepared, S, State, States, not_there
from .text_parts import TextParts
from .unpadding import Unpadding

logger = logging.get_logger(__name__)


def can_inspect() -> bool:
    """Whether values may steer the program: not while a graph of it is being recorded."""
    return not (torch.compiler.is_compiling() or torch.jit.is_tracing())


def reads_pairs(implementation: str) -> bool:
    """Whether an attention function is given a mask of pairs, [B, 1, T, S] boolean: the literal equation, torch's, or
    one of a user's own that is registered with the mask of torch's."""
    return implementation in ("eager", "sdpa") or ALL_MASK_ATTENTION_FUNCTIONS.get(implementation) is sdpa_mask


def check_axes(name: str, tensor: Tensor | None, axes: tuple[str, ...] = ("batch", "length")) -> None:
    """Refuses an input `name` without these axes; None is none.

    Raises:
        ValueError: another number of axes.
    """
    if tensor is not None and tensor.ndim != len(axes):
        remedy = "a batch of one text has 1 as its first axis" if tensor.ndim < len(axes) else "give one text per row"
        raise ValueError(f"`{name}` must be [{', '.join(axes)}], got {list(tensor.shape)}; {remedy}.")


class Extent(NamedTuple):
    """The tokens of a call and what is cached before them.

    Attributes:
        batch, length: B and T of the current tokens.
        cached: how many tokens stand before them; a tensor where the cache counts on the device.
        total: S, the slots of keys: cached + current tokens, or the capacity of a static cache.
        static: the cache has slots that are not written yet.
        device: where the tokens are.
    """

    batch: int
    length: int
    cached: int | Tensor
    total: int
    static: bool
    device: torch.device

    @property
    def fresh(self) -> bool:
        """Nothing is cached: the keys are exactly the current tokens."""
        return isinstance(self.cached, int) and self.cached == 0 and not self.static

    def query_index(self) -> Tensor:
        """[T]: slots of the current tokens."""
        if isinstance(self.cached, Tensor):
            return torch.arange(self.length, device=self.device) + self.cached
        return torch.arange(self.cached, self.cached + self.length, device=self.device)

    def key_index(self) -> Tensor:
        """[S]: slots of the keys."""
        return torch.arange(self.total, device=self.device)

    def exceeds(self, longest: int | None) -> bool:
        """Whether the slots reach beyond `longest` (None: there is no limit); those of a cache that counts on the
        device may, where it has so many."""
        if longest is None:
            return False
        if isinstance(self.cached, int):
            return self.cached + self.length > longest
        return isinstance(self.total, int) and can_inspect() and self.total > longest


def extent_of(inputs_embeds: Tensor, cache: Cache | None) -> Extent:
    """inputs_embeds: [B, T, D]. cache: of self-attention. Raises ValueError for a text without tokens."""
    batch, length = inputs_embeds.shape[:2]
    if length == 0:
        raise ValueError(
            f"The text has no tokens (a batch of {batch} rows of length 0); give at least one, such as the token that"
            " begins a text."
        )
    cached = cache.get_seq_length() if cache is not None else 0
    static = cache is not None and bool(cache.is_compileable)
    total = cache.get_mask_sizes(length, 0)[0] if cache is not None and static else cached + length
    return Extent(batch, length, cached, total, static, inputs_embeds.device)


def read_masks(
    attention_mask: Tensor | None, extent: Extent, takes_pairs: bool
) -> tuple[Tensor | None, Tensor | None]:
    """What a caller's `attention_mask` says: (padding mask [B, S], True = real token; prepared mask [B, 1, T, S] of
    pairs), each None where there is none. takes_pairs: every layer accepts a prepared mask. Of a prepared one for a
    static cache both are made: what counts real tokens (positions, hashes of pairs) needs the former.

    Raises:
        ValueError: a mask that does not fit the call, or a prepared one that not every layer accepts.
    """
    if attention_mask is None:
        return None, None
    if attention_mask.ndim == 4:
        if not extent.static:
            if takes_pairs:
                _check_pairs(attention_mask)
                return None, attention_mask
            raise ValueError(
                "A prepared 4-D attention mask needs attention with explicit scores (e.g. 'dense'), and a block that "
                "reads no neighbors by itself; give a [batch, length] mask of real tokens instead."
            )
        # `generate` makes one of the padding for every static cache: its last query sees all real tokens.
        last = attention_mask[:, 0, -1]
        padding = _padding_mask(last if last.dtype == torch.bool else last == 0, extent)
        return padding, attention_mask if takes_pairs else None
    return _padding_mask(attention_mask, extent), None


def _check_pairs(mask: Tensor) -> None:
    """Refuses a prepared mask that says other than who sees whom."""
    if mask.dtype == torch.bool or not can_inspect():
        return
    if not mask.is_floating_point() or bool(((mask != 0) & ~(mask <= -1e3)).any()):
        raise ValueError(
            f"A prepared 4-D attention mask of {mask.dtype} holds other numbers than 0 (may attend) and large negative"
            " ones (may not), such as a bias or ones; give a boolean one, and let a bias be the model's `position`."
        )


def _padding_mask(attention_mask: Tensor, extent: Extent) -> Tensor | None:
    batch, length, cached, total, static, device = extent
    if attention_mask.ndim != 2 or attention_mask.shape[0] != batch:
        raise ValueError(
            f"`attention_mask` must be [batch, length] = [{batch}, {total}], got {list(attention_mask.shape)}."
        )
    padding = attention_mask.to(device=device, dtype=torch.bool)
    if padding.shape[1] == length and not static and cached:
        # A mask of the new tokens alone: what is cached was real.
        padding = torch.cat([padding.new_ones(batch, int(cached)), padding], dim=1)
    elif static and padding.shape[1] < total:
        padding = pad(padding, (0, total - padding.shape[1]))
    if padding.shape[1] != total:
        raise ValueError(
            f"`attention_mask` covers {attention_mask.shape[1]} tokens, but {cached} cached and {length} new "
            f"tokens make {total}."
        )
    if not static and can_inspect() and bool(padding.all()):
        return None  # nothing is padded: the kernels' fast paths take no mask
    return padding


def token_positions(position_ids: Tensor | None, padding: Tensor | None, current: Tensor) -> Tensor:
    """[B or 1, T] positions of the current tokens: the caller's `position_ids` ([B, T] or [T]), else real tokens
    counted from 0, on whichever side padding [B, S] is. current: [T] slots of these tokens."""
    if position_ids is not None:
        return position_ids if position_ids.ndim == 2 else position_ids[None]
    if padding is not None:
        return real_places(padding)[:, current]
    return current[None]


@dataclass
class Call:
    """The state bundle of one tower's forward call.

    Attributes:
        padding_mask: [B, S] boolean, True = real token; S = cached + current tokens. None when nothing is padded.
        positions: [B or 1, T] integer positions of the current tokens (padding does not count).
        query_index: [T] slots of the current tokens among all S; relative distances and causality are taken from
            `query_index` and `key_index`, never from T == S.
        key_index: [S] slots of the keys.
        causal: whether later tokens are hidden.
        fresh: the keys are exactly the current tokens (nothing is cached).
        static: the cache has slots that are not written yet, so S is its capacity.
        explicit_mask: [B, 1 or H, T, S] mask that the caller prepared (True or 0 = may attend); only mechanisms with
            explicit scores accept it.
        segment_ids: [B, T] document number of each token in packed rows, or None.
        memory_padding_mask: [B, M] boolean mask of the memory that cross-attention reads.
        implementation: name of the attention back-end (transformers' `attn_implementation`).
        output_attentions: whether attention weights are wanted (selects the literal path).
        output_hidden_states: whether every layer's output is wanted; a stack that would run fewer layers, or run them
            in pieces, then runs them all, each over the whole sequence.
        logits_to_keep: of how many tokens, the last ones, states are wanted (0: of all), so that a stack may leave the
            others out of layers that keep nothing of them.
        unpadding: where the real tokens are, if layers are given them alone as one row [1, N, D] (`unpad_inputs`);
            masks and indices above are still those of the padded batch.
        parts: where the current tokens stand in their texts, if every process holds a part of each; masks and indices
            above are then those of the part, positions those of the text.
        inputs_embeds, position_ids: what the caller gave, for back-ends that build masks of their own.
        back_end: what a serving engine gives its attention function, by name; it keeps keys and values itself, and
            tokens of several texts stand side by side (`core/serving.py`).
        inputs: further model inputs that a component asked for by name (`Spec.inputs`) and the caller gave.
        made: what is made once per call and read by every layer (masks, rotary tables), by class and slot
            ([`Call.prepare`]). No tensor with a gradient.
        states: tensors with gradients that layers read and pass on (score biases, other layers' scores, extra
            sequences), likewise by class and slot ([`Call.state`]).
    """

    padding_mask: Tensor | None
    positions: Tensor
    query_index: Tensor
    key_index: Tensor
    causal: bool
    fresh: bool
    static: bool = False
    explicit_mask: Tensor | None = None
    segment_ids: Tensor | None = None
    memory_padding_mask: Tensor | None = None
    implementation: str = "sdpa"
    output_attentions: bool = False
    output_hidden_states: bool = False
    logits_to_keep: int = 0
    unpadding: Unpadding | None = None
    parts: TextParts | None = None
    inputs_embeds: Tensor | None = None
    position_ids: Tensor | None = None
    back_end: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    made: MutableMapping[Key, Any] = field(default_factory=dict)
    states: States = field(default_factory=dict)

    def __copy__(self) -> Call:
        # Every layer of a decoding step may have a view of its own. copy.copy is slow
        # here: it takes as long as the arithmetic of some layers.
        seen = object.__new__(type(self))
        seen.__dict__.update(self.__dict__)
        return seen

    def to(self, device: torch.device | str | int, **_: Any) -> Call:
        """This call on another device; this very object, if all of it is there."""
        device = torch.device(device)
        there = self.positions.device == device and (Moved, None) not in self.made
        return self if there else context_on(self, device)

    def prepare(self, kind: type[P], make: Callable[[], P], slot: Hashable = None) -> P:
        """What `make` gives, made unless this call has a `kind` already."""
        found = self.made.get((kind, slot))
        if found is None:
            found = self.made[kind, slot] = make()
        return found

    def prepared(self, kind: type[P], slot: Hashable = None) -> P:
        """This call's `kind`. Raises `LookupError` where nothing has put one there."""
        found = self.made.get((kind, slot))
        if found is None:
            raise not_there(kind, slot)
        return found

    def find(self, kind: type[P], slot: Hashable = None) -> P | None:
        """This call's `kind`, if it has one."""
        return self.made.get((kind, slot))

    def keep(self, value: Prepared, slot: Hashable = None) -> None:
        """Puts `value` there, under its class."""
        self.made[type(value), slot] = value

    def start(self, state: State, slot: Hashable = None) -> None:
        """Puts a state there that layers read."""
        self.states[type(state), slot] = state

    def given(self, kind: type[S], slot: Hashable = None) -> S:
        """The state of this kind that a stack or the layers below have given. Raises `LookupError` where none has."""
        found = self.states.get((kind, slot))
        if found is None:
            raise not_there(kind, slot)
        return found

    def state(self, kind: type[S], slot: Hashable = None) -> S | None:
        """The same, if there is any."""
        return self.states.get((kind, slot))

    @property
    def query_padding_mask(self) -> Tensor | None:
        """[B, T]: the padding mask of the current tokens alone."""
        if self.padding_mask is None or self.fresh:
            return self.padding_mask
        return self.padding_mask[:, self.query_index]

    def leave_padding_out(self) -> None:
        """Gives layers the real tokens alone (`unpad_inputs`), where nobody asks for what stands at padding."""
        asked = self.output_attentions or self.output_hidden_states or self.parts is not None
        if self.padding_mask is not None and not asked and can_inspect():
            self.unpadding = Unpadding(self.padding_mask)

    def padded(self, tokens: Tensor) -> Tensor:
        """[1, N, ...] of the real tokens -> [B, T, ...]; what is not packed stays."""
        return tokens if self.unpadding is None else self.unpadding.pad(tokens)

    def packed(self, tokens: Tensor) -> Tensor:
        """[B, T, ...] -> [1, N, ...] of the real tokens, where layers are given them alone."""
        return tokens if self.unpadding is None else self.unpadding.pack(tokens)

    def of_padded(self) -> Call:
        """This call for a function that reads the padded batch."""
        seen = copy.copy(self)
        seen.unpadding = None
        return seen

    def of_tokens(self) -> Call:
        """This call for a function of single tokens: all that it is given are real."""
        seen = copy.copy(self)
        seen.padding_mask = None
        return seen

    def passing(self, states: States) -> Call:
        """The same call seen from inside one layer, with that layer's states; this very object, if neither has any."""
        if not states and not self.states:
            return self
        seen = copy.copy(self)
        seen.states = states
        return seen

    def kept(self, *kinds: type[Prepared]) -> dict[Key, Any]:
        """What is made of these kinds."""
        return {key: value for key, value in self.made.items() if key[0] in kinds}

    def derive(self, *kinds: type[Prepared], **changes: Any) -> Call:
        """A copy for a part of the stack with other length, positions or masks; of what is made, only these `kinds`
        are carried over. Back-ends that make their masks of the whole text give way to SDPA."""
        implementation = self.implementation
        if not reads_pairs(implementation):
            if not implementation.startswith(("flash_attention", "flex_attention")) and "/" not in implementation:
                logger.warning_once(
                    f"Attention function {implementation!r} is not asked where layers read parts of a text; register"
                    " transformers' `sdpa_mask` for it (`AttentionMaskInterface.register`) if it takes such a mask."
                )
            implementation = "sdpa"
        return self.but(**{"made": self.kept(*kinds), "states": {}, "implementation": implementation, **changes})

    def but(self, **changes: Any) -> Call:
        """A copy with other values of these fields."""
        seen = copy.copy(self)
        seen.__dict__.update(changes)
        return seen


# Of a dataclass among a module's arguments, torch's FSDP makes a copy in its own precision (and fails at a class that
# is one): what a layer puts into a call would be lost to the next one.
del Call.__dataclass_fields__


class SublayerOutput(NamedTuple):
    """What a sublayer's function returns.

    Args:
        output: [B, T, D].
        weights: attention weights [B, H, T, S] where asked for, else None.
        gate: [B, T, 1] factor in [0, 1] on the output, or None.
        aux_losses: scalars by name, and what `core/choices.py` describes.
        states: what the next layer is given ([`one_state`](prepared.py)).
    """

    output: Tensor
    weights: Tensor | None = None
    gate: Tensor | None = None
    aux_losses: dict[str, Tensor] | None = None
    states: States | None = None


class Sublayer(nn.Module):
    """Base of the functions f of a layer, `x = leave(x, f(enter(x)))`.

    `forward(hidden_states [B, T, D], context)` of a feed-forward, and with `memory`, `past_key_values` and `step`
    next to them for what is planned as attention, gives a [`SublayerOutput`].
    """

    @property
    def takes_unpadded(self) -> bool:
        """Whether it may be given the real tokens of a batch as one row [1, N, D] (`context.unpadding`); one that may
        not is given the padded batch."""
        return False

    def prepare(self, context: Call, past_key_values: Cache | None) -> None:
        """Called once per forward call and layer before the first layer runs: let the call make what layers can
        share, once (`context.prepare`). What carries gradients it is given by `context.start`."""


def dropout_rate(name: str) -> Any:
    """A dropout probability as an attribute of a module, kept by an `nn.Dropout` that is called `name`.

    Fused functions take a probability. What switches dropout off in any model, as trl's trainers do, goes through the
    modules of this class and sets their `p`.
    """

    def read(module: nn.Module) -> float:
        rate: float = getattr(module, name).p
        return rate

    def write(module: nn.Module, rate: float) -> None:
        setattr(module, name, nn.Dropout(rate))

    return property(read, write)


def self_attention_cache(cache: Cache | None) -> Cache | None:
    """The part of a cache that self-attention writes."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def segments_from_positions(position_ids: Tensor) -> Tensor | None:
    """The [`document_numbers`] of packed rows; None if no row restarts."""
    if position_ids.shape[-1] == 1:  # a step of decoding, for which nothing is waited for
        return None
    numbers = document_numbers(position_ids)
    return numbers if bool((numbers[:, -1:] > 0).any()) else None


def document_numbers(position_ids: Tensor) -> Tensor:
    """Positions [B, T] that restart where a document begins -> the number of each token's document in its row, [B,
    T]."""
    restart = position_ids[:, 1:] != position_ids[:, :-1] + 1
    return pad(restart.long().cumsum(-1), (1, 0))


def places_in_documents(ends: Tensor, length: int) -> Tensor:
    """Where the documents of a row of `length` tokens begin, and the last one ends, [N + 1] -> the place of each token
    in its document, [T]."""
    slots = torch.arange(length, device=ends.device)
    return slots - ends.long()[torch.searchsorted(ends, slots, right=True, out_int32=False) - 1]


def add_losses(total: dict[str, Tensor], losses: dict[str, Tensor] | None) -> None:
    """Adds `losses` to `total`, by name."""
    for name, loss in (losses or {}).items():
        total[name] = total[name] + loss if name in total else loss
