# SPDX-License-Identifier: Apache-2.0
"""Hash layers: the token's id, not a router, says which expert it goes to."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..core.cache import RecurrentStateLayer
from ..core.call import Call, SublayerOutput, self_attention_cache
from ..core.components import aliased, bounded, check_layers, register
from ..core.hand_overs import HandOver
from ..core.prepared import Prepared
from .base import FeedForward
from .dense import DenseFeedForward
from .experts import Experts, ExpertsSpec, mix
from .multi_hash import MultiHashExperts
from .routing import real_tokens
from .token_maps import balanced_map, dispersed_map, k_means

_PRIME = 2**31 - 1
# Maps that are tables, made from data or from vectors.
_TABLES = ("balanced", "clustered", "dispersed")


class EarlierIds(Prepared):
    """The ids [B, T] of the tokens before those of a call."""

    ids: Tensor


class LastIdLayer(RecurrentStateLayer):
    """A part of a generation cache: the id of each row's last real token, [B]. It stands behind the layers of keys and
    values, so that it follows beams as they do, in a cache of any type."""

    is_compileable = True  # its size is fixed, so a static cache stays one


def previous_ids(ids: Tensor, context: Call, cache: Cache | None, nothing: int) -> Tensor:
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


def _last_id_layer(cache: Cache, context: Call) -> LastIdLayer:
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
    `balanced`: a table that [`balance`] fills from token frequencies; `clustered` and `dispersed`: tables that
    [`cluster`] fills from vectors of the tokens. Tables are saved with the model; until they are filled, they are the
    random map.
    multi_hash: N maps choose N slices of the network ([`MultiHashExperts`]).
    """

    experts: Experts
    spec: HashLayersSpec
    table: Tensor  # where the map is a table: [V], or [N, V]

    def __init__(self, config, spec: HashLayersSpec, layer_idx: int):
        super().__init__()
        self.spec, self.layer_idx = spec, layer_idx
        # Text seeds are the same in every process.
        drawn = random.Random(f"{spec.seed}/{layer_idx}")
        self.hashes = [
            (drawn.randrange(1, _PRIME), drawn.randrange(_PRIME), drawn.randrange(1, _PRIME))
            for _ in range(spec.multi_hash)
        ]
        self.nothing = config.vocab_size
        self.experts = spec.make_experts(config)
        if spec.hash in _TABLES:
            parts = (spec.multi_hash,) if spec.multi_hash > 1 else ()
            self.register_buffer("table", torch.zeros(*parts, config.vocab_size, dtype=torch.long))

    def initialize(self, config, init) -> None:
        self.experts.start(config, init)
        if self.spec.hash in _TABLES:
            init.copy_(self.table, self.random_table())

    def spread(self, ids: Tensor, before: Tensor | int = 0) -> Tensor:
        """The random map of `ids` [...]: [...], or [..., N]."""
        found = [
            (ids * factor + before * factor_before + offset).remainder(_PRIME).remainder(self.spec.num_experts)
            for factor, offset, factor_before in self.hashes
        ]
        return found[0] if len(found) == 1 else torch.stack(found, dim=-1)

    def random_table(self) -> Tensor:
        """The random map of all ids, [V] or [N, V]."""
        return self.spread(torch.arange(self.table.shape[-1], device=self.table.device)).t()

    def resize_vocabulary(self, size: int) -> None:
        """Tables for `size` ids: new ones are in the random map."""
        self.nothing = size
        if self.spec.hash not in _TABLES or size == self.table.shape[-1]:
            return
        kept = min(size, self.table.shape[-1])
        table = self.spread(torch.arange(size, device=self.table.device)).t().contiguous()
        table[..., :kept] = self.table[..., :kept]
        self.table = table

    @property
    def unfilled(self) -> bool:
        """Whether the map is a table that nobody has made yet."""
        return self.spec.hash in _TABLES and torch.equal(self.table, self.random_table())

    def prepare_training(self, model: nn.Module, counts: Callable[[], Tensor] | None) -> None:
        """Balances the tables of `model` that are still unfilled, this one among them.

        Raises:
            ValueError: a table that cannot be filled from counts, or no counts.
        """
        if not self.unfilled:
            return
        if self.spec.hash != "balanced":
            raise ValueError(
                f"feedforward 'hash_layers' with `hash={self.spec.hash!r}` makes its map from vectors of the tokens,"
                " which a model that starts from nothing does not have; build it, call"
                " `hf_xformers.feedforward.hash_layers.cluster(model, trained_model)`, save it with its tokenizer, and"
                " train from there with --init_from."
            )
        if counts is None:
            raise ValueError(
                "feedforward 'hash_layers' with `hash='balanced'` counts the tokens of the training text before it"
                " begins, which a stream does not allow; leave --streaming out, or take `hash='random'`."
            )
        balance(model, counts())

    def prepare(self, context: Call, past_key_values: Cache | None) -> None:
        """Finds the ids before those of the call, once for all layers, and keeps the last one in the cache."""
        ids = context.inputs.get("input_ids")
        if self.spec.reads and ids is not None:
            arguments = ids.long(), context, self_attention_cache(past_key_values), self.nothing
            context.prepare(EarlierIds, lambda: EarlierIds(previous_ids(*arguments)))

    def choose(self, context: Call | None) -> Tensor:
        """Experts [B or 1, T], or [B or 1, T, N]."""
        if context is not None and self.spec.hash == "position":
            return self.spread(context.positions)
        ids = None if context is None else context.inputs.get("input_ids")
        if ids is None:
            raise ValueError(
                "feedforward 'hash_layers' chooses experts by token id; give `input_ids`, not embeddings."
            )
        ids = ids.long()  # 32 bits do not hold the hash
        if self.spec.hash in _TABLES:
            return self.table[ids] if self.spec.multi_hash == 1 else self.table.t()[ids]
        if not self.spec.reads:
            return self.spread(ids)
        before = context.prepared(EarlierIds).ids  # type: ignore[union-attr]
        return self.spread(before) if self.spec.hash == "previous" else self.spread(ids, before)

    def forward(self, hidden_states: Tensor, context: Call | None) -> SublayerOutput:
        """hidden_states [B, T, D] -> [B, T, D].

        Raises:
            ValueError: the model was given `inputs_embeds`, which have no ids.
        """
        chosen = self.choose(context).unflatten(1, (-1, 1)) if self.spec.multi_hash == 1 else self.choose(context)
        chosen = chosen.expand(*hidden_states.shape[:2], -1).flatten(0, 1)
        chosen = chosen.masked_fill(~real_tokens(hidden_states, context)[:, None], self.spec.num_experts)
        output = mix(self.experts, hidden_states.flatten(0, 1), chosen, None)
        return SublayerOutput(output.view_as(hidden_states))


def _layers(model: nn.Module, *maps: str) -> list[HashExperts]:
    return [module for module in model.modules() if isinstance(module, HashExperts) and module.spec.hash in maps]


@torch.no_grad()
def balance(model: nn.Module, counts: Sequence[int] | Tensor) -> None:
    """Fills the tables of all `hash="balanced"` layers: from the most frequent token on, each goes to the expert that
    has the least so far (Roller et al. 2021, section 3.1).

    counts: how often each id occurs, one number for each vocabulary entry.

    Raises:
        ValueError: no such layer, or the wrong number of counts.
    """
    layers = _layers(model, "balanced")
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
        layer.table.copy_(balanced_map(numbers, layer.spec.num_experts))


@torch.no_grad()
def cluster(model: nn.Module, vectors: Tensor | nn.Module) -> None:
    """Fills the tables of all `hash="clustered"` and `hash="dispersed"` layers (Roller et al. 2021, section 3.1).

    The vectors of the tokens are cut into as many clusters as there are experts by k-means, under the spec's seed.
    Clustered: a token goes to the expert of its cluster, whose mean is nearest; experts get what clusters have, which
    is not the same for all. Dispersed: the tokens of each cluster are dealt out to all experts evenly.

    vectors: [V, d], one for each vocabulary entry; or a trained model with the same vocabulary (transformers' or this
    package's, a baseline without experts say), whose input embeddings they are.

    Raises:
        ValueError: no such layer; vectors that are too few, not finite, or fewer different ones than experts.
    """
    layers = _layers(model, "clustered", "dispersed")
    if not layers:
        raise ValueError(
            "`cluster` fills the tables of feedforward 'hash_layers' with `hash='clustered'` or 'dispersed'; there are"
            " none."
        )
    size = layers[0].table.shape[-1]
    vectors = vectors if isinstance(vectors, Tensor) else _token_vectors(vectors, size)
    if vectors.ndim != 2 or len(vectors) != size or not bool(vectors.isfinite().all()):
        raise ValueError(
            f"`vectors` holds {list(vectors.shape)} numbers for a vocabulary of {size}; give one vector of finite"
            " numbers for each entry."
        )
    for layer in layers:
        spec, tables = layer.spec, []
        clusters = k_means(vectors, spec.num_experts, torch.Generator().manual_seed(spec.seed))
        for part in range(spec.multi_hash):
            seed = random.Random(f"{spec.seed}/{layer.layer_idx}/{part}").getrandbits(62)
            dealt = dispersed_map(clusters, spec.num_experts, torch.Generator().manual_seed(seed))
            tables.append(clusters if spec.hash == "clustered" else dealt)
        layer.table.copy_(tables[0] if spec.multi_hash == 1 else torch.stack(tables))


def _token_vectors(model: nn.Module, size: int) -> Tensor:
    """[V, d]"""
    embeddings = model.get_input_embeddings()  # type: ignore[operator]
    if isinstance(embeddings, nn.Embedding):
        return embeddings.weight
    device = next(model.parameters()).device
    return torch.cat([embeddings(ids[None])[0] for ids in torch.arange(size, device=device).split(4096)])


@register("feedforward", "hash_layers", aliases=("hash",))
class HashLayersSpec(ExpertsSpec):
    """One expert per token, by its id.

    Args:
        layers: which layers have experts (`None`: the eighth, or the last of fewer; `every` is not read).
        hash: `random`, `balanced` with the help of [`balance`], `bigram` (with the token before), `previous` (the
            token before alone), `position` (the token's place, section 3.1, says which), `clustered` (near tokens
            share an expert) or `dispersed` (near tokens have different ones), both with the help of [`cluster`].
        multi_hash: how many hashes choose a slice each of a token's network (section 3.2).
        seed: of all that is drawn for the maps.
    """

    summary = "the token's id chooses the expert"
    inputs: ClassVar[tuple[str, ...]] = ("input_ids",)

    num_experts: int = aliased(32, "experts")
    layers: tuple[int, ...] | None = bounded(None, least=0)
    hash: Literal["random", "balanced", "bigram", "previous", "position", "clustered", "dispersed"] = "random"
    multi_hash: int = bounded(1, least=1)
    seed: int = 42

    @property
    def splits(self) -> frozenset[str]:  # type: ignore[override]  # a field decides
        """Slices of several hashes' experts are put together before the activation: none is a network by itself."""
        return frozenset({"experts"} if self.multi_hash == 1 else ())

    @property
    def reads(self) -> frozenset[HandOver]:  # type: ignore[override]  # a field decides
        return frozenset({HandOver.EARLIER_IDS} if self.hash in ("bigram", "previous") else ())

    def check_fields(self) -> None:
        super().check_fields()
        if self.multi_hash > 1 and self.hash in ("balanced", "clustered"):
            raise ValueError(
                f"hash_layers: `hash={self.hash!r}` is one map, and `multi_hash={self.multi_hash}` needs as many"
                " different ones; take 'random', 'dispersed', 'bigram', 'previous' or 'position'."
            )

    def check(self, config) -> None:
        super().check(config)
        check_layers(self, config)
        for name in ("hidden_size", "intermediate_size"):
            if getattr(config, name) % self.multi_hash:
                raise ValueError(
                    f"feedforward 'hash_layers' cuts `{name}` {getattr(config, name)} into `multi_hash`"
                    f" {self.multi_hash} equal slices; take a divisor of it."
                )
        if not config.stack.keeps_tokens:
            raise ValueError(
                f"feedforward 'hash_layers' chooses experts by token id, but the layers of stack {config.stack.type!r}"
                " see other states than the text's tokens; use 'switch_transformer', which chooses by state, or stack"
                " 'plain'."
            )
        if self.reads and HandOver.EARLIER_IDS not in config.stack.gives:
            raise ValueError(
                f"feedforward 'hash_layers' with `hash={self.hash!r}` looks at the token before in the text, which"
                f" stack {config.stack.type!r} does not show it; use `hash='random'`, or stack 'plain'."
            )

    def is_sparse(self, config, layer_idx: int) -> bool:
        layers = (min(7, config.num_hidden_layers - 1),) if self.layers is None else self.layers
        return layer_idx in layers

    def make_experts(self, config, num_experts: int | None = None) -> Experts:
        if self.multi_hash == 1:
            return super().make_experts(config, num_experts)
        return MultiHashExperts(
            self.num_experts if num_experts is None else num_experts,
            config.hidden_size,
            config.intermediate_size,
            activation=self.activation,
            bias=self.bias,
            dropout=self.inner_dropout(config),
            slices=self.multi_hash,
        )

    def build(self, config, **where) -> nn.Module:
        layer_idx = where.get("layer_idx", 0)
        if not self.is_sparse(config, layer_idx):
            return DenseFeedForward(config, self)
        return HashExperts(config, self, layer_idx)
