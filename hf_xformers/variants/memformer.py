# SPDX-License-Identifier: Apache-2.0
"""Memformer (Wu et al. 2022): memory slots that are read in every layer and written after each segment."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike
from ..families import ALL_HEADS, VariantInfo, make_family


class XFMemformerConfig(XFormerConfig):
    """Memformer (Wu et al. 2022): memory slots that are read in every layer and written after each segment.

    A model output's `segment_memory` is the next segment's input of the same name; in an encoder-decoder it is the
    encoder's. The stack's `num_slots` is the size of the memory. Sublayers are normalized before they read (the paper
    leaves open where): with `residual="post_ln"` small models hardly learn in their first hundreds of steps.
    """

    model_type = "xf_memformer"

    residual: SpecLike = "pre_ln"
    block: SpecLike = "memformer"
    stack: SpecLike = "memformer"


INFO = VariantInfo(
    section="6.4",
    summary="memory slots, read in every layer and written after each segment",
    paper="Wu et al. 2022",
    url="https://arxiv.org/abs/2010.06891",
    equation=(
        r"m_i' = \mathrm{softmax}\!\left(\frac{m_i W_Q [m_i W_K ; X W_K']^\top}{\tau}\right) [m_i ; X W_V], \qquad "
        r"m_i \leftarrow \frac{m_i' + b_i}{\lVert m_i' + b_i \rVert}"
    ),
    cost="time O(T^2 D + T k D) per segment of T tokens with k slots; the memory between segments is O(k D)",
    notes=(
        "`outputs.segment_memory` of one segment is the input `segment_memory` of the next, with gradient."
        " `hf_xformers.training.replay.replay_backward` back-propagates through any number of segments with the"
        " activations of one, and `XFormerTrainer(segment_streams=True)` does so over the micro-batches of a step. In"
        " generation the text is one segment: the memory is read, and given with every call."
    ),
    cite="wu2022memformer",
)

make_family(XFMemformerConfig, "XFMemformer", ALL_HEADS, INFO)
