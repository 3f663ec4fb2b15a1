# SPDX-License-Identifier: Apache-2.0
"""What is made once per call for its layers. An object's class, with a slot where there are several, is its key."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, dataclass_transform


@dataclass_transform(frozen_default=True, eq_default=False)
class Prepared:
    """Base of what a call makes once for all of its layers ([`LayerContext.prepare`]). A class that derives from it is
    a frozen dataclass.

    It holds no tensor with a gradient, as a stack that runs layers again would lose that; parameters are read from
    modules that stand in it.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclass(frozen=True, eq=False)(cls)


P = TypeVar("P", bound=Prepared)
Key: TypeAlias = tuple[type[Prepared], Hashable]


def not_prepared(kind: type[Prepared], slot: Hashable) -> LookupError:
    """The error of a reader that finds nothing."""
    where = "" if slot is None else f" in the slot {slot!r}"
    return LookupError(
        f"Nothing has put a `{kind.__name__}`{where} into this call; a stack, or `prepare` of a layer, does so before"
        " the first layer runs."
    )


__all__ = ["Key", "P", "Prepared", "not_prepared"]
