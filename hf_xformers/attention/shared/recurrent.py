# SPDX-License-Identifier: Apache-2.0
"""What mechanisms whose state decays share: their parts, the paths, the state for decoding."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from ...core.cache import RecurrentStateLayer
from ...core.call import Call, Sublayer, SublayerOutput
from ...core.components import bounded
from ...core.initialization import start_projections
from ...core.precision import Float32Module
from ...core.sequence_parallel import SequenceForm, Unserved
from ...core.weight_decay import Undecayed
from ...ops.common.products import widened, without_autocast
from ...ops.common.segments import accumulation_dtype
from ...ops.convolution.short import short_convolution
from ...ops.linear.decayed_scan import decayed_scan
from ...ops.linear.gated_delta import gated_delta_rule
from ...ops.linear.low_rank_delta import low_rank_delta_rule
from ...ops.linear.reference import gated_recurrence_reference
from .base import Attention
from .linear import state_layer
from .spec import AttentionSpec

_SHORTEST_STEP = 1e-4  # of a softplus time step at the start


class ShortConvolution(nn.Module):
    """A causal convolution of `taps` inputs for each channel, and SiLU. weight [C, k]: the last tap is on the token
    itself."""

    def __init__(self, channels: int, taps: int, bias: bool = False, silu: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, taps))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.silu = silu

    def initialize(self, config, init) -> None:
        bound = self.weight.shape[1] ** -0.5
        init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            init.uniform_(self.bias, -bound, bound)

    def forward(self, inputs: Tensor, context: Call, window: Tensor | None) -> tuple[Tensor, Tensor]:
        """inputs [B, T, C], window [B, k - 1, C] or None -> [B, T, C], and the window after them."""
        return short_convolution(
            inputs, self.weight, self.bias, silu=self.silu, window=window,
            padding_mask=context.query_padding_mask, segment_ids=context.segment_ids,
        )  # fmt: skip


class GatedNorm(Undecayed, nn.Module):
    """RMSNorm(x) g * f(z), or RMSNorm(x * f(z)) g with `gate_first`; norms and gates in float32 at least.

    x [..., width] is normalized in `groups` equal parts; the gain g has a number for each channel or, `shared`, for
    each channel of a part. gate: f, "silu" or "sigmoid".
    """

    undecayed = ("weight",)

    def __init__(
        self,
        width: int,
        eps: float,
        *,
        groups: int = 1,
        shared: bool = False,
        gain: bool = True,
        gate: Literal["silu", "sigmoid"] = "silu",
        gate_first: bool = False,
    ):
        super().__init__()
        self.groups, self.eps, self.gate_first = groups, eps, gate_first
        self.gate = F.silu if gate == "silu" else torch.sigmoid
        self.weight = nn.Parameter(torch.ones(width // groups if shared else width)) if gain else None

    def initialize(self, config, init) -> None:
        if self.weight is not None:
            init.ones_(self.weight)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """x and z [..., width] -> [..., width]"""
        (wide,) = widened(x)
        gate = None if z is None else self.gate(z.to(wide.dtype))
        if gate is not None and self.gate_first:
            wide = wide * gate
        wide = wide.unflatten(-1, (self.groups, -1))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.weight is not None:
            weight = self.weight.to(wide.dtype)
            wide = wide * (weight if weight.shape[0] == wide.shape[-1] else weight.view(self.groups, -1))
        wide = wide.flatten(-2)
        if gate is not None and not self.gate_first:
            wide = wide * gate
        return wide.to(x.dtype)


class DecayRates(Undecayed, Float32Module):
    """log a = -exp(A_log) softplus(x + dt_bias): a head's rate, and a time step of each token (Gu & Dao 2023, arXiv
    2312.00752, section 3.6). All in float32: rounded to bfloat16, a state would last for another length of text.

    A starts uniform in `rates`, steps log-uniform in `steps` (None: dt_bias starts as ones).
    """

    undecayed = ("A_log", "dt_bias")

    def __init__(
        self,
        heads: int,
        steps_per_head: int = 1,
        rates: tuple[float, float] = (0.0, 16.0),
        steps: tuple[float, float] | None = (1e-3, 1e-1),
    ):
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads * steps_per_head))
        self.rates, self.steps = rates, steps

    def initialize(self, config, init) -> None:
        rates = torch.empty(self.A_log.shape).uniform_(*self.rates).clamp(min=1e-4)
        init.copy_(self.A_log, rates.log().to(self.A_log))
        if self.steps is None:
            init.ones_(self.dt_bias)
            return
        low, high = (math.log(step) for step in self.steps)
        step = torch.empty(self.dt_bias.shape).uniform_(low, high).exp().clamp(min=_SHORTEST_STEP)
        init.copy_(self.dt_bias, (step + torch.log(-torch.expm1(-step))).to(self.dt_bias))  # softplus gives step again

    def forward(self, x: Tensor, least: float | None = None, most: float | None = None) -> tuple[Tensor, Tensor]:
        """x [B, T, H * n] -> log decays and time steps, kept between `least` and `most`, both [B, H, T], or [B, H, T,
        n] with n steps of a head."""
        with without_autocast(x):
            heads = self.A_log.shape[0]
            steps = F.softplus(x.to(self.dt_bias.dtype) + self.dt_bias).unflatten(-1, (heads, -1)).transpose(1, 2)
            if least is not None or most is not None:
                steps = steps.clamp(least, most)
            log_decay = -self.A_log.exp()[:, None, None] * steps
        if steps.shape[3] == 1:
            return log_decay[..., 0], steps[..., 0]
        return log_decay, steps


def unit_length(x: Tensor, eps: float = 1e-6, *, largest: bool = False) -> Tensor:
    """x / sqrt(|x|^2 + eps) or, `largest`, x / max(|x|, eps), in float32 at least."""
    (wide,) = widened(x)
    if largest:
        return F.normalize(wide, dim=-1, eps=eps).to(x.dtype)
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


class Tokens(NamedTuple):
    """What a text is to the recurrence: see `decayed_scan`, where there is a `beta`, `gated_delta_rule`, and where
    there are `read` and `write`, `low_rank_delta_rule`."""

    query: Tensor  # [B, G, T, K]
    key: Tensor
    value: Tensor  # [B, H, T, dv]
    log_decay: Tensor  # [B, H, T] or [B, H, T, K]
    beta: Tensor | None = None  # [B, H, T]
    passed: Tensor | None = None  # [B, H, T, dv], what goes past the state
    read: Tensor | None = None  # [B, H, T, K]
    write: Tensor | None = None
    gate: Tensor | None = None  # [B, T, H dv], what the output is multiplied with


class RecurrentAttention(Attention):
    """o_t = q_t S_t with S_t = Diag(a_t) S_{t-1} + k_t v_t^T, or corrected by the delta rule.

    A mechanism makes [`Tokens`] of a text ([`RecurrentAttention.tokens`]) and, of what is read, its output
    ([`RecurrentAttention.gated`]). A whole text is computed in chunks of `chunk_size` tokens: time O(T (C (K + dv) + K
    dv)) per head, memory O(T D). A token with a cache takes one step. State: S [H, K, dv] in float32, and the last
    inputs of the convolution, whatever the length. A padded token, on either side or inside, leaves both untouched.

    The literal path goes from token to token. The weights that it gives out are those that the recurrence implies for
    earlier values, of all values of a token together; a cached text gives none. `attention_probs_dropout_prob` has no
    effect, as there are no probabilities.

    In an encoder the text is read both ways with the same weights, and the output is the mean of what the recurrence
    gives for it and, turned back, for the text from its end (as in LION, Afzal et al. 2025, arXiv 2502.16249; BiMamba,
    Schiff et al. 2024, arXiv 2403.03234, section 3.1, has further weights for the way back).

    conv_bias, conv_order: of the short convolution, whether it has biases and in which order its channels are.
    """

    spec: RecurrentSpec
    conv_bias: ClassVar[bool] = False
    conv_order: ClassVar[str] = "qkv"

    def __init__(self, config, spec: RecurrentSpec, *, layer_idx: int, cross: bool = False):
        Sublayer.__init__(self)  # projections of widths of their own, and nothing that reads scores
        self.config, self.spec, self.layer_idx, self.cross = config, spec, layer_idx, cross
        self.head_losses, self.is_causal, self.position_terms = nn.ModuleList(), config.is_decoder, None
        self.key_width, self.value_width = spec.key_size(config), spec.value_size(config)
        query_heads, key_heads, value_heads = spec.heads(config)
        self.num_heads = max(query_heads, value_heads)
        self.scaling = self.key_width**-0.5 if spec.scale is None else spec.scale
        width, self.inner_width = config.hidden_size, self.num_heads * self.value_width
        self.q_proj = nn.Linear(width, query_heads * self.key_width, bias=spec.bias)
        self.k_proj = nn.Linear(width, spec.writes * key_heads * self.key_width, bias=spec.bias)
        self.v_proj = nn.Linear(width, spec.writes * value_heads * self.value_width, bias=spec.bias)
        self.o_proj = nn.Linear(self.inner_width, width, bias=spec.has_output_bias)
        self.gate_proj: nn.Linear | None = None
        self.short_conv: ShortConvolution | None = None
        if spec.conv:
            channels = sum(projection.out_features for projection in (self.q_proj, self.k_proj, self.v_proj))
            self.short_conv = ShortConvolution(channels, spec.conv, self.conv_bias)

    def initialize(self, config, init) -> None:
        inputs = [child for name, child in self.named_children() if isinstance(child, nn.Linear) and name != "o_proj"]
        start_projections(config, init, inputs=inputs, output=self.o_proj)

    # ------------------------------------------------------------------------------------------- for mechanisms

    def tokens(self, hidden_states: Tensor, context: Call, window: Tensor | None) -> tuple[Tokens, Any]:
        """[B, T, D] and the window of earlier inputs -> what the recurrence reads, and the window after these."""
        raise NotImplementedError

    def gated(self, output: Tensor, hidden_states: Tensor, tokens: Tokens) -> Tensor:
        """What heads have read [B, T, H, dv] -> [B, T, H * dv], for the output projection."""
        raise NotImplementedError

    def part_projections(self, hidden_states: Tensor) -> list[Tensor]:
        """Queries, keys and values [B, T, C] as their projections give them."""
        return [project(hidden_states) for project in (self.q_proj, self.k_proj, self.v_proj)]

    def query_key_value(self, hidden_states: Tensor, context: Call, window: Tensor | None):
        """Queries [B, G, T, K], keys [B, G, n T, K] and values [B, H, n T, dv] of n writes to a token, projected and
        convolved, and the window after."""
        parts = self.part_projections(hidden_states)
        if self.short_conv is not None:
            order = ["qkv".index(name) for name in self.conv_order]
            joined = torch.cat([parts[which] for which in order], dim=-1)
            # SiLU brings numbers near zero, which divided by their length have gradients out of float16's range.
            joined = joined.float() if joined.dtype == torch.float16 else joined
            joined, window = self.short_conv(joined, context, window)
            split = joined.split([parts[which].shape[-1] for which in order], dim=-1)
            parts = [split[self.conv_order.index(name)] for name in "qkv"]
        writes = self.spec.writes
        forms = (1, self.key_width), (writes, self.key_width), (writes, self.value_width)
        query, key, value = (
            x.unflatten(-1, (n, -1, w)).flatten(1, 2).transpose(1, 2) for x, (n, w) in zip(parts, forms, strict=True)
        )
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        return query, key, value.repeat_interleave(self.num_heads // value.shape[1], dim=1), window

    # ------------------------------------------------------------------------------------------- shared machinery

    def turned(self, query: Tensor, key: Tensor, context: Call) -> tuple[Tensor, Tensor]:
        """Queries and keys [B, H, T, K] as a rotary position turns them, where the spec's `angles` say so."""
        rotation = self.rotation(context)
        return (query, key) if rotation is None else (rotation(query), rotation(key))

    def forward(
        self,
        hidden_states: Tensor,
        context: Call,
        *,
        memory: Tensor | None = None,
        past_key_values: Cache | None = None,
        step: int | None = None,
    ) -> SublayerOutput:
        layer = state_layer(past_key_values, self.layer_idx if step is None else step)
        written, weights, tokens = self.read(hidden_states, context, layer)
        if not self.is_causal:
            back, back_weights, _ = self.read(hidden_states.flip(1), from_the_end(context), None)
            written = (written + back.flip(1)) / 2
            if weights is not None and back_weights is not None:
                weights = (weights + back_weights.flip(2, 3)) / 2
        states = self.passed_on(tokens.key, tokens.value)
        return SublayerOutput(self.o_proj(written.to(hidden_states.dtype)), weights, states=states)

    def read(
        self, hidden_states: Tensor, context: Call, layer: RecurrentStateLayer | None
    ) -> tuple[Tensor, Tensor | None, Tokens]:
        """A text [B, T, D] from its beginning to its end -> what is to be projected [B, T, H * dv], the weights, and
        what it was to the recurrence. layer: what earlier tokens left, which is replaced."""
        state = {} if layer is None else layer.state
        tokens, window = self.tokens(hidden_states, context, state.get("window"))
        if hidden_states.dtype == torch.float16:  # sums over a text leave its range, and a norm follows
            tokens = tokens._replace(value=tokens.value.float())
        options: dict[str, Any] = {"key_padding_mask": context.query_padding_mask, "segment_ids": context.segment_ids}
        writes, weights = self.spec.writes, None
        if writes > 1:  # the recurrence takes as many steps to a token
            repeated = {name: ids.repeat_interleave(writes, 1) for name, ids in options.items() if ids is not None}
            options |= repeated
        held = state.get("memory")
        if self.wants_weights(context):
            output, held, weights = self._literal(tokens, held, options)
        else:
            options |= {"state": held, "return_state": True, "chunk_size": self.spec.chunk_size}
            query, key, value, log_decay = tokens[:4]
            if tokens.read is not None and tokens.write is not None:
                corrected = tokens.read, tokens.write, log_decay
                found: Any = low_rank_delta_rule(query, key, value, *corrected, **options)
            elif tokens.beta is not None:
                found = gated_delta_rule(query, key, value, tokens.beta, log_decay, **options)
            else:
                found = decayed_scan(query, key, value, log_decay, **options)
            output, held = found
        if writes > 1:
            output = output[:, :, writes - 1 :: writes]
            weights = (
                None if weights is None else weights[:, :, writes - 1 :: writes].unflatten(-1, (-1, writes)).sum(-1)
            )
        if layer is not None:
            layer.advance(hidden_states.shape[1], memory=held, **({} if window is None else {"window": window}))
        return self.gated(output.transpose(1, 2), hidden_states, tokens), weights, tokens

    def _literal(self, tokens: Tokens, state: Tensor | None, options: dict[str, Any]):
        """Token by token: outputs, the state after, and weights [B, H, T, T], where no earlier text has a part."""
        dtype = tokens.value.dtype
        wide = accumulation_dtype(dtype)
        query, key, value, log_decay = (x.to(wide) for x in tokens[:4])
        corrects = {"beta": tokens.beta, "read": tokens.read, "write": tokens.write}
        options |= {name: x.to(wide) for name, x in corrects.items() if x is not None}
        with without_autocast(tokens.value):
            output, after = gated_recurrence_reference(query, key, value, log_decay, state=state, **options)
            weights = None
            if state is None:
                own = torch.eye(value.shape[2], dtype=wide, device=value.device).expand(*value.shape[:2], -1, -1)
                weights = gated_recurrence_reference(query, key, own, log_decay, **options)[0]
                output, weights = weights @ value, weights.to(dtype)  # the same, with a gradient to what is given out
        return output, after, weights


def from_the_end(context: Call) -> Call:
    """The call as it is for texts whose last token comes first."""
    seen = copy.copy(context)
    mask, documents = context.padding_mask, context.segment_ids
    seen.padding_mask = None if mask is None else mask.flip(1)
    seen.segment_ids = None if documents is None else documents.flip(1)
    seen.positions = -context.positions.flip(-1)
    return seen


@dataclass(kw_only=True)
class RecurrentSpec(AttentionSpec):
    """Base of the specs of mechanisms whose state decays. scales: whether queries have a factor. turns: whether a
    rotary position may turn them. writes: how many keys and values a token writes, one after another.

    Args:
        key_heads, value_heads: how many heads queries and keys have, and how many values; `None`: queries have the
            config's `num_attention_heads`, keys and values its `num_key_value_heads`, or with `key_heads` values have
            the former. Of heads of queries and of values one number divides the other.
        key_width, value_width: of a head (`None`: the config's).
        conv: taps of a short convolution of queries, keys and values (0: none).
        norm_eps: of the norm on the output (`None`: the config's).
        chunk_size: tokens per quadratic block of a text.
        angles: by what a rotary position turns queries and keys; unlike elsewhere by nothing, unless it is said.
    """

    acts = frozenset({"rotation"})
    keeps_rotated = True
    supports = frozenset({"mixer", "packed_rows"})
    not_taken_over = ("scale", "bias", "output_bias", "angles")  # which are for softmax
    scales: ClassVar[bool] = True
    turns: ClassVar[bool] = True

    key_heads: int | None = bounded(None, least=1)
    value_heads: int | None = bounded(None, least=1)
    key_width: int | None = bounded(None, least=1)
    value_width: int | None = bounded(None, least=1)
    conv: int = bounded(0, least=0)
    norm_eps: float | None = bounded(None, above=0)
    chunk_size: int = bounded(64, least=1)
    bias: bool = False
    angles: Literal["global", "local", "none"] = "none"

    @property
    def writes(self) -> int:
        return 1

    def heads(self, config) -> tuple[int, int, int]:
        """Heads of queries, keys and values."""
        queries, keys = config.num_attention_heads, config.key_value_heads
        if self.key_heads is None:
            return queries, keys, self.value_heads or keys
        return self.key_heads, self.key_heads, self.value_heads or queries

    def key_size(self, config) -> int:
        """Width of a head's keys."""
        return self.key_width or config.head_width

    def value_size(self, config) -> int:
        return self.value_width or config.head_width

    def eps(self, config) -> float:
        return config.layer_norm_eps if self.norm_eps is None else self.norm_eps

    def check_fields(self) -> None:
        if self.scale is not None and not self.scales:
            raise ValueError(f"{self.type} does not scale queries, got `scale={self.scale}`; leave it unset (None).")
        if self.angles != "none" and not self.turns:
            raise ValueError(
                f"{self.type} has no queries and keys that a position turns, got `angles={self.angles!r}`; set it to"
                " 'none'."
            )

    def check(self, config) -> None:
        if self.angles != "none" and not config.is_decoder:
            raise ValueError(
                f"{self.type} with `angles={self.angles!r}` is turned by places from the beginning, and an encoder"
                " reads a text from its end as well; set it to 'none'."
            )
        queries, keys, values = self.heads(config)
        if queries % keys or (values % queries and queries % values):
            raise ValueError(
                f"{self.type} has {queries} heads of queries, {keys} of keys and {values} of values; that of keys has"
                " to divide that of queries, and of queries and values one has to divide the other: change `key_heads`"
                " or `value_heads`."
            )
        if self.angles != "none" and self.key_size(config) != config.head_width:
            raise ValueError(
                f"{self.type} with `angles={self.angles!r}` is turned as heads of the config's width"
                f" {config.head_width}, but has keys of width {self.key_size(config)}; set `angles='none'`, or make"
                " these widths equal."
            )

    def weighs(self, config) -> bool:
        return False

    def projects_keys(self, config) -> bool:
        return False

    def sequence_form(self, config) -> SequenceForm | Unserved:
        return Unserved("reads the state that earlier parts of a text leave")

    def cache_layer(self, config, layer_idx: int = 0) -> RecurrentStateLayer:
        return RecurrentStateLayer()
