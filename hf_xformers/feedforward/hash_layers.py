"""Hash layers: the token's id, not a router, says which expert it goes to."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..core.cache import RecurrentStateLayer
from ..core.components import aliased, register
from ..core.context import LayerContext, SublayerOutput, self_attention_cache
from .base import FeedForward
from .dense import DenseFeedForward
from .experts import Experts, ExpertsSpec, real_tokens

_PRIME = 2**31 - 1
# What a call found out about earlier tokens, [B, T] in `context.shared`.
_PREVIOUS = "previous_ids"


class LastIdLayer(RecurrentStateLayer):
    """A part of a generation cache: the id of each row's last real token, [B]. It stands behind the layers of keys and
    values, so that it follows beams as they do, in a cache of any kind."""

    is_compileable = True  # its size is fixed, so a static cache stays one


def previous_ids(ids: Tensor, context: LayerContext, cache: Cache | None, nothing: int) -> Tensor:
    """The ids [B, T] of the real tokens before those of `ids`; `nothing` where a text, or a document of a packed row,
    begins.

    cache: where the last id of earlier calls is held, and that of this one is put; None: the text begins with this
    call.
    """
    held = None if cache is None else _last_id_layer(cache, context)
    first = torch.full_like(ids[:, 0], nothing) if held is None or not held.state else held.state["ids"]
    joined = torch.cat((first[:, None], ids), dim=1)
    mask = context.query_padding_mask
    if mask is not None:  # the last real one up to each place
        place = torch.arange(1, joined.shape[1], device=ids.device)
        joined = joined.gather(1, nn.functional.pad(torch.where(mask, place, 0).cummax(1).values, (1, 0)))
    if held is not None:
        held.advance(ids.shape[1], ids=joined[:, -1].clone())
    found = joined[:, :-1]
    if context.segment_ids is not None:
        begins = context.segment_ids[:, 1:] != context.segment_ids[:, :-1]
        found = found.masked_fill(nn.functional.pad(begins, (1, 0)), nothing)
    return found


def _last_id_layer(cache: Cache, context: LayerContext) -> LastIdLayer:
    layer = cache.layers[-1] if cache.layers else None
    if isinstance(layer, LastIdLayer):
        return layer
    if cache.get_seq_length() or not cache.layers:
        raise ValueError(
            f"feedforward 'hash_layers' hashes pairs of tokens, and the given {type(cache).__name__} does not hold the"
            " last one; leave `past_key_values` out, or make it with `hf_xformers.core.cache.make_cache(config)`."
        )
    made = LastIdLayer()
    cache.layers.append(made)
    return made


class HashExperts(FeedForward):
    """y_t = FFN_{h(w_t)}(x_t), h a fixed map from token ids to experts (Roller et al. 2021, arXiv 2106.04426, section
    3).

    No router, no loss, no capacity. `random`: h(w) = ((a w + b) mod p) mod E with a and b drawn from the seed and the
    layer.
    `position`: the same map of a token's position instead of its id; `previous`: of the id before it, h(w_{t-1});
    `bigram`: of both, h(w_{t-1}, w_t) = ((a w_t + c w_{t-1} + b) mod p) mod E. The first token of a text follows an id
    of its own, V. The last id is the state for decoding.
    `balanced`: a table that [`balance`] fills from token frequencies and that is saved with the model; until then it
    is the random one.
    """

    experts: Experts
    spec: HashLayersSpec
    table: Tensor  # where `hash` is 'balanced'

    def __init__(self, config, spec: HashLayersSpec, layer_idx: int):
        super().__init__()
        self.spec = spec
        drawn = random.Random(f"{spec.seed}/{layer_idx}")  # text seeds are the same in every process
        self.factor, self.offset = drawn.randrange(1, _PRIME), drawn.randrange(_PRIME)
        self.factor_before = drawn.randrange(1, _PRIME)
        self.nothing = config.vocab_size
        self.experts = spec.make_experts(config)
        if spec.hash == "balanced":
            self.register_buffer("table", torch.zeros(config.vocab_size, dtype=torch.long))

    def initialize(self, config, init) -> None:
        self.experts.start(config, init)
        if self.spec.hash == "balanced":
            init.copy_(self.table, self.spread(torch.arange(self.table.shape[0])))

    def spread(self, ids: Tensor, before: Tensor | int = 0) -> Tensor:
        """The random map."""
        mixed = ids * self.factor + before * self.factor_before + self.offset
        return mixed.remainder(_PRIME).remainder(self.spec.num_experts)

    def prepare(self, context: LayerContext, past_key_values: Cache | None) -> None:
        """Finds the ids before those of the call, once for all layers, and keeps the last one in the cache."""
        ids = context.inputs.get("input_ids")
        if self.spec.reads_previous and ids is not None and _PREVIOUS not in context.shared:
            cache = self_attention_cache(past_key_values)
            context.shared[_PREVIOUS] = previous_ids(ids, context, cache, self.nothing)

    def choose(self, context: LayerContext | None) -> Tensor:
        """Experts [B or 1, T]."""
        if context is not None and self.spec.hash == "position":
            return self.spread(context.positions)
        ids = None if context is None else context.inputs.get("input_ids")
        if ids is None:
            raise ValueError(
                "feedforward 'hash_layers' chooses experts by token id; give `input_ids`, not embeddings."
            )
        if self.spec.hash == "balanced":
            return self.table[ids]
        if not self.spec.reads_previous:
            return self.spread(ids)
        before = context.shared[_PREVIOUS]  # type: ignore[union-attr]
        return self.spread(before) if self.spec.hash == "previous" else self.spread(ids, before)

    def forward(self, hidden_states: Tensor, context: LayerContext | None) -> SublayerOutput:
        """hidden_states [B, T, D] -> [B, T, D].

        Raises:
            ValueError: the model was given `inputs_embeds`, which have no ids.
        """
        chosen = self.choose(context).expand(hidden_states.shape[:2]).reshape(-1)
        chosen = chosen.masked_fill(~real_tokens(hidden_states, context), self.spec.num_experts)
        output = self.experts(hidden_states.flatten(0, 1), chosen[:, None], None)
        return SublayerOutput(output.view_as(hidden_states))


@torch.no_grad()
def balance(model: nn.Module, counts: Sequence[int] | Tensor) -> None:
    """Fills the tables of all `hash="balanced"` layers: from the most frequent token on, each goes to the expert that
    has the least so far (Roller et al. 2021, section 3.1).

    counts: how often each id occurs, one number for each vocabulary entry.

    Raises:
        ValueError: no such layer, or the wrong number of counts.
    """
    layers = [
        module for module in model.modules() if isinstance(module, HashExperts) and module.spec.hash == "balanced"
    ]
    if not layers:
        raise ValueError(
            "`balance` fills the tables of feedforward 'hash_layers' with `hash='balanced'`; there are none."
        )
    numbers = [float(count) for count in counts]
    for layer in layers:
        if len(numbers) != layer.table.shape[0]:
            raise ValueError(
                f"`counts` has {len(numbers)} entries for a vocabulary of {layer.table.shape[0]}; give one each."
            )
        load = [(0.0, expert) for expert in range(layer.spec.num_experts)]
        table = [0] * len(numbers)
        for token in sorted(range(len(numbers)), key=lambda index: (-numbers[index], index)):
            filled, expert = heapq.heappop(load)
            table[token] = expert
            heapq.heappush(load, (filled + numbers[token], expert))
        layer.table.copy_(torch.tensor(table))


@register("feedforward", "hash_layers", aliases=("hash",))
class HashLayersSpec(ExpertsSpec):
    """One expert per token, by its id.

    layers: which layers have experts (`None`: the eighth, or the last of fewer; `every` is not read). hash: `random`,
    `balanced` with the help of [`balance`], `bigram` (with the token before), `previous` (the token before alone), or
    `position` (the token's place, section 3.1, says which). seed: of the random map.
    """

    summary = "the token's id chooses the expert"
    inputs: ClassVar[tuple[str, ...]] = ("input_ids",)

    num_experts: int = aliased(32, "experts")
    layers: tuple[int, ...] | None = None
    hash: Literal["random", "balanced", "bigram", "previous", "position"] = "random"
    seed: int = 42

    @property
    def reads_previous(self) -> bool:
        """Whether the token before another has a say in its expert."""
        return self.hash in ("bigram", "previous")

    def check(self, config) -> None:
        super().check(config)
        if not config.stack.keeps_tokens:
            raise ValueError(
                f"feedforward 'hash_layers' chooses experts by token id, but the layers of stack {config.stack.type!r}"
                " see other states than the text's tokens; use 'switch_transformer', which chooses by state, or stack"
                " 'plain'."
            )
        if self.reads_previous and not config.stack.tells_earlier_ids:
            raise ValueError(
                f"feedforward 'hash_layers' with `hash={self.hash!r}` looks at the token before in the text, which"
                f" stack {config.stack.type!r} does not show it; use `hash='random'`, or stack 'plain'."
            )

    def is_sparse(self, config, layer_idx: int) -> bool:
        layers = (min(7, config.num_hidden_layers - 1),) if self.layers is None else self.layers
        return layer_idx in layers

    def build(self, config, **where) -> nn.Module:
        layer_idx = where.get("layer_idx", 0)
        if not self.is_sparse(config, layer_idx):
            return DenseFeedForward(config, self)
        return HashExperts(config, self, layer_idx)


__all__ = ["HashExperts", "HashLayersSpec", "balance"]
