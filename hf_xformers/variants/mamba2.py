# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 (Dao, Gu 2024): a state space with a scalar decay of each token."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import DECODER_HEADS, VariantInfo, make_family


class XFMamba2Config(XFormerConfig):
    """Mamba-2 (Dao, Gu 2024): a state space with a scalar decay of each token."""

    model_type = "xf_mamba2"

    vocab_size: int = 50288
    hidden_size: int = 768
    num_hidden_layers: int = 24
    num_attention_heads: int = 24
    head_dim: int | None = 64
    intermediate_size: int = 3072
    max_position_embeddings: int = 2048
    layer_norm_eps: float = 1e-5
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    is_decoder: bool = True
    position: SpecLike = "none"
    attention: SpecLike = preset({"type": "mamba2", "key_heads": 1, "key_width": 128})
    normalization: SpecLike = "rms_norm"
    residual: SpecLike = "pre_ln"
    block: SpecLike = "no_ffn"


INFO = VariantInfo(
    section="successors",
    summary="a state space whose state decays by a time step of each token, in layers without a feed-forward",
    paper="Dao and Gu 2024",
    url="https://arxiv.org/abs/2405.21060",
    equation=r"S_t = e^{-A \Delta_t} S_{t-1} + B_t (\Delta_t x_t)^\top, \qquad "
    r"o_t = W_o\, \mathrm{RMSNorm}\!\left( \left(S_t^\top C_t + D x_t\right) \odot \mathrm{SiLU}(W_z u_t) \right)",
    cost=(
        "time O(T (C (N + P) + N P)) per head for chunks of C tokens, states of width N and heads of width P, memory"
        " O(T D); generation keeps H N P numbers per layer, and three inputs of the convolution, at any length"
    ),
    cite="dao2024transformers",
    notes=(
        "The family is causal; an encoder with this attention reads a text both ways. The preset has the sizes of"
        " mamba2-130m: layers have no feed-forward, and twice as many channels as the residual stream. Queries, keys"
        " and values are the paper's C, B and x. There are no attention probabilities, so"
        " `attention_probs_dropout_prob` has no effect."
    ),
)

make_family(XFMamba2Config, "XFMamba2", DECODER_HEADS, INFO)
