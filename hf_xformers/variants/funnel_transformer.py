# SPDX-License-Identifier: Apache-2.0
"""Funnel-Transformer (Dai et al. 2020): the sequence is pooled from block to block."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ENCODER_HEADS, VariantInfo, make_family


class XFFunnelTransformerConfig(XFormerConfig):
    """Funnel-Transformer (Dai et al. 2020): the sequence is pooled from block to block.

    `num_hidden_layers` counts the layers of the blocks (`stack.block_sizes`) and those that read the up-sampled states
    (`stack.decoder_layers`). For tasks on whole texts `stack={"type": "funnel", "upsample": False}` does without the
    latter.
    """

    model_type = "xf_funnel_transformer"

    num_hidden_layers: int = 14  # 4 + 4 + 4, and 2 after up-sampling
    embedding: SpecLike = preset({"type": "token", "normalize": True})
    position: SpecLike = "none"  # in the attention's scores
    attention: SpecLike = preset({"type": "transformer_xl", "share_biases": False})
    stack: SpecLike = "funnel"


INFO = VariantInfo(
    section="6.1",
    summary="pairs of states are pooled between blocks, so deeper layers read a shorter sequence",
    paper="Dai et al. 2020",
    url="https://arxiv.org/abs/2006.03236",
    equation=(
        r"h' = \mathrm{Pool}(h), \qquad h \leftarrow \mathrm{LN}(h' + \mathrm{Attn}(Q = h', KV = h)), \qquad "
        r"g = \mathrm{repeat}(h^K) + h^1"
    ),
    cost=(
        "a layer of block b takes 1 / 2^(b-1) of the feed-forward's and 1 / 4^(b-1) of the attention's time; memory"
        " O(T)"
    ),
    notes=(
        "Scores are Transformer-XL's with a pair of biases per layer; the released code's relative segment term comes"
        " with attention={'type': 'transformer_xl', 'share_biases': False, 'segments': True, 'joint_type': 2}. Padding"
        " does not change results: a pair with one real token is that token, and the token that `truncate` leaves out"
        " is each row's own last one."
    ),
    cite="dai2020funnel",
)

make_family(XFFunnelTransformerConfig, "XFFunnelTransformer", (*ENCODER_HEADS, "ForReplacedTokenDetection"), INFO)
