"""What a row of the table of literal equations says, and what those equations share.

An equation is given one text without padding, x [1, n, D], and gives what attention makes of it, [1, n, D], alone or
with the weights [1, H, n, m]. It is written for reading: loops over heads and tokens, or whole matrices in float64,
with nothing of the package but a layer's parameters. That padding, caches, blocks and other texts of a batch change
nothing is not its business: `tests/attention/test_references.py` holds all of that against it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.attention.score_helpers import HEADS, WIDTH, softmax_by_rows, split_heads

D = WIDTH // HEADS


@dataclass(frozen=True)
class Reference:
    """A mechanism with settings, and its literal equation.

    equation: (layer, x, memory=None, causal=False, ...) -> output or (output, weights); further arguments only where
    the row says so (`bias`, `turns`). chain: it is given all `layers`, which pass something on, and gives the outputs
    of each. layer_idx: which of `layers` is tested, where they are not a chain. causal, cross: in which forms it is
    tested (cross: or with which fields of the config). fields: of the config. prepare: sets what parameters do not
    hold (draws, tables) after they have been set at random. paths: ways to compute the same, names for
    `tests.attention.test_references.path`. weights: whether the literal path gives out the weights of the equation.

    bias, turns: the equation takes `bias` [H, n, n], what a position adds to scores; `turn`, which rotates queries and
    keys [1, H, n, d]. steady: the state for generation does not grow. rounds: near results in half precision (not
    where rounding decides on clusters or queries, or denominators come near zero). draws: training passes draw anew,
    or their dropout falls on what tokens have been brought together, so that two passes differ.
    """

    spec: dict[str, Any] | str
    equation: Callable[..., Any]
    causal: tuple[bool, ...] = (False, True)
    cross: bool | dict[str, Any] = False
    chain: bool = False
    layers: int = 1
    layer_idx: int = 0
    fields: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[Any], None] | None = None
    paths: tuple[str, ...] = ("eager", "sdpa")
    strong: float = 0.3
    tolerance: float = 1e-9
    weights: bool = True
    bias: bool = False
    turns: bool = False
    cached: bool = True
    steady: bool = False
    rounds: bool = True
    draws: bool = False


BOTH, ENCODER, DECODER = (False, True), (False,), (True,)
GROUPED, WIDE, RMS = {"num_key_value_heads": 2}, {"head_dim": 6}, {"normalization": "rms_norm"}
BLOCKS = ("eager", "blocks")  # of queries


def rows(name: str, equation: Callable[..., Any], kind: str, particular: dict[str, tuple], **common: Any):
    """Rows of one type. particular: by a further word, its settings and what else it has, beside `common`."""
    return {
        f"{name} {word}".strip(): Reference({"type": kind, **settings}, equation, **{**common, **dict(*more)})
        for word, (settings, *more) in particular.items()
    }


def heads_of(layer, x, memory=None, turn=lambda x: x):
    """Queries, keys and values [1, H, n, d], with heads that share keys written out."""
    read = x if memory is None else memory
    q = turn(split_heads(layer.q_proj(x), layer.head_dim))
    k, v = turn(split_heads(layer.k_proj(read), layer.head_dim)), split_heads(layer.v_proj(read), layer.head_dim)
    return q, *(y.repeat_interleave(layer.num_heads // y.shape[1], 1) for y in (k, v))


def visible(queries, keys, causal):
    """[n, m] boolean."""
    return torch.ones(queries, keys).tril().bool() if causal else torch.ones(queries, keys).bool()


def written(layer, mixed):
    """What heads have read, [1, H, n, d], as the layer gives it out."""
    mixed = mixed.transpose(1, 2).flatten(2)
    return mixed if layer.o_proj is None else layer.o_proj(mixed)


def softmax_attention(layer, x, memory=None, causal=False, allowed=None, bias=0.0):
    """softmax over the allowed keys with exponentials written out."""
    q, k, v = heads_of(layer, x, memory)
    allowed = visible(q.shape[2], k.shape[2], causal) if allowed is None else allowed
    weights = softmax_by_rows(q @ k.mT * layer.head_dim**-0.5 + bias, allowed)
    return written(layer, weights @ v), weights


def turned(x, theta):
    """x [B, H, T, d] with each pair of channels (i, i + d/2) at place t turned by t * theta^(-2i/d)."""
    found, half = torch.zeros_like(x), x.shape[-1] // 2
    for t in range(x.shape[2]):
        for i in range(half):
            angle = t * theta ** (-i / half)
            a, b = x[:, :, t, i], x[:, :, t, i + half]
            found[:, :, t, i] = a * math.cos(angle) - b * math.sin(angle)
            found[:, :, t, i + half] = b * math.cos(angle) + a * math.sin(angle)
    return found


def elu_features(x):
    return torch.where(x > 0, x + 1, torch.exp(x))


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def drawn(layer):
    """The first draw of random rows, where a layer has some."""
    if getattr(layer, "num_rows", None):
        layer.directions.copy_(layer.draw(0))
