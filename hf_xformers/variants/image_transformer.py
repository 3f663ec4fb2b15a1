# SPDX-License-Identifier: Apache-2.0
"""Image Transformer (Parmar et al. 2018): an image as a text of intensities, with local attention."""

from __future__ import annotations

from typing import ClassVar, Literal

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ALL_HEADS, VariantInfo, make_family


class XFImageTransformerConfig(XFormerConfig):
    """Image Transformer (Parmar et al. 2018): an image as a text of intensities, with local attention."""

    model_type = "xf_image_transformer"
    reads_colors: ClassVar[Literal["no", "also", "only"]] = "also"

    vocab_size: int = 258
    hidden_size: int = 512
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    intermediate_size: int = 2048
    max_position_embeddings: int = 3072
    pad_token_id: int | None = 256
    bos_token_id: int | None = 257
    attention: SpecLike = "image_transformer"
    position: SpecLike = preset({"type": "axial", "std": 0.02})


INFO = VariantInfo(
    section="4.1",
    summary="an image as a sequence of intensities, in which blocks of queries read what is near them",
    paper="Parmar et al. 2018",
    url="https://arxiv.org/abs/1802.05751",
    equation=(
        r"o_i = \sum_{j \in N(i)} \mathrm{softmax}_{N(i)}\!\left(\frac{q_i \cdot k_j}{\sqrt{d}}\right) v_j, \quad"
        r" N(i) = \{j \le i : b \lfloor i / b \rfloor - m \le j\}"
    ),
    cost="time and memory O(T (b + m) D) for blocks of b tokens and memories of m tokens before them",
    cite="parmar2018image",
    notes=(
        "Sizes are those for CIFAR-10: images of 32 x 32 pixels as 3072 tokens, the ids 0 to 255 for intensities, one"
        " for padding and one for the start. `image_size` and `num_channels` of the attention say how a text becomes a"
        " plane. local='2d' goes through it block by block: `config.attention.token_grid(config).ordered(pixels)`"
        " brings pixels into that order, `by_rows` back. The output is a softmax over intensities; head={'type':"
        " 'logistic_mixture', 'levels': 256} with tie_word_embeddings=False is the mixture of logistics, of each"
        " channel by itself. Encoders with local attention are not in the paper."
    ),
)

make_family(
    XFImageTransformerConfig,
    "XFImageTransformer",
    ALL_HEADS,
    INFO,
    further={"ForSequenceClassification": "AutoModelForImageClassification"},
)
