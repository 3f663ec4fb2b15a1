# SPDX-License-Identifier: Apache-2.0
"""PABEE (Zhou et al. 2020): BERT with a classifier on every layer, and texts that leave once several agree."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import VariantInfo, make_family


class XFPabeeConfig(XFormerConfig):
    """PABEE (Zhou et al. 2020): BERT with a classifier on every layer, and texts that leave once several agree.

    `stack={"type": "patience_exit", "patience": P}` says how many must confirm (default: half the layers). Regression
    counts numbers closer than `regression_threshold` as equal.
    """

    model_type = "xf_pabee"

    vocab_size: int = 30522
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    add_pooler: bool = True
    embedding: SpecLike = preset({"type": "token", "normalize": True})
    stack: SpecLike = "patience_exit"
    head: SpecLike = "transform"


INFO = VariantInfo(
    section="6.3",
    summary="a classifier on every layer; a text leaves when enough of them in a row agree",
    paper="Zhou et al. 2020",
    url="https://arxiv.org/abs/2006.04152",
    equation=(
        r"c_l = \mathbb{1}[y_l = y_{l-1}] \, (c_{l-1} + 1), \quad \hat{y} = y_l \text{ at the first } c_l = P, \quad "
        r"\mathcal{L} = \frac{\sum_l l \, \mathcal{L}_l}{\sum_l l}"
    ),
    cost="time O(l T^2 D) for a text that leaves after layer l, and one classifier for each layer it passes",
    notes=(
        "Only sequence classification and regression leave early; all classifiers are trained at once. The paper's"
        " main model is ALBERT: `share_layers` runs one layer's weights at every depth. Each text of a batch leaves by"
        " itself, and outputs say where: `exit_layers`."
    ),
    cite="zhou2020pabee",
)

make_family(XFPabeeConfig, "XFPabee", ("Model", "ForMaskedLM", "ForSequenceClassification"), INFO)
