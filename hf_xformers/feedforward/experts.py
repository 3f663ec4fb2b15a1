# SPDX-License-Identifier: Apache-2.0
"""What mixtures of experts share: stacked experts, a router in full precision, queues with a capacity, balance losses.

Tokens are flat here, [N, D] with N = B * T. An assignment of token n to expert `num_experts` means "nowhere": it costs
nothing and gives zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from ..compat import grouped_mm, grouped_mm_fallback, parameters_of, under_adapter
from ..core.call import can_inspect, dropout_rate
from ..core.components import aliased, bounded
from ..core.distributed import process_number
from ..ops.common.derivatives import first_derivative_only
from .dense import DenseFeedForward, DenseForm

_fallback = grouped_mm_fallback()


def wide(tensor: Tensor) -> Tensor:
    """`tensor` in float32 at least."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def grouped_matmul(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """rows [N, K] sorted by expert, weight [E, K, M], ends [E] (int32, where each expert's rows end) -> [N, M].

    Rows beyond the last end belong to nobody: what stands there afterwards is undefined, in the gradient as well.
    """
    aligned = all(size * rows.element_size() % 16 == 0 for size in weight.shape[1:])
    if rows.dtype == torch.float64 or not aligned:  # the kernel takes neither
        return _fallback(rows, weight, ends)
    return grouped_mm(rows, weight, ends)


class SlicedExperts(torch.autograd.Function):
    """W_down[e] act(W_up[e] x + b_up[e]) + b_down[e] for rows [n, D] sorted by expert; ends: where each expert's rows
    end. act may make one number of several.

    One expert after the other, so that what is as wide as the inner width stays small next to its first half, which is
    kept. Every product is written where it belongs, gradients of weights too: nothing is stacked or masked afterwards.
    kept: [n, F] boolean, what dropout leaves, scaled by `boost`; or None.
    """

    @staticmethod
    def forward(ctx: Any, rows, up, up_bias, down, down_bias, activation, ends, kept, boost) -> Tensor:
        inner = rows.new_empty(rows.shape[0], up.shape[1])
        output = rows.new_empty(rows.shape[0], down.shape[1])
        for expert, (begin, end) in enumerate(zip([0, *ends], ends)):
            if begin == end:
                continue
            part = slice(begin, end)
            torch.mm(rows[part], up[expert].t(), out=inner[part])
            if up_bias is not None:
                inner[part] += up_bias[expert].to(inner.dtype)
            active = activation(inner[part])
            if kept is not None:
                active = active * kept[part] * boost
            torch.mm(active, down[expert].t(), out=output[part])
            if down_bias is not None:
                output[part] += down_bias[expert].to(output.dtype)
        ctx.save_for_backward(rows, inner, up, down, kept)
        ctx.activation, ctx.ends, ctx.boost = activation, ends, boost
        ctx.bias_dtype = None if up_bias is None else up_bias.dtype
        return output

    @staticmethod
    @first_derivative_only("A network of experts")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, inner, up, down, kept = ctx.saved_tensors
        needs = ctx.needs_input_grad
        grad_rows = torch.empty_like(rows) if needs[0] else None
        grad_up = torch.empty_like(up) if needs[1] else None
        grad_up_bias = up.new_zeros(up.shape[:2], dtype=ctx.bias_dtype) if needs[2] else None
        grad_down = torch.empty_like(down) if needs[3] else None
        grad_down_bias = down.new_zeros(down.shape[:2], dtype=ctx.bias_dtype) if needs[4] else None
        for expert, (begin, end) in enumerate(zip([0, *ctx.ends], ctx.ends)):
            part, given = slice(begin, end), grad[begin:end]
            if begin == end:
                for idle in (grad_up, grad_down):
                    if idle is not None:
                        idle[expert].zero_()
                continue
            with torch.enable_grad():
                before = inner[part].detach().requires_grad_()
                after = ctx.activation(before)
            active = after.detach()
            if kept is not None:
                active = active * kept[part] * ctx.boost
            if grad_down is not None:
                torch.mm(given.t(), active, out=grad_down[expert])
            if grad_down_bias is not None:
                grad_down_bias[expert] = given.sum(0)
            if not any(needs[:3]):
                continue
            back = given @ down[expert]
            if kept is not None:
                back = back * kept[part] * ctx.boost
            (back,) = torch.autograd.grad(after, before, back)
            if grad_rows is not None:
                torch.mm(back, up[expert], out=grad_rows[part])
            if grad_up is not None:
                torch.mm(back.t(), rows[part], out=grad_up[expert])
            if grad_up_bias is not None:
                grad_up_bias[expert] = back.sum(0)
        return grad_rows, grad_up, grad_up_bias, grad_down, grad_down_bias, None, None, None, None


def counts_are_at_hand(tokens: Tensor, weight: Tensor) -> bool:
    """Whether a program may read how many rows each expert has: plain tensors on the CPU, no graph being recorded."""
    plain = type(tokens) in (Tensor, nn.Parameter) and type(weight.data) is Tensor
    return plain and tokens.device.type == "cpu" and can_inspect()


def own_draws(device: torch.device) -> AbstractContextManager[None]:
    """A context with random numbers of this process's own, after which those of all processes are as before: one
    number further, wherever they are alike."""
    seed = int(torch.randint(2**31, ()))
    devices = [] if device.type == "cpu" else [device]

    @contextmanager
    def drawing() -> Iterator[None]:
        with torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type):
            torch.manual_seed(seed + process_number())
            yield

    return drawing()


class Experts(nn.Module):
    """E feed-forward networks of one shape: FFN_e(x) = W_down[e] act(W_up[e] x + b_up[e]) + b_down[e].

    up_proj [E, F, D], down_proj [E, D, F]; gated experts have gate_up_proj [E, 2 F, D], the rows of the gate and those
    of what it gates, in place of the first. Tokens are sorted by expert and each projection is a product per slice of
    rows (one grouped product on accelerators), so time is that of the assignments made. Every parameter takes part in
    every backward pass, chosen or not.

    Under expert parallelism (transformers' styles `grouped_gemm` and `ep_dispatch_experts`) a process has E / n of
    them, and [`forward`] is called with the tokens that were brought to it.
    """

    _is_expert_parallel = False  # transformers sets it where it splits the experts

    up_proj: nn.Parameter
    up_bias: nn.Parameter | None
    gate_up_proj: nn.Parameter
    gate_up_bias: nn.Parameter | None

    dropout = dropout_rate("activation_dropout")

    def __init__(
        self,
        num_experts: int,
        width: int,
        inner: int,
        *,
        activation: str,
        bias: bool,
        dropout: float,
        slices: int = 1,
        gate: nn.Module | None = None,
    ):
        """slices: how many parts both projections are cut into by their outputs; each part has its experts. gate: of
        gated experts, [..., 2 F] -> [..., F], in place of the activation."""
        super().__init__()
        self.num_experts, self.slices, self.dropout = num_experts, slices, dropout
        self.all_experts = num_experts  # of all processes; `num_experts` are those of this one
        self.gated = gate is not None
        self.activation = ACT2FN[activation] if gate is None else gate
        rows, name = (2 * inner, "gate_up") if self.gated else (inner, "up")
        up, down = (slices * num_experts, rows // slices), (slices * num_experts, width // slices)
        self.register_parameter(f"{name}_proj", nn.Parameter(torch.empty(*up, width)))
        self.down_proj = nn.Parameter(torch.empty(*down, inner))
        self.register_parameter(f"{name}_bias", nn.Parameter(torch.zeros(up)) if bias else None)
        self.down_bias = nn.Parameter(torch.zeros(down)) if bias else None

    def inward(self) -> tuple[nn.Parameter, nn.Parameter | None]:
        """Weights and biases of the projection to the inner width."""
        return (self.gate_up_proj, self.gate_up_bias) if self.gated else (self.up_proj, self.up_bias)

    def start(self, config, init, scale: float | None = None) -> None:
        """As the config's initializer starts dense projections; with `scale` s: truncated normal of variance s / fan
        in."""
        up, up_bias = self.inward()
        for weight, writes in ((up, False), (self.down_proj, True)):
            fan_out, fan_in = weight.shape[1] * self.slices, weight.shape[2]
            fan_out = fan_out // 2 if self.gated and not writes else fan_out
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
        for bias in (up_bias, self.down_bias):
            if bias is not None:
                init.zeros_(bias)

    def forward(self, tokens: Tensor, chosen: Tensor, gates: Tensor | None) -> Tensor:
        """sum_j gates[n, j] * FFN_{chosen[n, j]}(tokens[n]).

        tokens [N, D]; chosen [N, k], 0 <= chosen <= num_experts (the last: nowhere); gates [N, k] or None (all 1) ->
        [N, D].
        """
        if self._is_expert_parallel and self.dropout and self.training:  # processes hold unequal numbers of rows
            with own_draws(tokens.device):
                return self._run(tokens, chosen, gates)
        return self._run(tokens, chosen, gates)

    def _run(self, tokens: Tensor, chosen: Tensor, gates: Tensor | None) -> Tensor:
        if counts_are_at_hand(tokens, self.down_proj) and not parameters_of(self.activation):
            return self._by_slices(tokens, chosen, gates)
        return self._by_groups(tokens, chosen, gates)

    def weights(self, device: str) -> tuple[Tensor, Tensor]:
        """Both projections; in autocast's precision, which does not reach grouped products by itself."""
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            return self.inward()[0].to(dtype), self.down_proj.to(dtype)
        return self.inward()[0], self.down_proj

    def _by_slices(self, tokens: Tensor, chosen: Tensor, gates: Tensor | None) -> Tensor:
        """The assignments made and no others, one slice of rows after the other: the fastest where reading how many
        there are does not wait for a device."""
        up, down = self.weights("cpu")
        flat = chosen.reshape(-1)
        order = torch.sort(flat, stable=True).indices
        ends = torch.bincount(flat, minlength=self.num_experts)[: self.num_experts].cumsum(0).tolist()
        order = order[: ends[-1]]
        rows = order if chosen.shape[1] == 1 else order // chosen.shape[1]
        inputs, kept, rate = tokens.to(up.dtype).index_select(0, rows), None, self.dropout if self.training else 0.0
        if rate:
            kept = torch.empty(len(rows), down.shape[2], dtype=torch.bool).bernoulli_(1 - rate)
        output = SlicedExperts.apply(
            inputs, up, self.inward()[1], down, self.down_bias, self.activation, ends, kept, 1 / (1 - rate)
        )
        if gates is not None:
            output = output * gates.to(output.dtype).reshape(-1, 1).index_select(0, order)
        total = output.new_zeros(tokens.shape[0], output.shape[1])
        return total.index_add(0, rows, output).to(tokens.dtype)

    def _by_groups(self, tokens: Tensor, chosen: Tensor, gates: Tensor | None) -> Tensor:
        """Grouped products over all rows, those of nobody included, so that no number has to leave the device."""
        count, choices = chosen.shape
        flat = chosen.reshape(-1)
        sorted_experts, order = torch.sort(flat, stable=True)
        ends = torch.searchsorted(sorted_experts, torch.arange(self.num_experts, device=flat.device), right=True)
        nowhere = (sorted_experts == self.num_experts).unsqueeze(-1)
        sorted_experts = sorted_experts.clamp(max=self.num_experts - 1)
        up, down = self.weights(tokens.device.type)
        ends = ends.to(torch.int32)
        # Rows of nobody are masked at every step: forward and backward leave arbitrary numbers in them.
        inner = tokens.to(up.dtype)[order // choices].masked_fill(nowhere, 0.0)
        inner = grouped_matmul(inner, up.transpose(1, 2), ends).masked_fill(nowhere, 0.0)
        up_bias = self.inward()[1]
        if up_bias is not None:
            inner = inner + up_bias.to(inner.dtype)[sorted_experts]
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

    def after_distribution(self, batches: int) -> None:
        """Works around torch's FSDP2, which divides the gradients of experts that a single process holds by `batches`
        twice in float16 and float64 (2.13): a hook on the sum divides instead."""
        if self._is_expert_parallel:
            self.set_gradient_divide_factor(1.0)  # type: ignore[operator]
            self.set_all_reduce_hook(lambda gradients: gradients.div_(batches))  # type: ignore[operator]


def mix(experts: nn.Module, tokens: Tensor, chosen: Tensor, gates: Tensor | None) -> Tensor:
    """[`Experts.forward`] with the experts of all processes; chosen numbers them all. experts: [`Experts`], or what
    peft puts around it to adapt its tensors, of which nothing but calls is passed on.

    transformers' exchange of tokens knows no "nowhere" and asks for gates: there such an assignment goes to some
    expert, each in turn, with gate 0.
    """
    own: Any = under_adapter(experts) or experts
    if own._is_expert_parallel:
        nowhere = chosen == own.all_experts
        turns = torch.arange(chosen.numel(), device=chosen.device).view_as(chosen) % own.all_experts
        chosen = torch.where(nowhere, turns, chosen)
        gates = torch.ones_like(chosen, dtype=tokens.dtype) if gates is None else gates.to(tokens.dtype)
        gates = gates.masked_fill(nowhere, 0.0)
    return experts(tokens, chosen, gates)


class Router(nn.Module):
    """logits = W x in float32 at least, whatever the model's precision and autocast say.

    Fedus et al. 2022 (arXiv 2101.03961), section 2.4. jitter: in training x is multiplied by U(1 - jitter, 1 +
    jitter), elementwise; the experts read x itself. bias: logits have one.
    """

    def __init__(self, width: int, num_outputs: int, jitter: float = 0.0, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_outputs, width))
        self.bias = nn.Parameter(torch.zeros(num_outputs)) if bias else None
        self.jitter = jitter

    def forward(self, tokens: Tensor) -> Tensor:
        """[N, D] -> [N, outputs]."""
        tokens = wide(tokens)
        if self.training and self.jitter:
            tokens = tokens * torch.empty_like(tokens).uniform_(1.0 - self.jitter, 1.0 + self.jitter)
        with torch.autocast(device_type=tokens.device.type, enabled=False):
            return F.linear(tokens, self.weight.to(tokens.dtype), None if self.bias is None else self.bias.to(tokens))


@dataclass(kw_only=True)
class ExpertsSpec(DenseForm):
    """Base of specs with experts.

    Args:
        num_experts: E.
        every: experts stand in every `every`-th layer, the last of each run of `every`; the others have one dense
            network of the same form.
        activation: its name in transformers' table.
        bias: biases on the projections.
        expert_dropout: dropout inside the experts (`None`: the config's `activation_dropout_prob`).
    """

    splits = frozenset({"experts"})

    num_experts: int = aliased(8, "experts")
    every: int = 1
    activation: str = "relu"
    bias: bool = False
    expert_dropout: float | int | None = bounded(None, least=0, below=1)

    def check_fields(self) -> None:
        if self.num_experts < 1 or self.every < 1:
            raise ValueError(
                f"{self.type}: `num_experts` and `every` must be at least 1, got {self.num_experts} and {self.every}."
            )
        if self.activation not in ACT2FN:
            raise ValueError(
                f"{self.type}: unknown activation {self.activation!r}; known: {', '.join(sorted(ACT2FN))}."
            )
        for name, value in self.capacities().items():
            if value is not None and value <= 0:
                raise ValueError(f"{self.type}: `{name}` must be positive, or None for no capacity, got {value}.")

    def capacities(self) -> dict[str, float | None]:
        """The factors that bound what an expert takes, by their fields' names; None: no bound."""
        return {}

    def expert_parameters(self) -> tuple[str, ...]:
        up = "gate_up" if self.gated else "up"
        biases = (f"{up}_bias", "down_bias") if self.bias else ()
        return f"{up}_proj", "down_proj", *biases

    def expert_count(self) -> int:
        return self.num_experts

    def is_sparse(self, config, layer_idx: int) -> bool:
        """Whether layer `layer_idx` has experts; a stack shorter than `every` has them in its last layer."""
        every = min(self.every, max(config.num_hidden_layers, 1))
        return layer_idx % every == every - 1

    def make_experts(self, config, num_experts: int | None = None) -> Experts:
        return Experts(
            self.num_experts if num_experts is None else num_experts,
            config.hidden_size,
            config.intermediate_size,
            activation=self.activation,
            bias=self.bias,
            dropout=self.inner_dropout(config),
        )

    def inner_dropout(self, config) -> float:
        """Dropout inside the experts."""
        return float(config.activation_dropout_prob if self.expert_dropout is None else self.expert_dropout)

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
