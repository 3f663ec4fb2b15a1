# SPDX-License-Identifier: Apache-2.0
"""The normalization contract."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from ..core.call import Call
from ..core.components import Spec


class NormSpec(Spec):
    """Base of specs of norms, whose `build(config, width=...)` gives a module over [..., width], without a
    width over [..., hidden_size].

    over_tokens: its statistics are over the tokens of a batch, so that its module takes `mask` [...] next to the
    vectors, True = real. any_width: a norm of any width does the same as one of `hidden_size`; one that knows what the
    channels of a state stand for does not. knows_heads: it has a form with a gain for every head
    ([`NormSpec.build_for_heads`]).
    """

    over_tokens: ClassVar[bool] = False
    any_width: ClassVar[bool] = True
    knows_heads: ClassVar[bool] = False

    def build_for_heads(self, config: Any, heads: int) -> nn.Module:
        """The norm of single heads [..., heads, d], each with a gain of its own."""
        raise NotImplementedError


def norm_inputs(norm: NormSpec, context: Call | None) -> dict[str, Any]:
    """What a norm of this spec is given besides the vectors [B, T, D]: `mask` [B, T] if its statistics are over
    tokens."""
    if context is None or not norm.over_tokens:
        return {}
    return {"mask": context.query_padding_mask}
