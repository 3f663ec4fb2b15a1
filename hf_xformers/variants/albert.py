# SPDX-License-Identifier: Apache-2.0
"""ALBERT (Lan et al. 2020): a BERT whose layers share their weights, over a narrow token table."""

from __future__ import annotations

from typing import Any, ClassVar

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ENCODER_HEADS, SENTENCE_PAIR_HEADS, VariantInfo, make_family


class XFAlbertConfig(XFormerConfig):
    """ALBERT (Lan et al. 2020): a BERT whose layers share their weights, over a narrow token table.

    The defaults are the second release's base model, which drops nothing out; `presets` has the published sizes.
    `num_hidden_layers` counts the runs of the layer.
    """

    model_type = "xf_albert"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "base": {},
        "large": {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        },
        "xlarge": {
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 8192,
        },
        "xxlarge": {
            "hidden_size": 4096,
            "num_attention_heads": 64,
            "intermediate_size": 16384,
        },
    }

    vocab_size: int = 30000
    type_vocab_size: int = 2
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    classifier_dropout: float | int | None = 0.1
    layer_norm_eps: float = 1e-12
    add_pooler: bool = True
    bos_token_id: int | None = 2
    eos_token_id: int | list[int] | None = 3
    embedding: SpecLike = preset({"type": "factorized", "width": 128, "narrow_positions": True})
    feedforward: SpecLike = preset({"type": "gelu", "approximate": "tanh"})
    stack: SpecLike = preset({"type": "universal", "step_signal": "none", "position_signal": False})
    head: SpecLike = preset({"type": "transform", "activation": "gelu_new"})


INFO = VariantInfo(
    section="7",
    summary="BERT with one layer at every depth and a narrow token table",
    paper="Lan et al. 2020",
    url="https://arxiv.org/abs/1909.11942",
    equation=(
        r"x^0 = W\,\mathrm{LN}(E_{w} + P + S) + b, \qquad x^{l+1} = \mathrm{layer}_\theta(x^l) \;"
        r"\text{ with the same } \theta"
    ),
    cost="time that of BERT; parameters V e + e D and those of one layer",
    notes=(
        "Pretraining is by masked n-grams and the order of sentences: `--objective sop --objective.mlm mlm`."
        " Further layers of their own: stack={'type': 'universal', 'step_signal': 'none', 'position_signal': False,"
        " 'groups': 2} for `num_hidden_groups`, 'layers_per_step' for `inner_group_num`. The first release has"
        " feedforward='gelu' and drops out a tenth."
    ),
    cite="lan2020albert",
)

make_family(XFAlbertConfig, "XFAlbert", (*ENCODER_HEADS, *SENTENCE_PAIR_HEADS, "ForCausalLM"), INFO)
