"""What mixtures of experts share: stacked experts, a router in full precision, queues with a capacity, balance losses.

Tokens are flat here, [N, D] with N = B * T. An assignment of token n to expert `num_experts` means "nowhere": it costs
nothing and gives zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.integrations import moe as transformers_moe

from ..components import Spec
from ..context import LayerContext
from .dense import DenseFeedForward


def wide(tensor: Tensor) -> Tensor:
    """`tensor` in float32 at least."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def grouped_matmul(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """rows [N, K] sorted by expert, weight [E, K, M], ends [E] (int32, where each expert's rows end) -> [N, M].

    Rows beyond the last end belong to nobody: what stands there afterwards is undefined, in the gradient as well.
    """
    aligned = all(size * rows.element_size() % 16 == 0 for size in weight.shape[1:])
    if rows.dtype == torch.float64 or not aligned:  # the kernel takes neither
        return torch.ops.transformers.grouped_mm_fallback(rows, weight, ends)
    return transformers_moe._grouped_mm(rows, weight, ends)


class Experts(nn.Module):
    """E feed-forward networks of one shape: FFN_e(x) = W_down[e] act(W_up[e] x + b_up[e]) + b_down[e].

    up_proj [E, F, D], down_proj [E, D, F]. Tokens are sorted by expert and each projection is one grouped product, so
    time is that of the assignments made. Every parameter takes part in every backward pass, chosen or not.
    """

    def __init__(self, num_experts: int, width: int, inner: int, *, activation: str, bias: bool, dropout: float):
        super().__init__()
        self.num_experts, self.dropout = num_experts, dropout
        self.activation = ACT2FN[activation]
        self.up_proj = nn.Parameter(torch.empty(num_experts, inner, width))
        self.down_proj = nn.Parameter(torch.empty(num_experts, width, inner))
        self.up_bias = nn.Parameter(torch.zeros(num_experts, inner)) if bias else None
        self.down_bias = nn.Parameter(torch.zeros(num_experts, width)) if bias else None

    def start(self, config, init, scale: float | None = None) -> None:
        """As the config's initializer starts dense projections; with `scale` s: truncated normal of variance s / fan in."""
        for weight, writes in ((self.up_proj, False), (self.down_proj, True)):
            fan_out, fan_in = weight.shape[1:]
            if scale is not None:
                std = (scale / fan_in) ** 0.5
                init.trunc_normal_(weight, mean=0.0, std=std, a=-2 * std, b=2 * std)
            elif config.initializer == "xavier":
                bound = config.initializer_factor * (6 / (fan_in + fan_out)) ** 0.5
                init.uniform_(weight, -bound, bound)
            elif config.initializer == "small":
                init.normal_(weight, mean=0.0, std=config.initializer_factor * (2 / (fan_in + fan_out)) ** 0.5)
            elif config.initializer == "t5":
                init.normal_(weight, mean=0.0, std=config.initializer_factor * fan_in**-0.5)
            else:
                shrink = writes and config.initializer == "scaled_residual"
                depth = max(2 * config.num_hidden_layers, 1) ** -0.5 if shrink else 1.0
                init.normal_(weight, mean=0.0, std=config.initializer_range * depth)
        for bias in (self.up_bias, self.down_bias):
            if bias is not None:
                init.zeros_(bias)

    def forward(self, tokens: Tensor, chosen: Tensor, gates: Tensor | None) -> Tensor:
        """sum_j gates[n, j] * FFN_{chosen[n, j]}(tokens[n]).

        tokens [N, D]; chosen [N, k], 0 <= chosen <= num_experts (the last: nowhere); gates [N, k] or None (all 1) -> [N, D].
        """
        count, choices = chosen.shape
        flat = chosen.reshape(-1)
        sorted_experts, order = torch.sort(flat, stable=True)
        ends = torch.searchsorted(sorted_experts, torch.arange(self.num_experts, device=flat.device), right=True)
        nowhere = (sorted_experts == self.num_experts).unsqueeze(-1)
        sorted_experts = sorted_experts.clamp(max=self.num_experts - 1)
        up, down, device = self.up_proj, self.down_proj, tokens.device.type
        if torch.is_autocast_enabled(device):  # which does not reach grouped products by itself
            up, down = (weight.to(torch.get_autocast_dtype(device)) for weight in (up, down))
        ends = ends.to(torch.int32)
        # Rows of nobody are masked at every step: forward and backward leave arbitrary numbers in them.
        inner = tokens.to(up.dtype)[order // choices].masked_fill(nowhere, 0.0)
        inner = grouped_matmul(inner, up.transpose(1, 2), ends).masked_fill(nowhere, 0.0)
        if self.up_bias is not None:
            inner = inner + self.up_bias.to(inner.dtype)[sorted_experts]
        inner = self.activation(inner)
        if self.dropout and self.training:
            inner = F.dropout(inner, self.dropout)
        inner = inner.masked_fill(nowhere, 0.0)
        output = grouped_matmul(inner, down.transpose(1, 2), ends)
        if self.down_bias is not None:
            output = output + self.down_bias.to(output.dtype)[sorted_experts]
        output = output.masked_fill(nowhere, 0.0)
        back = torch.empty_like(order)
        back[order] = torch.arange(flat.shape[0], device=flat.device)
        output = output[back].view(count, choices, -1)
        if gates is not None:
            output = output * gates.to(output.dtype).unsqueeze(-1)
        return output.sum(1).to(tokens.dtype)


class Router(nn.Module):
    """logits = W x in float32 at least, whatever the model's precision and autocast say.

    Fedus et al. 2022 (arXiv 2101.03961), section 2.4. jitter: in training x is multiplied by U(1 - jitter, 1 + jitter),
    elementwise; the experts read x itself.
    """

    def __init__(self, width: int, num_outputs: int, jitter: float = 0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_outputs, width))
        self.jitter = jitter

    def forward(self, tokens: Tensor) -> Tensor:
        """[N, D] -> [N, outputs]."""
        tokens = wide(tokens)
        if self.training and self.jitter:
            tokens = tokens * torch.empty_like(tokens).uniform_(1.0 - self.jitter, 1.0 + self.jitter)
        with torch.autocast(device_type=tokens.device.type, enabled=False):
            return F.linear(tokens, self.weight.to(tokens.dtype))


# ------------------------------------------------------------------------------------------------------- queues


def real_tokens(hidden_states: Tensor, context: LayerContext | None) -> Tensor:
    """[B * T] boolean, True = real."""
    mask = None if context is None else context.query_padding_mask
    if mask is None:
        return hidden_states.new_ones(hidden_states.shape[0] * hidden_states.shape[1], dtype=torch.bool)
    return mask.reshape(-1)


def documents(hidden_states: Tensor, context: LayerContext | None) -> Tensor:
    """[B * T] number of each token's text, 0 <= number < B * T: its row, or its document in packed rows."""
    batch, length = hidden_states.shape[:2]
    rows = torch.arange(batch, device=hidden_states.device)[:, None] * length
    segments = None if context is None else context.segment_ids
    return (rows.expand(batch, length) if segments is None else rows + segments).reshape(-1)


def places(keys: Tensor) -> Tensor:
    """keys [n] integers -> how many earlier entries have the same key: a place in its queue, counted from 0."""
    ordered, order = torch.sort(keys, stable=True)
    rank = torch.arange(keys.shape[0], device=keys.device) - torch.searchsorted(ordered, ordered)
    return torch.empty_like(rank).scatter_(0, order, rank)


def capacities(texts: Tensor, real: Tensor, num_experts: int, factor: float) -> Tensor:
    """[N]: how many tokens an expert takes of each token's text: ceil(factor * real tokens of the text / num_experts)."""
    counts = torch.zeros_like(texts).scatter_add_(0, texts, real.long())[texts]
    parts = round(factor * 10_000)  # in whole numbers: 1.1 * 10 must not become 12
    return -(-counts * parts // (num_experts * 10_000))


def within_capacity(chosen: Tensor, texts: Tensor, real: Tensor, num_experts: int, factor: float | None) -> Tensor:
    """Which assignments are kept: chosen [N, k] -> boolean [N, k].

    Every text has its own queue at every expert, in token order; all first choices stand before all second ones. None:
    no capacity. Padding and assignments to nowhere are never kept and take no place.
    """
    kept = real[:, None] & (chosen < num_experts)
    if factor is None:
        return kept
    keys = torch.where(kept, texts[:, None] * num_experts + chosen, texts.shape[0] * num_experts)
    place = places(keys.T.reshape(-1)).view(chosen.shape[1], -1).T
    return kept & (place < capacities(texts, real, num_experts, factor)[:, None])


# ------------------------------------------------------------------------------------------------------- losses


def mean_over(values: Tensor, real: Tensor) -> Tensor:
    """values [N, ...] -> their mean over real tokens, zeros where there are none."""
    mask = real.view(-1, *[1] * (values.ndim - 1))
    return values.masked_fill(~mask, 0.0).sum(0) / real.sum().clamp(min=1)


def balance_loss(probabilities: Tensor, chosen: Tensor, real: Tensor) -> Tensor:
    """E * sum_e f_e P_e: f_e the share of real tokens whose (first) choice is e, P_e the mean probability of e.

    Fedus et al. 2022, eqs. 4-6. 1 at balance; gradients flow through P alone. probabilities [N, E], chosen [N].
    """
    num_experts = probabilities.shape[-1]
    share = mean_over(F.one_hot(chosen, num_experts).to(probabilities.dtype), real)
    return num_experts * (share * mean_over(probabilities, real)).sum()


def z_loss(logits: Tensor, real: Tensor) -> Tensor:
    """Mean over real tokens of (logsumexp of the logits)^2 (Zoph et al. 2022, arXiv 2202.08906, eq. 5)."""
    return mean_over(torch.logsumexp(logits, -1).square(), real)


# ------------------------------------------------------------------------------------------------------- specs


@dataclass(kw_only=True)
class ExpertsSpec(Spec):
    """Base of specs with experts.

    num_experts: E. every: experts stand in every `every`-th layer, the last of each run of `every`; the others have one
    dense network of the same form. activation: its name in transformers' table. bias: biases on the projections.
    expert_dropout: dropout inside the experts (`None`: the config's `activation_dropout_prob`).
    """

    gated: ClassVar[bool] = False
    conformance_exceptions: ClassVar[dict[str, str]] = {
        "test_attention_outputs:seq2seq": "it counts the outputs, which here include the auxiliary losses",
    }

    num_experts: int = 8
    every: int = 1
    activation: str = "relu"
    bias: bool = False
    expert_dropout: float | int | None = None

    def check_fields(self) -> None:
        if self.num_experts < 1 or self.every < 1:
            raise ValueError(
                f"{self.type}: `num_experts` and `every` must be at least 1, got {self.num_experts} and {self.every}."
            )
        if self.activation not in ACT2FN:
            raise ValueError(
                f"{self.type}: unknown activation {self.activation!r}; known: {', '.join(sorted(ACT2FN))}."
            )
        if self.expert_dropout is not None and not 0 <= self.expert_dropout < 1:
            raise ValueError(f"{self.type}: `expert_dropout` is a probability in [0, 1), got {self.expert_dropout}.")
        for name in ("capacity_factor", "eval_capacity_factor"):
            value = getattr(self, name, None)
            if value is not None and value <= 0:
                raise ValueError(f"{self.type}: `{name}` must be positive, or None for no capacity, got {value}.")

    def is_sparse(self, config, layer_idx: int) -> bool:
        """Whether layer `layer_idx` has experts; a stack shorter than `every` has them in its last layer."""
        every = min(self.every, max(config.num_hidden_layers, 1))
        return layer_idx % every == every - 1

    def make_experts(self, config, num_experts: int | None = None) -> Experts:
        dropout = config.activation_dropout_prob if self.expert_dropout is None else self.expert_dropout
        return Experts(
            self.num_experts if num_experts is None else num_experts,
            config.hidden_size,
            config.intermediate_size,
            activation=self.activation,
            bias=self.bias,
            dropout=float(dropout),
        )

    def build_sparse(self, config, layer_idx: int) -> nn.Module:
        """The module of a layer with experts."""
        raise NotImplementedError

    def build(self, config, **where) -> nn.Module:
        layer_idx = where.get("layer_idx", 0)
        if self.is_sparse(config, layer_idx):
            return self.build_sparse(config, layer_idx)
        return DenseFeedForward(config, self)  # which reads `activation_name`, `gated` and `bias`

    @property
    def activation_name(self) -> str:
        return self.activation
