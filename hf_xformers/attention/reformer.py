# SPDX-License-Identifier: Apache-2.0
"""LSH attention (Reformer)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..core.cache import appended
from ..core.call import Call, SublayerOutput, self_attention_cache
from ..core.components import aliased, bounded, register
from ..core.initialization import seeded_normal, start_projections
from ..core.prepared import Prepared
from ..ops.bucketed.attention import Chunks, bucketed_attention, bucketed_reference
from ..ops.common.constants import constant
from .shared.base import Attention
from .shared.bucketed import BucketedSpec, Stage, attend_in_buckets, labels_of_all, recent_attention

_EPSILON = 1e-6  # added to the mean square of a key before it is brought to length 1, as in the released code


class HashLabels(Prepared):
    """Buckets of the keys of a call, in a slot for each step."""

    labels: Tensor


class ReformerAttention(Attention):
    """Softmax attention among tokens whose shared query and key fall into the same bucket of some hash.

    Kitaev, Kaiser, Levskaya 2020 (arXiv 2001.04451), section 2 and appendix A: with k_j = q_j / |q_j| and random
    R_a [d, b/2],

        h_a(x) = argmax([x R_a ; -x R_a])        (equation in section 2, "Locality sensitive hashing")
        P_i^a  = {j : h_a(q_i) = h_a(q_j)}, of these the ones near in the order by (bucket, position)
        o_i    = sum_j softmax_j(scale * q_i k_j) v_j over the union of P_i^a over rounds a,

    j != i unless nothing else is left. A causal model reads, in each round, the `chunk_length` most recent tokens of
    its bucket: what a token reads is then settled when it arrives (strict causality; it can be cached). The paper's
    form cuts the sorted order into chunks and reads its own chunk and the one before, so that a later token can move
    an earlier one into another chunk; encoders use it, decoders on request.

    The number of buckets b is that of the text's length, about 2 T / chunk_length as in the paper, unless the config
    has one: of each row's real tokens by themselves; in a strictly causal model of the text up to about the token
    itself ([`Stage`]). Fewer buckets take the first columns of R_a.

    Shapes: hidden states [B, T, D] -> [B, T, D]; labels [B, H, rounds, T]. Time O(rounds * T * (chunk_length * d +
    log T)). Rotations are a buffer, drawn from `hash_seed`. State: keys, values, labels.
    """

    spec: ReformerSpec
    rotations: Tensor

    def __init__(self, config, spec: ReformerSpec, *, layer_idx: int, cross: bool = False):
        super().__init__(config, spec, layer_idx=layer_idx, cross=cross)
        del self.k_proj  # queries and keys share q_proj
        self.factors = spec.bucket_factors(config)
        self.by_length = spec.num_buckets is None
        self.stages = [Stage(0, spec.chunk_length * spec.chunks_before)]
        self.stage_powers: list[int] = []
        self.strict = self.is_causal and spec.causal_form == "strict"
        if self.strict and self.by_length:
            self.stages, self.stage_powers = self._stages()
        self.hash_width = sum(self.factors) // 2
        self.register_buffer("rotations", self.draw_rotations())

    def initialize(self, config, init) -> None:
        start_projections(config, init, inputs=(self.q_proj, self.v_proj), output=self.o_proj)
        self.start_queries(config, init)
        init.copy_(self.rotations, self.draw_rotations())

    def draw_rotations(self) -> Tensor:
        """[rounds, H, d, b/2] of N(0, 1); a round's do not depend on the number of rounds, unless all layers share
        them."""
        shape = (self.num_heads, self.head_dim, self.hash_width)
        if self.spec.share_rotations:
            generator = torch.Generator().manual_seed(self.spec.hash_seed)
            rounds = (*shape[:2], self.spec.num_hashes, shape[2])
            return torch.randn(rounds, generator=generator, dtype=torch.float32).permute(2, 0, 1, 3).contiguous()
        key = ("reformer", self.spec.hash_seed, self.layer_idx)
        return torch.stack([seeded_normal(shape, *key, number) for number in range(self.spec.num_hashes)])

    @property
    def num_buckets(self) -> int:
        return math.prod(self.factors)

    def _stages(self) -> tuple[list[Stage], list[int]]:
        """Of a strictly causal model: the stages, and the power of 2 that is the number of buckets of each."""
        most, window, size = self.num_buckets.bit_length() - 1, self.stages[0].window, self.spec.chunk_length
        powers = [*range(2, most, 2), most] if most > 2 else [most]
        # A stage ends where its buckets are those of the text so far: T = b chunk_length / 2.
        begins = [0, *(2 ** (power - 1) * size for power in powers[:-1])]
        return [Stage(begin, window) for begin in begins], powers

    @torch.no_grad()
    def hash(self, keys: Tensor, valid: Tensor | None = None) -> Tensor:
        """Bucket numbers of keys [B, H, T, d], valid [B, T] True for a real token -> [B, H, rounds, T], in a strictly
        causal model [B, H, stages * rounds, T]. With several factors a bucket is a tuple of hashes."""
        keys = keys.to(torch.promote_types(keys.dtype, torch.float32))
        turned = [keys @ rotations for rotations in self.rotations.to(keys.dtype).unbind(0)]
        kinds: list[Sequence[int | Tensor]]
        if self.stage_powers:
            kinds = [self._factors(power) for power in self.stage_powers]
        elif not self.by_length:
            kinds = [self.factors]
        elif valid is None and not torch.compiler.is_compiling():
            kinds = [self._factors(self._power(keys.shape[2]))]
        else:
            table = [self._factors(power) for power in range(1, self.num_buckets.bit_length())]
            power = self._power_of_rows(keys, valid)
            kinds = [[constant(column, keys.device)[power - 1] for column in zip(*table, strict=True)]]
        return torch.stack([self._bucket(each, kind) for kind in kinds for each in turned], dim=2).int()

    def _bucket(self, turned: Tensor, factors: Sequence[int | Tensor]) -> Tensor:
        """Turned keys [B, H, T, b/2] -> bucket numbers [B, H, T] among the product of factors, numbers or those of
        each row [B]."""
        bucket: Any = 0
        base: Any = 1
        start = 0
        for factor, room in zip(factors, self.factors, strict=True):
            columns = turned[..., start : start + room // 2]
            if isinstance(factor, Tensor):
                factor = factor[:, None, None]
                absent = torch.arange(room // 2, device=turned.device) >= factor[..., None] // 2
                high, at_high = columns.masked_fill(absent, -torch.inf).max(-1)
                low, at_low = columns.masked_fill(absent, torch.inf).min(-1)
            elif factor > 1:
                high, at_high = columns[..., : factor // 2].max(-1)
                low, at_low = columns[..., : factor // 2].min(-1)
            if isinstance(factor, Tensor) or factor > 1:
                bucket = bucket + base * torch.where(high >= -low, at_high, at_low + factor // 2)
            base, start = base * factor, start + room // 2
        return bucket

    def _factors(self, power: int) -> tuple[int, ...]:
        """2^power buckets as factors no larger than those of the rotations: one hash while the last of them has
        room."""
        if len(self.factors) == 1:
            return (2**power,)
        if 2**power <= self.factors[-1]:
            return 1, 2**power
        return 2 ** (power // 2), 2 ** (power - power // 2)

    def _power(self, length: int) -> int:
        """The least p with 2^p >= 2 T / chunk_length, at least 1 and as many as there are rotations for."""
        size, most = self.spec.chunk_length, self.num_buckets.bit_length() - 1
        return next((power for power in range(1, most) if length <= 2 ** (power - 1) * size), most)

    def _power_of_rows(self, keys: Tensor, valid: Tensor | None) -> Tensor:
        """[`_power`] of the real tokens of each row, [B]."""
        lengths = torch.full_like(keys[:, 0, 0, 0], keys.shape[2]) if valid is None else valid.sum(-1)
        power = torch.ones_like(lengths, dtype=torch.long)
        for doubled in range(self.num_buckets.bit_length() - 2):
            power = power + (lengths > self.spec.chunk_length * 2**doubled)
        return power

    def keys(self, shared: Tensor) -> Tensor:
        """q -> k = q / |q|, [..., d]."""
        precise = shared.to(torch.promote_types(shared.dtype, torch.float32))
        return _UnitLength.apply(precise).to(shared.dtype)

    def forward(
        self,
        hidden_states: Tensor,
        context: Call,
        *,
        memory: Tensor | None = None,
        past_key_values: Cache | None = None,
        step: int | None = None,
    ) -> SublayerOutput:
        step = self.layer_idx if step is None else step
        query, value = self.heads(self.q_proj(hidden_states)), self.heads(self.v_proj(hidden_states))
        key = self.keys(query)
        # When activations are computed again (reversible layers, checkpointing), the buckets stay those of the first
        # time: a key that was rebuilt with another rounding may fall on the other side of a border.
        made = context.prepare(HashLabels, lambda: HashLabels(self.hash(key, context.query_padding_mask)), step)
        labels = made.labels
        cache = self_attention_cache(past_key_values)
        if cache is not None:
            if "generate" in self.spec.why_not:
                raise ValueError(self.spec.why_not["generate"])
            key, value = appended(cache, key, value, step)
            labels = labels_of_all(labels, key, cache, step, self.hash)
        output, weights = self._attend(query, key, value, labels, context)
        output = self.o_proj(output.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1))
        return SublayerOutput(output, weights)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, labels: Tensor, context: Call
    ) -> tuple[Tensor, Tensor | None]:
        spec, literal, added = self.spec, self.wants_weights(context), self.score_terms(context)
        dropout = self.dropout_now
        released = spec.sets == "chunk"
        options: dict[str, Any] = {"own_key_last": True, "distinct": spec.deduplicate and not released}
        if self.strict:
            options.update(num_labels=self.num_buckets, scale=self.scaling, dropout=dropout, added=added)
            return recent_attention(query, key, value, labels, self.stages, context, literal=literal, **options)
        sets = Chunks(
            spec.chunk_length,
            spec.chunks_before,
            spec.chunks_after,
            causal=self.is_causal,
            own_label=not released,
            circular=released,
        )
        options.update(key_padding_mask=context.padding_mask)
        if added is not None and literal:
            reference = partial(bucketed_reference, query, key, value, labels, sets, **options)
            return added.from_matrix(reference, query, key, value, dropout)
        if added is not None:
            options.update(num_labels=self.num_buckets)
            return attend_in_buckets(query, key, value, labels, sets, added, dropout, **options), None
        options.update(scale=self.scaling, dropout=dropout)
        if literal:
            return bucketed_reference(query, key, value, labels, sets, **options)
        return bucketed_attention(query, key, value, labels, sets, num_labels=self.num_buckets, **options), None


class _UnitLength(torch.autograd.Function):
    """x (|x|^2 + d eps)^(-1/2), [..., d]; keeps x alone."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * _UnitLength.factor(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        factor = _UnitLength.factor(x)
        along = torch.linalg.vecdot(x, grad)[..., None]
        return torch.addcmul(grad * factor, x, along * factor**3, value=-1)

    @staticmethod
    def factor(x: Tensor) -> Tensor:
        return (torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() + x.shape[-1] * _EPSILON).rsqrt()


@register("attention", "reformer", aliases=("lsh",))
class ReformerSpec(BucketedSpec):
    """
    Args:
        num_hashes: rounds of hashing.
        num_buckets: buckets per round, an even number or a list of even factors (`None`: 2 T / chunk_length for a text
            of T tokens, as in the paper, as powers of two).
        chunk_length: tokens per chunk.
        chunks_before, chunks_after: chunks read around a query's own; a strict decoder reads the chunk_length *
            chunks_before most recent tokens of a bucket.
        causal_form: what a decoder reads, `strict` or the `paper`'s form, in which later tokens move chunk borders;
            that one cannot generate.
        sets: `bucket` (the paper's sets) or `chunk` (the released code's: all tokens of the chunks, whatever their
            bucket, once per round, and chunks of all rounds in a ring; padding then changes results).
        deduplicate: a key in several rounds counts once (else once per round).
        hash_seed: seed of the rotations.
        share_rotations: all layers hash with the same rotations, drawn at a stroke (the released code), else each with
            its own.
    """

    summary = "attention inside buckets of a locality-sensitive hash"
    acts = frozenset({"score_bias", "score_terms"})
    later_tokens = "which keys an earlier one reads"

    bias: bool = False
    num_hashes: int = bounded(4, "hashes", least=1)
    num_buckets: int | tuple[int, ...] | None = aliased(None, "buckets")
    chunk_length: int = bounded(64, least=1)
    chunks_before: int = bounded(1, least=0)
    chunks_after: int = bounded(0, least=0)
    sets: Literal["bucket", "chunk"] = "bucket"
    deduplicate: bool = True
    hash_seed: int = bounded(0, least=0, below=2**31)
    share_rotations: bool = False

    def check_fields(self) -> None:
        factors = (self.num_buckets,) if isinstance(self.num_buckets, int) else self.num_buckets or ()
        for factor in factors:
            if factor < 2 or factor % 2:
                raise ValueError(
                    f"reformer hashes into pairs of opposite buckets, so `num_buckets` {self.num_buckets} must be made"
                    " of even numbers of at least 2."
                )

    def check(self, config) -> None:
        if config.key_value_heads != config.num_attention_heads:
            raise ValueError(
                f"reformer shares queries and keys, so it cannot have {config.key_value_heads} key/value heads for "
                f"{config.num_attention_heads} heads; leave `num_key_value_heads` unset."
            )
        if not config.is_decoder:
            return
        if self.chunks_after:
            raise ValueError(
                f"reformer in a decoder cannot read `chunks_after` {self.chunks_after}; set it to 0, or use an"
                " encoder."
            )
        if self.causal_form == "strict" and (self.sets == "chunk" or self.chunks_before < 1):
            raise ValueError(
                "reformer's strictly causal form reads recent tokens of a query's own bucket, so `sets`"
                f" {self.sets!r} and "
                f"`chunks_before` {self.chunks_before} have no meaning in it; use sets 'bucket' and at least 1, or "
                "causal_form='paper'."
            )
        self.check_causal_form(config)

    def projects_keys(self, config) -> bool:
        return False

    def bucket_factors(self, config) -> tuple[int, ...]:
        """The factors of the number of buckets, where it follows the text of the longest that positions are made
        for."""
        if self.num_buckets is not None:
            return (self.num_buckets,) if isinstance(self.num_buckets, int) else tuple(self.num_buckets)
        power = max(math.ceil(math.log2(max(2 * config.max_position_embeddings / self.chunk_length, 2))), 1)
        if power <= 6:
            return (2**power,)
        # One hash into more buckets would cost as much as the attention itself.
        return 2 ** (power // 2), 2 ** (power - power // 2)

    def build(self, config, **where) -> ReformerAttention:
        return ReformerAttention(config, self, **where)
