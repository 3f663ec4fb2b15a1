# SPDX-License-Identifier: Apache-2.0
"""DeeBERT (Xin et al. 2020): BERT with a classifier on every layer, and texts that leave at the first sure one."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import VariantInfo, make_family


class XFDeebertConfig(XFormerConfig):
    """DeeBERT (Xin et al. 2020): BERT with a classifier on every layer, and texts that leave at the first sure one.

    `stack={"type": "entropy_exit", "threshold": S}` says how sure is sure enough, in nats; by default no text leaves
    early.
    """

    model_type = "xf_deebert"

    vocab_size: int = 30522
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    add_pooler: bool = True
    embedding: SpecLike = preset({"type": "token", "normalize": True})
    stack: SpecLike = "entropy_exit"
    head: SpecLike = "transform"


INFO = VariantInfo(
    section="6.3",
    summary="a classifier on every layer; a text leaves after the first one whose entropy is low",
    paper="Xin et al. 2020",
    url="https://arxiv.org/abs/2004.12993",
    equation=(
        r"\hat{y} = z_l, \quad l = \min\Big\{ j : -\sum_c p_{j,c} \log p_{j,c} < S \Big\}, \quad p_j ="
        r" \mathrm{softmax}(z_j)"
    ),
    cost="time O(l T^2 D) for a text that leaves after layer l, and one classifier for each layer it passes",
    notes=(
        "Only sequence classification leaves early. Train in two stages: as it is (layers and last classifier), then,"
        " after `model.exits.begin_ramps(model)`, the ramps alone. Each text of a batch leaves by itself, and outputs"
        " say where: `exit_layers`."
    ),
    cite="xin2020deebert",
)

make_family(XFDeebertConfig, "XFDeebert", ("Model", "ForMaskedLM", "ForSequenceClassification"), INFO)
