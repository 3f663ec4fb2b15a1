# SPDX-License-Identifier: Apache-2.0
"""What a call holds besides its facts, in objects whose class, with a slot where there are several, is their key."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar, dataclass_transform


@dataclass_transform(frozen_default=True, eq_default=False)
class _Kind:
    """A class that derives from one of these is a frozen dataclass."""

    __match_args__: ClassVar[tuple[str, ...]]  # the names of its fields

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclass(frozen=True, eq=False)(cls)


class Prepared(_Kind):
    """Base of what a call makes once for all of its layers ([`Call.prepare`]).

    It holds no tensor with a gradient, as a stack that runs layers again would lose that; parameters are read from
    modules that stand in it.
    """


class State(_Kind):
    """Base of tensors with gradients that layers read and pass on: all fields are tensors or None.

    They travel through a layer's arguments, so that checkpointing follows them. What a layer passes on leads with the
    batch, or with 1.
    """


@dataclass(frozen=True)
class Carry:
    """What the layers of a mechanism share besides the call.

    Args:
        kind: what it is (None: a way of reading alone).
        sizes: what has to be alike in all these layers.
        of_first: layer 0 owns it.
        owner: the layer that owns what layer number n reads, where that is not layer 0; all others have it in place of
            a state of their own in a cache.
        handed_on: each layer hands it to the next one.
        throughout: every layer does so, up to the last.
        reach: who else has it, the `pooler` of a text's vector, or `cross_attention` of the same type, which continues
            with it.
    """

    kind: type[Prepared] | type[State] | None
    sizes: tuple = ()
    of_first: bool = False
    owner: Callable[[int], int] | None = None
    handed_on: bool = False
    throughout: bool = False
    reach: Literal["", "pooler", "cross_attention"] = ""


P = TypeVar("P", bound=Prepared)
S = TypeVar("S", bound=State)
Key: TypeAlias = tuple[type[Any], Hashable]
States: TypeAlias = dict[Key, Any]


def not_there(kind: type[Any], slot: Hashable) -> LookupError:
    """The error of a reader that finds nothing."""
    where = "" if slot is None else f" in the slot {slot!r}"
    return LookupError(
        f"Nothing has put a `{kind.__name__}`{where} into this call; a stack, or `prepare` of a layer, does so before"
        " the first layer runs."
    )


def one_state(state: State, slot: Hashable = None) -> States:
    """A state by its key, as a sublayer passes it on."""
    return {(type(state), slot): state}
