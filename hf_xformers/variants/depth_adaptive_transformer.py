# SPDX-License-Identifier: Apache-2.0
"""The Depth-Adaptive Transformer (Elbayad et al. 2020): an encoder-decoder whose tokens leave at different depths."""

from __future__ import annotations

from ..configuration_xformer import Initializer, XFormerConfig
from ..core.components import SpecLike, preset
from ..families import VariantInfo, make_family


class XFDepthAdaptiveTransformerConfig(XFormerConfig):
    """The Depth-Adaptive Transformer (Elbayad et al. 2020): an encoder-decoder whose tokens leave at different depths.

    The decoder's stack says when they leave: `decoder.stack.exit_threshold` (or, in a decoder alone,
    `stack.exit_threshold`) is how probable the next token has to be; by default no token leaves early.
    """

    model_type = "xf_depth_adaptive_transformer"

    vocab_size: int = 37000
    hidden_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    intermediate_size: int = 2048
    initializer: Initializer = "xavier"
    eos_token_id: int | list[int] | None = 1
    is_encoder_decoder: bool = True
    embedding: SpecLike = preset({"type": "token", "scale": True})
    position: SpecLike = "sinusoidal_absolute"
    feedforward: SpecLike = "relu"
    stack: SpecLike = "decoder_exit"


INFO = VariantInfo(
    section="6.3",
    summary="a decoder's tokens leave at different depths",
    paper="Elbayad et al. 2020",
    url="https://arxiv.org/abs/1910.10073",
    equation=(
        r"h_t^{(m)} = h_t^{(n)} \text{ for } m > n, \quad n = \min\Big\{ j : \max_y p(y \mid h_t^{(j)}) > \tau \Big\},"
        r" \quad \mathcal{L} = \frac{\sum_n \omega_n \mathcal{L}_n}{\sum_n \omega_n}"
    ),
    cost="as the vanilla Transformer until a token leaves; above, its keys and values alone: 2 D^2 for a layer",
    notes=(
        "Outputs say after which layer of the decoder each token left: `exit_layers`. Generation with a cache leaves"
        " at the same depths as one pass over the text. Training is `aligned` (every layer predicts all tokens) or"
        " `mixed` (at drawn depths); `halting='gates'` learns where to leave from the likelihood of the targets."
    ),
    cite="elbayad2020depth",
)

make_family(
    XFDepthAdaptiveTransformerConfig,
    "XFDepthAdaptiveTransformer",
    ("Model", "ForSeq2SeqLM", "ForCausalLM"),
    INFO,
)
