# SPDX-License-Identifier: Apache-2.0
"""Delta networks (Schlag, Irie, Schmidhuber 2021): linear attention that overwrites what it holds for a key."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import DECODER_HEADS, VariantInfo, make_family


class XFDeltaNetConfig(XFormerConfig):
    """Delta networks (Schlag, Irie, Schmidhuber 2021): linear attention that overwrites what it holds for a key."""

    model_type = "xf_delta_net"

    hidden_size: int = 128
    num_hidden_layers: int = 16
    num_attention_heads: int = 8
    intermediate_size: int = 2048
    max_position_embeddings: int = 1024
    attention_probs_dropout_prob: float | int = 0.0
    is_decoder: bool = True
    embedding: SpecLike = preset({"type": "token", "scale": True})
    position: SpecLike = "sinusoidal_absolute"
    attention: SpecLike = preset({"type": "delta_net", "bias": False})
    feedforward: SpecLike = "relu"


INFO = VariantInfo(
    section="4.2",
    summary="a linear attention whose state is corrected by the delta rule, with deterministic features (DPFP)",
    paper="Schlag et al. 2021",
    url="https://arxiv.org/abs/2102.11174",
    equation=r"S_i = S_{i-1} + \beta_i \, \phi(k_i)^\top \big( v_i - \phi(k_i) S_{i-1} \big), \qquad "
    r"o_i = \phi(q_i) S_i, \qquad \beta_i = \sigma(w x_i)",
    cost=(
        "time O(T (C + d) F) per head for chunks of C tokens and F features, memory O(T D); generation keeps H F d"
        " numbers per layer at any length"
    ),
    cite="schlag2021linear",
    notes=(
        "Causal only. The preset is the published one for WikiText-103 (post-LN, no biases in attention, scaled"
        " embeddings, sinusoids), without its adaptive softmax. `--attention.feature_map elu` and `favor` are the"
        " variants with elu(x) + 1 and with FAVOR+, `--attention.attention_normalize true` those that divide by sums"
        " of weights. Computed in chunks as in Yang et al. 2024 (arXiv 2406.06484). Their DeltaNet layer is another"
        " model (SiLU, l2-normalized keys, short convolutions, a norm on the output)."
    ),
)

make_family(XFDeltaNetConfig, "XFDeltaNet", DECODER_HEADS, INFO)
