# SPDX-License-Identifier: Apache-2.0
"""Voting early exit (Sun et al. 2021): BERT with a classifier on every layer, and texts that leave by vote."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import VariantInfo, make_family


class XFVotingEarlyExitConfig(XFormerConfig):
    """Voting early exit (Sun et al. 2021): BERT with a classifier on every layer, and texts that leave by vote.

    `stack={"type": "voting_exit", "vote_threshold": tau}` says how many votes are enough (default: all of the first
    half of the layers).
    """

    model_type = "xf_voting_early_exit"

    vocab_size: int = 30522
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    add_pooler: bool = True
    embedding: SpecLike = preset({"type": "token", "normalize": True})
    stack: SpecLike = "voting_exit"
    head: SpecLike = "transform"


INFO = VariantInfo(
    section="6.3",
    summary="the classifiers of all layers vote; a text leaves when enough of them agree",
    paper="Sun et al. 2021",
    url="https://arxiv.org/abs/2105.13792",
    equation=(
        r"\hat{y} = \arg\max_c v_c \text{ at the first } l \text{ with } \max_c v_c / l^{\lambda} \ge \tau, \quad"
        r" v_c = \#\{i \le l : y_i = c\}, \quad \mathcal{L}_l = \mathrm{CE}_l - \beta \min_{i<l}"
        r" \mathrm{CE}(p_i, p_l)"
    ),
    cost="time O(l T^2 D) for a text that leaves after layer l, and one classifier for each layer it passes",
    notes=(
        "Only sequence classification leaves early; all classifiers are trained at once, and are kept apart by a term"
        " that rewards another answer than that of the nearest one before. Each text of a batch leaves by itself, and"
        " outputs say where: `exit_layers`. `hf-xformers finetune` measures accuracy against depth."
    ),
    cite="sun2021early",
)

make_family(XFVotingEarlyExitConfig, "XFVotingEarlyExit", ("Model", "ForMaskedLM", "ForSequenceClassification"), INFO)
