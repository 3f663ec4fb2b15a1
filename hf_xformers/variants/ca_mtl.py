# SPDX-License-Identifier: Apache-2.0
"""The attention of CA-MTL (Pilault et al. 2021): a bias on near tokens that depends on the task."""

from __future__ import annotations

from typing import Any

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ALL_HEADS, VariantInfo, make_family


class XFCAMTLConfig(XFormerConfig):
    """The attention of CA-MTL (Pilault et al. 2021): a bias on near tokens that depends on the task.

    BERT's layers with conditional block-diagonal attention. Set `attention={"type": "ca_mtl", "num_tasks": n}` and
    give the input `tasks` [batch], the number of each text's task. The paper's conditional norms, alignment and
    bottleneck come with `stack={"type": "ca_mtl", "num_tasks": n}` and `residual="conditional_post_ln"`, which tell
    the attention the task, too. An encoder-decoder's decoder has dense attention.
    """

    model_type = "xf_ca_mtl"

    attention: SpecLike = "ca_mtl"
    decoder: dict[str, Any] | None = preset({"attention": "dense"})


INFO = VariantInfo(
    section="4.5",
    summary="a bias on tokens of the same block of positions, modulated by the task",
    paper="Pilault et al. 2021",
    url="https://arxiv.org/abs/2009.09139",
    equation=(
        r"\mathrm{softmax}\Big( \frac{Q K^\top}{\sqrt d} + M(z) \Big) V, \qquad M(z) = \mathrm{blockdiag}_n\big("
        r" (1 + \gamma(z)) \odot W_n + \beta(z) \big)"
    ),
    cost="time O(T^2 D), memory O(T D): scores are made in blocks of queries",
    cite="pilault2021conditionally",
)

make_family(XFCAMTLConfig, "XFCAMTL", ALL_HEADS, INFO)
