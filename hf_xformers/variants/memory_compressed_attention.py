# SPDX-License-Identifier: Apache-2.0
"""T-DMCA (Liu et al. 2018): local layers by turns with layers that read the text compressed by a convolution."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike
from ..families import ALL_HEADS, VariantInfo, make_family


class XFMemoryCompressedAttentionConfig(XFormerConfig):
    """T-DMCA (Liu et al. 2018): local layers by turns with layers that read the text compressed by a convolution."""

    model_type = "xf_memory_compressed_attention"

    num_hidden_layers: int = 5
    attention: SpecLike = "memory_compressed_attention"


INFO = VariantInfo(
    section="4.3",
    summary="blocks of tokens, and the whole text compressed",
    paper="Liu et al. 2018",
    url="https://arxiv.org/abs/1801.10198",
    equation=r"m_0 = x_0, \quad m_b = C\,[x_{(b-1)r}; \dots; x_{br-1}] + c, \qquad "
    r"o_i = \mathrm{softmax}_{b r \le i}\!\left(\frac{q_i (m_b W_k)^\top}{\sqrt d}\right) m_b W_v",
    cost=(
        "local layers in time O(T w D) for blocks of w tokens, compressed ones in time O(T^2 D / r) for slots of r;"
        " memory O(T D); r D^2 parameters more in a compressed layer"
    ),
    cite="liu2018generating",
    notes=(
        "The paper's decoder has five layers, L M L M L; its experts in the middle one are the feed-forward"
        " `sparsely_gated_moe` of a layer. A token never reads its own slot, nor one that is not complete."
    ),
)

make_family(XFMemoryCompressedAttentionConfig, "XFMemoryCompressedAttention", ALL_HEADS, INFO)
