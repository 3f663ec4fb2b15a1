# SPDX-License-Identifier: Apache-2.0
"""DeBERTa (He et al. 2021): content and relative position attend to each other, absolute positions come last."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from torch import Tensor, nn

from ..auto_classes import register_model
from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..core.reading_weights import weight_of
from ..families import ENCODER_HEADS, VariantInfo, make_family
from ..stacks.enhanced_mask_decoder import ABSOLUTE_POSITIONS

_SECOND = {"type": "deberta", "buckets": 256, "share_projections": True, "normalize": True}  # of versions 2 and 3


class XFDebertaConfig(XFormerConfig):
    """DeBERTa (He et al. 2021): content and relative position attend to each other, absolute positions come last.

    `presets` has its three versions. `pretraining` has the settings `replaced_tokens` of the third, which is
    pretrained by detection of replaced tokens; `ForReplacedTokenDetection` and `ForReplacedTokenPreTraining` read
    them.
    """

    model_type = "xf_deberta"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "base": {},
        "v2_xlarge": {
            "hidden_size": 1536,
            "num_hidden_layers": 24,
            "num_attention_heads": 24,
            "intermediate_size": 6144,
            "vocab_size": 128100,
            "position": _SECOND,
            "block": {"type": "convolution", "kernel": 3, "activation": "gelu"},
        },
        "v3_base": {
            "vocab_size": 128100,
            "position": _SECOND,
        },
    }

    vocab_size: int = 50265
    layer_norm_eps: float = 1e-7
    pretraining: dict[str, Any] = preset(
        {
            "replaced_tokens": {
                "generator_size": 1.0,
                "generator_depth": 0.5,
                "generator_sharing": "gradient_disentangled",
                "detection_context": True,
            }
        }
    )
    embedding: SpecLike = preset({"type": "token", "normalize": True})
    position: SpecLike = "deberta"
    stack: SpecLike = "enhanced_mask_decoder"
    head: SpecLike = "transform"


INFO = VariantInfo(
    section="5.1",
    summary="disentangled attention, and an enhanced mask decoder for masked language modeling",
    paper="He et al. 2021",
    url="https://arxiv.org/abs/2006.03654",
    equation=r"\frac{q_i k_j^\top + q_i K^{r\top}_{\delta(i,j)} + k_j Q^{r\top}_{\delta(i,j)}}{\sqrt{3d}}",
    cost="time O(T^2 D + T k D), memory O(T k): scores are made in blocks of queries",
    cite="he2021deberta",
    notes=(
        "`XFDebertaConfig.preset` has the three versions, 'base', 'v2_xlarge' and 'v3_base'. The second and the third"
        " have position={'type': 'deberta', 'buckets': 256, 'share_projections': True, 'normalize': True}, the second"
        " block='convolution'. The third is pretrained by `--objective replaced_token_detection`, with a generator of"
        " half the layers."
    ),
)

_family = make_family(
    XFDebertaConfig, "XFDeberta", (*ENCODER_HEADS, "ForReplacedTokenDetection", "ForReplacedTokenPreTraining"), INFO
)


_MaskedLM: Any = _family["ForMaskedLM"]


class XFDebertaForMaskedLM(_MaskedLM):
    """An encoder that predicts masked tokens, with DeBERTa's enhanced mask decoder: absolute positions, which the
    layers below do not know, enter in the last one (He et al. 2021, section 3.2). Other heads are trained without
    it."""

    def __init__(self, config: XFDebertaConfig):
        super().__init__(config)
        self.absolute_positions = None
        if ABSOLUTE_POSITIONS in self.config.stack.inputs:
            self.absolute_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.post_init()

    @functools.wraps(_MaskedLM.forward)
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs, **self.own_inputs())

    def own_inputs(self) -> dict[str, Tensor]:
        return {} if self.absolute_positions is None else {ABSOLUTE_POSITIONS: weight_of(self.absolute_positions)}


register_model("AutoModelForMaskedLM", XFDebertaConfig, XFDebertaForMaskedLM)
