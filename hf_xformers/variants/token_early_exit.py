# SPDX-License-Identifier: Apache-2.0
"""Token-level early exit (Li et al. 2021): BERT whose tokens halt once their tags are certain."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import VariantInfo, make_family


class XFTokenEarlyExitConfig(XFormerConfig):
    """Token-level early exit (Li et al. 2021): BERT whose tokens halt once their tags are certain.

    `stack={"type": "token_exit", "exit_threshold": delta}` says how certain, as a share of the entropy of a guess; by
    default no token halts early.
    """

    model_type = "xf_token_early_exit"

    vocab_size: int = 30522
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    embedding: SpecLike = preset({"type": "token", "normalize": True})
    stack: SpecLike = "token_exit"
    head: SpecLike = "transform"


INFO = VariantInfo(
    section="6.3",
    summary="tokens halt after the first layer that is sure of their tags",
    paper="Li et al. 2021",
    url="https://arxiv.org/abs/2105.13878",
    equation=(
        r"h_i^{(m)} = h_i^{(l)} \text{ for } m > l, \quad l = \min\Big\{ j : \max_{|n - i| \le k} u_n^{(j)} < \delta"
        r" \Big\}, \quad u = H(p) / \log C"
    ),
    cost="time O(l T^2 D) for a text whose last token halts after layer l; feed-forward time by its running tokens",
    notes=(
        "Only token classification halts early. Halted tokens keep their states, which the others still read; outputs"
        " say where each one halted: `exit_layers`. `exit_level='sentence'` lets a text halt as a whole (SENTEE)."
        " Train with `training_stage='joint'`, then, with a threshold, with 'self_sampling'."
    ),
    cite="li2021accelerating",
)

make_family(XFTokenEarlyExitConfig, "XFTokenEarlyExit", ("Model", "ForMaskedLM", "ForTokenClassification"), INFO)
