# SPDX-License-Identifier: Apache-2.0
"""Recurrence added to a pretrained language model (Yoshida et al. 2020): windows that carry one key and value."""

from __future__ import annotations

from ..configuration_xformer import Initializer, XFormerConfig
from ..core.components import SpecLike, preset
from ..families import DECODER_HEADS, VariantInfo, make_family


class XFRecurrentPretrainedLMConfig(XFormerConfig):
    """Recurrence added to a pretrained language model (Yoshida et al. 2020): windows that carry one key and value.

    GPT-2 with stack 'recurrent_windows': texts of any length are read in windows of `max_position_embeddings` tokens,
    or of the stack's `window_size`. Any pretrained decoder that the stack takes becomes one with
    `swap_components(model, stack="recurrent_windows")`.
    """

    model_type = "xf_recurrent_pretrained_lm"

    vocab_size: int = 50257
    max_position_embeddings: int = 1024
    initializer: Initializer = "scaled_residual"
    pad_token_id: int | None = None
    bos_token_id: int | None = 50256
    eos_token_id: int | list[int] | None = 50256
    is_decoder: bool = True
    residual: SpecLike = "pre_ln"
    feedforward: SpecLike = preset({"type": "gelu", "approximate": "tanh"})
    stack: SpecLike = "recurrent_windows"


INFO = VariantInfo(
    section="6.4",
    summary="a pretrained LM reads windows, and carries one key",
    paper="Yoshida et al. 2020",
    url="https://arxiv.org/abs/2008.07027",
    equation=(
        r"\bar z_s = \frac{1}{W} \sum_{t=1}^{W} h_{s,t}^{(l)}, \qquad (k, v) = r(\bar z_s), \qquad"
        r" K_{s+1}^{(m)} = [k ; K], \quad V_{s+1}^{(m)} = [v ; V]"
    ),
    cost="time O(T W D) for a text of T tokens in windows of W; its state is one vector and a window's keys",
    notes=(
        "`swap_components(model, stack='recurrent_windows')` makes one of a pretrained decoder; without the carried"
        " key it is that model on each window by itself. `outputs.segment_memory` of one call is the input"
        " `segment_memory` of the next, with gradient; `XFormerTrainer(segment_streams=True)` lays the corpus in"
        " contiguous streams and carries it. Texts longer than a window can be given in one call, too."
    ),
    cite="yoshida2020adding",
)

make_family(XFRecurrentPretrainedLMConfig, "XFRecurrentPretrainedLM", DECODER_HEADS, INFO)
