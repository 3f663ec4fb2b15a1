"""An embedding for `hf-xformers benchmark --import`: what stands before a token is added to it, for all mechanisms.

Recall of pairs needs to know what a value stood behind. A short convolution inside some mechanisms gives that to them
alone; here every model has one at its input (Arora et al. 2023, arXiv 2312.04927, compare mechanisms so).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from hf_xformers.core.components import register
from hf_xformers.embedding.token import TokenEmbedding, TokenEmbeddingSpec

TAPS = 4


class ShortConvolution(TokenEmbedding):
    """x_t = E[w_t] + sum_i c_i E[w_(t-i)], i from 0 to 3, with c_i for each channel, plus the position. For training:
    generation would not know the tokens of earlier steps."""

    def __init__(self, config, spec: TokenEmbeddingSpec):
        super().__init__(config, spec)
        self.taps = nn.Conv1d(config.hidden_size, config.hidden_size, TAPS, groups=config.hidden_size, bias=False)

    def forward(self, inputs_embeds: Tensor, *arguments, **ids) -> Tensor:
        """inputs_embeds [B, T, D], and what [`TokenEmbedding.forward`] reads -> [B, T, D]."""
        mixed = self.taps(F.pad(inputs_embeds.mT, (TAPS - 1, 0))).mT
        return super().forward(inputs_embeds + mixed, *arguments, **ids)


@register("embedding", "short_convolution")
class ShortConvolutionSpec(TokenEmbeddingSpec):
    summary = "token vectors with those of the three tokens before"

    def build(self, config, **where) -> ShortConvolution:
        return ShortConvolution(config, self)
