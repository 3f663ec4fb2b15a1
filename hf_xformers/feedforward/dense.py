# SPDX-License-Identifier: Apache-2.0
"""Dense position-wise feed-forward sublayers, plain and gated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.activations import ACT2FN

from ..core.call import Call, SublayerOutput, dropout_rate
from ..core.components import bounded, register
from ..core.initialization import start_projections
from .base import FeedForward, FeedForwardSpec


class DenseForm(FeedForwardSpec):
    """Base of specs that say how a dense network looks: of every layer, or of those where its own kind does not
    stand."""

    bias: bool

    @property
    def activation_name(self) -> str:
        """The activation's name in transformers' table."""
        raise NotImplementedError

    @property
    def gate_factor(self) -> float:
        """What is multiplied with a gate before its activation."""
        return 1.0

    def common_settings(self) -> dict[str, Any]:
        return {"bias": self.bias, "activation": self.activation_name}


class DenseFeedForward(FeedForward):
    """y = W_down(act(W_up x)); gated: y = W_down(act(W_gate x) * (W_up x)).

    Vaswani et al. 2017, eq. 2; Shazeer 2020 (arXiv 2002.05202), eqs. 5-6 for the gated forms.
    """

    dropout = dropout_rate("activation_dropout")

    def __init__(self, config, spec: DenseForm):
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.up_proj = nn.Linear(width, inner, bias=spec.bias)
        self.gate_proj = nn.Linear(width, inner, bias=spec.bias) if spec.gated else None
        self.down_proj = nn.Linear(inner, width, bias=spec.bias)
        self.activation = ACT2FN[spec.activation_name]
        self.gate_factor = spec.gate_factor
        self.dropout = config.activation_dropout_prob
        self.chunk_size = config.chunk_size_feed_forward

    @property
    def takes_unpadded(self) -> bool:
        return True

    def initialize(self, config, init) -> None:
        inputs = [self.up_proj] if self.gate_proj is None else [self.up_proj, self.gate_proj]
        start_projections(config, init, inputs=inputs, output=self.down_proj)

    def transform(self, hidden_states: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        inner = self.up_proj(hidden_states)
        if self.gate_proj is None:
            inner = self.activation(inner)
        else:
            gate = self.gate_proj(hidden_states)
            inner = self.activation(gate if self.gate_factor == 1.0 else gate * self.gate_factor) * inner
        if self.dropout and self.training:
            inner = F.dropout(inner, self.dropout)
        return self.down_proj(inner)

    def forward(self, hidden_states: Tensor, context: Call) -> SublayerOutput:
        """hidden_states [B, T, D] -> [B, T, D]; `chunk_size_feed_forward` bounds the tokens in flight, also those kept
        for the backward pass, which computes each chunk's inner activations again."""
        if not self.chunk_size:
            return SublayerOutput(self.transform(hidden_states))
        pieces = hidden_states.split(self.chunk_size, dim=1)  # the last one may be shorter: any length works
        if torch.is_grad_enabled():
            return SublayerOutput(
                torch.cat([checkpoint(self.transform, piece, use_reentrant=False) for piece in pieces], dim=1)
            )
        return SublayerOutput(torch.cat([self.transform(piece) for piece in pieces], dim=1))


@dataclass(kw_only=True)
class DenseFeedForwardSpec(DenseForm):
    """Base of the dense forms. activation: its name in transformers' table. bias: biases on the projections."""

    activation: ClassVar[str]
    splits = frozenset({"inner"})
    supports = frozenset({"context_parallel"})

    bias: bool = True

    @property
    def activation_name(self) -> str:
        return self.activation

    def build(self, config, **where) -> DenseFeedForward:
        return DenseFeedForward(config, self)


@register("feedforward", "relu", aliases=("relu_ffn",))
class ReLUSpec(DenseFeedForwardSpec):
    """max(0, x W1) W2 (Vaswani et al. 2017, eq. 2)."""

    summary = "two projections with a ReLU between"
    activation = "relu"


@register("feedforward", "squared_relu", aliases=("squared_relu_ffn", "relu2"))
class SquaredReLUSpec(DenseFeedForwardSpec):
    """max(0, x W1)^2 W2 (So et al. 2021, arXiv 2109.08668, section 4: Primer)."""

    summary = "two projections with a squared ReLU between"
    activation = "relu2"


@register("feedforward", "swish", aliases=("swish_ffn",))
class SwishSpec(DenseFeedForwardSpec):
    """Swish with beta = 1, i.e. SiLU (Ramachandran et al. 2018)."""

    summary = "two projections with a Swish between"
    activation = "silu"


# "gelu_pytorch_tanh" is the same function as "gelu_new" in one operator: written out, it keeps four tensors of the
# inner width.
_GELU = {"none": "gelu", "tanh": "gelu_pytorch_tanh", "sigmoid": "quick_gelu"}


@register("feedforward", "gelu", aliases=("gelu_ffn",))
class GELUSpec(DenseFeedForwardSpec):
    """GELU (Hendrycks & Gimpel 2016). approximate: `none` (erf; BERT), `tanh` (GPT, GPT-2) or `sigmoid`,
    x sigmoid(1.702 x) (Image GPT)."""

    summary = "two projections with a GELU between"
    activation = "gelu"

    approximate: Literal["none", "tanh", "sigmoid"] = "none"

    @property
    def activation_name(self) -> str:
        return _GELU[self.approximate]


@register("feedforward", "glu", aliases=("glu_ffn",))
class GLUSpec(DenseFeedForwardSpec):
    """(sigmoid(x W) * x V) W2 (Dauphin et al. 2017; Shazeer 2020, eq. 4)."""

    summary = "gated by a sigmoid"
    activation, gated = "sigmoid", True


@register("feedforward", "bilinear", aliases=("bilinear_ffn",))
class BilinearSpec(DenseFeedForwardSpec):
    """(x W * x V) W2, no nonlinearity (Shazeer 2020, eq. 5)."""

    summary = "gated without a nonlinearity"
    activation, gated = "linear", True


@register("feedforward", "reglu", aliases=("reglu_ffn",))
class ReGLUSpec(DenseFeedForwardSpec):
    """(max(0, x W) * x V) W2 (Shazeer 2020, eq. 5)."""

    summary = "gated by a ReLU"
    activation, gated = "relu", True


@register("feedforward", "squared_reglu", aliases=("squared_reglu_ffn",))
class SquaredReGLUSpec(DenseFeedForwardSpec):
    """(max(0, x W)^2 * x V) W2: [`SquaredReLUSpec`]'s activation in the gated form of Shazeer 2020, section 2."""

    summary = "gated by a squared ReLU"
    activation, gated = "relu2", True


@register("feedforward", "geglu", aliases=("geglu_ffn",))
class GEGLUSpec(DenseFeedForwardSpec):
    """(GELU(x W) * x V) W2 (Shazeer 2020, eq. 5). approximate: as for `gelu`; T5 v1.1 uses `tanh`."""

    summary = "gated by a GELU"
    activation, gated = "gelu", True

    approximate: Literal["none", "tanh", "sigmoid"] = "none"

    @property
    def activation_name(self) -> str:
        return _GELU[self.approximate]


@register("feedforward", "swiglu", aliases=("swiglu_ffn",))
class SwiGLUSpec(DenseFeedForwardSpec):
    """(Swish(c x W) * x V) W2 (Shazeer 2020, eq. 5). gate_scale: c (1 in the paper; Falcon-H1)."""

    summary = "gated by a Swish"
    activation, gated = "silu", True

    gate_scale: float | int = bounded(1.0, above=0)

    @property
    def gate_factor(self) -> float:
        return self.gate_scale
