# SPDX-License-Identifier: Apache-2.0
"""HAN (Miculicich et al. 2018): translation of documents with hierarchical attention to the sentences before."""

from __future__ import annotations

from ..configuration_xformer import Initializer, XFormerConfig
from ..core.components import SpecLike, preset
from ..families import SEQ2SEQ_HEADS, VariantInfo, make_family


class XFHanNmtConfig(XFormerConfig):
    """HAN (Miculicich et al. 2018): translation of documents with hierarchical attention to the sentences before.

    Models take the K sentences before as `context_input_ids` and `context_attention_mask` [B, K, S]; without them, or
    where all are masked, they are models of single sentences. `stack={"type": "han_nmt", "side": "both"}` reads
    translations of these, `decoder_context_input_ids`, as well.
    """

    model_type = "xf_han_nmt"

    vocab_size: int = 37000
    hidden_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    intermediate_size: int = 2048
    layer_norm_eps: float = 1e-6
    initializer: Initializer = "xavier"
    eos_token_id: int | list[int] | None = 1
    is_encoder_decoder: bool = True
    embedding: SpecLike = preset({"type": "token", "scale": True})
    position: SpecLike = "sinusoidal_absolute"
    attention: SpecLike = preset({"type": "dense", "bias": False})
    cross_attention: SpecLike = preset({"type": "dense", "bias": False})
    feedforward: SpecLike = "relu"
    stack: SpecLike = "han_nmt"


INFO = VariantInfo(
    section="6.4",
    summary="attention to the words, then to the sentences before, through a gate",
    paper="Miculicich et al. 2018",
    url="https://arxiv.org/abs/1809.01576",
    equation=(
        r"s^j_t = \mathrm{MHA}(h_t, h^j), \quad d_t = \mathrm{FF}(\mathrm{MHA}(h_t, s^{1 \dots K}_t)), \quad"
        r" h_t \leftarrow \mathrm{LN}((1 - g_t) h_t + g_t d_t)"
    ),
    cost="time O(K T^2 D) for K sentences before of T tokens each",
    notes=(
        "`finetune --task translation` gives every row the sentences before it: of its document by a column `document`"
        " or `doc_id`, else of the lines before. A sentence without any before it is translated as by the vanilla"
        " Transformer. The paper trains that first: start from such a checkpoint with `--model`."
    ),
    cite="miculicich2018document",
)

make_family(XFHanNmtConfig, "XFHanNmt", SEQ2SEQ_HEADS, INFO)
