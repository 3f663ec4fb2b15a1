"""Backward passes that are no functions to differentiate again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

LITERAL = "load the model with `attn_implementation='eager'`"


def first_derivative_only(what: str, remedy: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a `backward` refuse to be differentiated. torch's own mark for that leaves the second derivative out
    without a word where the incoming gradient is a constant, as that of a sum is.

    Args:
        what: whose backward pass this is, the beginning of a sentence.
        remedy: how a second derivative can be had, if there is a way.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def checked(ctx: Any, *grads: Any) -> Any:
            if torch.is_grad_enabled():  # only where a derivative of the result is asked for (`create_graph=True`)
                way = f"; for one, {remedy}" if remedy else ""
                raise RuntimeError(f"{what} has no second derivative on this path{way}.")
            return backward(ctx, *grads)

        return checked

    return decorate
