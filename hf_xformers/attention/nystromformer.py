# SPDX-License-Identifier: Apache-2.0
"""Nystromformer: softmax attention approximated through a few landmarks, and a convolution over the values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from ..core.call import Call
from ..core.components import bounded, register
from ..ops.common.products import masked_softmax, wide_products
from ..ops.head_convolution import convolve_heads
from ..ops.landmarks import landmark_factors
from ..ops.nystrom import iterative_pinv, nystrom_attention
from .shared.base import Attention
from .shared.spec import AttentionSpec


class HeadConvolution(nn.Conv2d):
    """A kernel [K, 1] for each head, in products of matrices. It is called as a module, so that adapters and hooks on
    it count."""

    def forward(self, input: Tensor, literal: bool = False) -> Tensor:
        """input [B, H, T, d] -> [B, H, T, d]; literal: by torch's own convolution."""
        return convolve_heads(input, self.weight[:, 0, :, 0], literal)


class NystromAttention(Attention):
    """O = softmax(Q K~^T) pinv(softmax(Q~ K~^T)) softmax(Q~ K^T) V + DWConv(V), all scores times `scale`.

    Xiong et al. 2021 (arXiv 2102.03902), eqs. 11-14: the landmarks Q~ and K~ are means of `num_landmarks` segments of
    consecutive real tokens, of equal length up to one token, the pseudo-inverse is `pinv_iterations` steps of an
    iteration made of products. A text of no more tokens than landmarks gets exact attention, and so does every text
    where the landmarks are as many as `text_length`. DWConv convolves each
    head's values over the sequence with a kernel of its own (the paper's skip connection). Padding enters neither
    landmarks nor convolution.

    Time O(T m d) per head, memory O(T m). The weights given out are those of the approximation without the
    convolution: they can be negative and sum to one only roughly. They have no dropout, as in the released code:
    `attention_probs_dropout_prob` has no effect.
    """

    spec: NystromSpec

    def __init__(self, config, spec: NystromSpec, **where):
        super().__init__(config, spec, **where)
        size = spec.conv_kernel_size
        self.conv = None
        if size is not None:
            heads = self.num_heads
            self.conv = HeadConvolution(heads, heads, (size, 1), padding=(size // 2, 0), groups=heads, bias=False)

    def initialize(self, config, init) -> None:
        super().initialize(config, init)
        if self.conv is not None:
            init.normal_(self.conv.weight, mean=0.0, std=config.initializer_range)

    @property
    def num_landmarks(self) -> int | None:
        """Landmarks of a text; None: each token is one."""
        return None if self.spec.num_landmarks == self.spec.text_length else self.spec.num_landmarks

    def attend(self, query: Tensor, key: Tensor, value: Tensor, context: Call) -> tuple[Tensor, Tensor | None]:
        key, value = self.repeated(key), self.repeated(value)
        spec, mask, weights = self.spec, context.padding_mask, None
        if self.wants_weights(context):
            weights = self.matrix(query, key, mask)
            output = weights @ value
        else:
            output = nystrom_attention(
                *(query, key, value),
                num_landmarks=query.shape[2] if self.num_landmarks is None else self.num_landmarks,
                key_padding_mask=mask,
                query_padding_mask=mask,
                pinv_iterations=spec.pinv_iterations,
                pinv_init=spec.pinv_init,
                scale=self.scaling,
            )
        if self.conv is not None:
            value = value if mask is None else value.masked_fill(~mask[:, None, :, None], 0.0)
            output = output + self.conv(value, literal=context.implementation == "eager")
        return output.transpose(1, 2), weights

    def matrix(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
        """The approximated attention matrix [B, H, T, T], its three factors multiplied out."""
        most, dtype, length = self.num_landmarks, query.dtype, query.shape[2]
        real = query.new_ones(query.shape[0], query.shape[2], dtype=torch.bool) if mask is None else mask
        exact = masked_softmax(wide_products(query, key) * self.scaling, real[:, None, None])
        # In a graph for every length the choice is made row by row.
        if most is None or (not isinstance(length, torch.SymInt) and length <= most):
            return exact.to(dtype)
        first, middle, last = landmark_factors(query, key, most, real, self.scaling)
        with torch.autocast(query.device.type, enabled=False):
            if self.spec.pinv_iterations is None:
                inverse = torch.linalg.pinv(middle)
            else:
                inverse = iterative_pinv(middle, self.spec.pinv_iterations, init=self.spec.pinv_init)
            product = first @ inverse @ last
        few = (real.sum(-1) <= most)[:, None, None, None]
        return torch.where(few, exact, product).to(dtype)


@register("attention", "nystromformer", aliases=("nystrom",))
class NystromSpec(AttentionSpec):
    """
    Args:
        num_landmarks: segments of the text.
        text_length: tokens of the texts that they are meant for, a multiple of it (`None`: any); where both are one
            number each token is a landmark, and attention is exact at every length.
        conv_kernel_size: tokens under the kernel of the convolution over values, odd (`None`: no convolution).
        pinv_iterations: steps of the inverse (`None`: exact pseudo-inverse, which is not always the better
            approximation).
        pinv_init: its start, by the norms of each matrix, or `global`, by the largest of all (transformers'
            Nystromformer), which lets the rest of the batch change a result.
    """

    summary = "softmax attention through a few landmarks (Nystrom method): linear time"
    head_options = frozenset({"norm"})
    why_not: ClassVar[Mapping[str, str]] = {"causal": "its landmarks are means over all tokens, later ones too."}

    num_landmarks: int = bounded(64, "landmarks", least=1)
    text_length: int | None = bounded(None, least=1)
    conv_kernel_size: int | None = bounded(65, least=1)
    pinv_iterations: int | None = bounded(6, least=1)
    pinv_init: Literal["per_matrix", "global"] = "per_matrix"

    def check_fields(self) -> None:
        if self.text_length is not None and self.text_length % self.num_landmarks:
            raise ValueError(
                f"nystromformer cuts texts into equal segments, so `text_length` {self.text_length} must be a multiple"
                f" of `num_landmarks` {self.num_landmarks}."
            )
        if self.conv_kernel_size is not None and self.conv_kernel_size % 2 == 0:
            raise ValueError(
                "nystromformer centers its convolution on a token, so `conv_kernel_size` must be odd, got"
                f" {self.conv_kernel_size}."
            )

    def weighs(self, config) -> bool:
        return False

    def build(self, config, **where) -> NystromAttention:
        return NystromAttention(config, self, **where)
