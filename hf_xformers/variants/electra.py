# SPDX-License-Identifier: Apache-2.0
"""ELECTRA (Clark et al. 2020): a BERT that finds the tokens which a small generator put into its text."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ENCODER_HEADS, VariantInfo, make_family


class XFElectraConfig(XFormerConfig):
    """ELECTRA (Clark et al. 2020): a BERT that finds the tokens which a small generator put into its text.

    The defaults are the base model; `presets` has the published sizes. The generator of the base model has a third of
    its width (`pretraining`: `replaced_tokens`, `generator_size`), those of small and large a quarter.
    """

    model_type = "xf_electra"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "small": {
            "hidden_size": 256,
            "num_attention_heads": 4,
            "intermediate_size": 1024,
            "pretraining": {"replaced_tokens": {"generator_size": 0.25}},
            "embedding": {"type": "factorized", "width": 128, "narrow_positions": True},
        },
        "base": {},
        "large": {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "pretraining": {"replaced_tokens": {"generator_size": 0.25}},
        },
    }

    vocab_size: int = 30522
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    classifier_transform: Literal["none", "dense", "dense_norm"] = "dense"
    pretraining: dict[str, Any] = preset({"replaced_tokens": {"generator_size": 1 / 3}})
    embedding: SpecLike = preset({"type": "token", "normalize": True})
    head: SpecLike = "transform"


INFO = VariantInfo(
    section="7",
    summary="BERT trained to find the tokens that a small generator replaced",
    paper="Clark et al. 2020",
    url="https://arxiv.org/abs/2003.10555",
    equation=(
        r"\mathcal{L}_{\mathrm{MLM}}(x; \theta_G) + \lambda \sum_t \mathrm{BCE}\big(\sigma(w^\top h_D(x^c)_t),"
        r" [x^c_t \ne x_t]\big)"
    ),
    cost="that of BERT; in pretraining the generator takes 15 to 30 % more",
    notes=(
        "The objective `replaced_token_detection` trains `ForReplacedTokenPreTraining`, generator and discriminator"
        " together; `extract('discriminator')` and `extract('generator')` make ordinary models of them."
    ),
    cite="clark2020electra",
)

make_family(
    XFElectraConfig,
    "XFElectra",
    (*ENCODER_HEADS, "ForReplacedTokenDetection", "ForReplacedTokenPreTraining", "ForCausalLM"),
    INFO,
)
