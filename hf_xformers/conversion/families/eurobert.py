"""EuroBERT: `eurobert` -> `xformer`. Llama that reads both sides.

Its classifier of texts reads the mean of what a hidden layer makes of every token, and has no counterpart here; its
model converts with `head='Model'`.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..base import Converter, Head, register
from ..rules import Rule, copied
from . import llama


def _mlm(config: XFormerConfig) -> tuple[Rule, ...]:
    return (llama.linear("lm_head", "lm_head.decoder", config.head.bias),)


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        **llama.to_ours(config),
        "is_decoder": False,
        "head": {"type": "linear", "bias": config.mlp_bias},
    }


CONVERTER = register(
    Converter(
        model_type="eurobert",
        variant="xformer",
        native=False,
        fields=llama.FIELDS,
        to_ours=to_ours,
        to_theirs=llama.to_theirs,
        groups={
            "backbone": llama.backbone,
            "mlm": _mlm,
            "token": (copied("classifier.*", "classifier.*"),),
        },
        heads=(
            Head("EuroBertModel", "Model", "", ("backbone",)),
            Head("EuroBertForMaskedLM", "ForMaskedLM", "model.", ("backbone", "mlm")),
            Head("EuroBertForTokenClassification", "ForTokenClassification", "model.", ("backbone", "token")),
        ),
        components=llama.COMPONENTS,
        unread=("hidden_act", "pretraining_tp", "rope_parameters", "mask_token_id", "classifier_pooling"),
    )
)
