# SPDX-License-Identifier: Apache-2.0
"""Informer (Zhou et al. 2021): few queries attend, the encoder halves its sequence, and the decoder writes at once."""

from __future__ import annotations

from typing import Any

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ENCODER_HEADS, VariantInfo, make_family


class XFInformerConfig(XFormerConfig):
    """Informer (Zhou et al. 2021): few queries attend, the encoder halves its sequence, and the decoder writes at
    once."""

    model_type = "xf_informer"

    hidden_size: int = 512
    num_hidden_layers: int = 3
    num_decoder_layers: int | None = 2
    num_attention_heads: int = 8
    intermediate_size: int = 2048
    hidden_dropout_prob: float | int = 0.05
    attention_probs_dropout_prob: float | int = 0.05
    embedding: SpecLike = preset({"type": "token", "scale": True})
    attention: SpecLike = "informer"
    position: SpecLike = "sinusoidal_absolute"
    stack: SpecLike = "distilling"
    decoder: dict[str, Any] | None = preset({"attention": "dense", "stack": "plain"})


INFO = VariantInfo(
    section="4.3",
    summary="few queries attend, the others take the mean; the encoder halves its sequence",
    paper="Zhou et al. 2021",
    url="https://arxiv.org/abs/2012.07436",
    equation=r"o_i = \begin{cases} \mathrm{softmax}(q_i K^\top / \sqrt d) V & i \in \mathrm{top}_u M \\"
    r" \frac{1}{T} \sum_j v_j & \text{else} \end{cases}, \quad M_i = \max_j q_i k_j^\top - \frac{1}{T} \sum_j q_i"
    r" k_j^\top, \quad x^{l+1} = \mathrm{MaxPool}(\mathrm{ELU}(\mathrm{Conv}(x^l)))",
    cost="time O(T c log T D), memory O(T D + T c log T); each layer of the encoder has half the tokens of the last",
    cite="zhou2021informer",
    notes=(
        "The keys on which queries are measured follow from a seed and from a token's place in its text; the"
        " released code draws them anew in every call. It also has a BatchNorm between convolution and ELU, which"
        " the paper's equation lacks and which is left out, as it mixes the rows of a batch. Models that predict"
        " something for each token bring the shortened states back to the text's length. The decoder of an"
        " encoder-decoder has dense attention: the masked form lets later tokens decide which queries attend, and is"
        " there as `decoder={'attention': {'type': 'informer', 'causal_form': 'paper'}}` for models that do not"
        " generate. `XFInformerForTimeSeriesPrediction` forecasts: it reads `past_values` and features of their"
        " times, and its decoder writes all steps in one pass (`hf-xformers finetune --task forecasting`)."
    ),
)

make_family(XFInformerConfig, "XFInformer", (*ENCODER_HEADS, "ForSeq2SeqLM", "ForTimeSeriesPrediction"), INFO)
