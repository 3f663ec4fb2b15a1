# SPDX-License-Identifier: Apache-2.0
"""Backward passes that are no functions to differentiate again, in the types of their forward passes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .products import without_autocast

LITERAL = "load the model with `attn_implementation='eager'`"


def first_derivative_only(what: str, remedy: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a `backward` refuse to be differentiated. torch's own mark for that leaves the second derivative out
    without a word where the incoming gradient is a constant, as that of a sum is.

    It also runs it without autocast, whoever calls: as a rule `backward` is called outside of autocast's block, and
    inside of it products would have another type than the tensors that they are added to.

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
            given = next((grad for grad in grads if grad is not None), None)
            if given is None:  # what reads the results has no gradient for any of them
                return (None,) * len(ctx.needs_input_grad)
            with without_autocast(given):
                return backward(ctx, *grads)

        return checked

    return decorate
