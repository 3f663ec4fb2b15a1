# SPDX-License-Identifier: Apache-2.0
"""Product-key memory: a very large key-value memory in place of a feed-forward, read sparsely."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from ..core.call import Call, SublayerOutput
from ..core.components import bounded, check_layers, register
from ..core.distributed import sum_over_processes
from ..core.weight_decay import Undecayed
from ..ops.common.constants import constant
from ..ops.common.derivatives import first_derivative_only
from .base import FeedForward
from .dense import DenseFeedForward, DenseForm
from .experts import wide
from .routing import real_tokens

CACHED_NUMBERS = 1 << 20  # of values read at once for the gradient of weights: 4 MiB in float32
NUMBERS_AT_ONCE = 1 << 27  # the same on other devices, where a step costs more than a buffer


class TokenBatchNorm(Undecayed, nn.Module):
    """Batch normalization over real tokens alone: y = g (x - mean) / sqrt(var + eps) + b per channel.

    In training mean and (biased) variance are those of the real tokens of all processes, and running ones follow in
    the backward
    pass: once for each step, also where checkpointing runs the forward pass twice. In evaluation the running ones are
    used, and a token's output depends on nothing else. A frozen norm (its weight needs no gradient, as
    besides adapters) keeps its statistics and uses them in training too: what is saved then stays what was used.
    """

    undecayed = ("weight", "bias")

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int, eps: float = 1e-5, momentum: float = 0.1):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))
        self.eps, self.momentum = eps, momentum

    def initialize(self, config, init) -> None:
        init.ones_(self.weight)
        init.zeros_(self.bias)
        init.zeros_(self.running_mean)
        init.ones_(self.running_var)

    def forward(self, tokens: Tensor, real: Tensor) -> Tensor:
        """tokens [N, C], real [N] boolean -> [N, C]."""
        values = wide(tokens)
        mean, var, current = self.running_mean, self.running_var, None
        if self.training and self.weight.requires_grad:
            masked = values.masked_fill(~real[:, None], 0.0)
            sums = sum_over_processes(torch.cat([masked.sum(0), real.sum()[None].to(masked.dtype)]))
            count = sums[-1]
            mean = sums[:-1] / count.clamp(min=1)
            spread = (masked - mean).masked_fill(~real[:, None], 0.0).square().sum(0)
            var = sum_over_processes(spread) / count.clamp(min=1)
            current = mean.detach(), var.detach() * count / (count - 1).clamp(min=1), count  # the variance unbiased
        scale = torch.rsqrt(var.to(values.dtype) + self.eps) * self.weight.to(values.dtype)
        output = ((values - mean.to(values.dtype)) * scale + self.bias).to(tokens.dtype)
        if current is None:
            return output
        if torch.compiler.is_compiling():  # a graph cannot hold a backward pass that changes buffers
            self.follow(*current)
            return output
        return _Follow.apply(output, self, *current)

    @torch.no_grad()
    def follow(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        """Moves the running statistics towards those of `count` tokens, if there are any."""
        for running, current in ((self.running_mean, mean), (self.running_var, var)):
            running.lerp_(torch.where(count > 0, current.to(running.dtype), running), self.momentum)


class _Follow(torch.autograd.Function):
    """Hands its input on; in the backward pass the norm follows the statistics of the step."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, norm: TokenBatchNorm, *current: Tensor) -> Tensor:
        ctx.norm, ctx.current = norm, current
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.norm.follow(*ctx.current)
        return grad, None, None, None, None


def candidates(topk: int) -> tuple[tuple[int, int], ...]:
    """Ranks (a, b), from 0, of the pairs that can be among the `topk` best sums of two descending lists: (a + 1)(b +
    1) pairs are at least as good as (a, b), itself included. About k ln k of k^2."""
    return tuple((a, b) for a in range(topk) for b in range(topk // (a + 1)))


class WeightGradient(torch.autograd.Function):
    """Passes on the output [N, D] = sum_j weights[:, j] * values[slots[:, j]] and gives `weights` its gradient
    <values, grad>: some tokens at a time, whose values stay in the processor's cache."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, weights: Tensor, slots: Tensor, values: Tensor) -> Tensor:
        ctx.save_for_backward(slots, values)
        return output.view_as(output)

    @staticmethod
    @first_derivative_only("A product-key memory")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        slots, values = ctx.saved_tensors
        found = grad.new_empty(slots.shape)
        at_once = CACHED_NUMBERS if slots.device.type == "cpu" else NUMBERS_AT_ONCE
        step = max(1, at_once // max(1, slots.shape[1] * values.shape[1]))
        for begin in range(0, slots.shape[0], step):
            part = slice(begin, begin + step)
            read = values.index_select(0, slots[part].flatten()).view(*slots[part].shape, -1)
            torch.bmm(read, grad[part, :, None].to(read.dtype), out=found[part, :, None])
        return grad, found, None, None


class ProductKeyMemory(FeedForward):
    """y = sum_h sum_{j in I_h} softmax_j(q_h k_j) V_j over the k best of n^2 slots, whose keys are pairs of n + n
    sub-keys.

    Lample et al. 2019 (arXiv 1907.05242), eqs. 1-6. Slot a * n + b has the key (K1_a, K2_b); the k best of each half
    suffice to find the k best pairs, so a read costs H (n d + k^2 + k D) and never looks at n^2 keys. The values
    are shared by the heads.
    """

    def __init__(self, config, spec: ProductKeyMemorySpec):
        super().__init__()
        self.spec = spec
        width, half = config.hidden_size, spec.resolved_key_dim(config) // 2
        self.num_heads, self.num_keys, self.topk = (
            spec.num_heads,
            spec.resolved_num_keys(config),
            spec.resolved_topk(config),
        )
        self.ranks = tuple(zip(*candidates(self.topk)))
        self.query_proj = nn.Linear(width, self.num_heads * 2 * half)
        self.query_norm: nn.Module | None = None
        if spec.query_norm == "batch":
            self.query_norm = TokenBatchNorm(self.num_heads * 2 * half)
        elif spec.query_norm == "layer":
            self.query_norm = nn.LayerNorm(half)
        self.keys = nn.Parameter(torch.empty(self.num_heads, 2, self.num_keys, half))
        self.values = nn.Parameter(torch.empty(self.num_keys**2, width))
        self.ffn = DenseFeedForward(config, spec) if spec.mode == "add" else None

    def initialize(self, config, init) -> None:
        bound = self.keys.shape[-1] ** -0.5
        init.uniform_(self.keys, -bound, bound)
        init.normal_(self.values, mean=0.0, std=self.values.shape[-1] ** -0.5)

    def queries(self, tokens: Tensor, real: Tensor) -> Tensor:
        """[N, D] -> [N, H, 2, d / 2]."""
        query = self.query_proj(tokens)
        shape = (tokens.shape[0], self.num_heads, 2, -1)
        if self.query_norm is None:
            return query.view(shape)
        if self.spec.query_norm == "batch":
            return self.query_norm(query, real).view(shape)
        return self.query_norm(query.view(shape))

    def best_slots(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """[N, H, 2, d / 2] -> scores [N, H, k], highest first, and their slots."""
        scores = torch.einsum("nhpd,hpad->nhpa", query, self.keys.to(query.dtype))
        best, index = scores.topk(self.topk, dim=-1)
        first, second = (constant(ranks, query.device) for ranks in self.ranks)
        sums = best[:, :, 0].index_select(-1, first) + best[:, :, 1].index_select(-1, second)
        scores, chosen = sums.topk(self.topk, dim=-1)
        slots = index[:, :, 0].gather(-1, first[chosen]) * self.num_keys + index[:, :, 1].gather(-1, second[chosen])
        return scores, slots

    def forward(self, hidden_states: Tensor, context: Call | None) -> SublayerOutput:
        """hidden_states [B, T, D] -> [B, T, D]."""
        tokens = hidden_states.flatten(0, 1)
        scores, slots = self.best_slots(self.queries(tokens, real_tokens(hidden_states, context)))
        weights = torch.softmax(wide(scores), -1).to(self.values.dtype)
        slots, weights = slots.flatten(1), weights.flatten(1)
        # The kernel's gradient of weights is slow on the CPU, and elsewhere there is none in bfloat16.
        apart = not torch.compiler.is_compiling() if weights.device.type == "cpu" else weights.dtype == torch.bfloat16
        apart = apart and weights.requires_grad
        output = F.embedding_bag(
            slots,
            self.values,
            per_sample_weights=weights.detach() if apart else weights,
            mode="sum",
            sparse=self.spec.sparse_gradients,
        )
        if apart:
            output = WeightGradient.apply(output, weights, slots, self.values)
        output = output.to(hidden_states.dtype).view_as(hidden_states)
        if self.ffn is not None:
            output = output + self.ffn(hidden_states, context).output
        return SublayerOutput(output)


@register("feedforward", "product_key_memory", aliases=("pkm",))
class ProductKeyMemorySpec(DenseForm):
    """A memory of n^2 slots in some layers, a dense network in the others.

    Args:
        layers: which layers have a memory (`None`: the middle one).
        num_heads: reading heads.
        num_keys: n, sub-keys per half (`None`: hidden_size / 2, the paper's 512 at width 1024).
        topk: slots read by a head (`None`: n / 4, at most 32).
        key_dim: width of a whole key (`None`: hidden_size / 4, made even).
        query_norm: `batch` (the paper's best; statistics over the batch's real tokens in training, running ones in
            evaluation), `layer` (each half by itself) or `none`.
        mode: the memory replaces the dense network or is added to it.
        sparse_gradients: the values' gradient as a sparse tensor, for optimizers that take one (SparseAdam).
        activation, bias: of the dense networks.
    """

    summary = "a memory of many slots found by products of keys"
    tensor_parallel = False  # its batch norm's sums over processes are those of data parallelism
    unquantized = {"feedforward.query_proj": "it chooses rows of a memory, and a small change chooses others"}

    layers: tuple[int, ...] | None = bounded(None, least=0)
    num_heads: int = bounded(4, least=1)
    num_keys: int | None = bounded(None, least=1)
    topk: int | None = bounded(None, least=1)
    key_dim: int | None = None
    query_norm: Literal["batch", "layer", "none"] = "batch"
    mode: Literal["replace", "add"] = "replace"
    sparse_gradients: bool = False
    activation: str = "gelu"
    bias: bool = True

    @property
    def activation_name(self) -> str:
        return self.activation

    def resolved_num_keys(self, config) -> int:
        """n for this config."""
        return max(config.hidden_size // 2, 1) if self.num_keys is None else self.num_keys

    def resolved_topk(self, config) -> int:
        """k for this config."""
        return min(32, max(self.resolved_num_keys(config) // 4, 1)) if self.topk is None else self.topk

    def resolved_key_dim(self, config) -> int:
        """Width of a key for this config."""
        return 2 * max(config.hidden_size // 8, 1) if self.key_dim is None else self.key_dim

    def check_fields(self) -> None:
        if self.key_dim is not None and (self.key_dim < 2 or self.key_dim % 2):
            raise ValueError(f"product_key_memory: `key_dim` is cut into halves and must be even, got {self.key_dim}.")
        if self.activation not in ACT2FN:
            raise ValueError(
                f"product_key_memory: unknown activation {self.activation!r}; known: {', '.join(sorted(ACT2FN))}."
            )

    def check(self, config) -> None:
        check_layers(self, config)
        keys, topk = self.resolved_num_keys(config), self.resolved_topk(config)
        if topk > keys:
            raise ValueError(f"product_key_memory: `topk` {topk} exceeds `num_keys` {keys}; lower it or add keys.")
        if topk == 1:
            raise ValueError(
                f"product_key_memory: a softmax over the one slot that `topk` 1 reads (a fourth of `num_keys` {keys},"
                " unless set) is constant, so keys and queries would learn nothing; set `topk` to 2 or more, or"
                " `num_keys` to 8 or more."
            )

    def build(self, config, **where) -> nn.Module:
        layers = (config.num_hidden_layers // 2,) if self.layers is None else self.layers
        memory = where.get("layer_idx", 0) in layers
        return ProductKeyMemory(config, self) if memory else DenseFeedForward(config, self)
