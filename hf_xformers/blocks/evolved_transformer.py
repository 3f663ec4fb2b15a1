# SPDX-License-Identifier: Apache-2.0
"""The Evolved Transformer's cells, which an evolutionary search has found."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache, EncoderDecoderCache

from ..core.call import Call, SublayerOutput
from ..core.components import bounded, register
from .base import BlockSpec, SublayerPlan, XFormerLayer
from .cache_parts import SeveralAttentionsLayer, WindowPartsCacheLayer
from .gated_linear import GatedLinear
from .narrow import check_reshaped, reshaped
from .separable_convolution import SeparableConvolution
from .window_state import WindowSublayer, check_window_block

# Plans' names. Those of further attentions do not hold the word by which weights of a layer's own are recorded.
GLU, BRANCHES, WIDE, AGAIN = "gated", "branches", "wide_heads", "memory_again"


def add_to_first(wide: Tensor, narrow: Tensor) -> Tensor:
    """wide + narrow with zeros for the channels that it lacks."""
    return wide + F.pad(narrow, (0, wide.shape[-1] - narrow.shape[-1]))


class EncoderBranches(WindowSublayer):
    """relu(x W) [4 D] + relu(conv_3(x)) [D / 2]; a norm; sepconv_9 [D / 2]. Missing channels are zeros.

    So, Liang and Le 2019 (arXiv 1901.11117), figure 3; kernels are centered, and zeros stand beyond the text before
    both convolutions.
    """

    def __init__(self, config, spec: EvolvedTransformerBlockSpec, layer_idx: int):
        super().__init__(BRANCHES, layer_idx)
        width = config.hidden_size
        self.up_proj = nn.Linear(width, 4 * width)
        self.conv = nn.Conv1d(width, width // 2, spec.encoder_kernels[0])
        self.norm = config.normalization.build(config, width=4 * width)
        self.separable = SeparableConvolution(4 * width, width // 2, spec.encoder_kernels[1])
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: Tensor, context: Call, **given: Any) -> SublayerOutput:
        windows = self.windows_of(hidden_states, self.conv.weight.shape[-1], context, None, None)
        near = self.dropout(F.relu(self.conv(windows.transpose(1, 2)).transpose(1, 2)))
        inner = self.norm(add_to_first(self.dropout(F.relu(self.up_proj(hidden_states))), near))
        mixed = self.separable(self.windows_of(inner, self.separable.kernel, context, None, None))
        return SublayerOutput(F.pad(mixed, (0, hidden_states.shape[-1] - mixed.shape[-1])))


class DecoderBranches(WindowSublayer):
    """relu(sepconv_11(x)) [2 D] + sepconv_7(x) [D / 2]; a norm; sepconv_7 [D] (figure 3). Kernels end at their token.
    State: the last inputs that the wider kernel reads, and the last ones after the norm."""

    def __init__(self, config, spec: EvolvedTransformerBlockSpec, layer_idx: int):
        super().__init__(BRANCHES, layer_idx)
        width, (left, right, last) = config.hidden_size, spec.decoder_kernels
        self.left = SeparableConvolution(width, 2 * width, left)
        self.right = SeparableConvolution(width, width // 2, right)
        self.norm = config.normalization.build(config, width=2 * width)
        self.separable = SeparableConvolution(2 * width, width, last)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        hidden_states: Tensor,
        context: Call,
        *,
        memory: Tensor | None = None,
        past_key_values: Cache | None = None,
        step: int | None = None,
    ) -> SublayerOutput:
        most = max(self.left.kernel, self.right.kernel)
        windows = self.windows_of(hidden_states, most, context, past_key_values, step)
        left, right = (conv(windows[:, most - conv.kernel :]) for conv in (self.left, self.right))
        inner = self.norm(add_to_first(self.dropout(F.relu(left)), self.dropout(right)))
        further = self.windows_of(inner, self.separable.kernel, context, past_key_values, step, f"{BRANCHES}_inner")
        return SublayerOutput(self.separable(further))


class EvolvedTransformerLayer(SeveralAttentionsLayer):
    """One cell: of an encoder, or of a decoder with or without a memory."""

    further = (WIDE,)

    @staticmethod
    def _build(config, entry: SublayerPlan, layer_idx: int):
        spec = config.block
        if entry.name == GLU:
            return GatedLinear(config.hidden_size)
        if entry.name == BRANCHES:
            return (DecoderBranches if config.is_decoder else EncoderBranches)(config, spec, layer_idx)
        if entry.name == WIDE:
            return config.attention.build(spec.wide_part(config), layer_idx=layer_idx)
        return XFormerLayer._build(config, entry, layer_idx)

    def run_entered(
        self,
        entry: SublayerPlan,
        entered: Tensor,
        context: Call,
        memory: Tensor | None,
        past_key_values: Cache | None,
        step: int,
    ) -> SublayerOutput:
        if entry.kind == "cross_attention" and isinstance(past_key_values, EncoderDecoderCache):
            # Two attentions of a layer read the memory, and each keeps what it has made of it.
            step = 2 * step + (entry.name == AGAIN)
        return super().run_entered(entry, entered, context, memory, past_key_values, step)


@register("block", "evolved_transformer", aliases=("evolved",))
class EvolvedTransformerBlockSpec(BlockSpec):
    """So, Liang and Le 2019 (arXiv 1901.11117), figure 3, with the details of the released code; each sublayer has the
    config's residual frame.

    Encoder: gated linear unit; convolutional branches; attention; feed-forward. Decoder: attention with more heads
    besides cross-attention, both of the same normed input; convolutional branches; attention; cross-attention;
    feed-forward. A layer does about the work of two.

    encoder_kernels: tokens that the branch and the separable convolution after it read. decoder_kernels: those of the
    left branch, the right branch and the separable convolution after them. wide_heads: heads of a decoder's first
    attention, unless `num_attention_heads` are more.
    """

    passes_states: ClassVar[bool] = False
    in_sequence: ClassVar[bool] = False
    mixes: ClassVar[str] = "its convolutions read a token's neighbors"

    summary = "the cells of an evolutionary search: gates, convolutional branches, attention"

    encoder_kernels: tuple[int, ...] = (3, 9)
    decoder_kernels: tuple[int, ...] = (11, 7, 7)
    wide_heads: int = bounded(16, least=1)

    def wide_part(self, config) -> Any:
        """The layer's config as the attention with more heads sees it."""
        return reshaped(config, heads=max(self.wide_heads, config.num_attention_heads))

    def check_fields(self) -> None:
        for name, count in (("encoder_kernels", 2), ("decoder_kernels", 3)):
            kernels = getattr(self, name)
            if len(kernels) != count or min(kernels) < 1:
                raise ValueError(
                    f"block 'evolved_transformer' needs {count} sizes of 1 or more under `{name}`, got {kernels}."
                )
        if any(kernel % 2 == 0 for kernel in self.encoder_kernels):
            raise ValueError(
                "block 'evolved_transformer' centers its kernels in an encoder, which needs odd `encoder_kernels`,"
                f" got {self.encoder_kernels}."
            )

    def check(self, config) -> None:
        norm = config.normalization
        if norm.over_tokens or not norm.any_width:
            raise ValueError(
                f"block 'evolved_transformer' normalizes its branches, which are wider than states, which"
                f" normalization {norm.type!r} cannot; use 'layer_norm' or 'rms_norm'."
            )
        if config.hidden_size % 2:
            raise ValueError(
                f"block 'evolved_transformer' needs an even `hidden_size`, got {config.hidden_size}: branches have"
                " half of its channels."
            )
        if not config.is_decoder:
            return
        inside = config.position.acts & {"score_terms", "head_terms"}
        if inside:
            raise ValueError(
                f"position {config.position.type!r} has terms for one attention of each layer, but block"
                " 'evolved_transformer' has two in a decoder; use a position at the input such as"
                " 'sinusoidal_absolute'."
            )
        if not (config.residual.additive and config.residual.shares_input):
            raise ValueError(
                "block 'evolved_transformer' adds two attentions of one normed input to the stream in a decoder, which"
                f" residual {config.residual.type!r} cannot; use 'pre_ln'."
            )
        check_window_block("evolved_transformer", config, "windows of inputs and keys of a second attention")
        check_reshaped("evolved_transformer", config, self.wide_part(config))

    def plan(self, config, layer_idx: int, cross: bool) -> list[SublayerPlan]:
        attention, feedforward = SublayerPlan("attention", "attention"), SublayerPlan("feedforward", "feedforward")
        branches = SublayerPlan(BRANCHES, "attention")  # of this kind: they are given the cache
        if not config.is_decoder:
            return [SublayerPlan(GLU, "attention"), branches, attention, feedforward]
        beside = [SublayerPlan("cross_attention", "cross_attention", reads="same_input")] if cross else []
        again = [SublayerPlan(AGAIN, "cross_attention")] if cross else []
        return [SublayerPlan(WIDE, "attention"), *beside, branches, attention, *again, feedforward]

    def cache_layer(self, config) -> WindowPartsCacheLayer:
        return WindowPartsCacheLayer()

    def build(self, config, **where) -> EvolvedTransformerLayer:
        return EvolvedTransformerLayer(config, self, **where)
