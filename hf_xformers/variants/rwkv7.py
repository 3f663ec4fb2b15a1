# SPDX-License-Identifier: Apache-2.0
"""RWKV-7 (Peng et al. 2025): a delta rule with decays and learning rates of every channel, and token shift."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import DECODER_HEADS, VariantInfo, make_family


class XFRwkv7Config(XFormerConfig):
    """RWKV-7 (Peng et al. 2025): a delta rule with decays and learning rates of every channel, and token shift."""

    model_type = "xf_rwkv7"

    vocab_size: int = 50304
    intermediate_size: int = 3072
    max_position_embeddings: int = 4096
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    is_decoder: bool = True
    tie_word_embeddings: bool = False
    embedding: SpecLike = preset({"type": "token", "normalize": True})
    position: SpecLike = "none"
    attention: SpecLike = "rwkv7"
    residual: SpecLike = "pre_ln"
    block: SpecLike = "rwkv7"


INFO = VariantInfo(
    section="successors",
    summary="a delta rule with decays and learning rates of every channel, and token shift",
    paper="Peng et al. 2025",
    url="https://arxiv.org/abs/2503.14456",
    equation=(
        r"S_t = \left(\mathrm{Diag}(a_t) - (\hat\kappa_t \odot i_t) \hat\kappa_t^\top\right) S_{t-1} + k_t v_t^\top,"
        r" \quad y_t = W_o \big[ g_t \odot \big( \mathrm{LN}(S_t^\top r_t) + (r_t^\top (u \odot k_t)) v_t \big) \big]"
    ),
    cost=(
        "time O(T (C (K + V) + K V)) per head in chunks of C tokens, memory O(T D); a state of K V numbers per head,"
        " and two tokens per layer, whatever the length"
    ),
    cite="peng2025rwkv7",
    notes=(
        "Causal only, without positions. The block `rwkv7` has channel mixing in place of a feed-forward network,"
        " which like time mixing reads the token before; it stands with any recurrence. Layers mix in the values of"
        " layer 0, which has to be of this kind where layers differ. The sizes are those of the 168M model, with heads"
        " of 64. There are no attention probabilities, so `attention_probs_dropout_prob` has no effect."
    ),
)

make_family(XFRwkv7Config, "XFRwkv7", DECODER_HEADS, INFO)
