# SPDX-License-Identifier: Apache-2.0
"""Where a sublayer normalizes and how its output joins the residual stream."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from ..compat import has_hooks
from ..core.call import Call
from ..core.components import Spec, bounded, register
from ..core.weight_decay import Undecayed
from .base import NormSpec, norm_inputs


class Residual(Undecayed, nn.Module):
    """The frame of one sublayer function f: `y = leave(x, f(enter(x)))`.

    scale: factor on f's output given by the block (Macaron's half steps). keeps_stream: `leave(x, f)` depends on x.
    """

    keeps_stream: ClassVar[bool] = True

    def __init__(self, config, scale: float = 1.0):
        super().__init__()
        self.scale = scale
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def inputs(self, context: Call) -> dict[str, Any]:
        """What `enter` and `leave` are given of the call next to the vectors, by keyword."""
        return {}

    def enter(self, hidden_states: Tensor, **inputs: Any) -> Tensor:
        """[B, T, D] residual stream -> f's input."""
        return hidden_states

    def branch(self, output: Tensor, gate: Tensor | None) -> Tensor:
        """f's output as it is added: dropout, then the block's scale and the sublayer's gate [B, T, 1]."""
        dropout = self.dropout
        # In evaluation called only where something stands behind it, such as an adapter: a call for nothing takes
        # longer than the sum that follows it.
        if dropout.training or has_hooks(dropout) or type(dropout) is not nn.Dropout:
            output = dropout(output)
        if self.scale != 1.0:
            output = output * self.scale
        return output if gate is None else output * gate

    def leave(self, hidden_states: Tensor, output: Tensor, gate: Tensor | None = None, **inputs: Any) -> Tensor:
        """Residual stream and f's output -> new residual stream."""
        raise NotImplementedError


class PlainSum(Residual):
    """y = x + f(x): no norm, wherever the config's residual normalizes."""

    def leave(self, hidden_states: Tensor, output: Tensor, gate: Tensor | None = None, **inputs: Any) -> Tensor:
        return hidden_states + self.branch(output, gate)


class PostNorm(Residual):
    """y = LN(a x + f(x)), a = `stream_scale` (Vaswani et al. 2017, section 3.1: 1; Wang et al. 2022, arXiv 2203.00555,
    section 3)."""

    def __init__(self, config, scale: float = 1.0, stream_scale: float = 1.0):
        super().__init__(config, scale)
        self.stream_scale = stream_scale
        self.normalization: NormSpec = config.normalization
        self.norm = config.normalization.build(config)

    def inputs(self, context: Call) -> dict[str, Any]:
        return norm_inputs(self.normalization, context) if self.normalization.over_tokens else {}

    def leave(self, hidden_states: Tensor, output: Tensor, gate: Tensor | None = None, **inputs: Any) -> Tensor:
        return self.norm(self.summed(hidden_states, output, gate), **inputs)

    def summed(self, hidden_states: Tensor, output: Tensor, gate: Tensor | None) -> Tensor:
        """What is normalized."""
        stream = hidden_states if self.stream_scale == 1.0 else hidden_states * self.stream_scale
        return stream + self.branch(output, gate)


class PreNorm(Residual):
    """y = x + f(LN(x)) (Xiong et al. 2020, arXiv 2002.04745)."""

    def __init__(self, config, scale: float = 1.0):
        super().__init__(config, scale)
        self.normalization: NormSpec = config.normalization
        self.norm = config.normalization.build(config)

    def inputs(self, context: Call) -> dict[str, Any]:
        return norm_inputs(self.normalization, context) if self.normalization.over_tokens else {}

    def enter(self, hidden_states: Tensor, **inputs: Any) -> Tensor:
        return self.norm(hidden_states, **inputs)

    def leave(self, hidden_states: Tensor, output: Tensor, gate: Tensor | None = None, **inputs: Any) -> Tensor:
        return hidden_states + self.branch(output, gate)


def final_norm(config) -> nn.Module:
    """The normalization of what a stack gives."""
    return config.normalization.build(config, width=config.stack.output_width(config))


class ResidualSpec(Spec):
    """Base of residual specs.

    Attributes:
        module: the frame's class.
        additive: `leave(x, f) = x + g(f)`, so that x can be recovered from the sum (reversible layers).
        enters_as_is: f reads the residual stream itself.
        shares_input: what a frame makes of the stream can be given to further sublayers, whose own frames have no norm
            before f (`entered`).
    """

    module: ClassVar[type[Residual]]
    additive: ClassVar[bool] = False
    enters_as_is: ClassVar[bool] = False
    shares_input: ClassVar[bool] = False

    def build(self, config, **where) -> Residual:
        """The frame of one sublayer. where: `scale`, `layer_idx`, `siblings` (frames of the layer's sublayers before
        it), `entered` (whether the sublayer is given the input of another one)."""
        return self.module(config, scale=where.get("scale", 1.0))

    def build_final(self, config) -> nn.Module | None:
        """The normalization after the last layer, or None."""
        return None


@register("residual", "post_ln", aliases=("post",))
class PostLNSpec(ResidualSpec):
    """final_norm: also normalize after the last layer (off in the paper). stream_scale: factor on the residual stream
    in every sum (DeepNorm's alpha, 1 in the paper; MiniMax)."""

    supports = frozenset({"context_parallel"})
    summary = "normalize after the residual sum"
    module: ClassVar[type[PostNorm]] = PostNorm
    enters_as_is = True

    final_norm: bool = False
    stream_scale: float | int = bounded(1.0, above=0)

    def build(self, config, **where) -> Residual:
        return self.module(config, scale=where.get("scale", 1.0), stream_scale=self.stream_scale)

    def build_final(self, config) -> nn.Module | None:
        return final_norm(config) if self.final_norm else None


@register("residual", "pre_ln", aliases=("pre",))
class PreLNSpec(ResidualSpec):
    """
    Args:
        final_norm: normalize the residual stream after the last layer.
        final_dropout: dropout after that norm (T5).
        first_norm: whether the first sublayer has a norm, which an embedding that ends in one makes needless
            (ModernBERT).
        branch_scale: factor on what every sublayer adds (Granite).
    """

    supports = frozenset({"context_parallel"})
    summary = "normalize a sublayer's input, plus a final norm"
    module = PreNorm
    additive = True
    shares_input = True

    final_norm: bool = True
    final_dropout: bool = False
    first_norm: bool = True
    branch_scale: float | int = bounded(1.0, above=0)

    def build(self, config, **where) -> Residual:
        where["scale"] = where.get("scale", 1.0) * self.branch_scale
        first = where.get("layer_idx") == 0 and not where.get("siblings")
        if where.get("entered") or (first and not self.first_norm):
            return PlainSum(config, scale=where["scale"])
        return super().build(config, **where)

    def build_final(self, config) -> nn.Module | None:
        parts = [final_norm(config)] if self.final_norm else []
        if self.final_dropout:
            parts.append(nn.Dropout(config.hidden_dropout_prob))
        return nn.Sequential(*parts) if len(parts) > 1 else (parts[0] if parts else None)
