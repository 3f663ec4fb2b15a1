# SPDX-License-Identifier: Apache-2.0
"""Product-key memory (Lample et al. 2019): one feed-forward is a very large memory, read sparsely."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike
from ..families import ALL_HEADS, VariantInfo, make_family


class XFProductKeyMemoryConfig(XFormerConfig):
    """Product-key memory (Lample et al. 2019): one feed-forward is a very large memory, read sparsely."""

    model_type = "xf_product_key_memory"

    hidden_size: int = 1024
    num_attention_heads: int = 16
    intermediate_size: int = 4096
    feedforward: SpecLike = "product_key_memory"


INFO = VariantInfo(
    section="5.3",
    summary="a layer's feed-forward is a memory of n^2 slots, of which each token reads the best few",
    paper="Lample et al. 2019",
    url="https://arxiv.org/abs/1907.05242",
    equation=(
        r"s_{ab} = q_1 K^1_a + q_2 K^2_b, \qquad y = \sum_h \sum_{(a,b) \in \mathrm{top}_k} \mathrm{softmax}(s)_{ab} "
        r"\, V_{a n + b}"
    ),
    cost="time O(T H (n d + k^2 + k D)) for H heads, n sub-keys of width d and k slots read; n^2 D parameters",
    cite="lample2019large",
    notes=(
        "The k best of the n^2 sums are found exactly from the k best of each half. Queries pass batch "
        "normalization over the batch's real tokens, so in training an output depends on the batch, later tokens "
        "included; evaluation uses the running statistics and depends on the token alone (`query_norm: layer` does "
        "so in training too). The paper trains the values with a constant rate of 1e-3 next to the model's schedule; "
        "`sparse_gradients` gives their gradient as a sparse tensor."
    ),
)

make_family(XFProductKeyMemoryConfig, "XFProductKeyMemory", ALL_HEADS, INFO)
