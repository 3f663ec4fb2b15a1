# SPDX-License-Identifier: Apache-2.0
"""Image GPT (Chen et al. 2020): a causal decoder over the colors of an image's pixels."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import VariantInfo, make_family


def _size(width: int, layers: int, heads: int, positions: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        "max_position_embeddings": positions,
    }


class XFImageGPTConfig(XFormerConfig):
    """Image GPT (Chen et al. 2020): a causal decoder over the colors of an image's pixels.

    An image is a text of colors, row by row: the ids below `vocab_size - 1` are clusters of colors, the last one
    starts an image and is never predicted. `max_position_embeddings` is the number of pixels that can be written.
    Presets have the sizes of the published models, for images of 32 x 32 pixels.
    """

    model_type: ClassVar[str] = "xf_image_gpt"
    reads_colors: ClassVar[Literal["no", "also", "only"]] = "only"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "small": _size(512, 24, 8, 1024),
        "medium": _size(1024, 36, 8, 1024),
        "large": _size(1536, 48, 16, 1024),
    }

    vocab_size: int = 513
    hidden_size: int = 512
    num_hidden_layers: int = 24
    num_attention_heads: int = 8
    intermediate_size: int = 2048
    max_position_embeddings: int = 1024
    layer_norm_eps: float = 1e-5
    pad_token_id: int | None = None
    bos_token_id: int | None = 512
    is_decoder: bool = True
    tie_word_embeddings: bool = False
    classifier_pooling: Literal["auto", "first", "mean", "last", "late_mean", "attention"] = "mean"
    normalization: SpecLike = "rms_norm"
    residual: SpecLike = "pre_ln"
    feedforward: SpecLike = preset({"type": "gelu", "approximate": "sigmoid"})
    head: SpecLike = preset({"type": "linear", "unpredicted": 1})


INFO = VariantInfo(
    section="8",
    summary="a causal decoder over the colors of an image's pixels",
    paper="Chen et al. 2020",
    url="https://openai.com/index/image-gpt/",
    equation=(
        r"p(x) = \prod_{i=1}^{H W} p(x_i \mid x_1, \dots, x_{i-1}), \quad x_i \in \{1, \dots, 512\}, \qquad"
        r" n(h) = w \odot \frac{h}{\sqrt{\tfrac{1}{D} \sum_k h_k^2}}"
    ),
    cost="time O(T^2 D) for T = H W pixels, memory O(T D) with fused kernels",
    notes=(
        "A token is the color of a pixel, the nearest of 512 clusters (k-means); the last id starts an image."
        " `hf-xformers pretrain --variant image_gpt --data FOLDER` finds the clusters and saves them with the model,"
        " in the image processor of transformers' ImageGPT. Norms neither subtract the mean nor add a bias, the"
        " feed-forward's GELU is x sigmoid(1.702 x), and the output is not tied. Classifiers read the mean of the last"
        " layer, as the paper's do when they are fine-tuned; its linear probes read a layer in the middle"
        " (`hf-xformers features --layers`). Its bidirectional objective, on masked pixels, is not part of the family."
    ),
    cite="chen2020generative",
)

make_family(
    XFImageGPTConfig,
    "XFImageGPT",
    ("Model", "ForCausalLM", "ForSequenceClassification"),
    INFO,
    further={"ForSequenceClassification": "AutoModelForImageClassification"},
)
