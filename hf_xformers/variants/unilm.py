# SPDX-License-Identifier: Apache-2.0
"""UniLM (Dong et al. 2019): BERT's encoder under four masks, which reads texts and writes them."""

from __future__ import annotations

from typing import Any, ClassVar

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ENCODER_HEADS, VariantInfo, make_family


class XFUniLMConfig(XFormerConfig):
    """UniLM (Dong et al. 2019): BERT's encoder under four masks, which reads texts and writes them.

    The input `mask_modes` [B, 2] says for each row under which mask it is read (0 bidirectional, 1 left-to-right,
    2 right-to-left, 3 sequence-to-sequence) and how many tokens a first text has. Six types of tokens: two for texts
    in mode 0, one for each of the modes 1 and 2, two in mode 3. `mask_token_id` and `sep_token_id` are what it writes
    with, and up to.
    """

    model_type = "xf_unilm"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "base": {},
        "large": {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        },
    }

    vocab_size: int = 28996
    type_vocab_size: int = 6
    mask_token_id: int | None = None
    sep_token_id: int | None = None
    layer_norm_eps: float = 1e-12
    add_pooler: bool = True
    embedding: SpecLike = preset({"type": "token", "normalize": True})
    head: SpecLike = "transform"
    stack: SpecLike = "mask_modes"


INFO = VariantInfo(
    section="7",
    summary="one encoder under four masks: both sides, either side, source and target",
    paper="Dong et al. 2019",
    url="https://arxiv.org/abs/1905.03197",
    equation=(
        r"\mathrm{softmax}\!\left(\frac{Q K^\top}{\sqrt{d}} + M\right) V, \qquad "
        r"M_{ij} = 0 \text{ where } i \text{ may see } j, \text{ else } -\infty"
    ),
    cost="time O(T^2 D); memory O(T D), T^2 bytes of a mask for each row not read from both sides",
    notes=(
        "Without the input `mask_modes` it is BERT. Trained by `--objective unilm`; `finetune` trains it on pairs of"
        " source and target (summarization, translation), and `predict` writes."
    ),
    cite="dong2019unilm",
)

make_family(XFUniLMConfig, "XFUniLM", (*ENCODER_HEADS, "ForPreTraining", "ForClozeWriting"), INFO)
