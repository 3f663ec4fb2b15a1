# SPDX-License-Identifier: Apache-2.0
"""BigBird (Zaheer et al. 2020): a window of blocks, random blocks and global blocks."""

from __future__ import annotations

from typing import Any, ClassVar

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ENCODER_HEADS, VariantInfo, make_family


class XFBigBirdConfig(XFormerConfig):
    """BigBird (Zaheer et al. 2020): a window of blocks, random blocks and global blocks."""

    model_type = "xf_bigbird"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "base": {},
    }

    vocab_size: int = 50358
    type_vocab_size: int = 2
    max_position_embeddings: int = 4096
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    sep_token_id: int | None = 66
    layer_norm_eps: float = 1e-12
    embedding: SpecLike = preset({"type": "token", "normalize": True})
    attention: SpecLike = "bigbird"
    decoder: dict[str, Any] | None = preset({"attention": "dense"})
    feedforward: SpecLike = preset({"type": "gelu", "approximate": "tanh"})
    head: SpecLike = "transform"


INFO = VariantInfo(
    section="4.1",
    summary="each block of tokens reads its neighbors, a few random blocks and the global blocks",
    paper="Zaheer et al. 2020",
    url="https://arxiv.org/abs/2007.14062",
    equation=(
        r"o_i = \sum_{j \in N(i)} \mathrm{softmax}_{N(i)}\!\left(\frac{q_i \cdot k_j}{\sqrt{d}}\right) v_j, \quad "
        r"N(i) = \mathrm{window}(i) \cup \mathrm{random}(i) \cup G"
    ),
    cost=(
        "time and memory O(T b (w + r + 2 g) D) for blocks of b tokens, w in the window, r random, g global at"
        " each end"
    ),
    cite="zaheer2020big",
    notes=(
        "Not causal: the decoder of an encoder-decoder has dense attention, as in the paper (section 4). Random blocks"
        " are drawn from those of the text, up to its last real token: texts of every length have as many, and padding"
        " changes nothing. The extended form (ETC): attention={'type': 'bigbird', 'global_mode': 'etc',"
        " 'num_random_blocks': 0}, stack='global_tokens' (with a decoder={'attention': 'dense', 'stack': 'plain'})."
    ),
)

make_family(XFBigBirdConfig, "XFBigBird", (*ENCODER_HEADS, "ForPreTraining", "ForSeq2SeqLM"), INFO)
