# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM (Shoeybi et al. 2019): BERT and GPT-2 with the norms before the sublayers, which deep models need."""

from __future__ import annotations

from typing import Any, ClassVar

from ..configuration_xformer import Initializer, XFormerConfig
from ..core.components import SpecLike
from ..families import ENCODER_HEADS, SENTENCE_PAIR_HEADS, VariantInfo, make_family


def _bert(width: int, layers: int, heads: int) -> dict[str, Any]:
    """An encoder of the paper's table of BERTs."""
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
    }


def _gpt(width: int, layers: int, heads: int) -> dict[str, Any]:
    """A decoder: GPT-2 with a vocabulary that eight devices can share."""
    return {
        **_bert(width, layers, heads),
        "vocab_size": 51200,
        "max_position_embeddings": 1024,
        "type_vocab_size": 0,
        "layer_norm_eps": 1e-5,
        "add_pooler": False,
        "is_decoder": True,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
        "pad_token_id": None,
        "feedforward": {"type": "gelu", "approximate": "tanh"},
        "head": "linear",
    }


class XFMegatronConfig(XFormerConfig):
    """Megatron-LM (Shoeybi et al. 2019): BERT and GPT-2 with the norms before the sublayers, which deep models need.

    The defaults are those of the smallest BERT; `presets` has the published sizes, `bert_*` for encoders and `gpt_*`,
    `turing_nlg` for decoders (`ForCausalLM`).
    """

    model_type = "xf_megatron"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "bert_336m": {},
        "bert_1.3b": _bert(2048, 24, 32),
        "bert_3.9b": _bert(2560, 48, 40),
        "gpt_355m": _gpt(1024, 24, 16),
        "gpt_1.2b": _gpt(1536, 40, 16),
        "gpt_2.5b": _gpt(1920, 54, 20),
        "gpt_8.3b": _gpt(3072, 72, 24),
        "turing_nlg": _gpt(4256, 78, 28),
    }

    vocab_size: int = 29056
    hidden_size: int = 1024
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    intermediate_size: int = 4096
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    add_pooler: bool = True
    initializer: Initializer = "scaled_residual"
    residual: SpecLike = "pre_ln"
    head: SpecLike = "transform"


INFO = VariantInfo(
    section="7",
    summary="BERT and GPT-2 with norms before the sublayers, for depth",
    paper="Shoeybi et al. 2019",
    url="https://arxiv.org/abs/1909.08053",
    equation=r"x \leftarrow x + f(\mathrm{LN}(x)), \qquad \text{output } \mathrm{LN}(x^L)",
    cost="time O(T^2 D), memory O(T D) with fused kernels",
    notes=(
        "`Config.preset` has the sizes of the paper and of Turing-NLG: `XFMegatronConfig.preset('gpt_8.3b')`. On"
        " several devices a layer is divided by columns, then by rows, as in the paper: load with `tp_plan='auto'`."
    ),
    cite="shoeybi2019megatron",
)

make_family(XFMegatronConfig, "XFMegatron", (*ENCODER_HEADS, *SENTENCE_PAIR_HEADS, "ForCausalLM"), INFO)
