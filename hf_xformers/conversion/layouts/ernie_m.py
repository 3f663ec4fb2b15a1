# SPDX-License-Identifier: Apache-2.0
"""The layout of ERNIE-M checkpoints, as transformers 4 wrote them."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from .shared import BareLayout, Layout, parts


class ErnieMConfig(PreTrainedConfig):
    """Fields of its config.json. act_dropout: inside the feed-forward network (`None`: as `hidden_dropout_prob`).
    max_position_embeddings: rows of the table, of which the first two are for nothing."""

    model_type = "ernie_m"

    vocab_size: int = 250002
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.1
    max_position_embeddings: int = 514
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-5
    classifier_dropout: float | int | None = None
    act_dropout: float | int | None = 0.0
    is_decoder: bool = False
    pad_token_id: int | None = 1
    tie_word_embeddings: bool = True


def _layer(config: ErnieMConfig) -> nn.Module:
    width, inner = config.hidden_size, config.intermediate_size
    projections = parts({f"{name}_proj": nn.Linear(width, width) for name in "qkv"})
    return parts(
        {
            "self_attn": parts({"self_attn": projections, "out_proj": nn.Linear(width, width)}),
            "linear1": nn.Linear(width, inner),
            "linear2": nn.Linear(inner, width),
            "norm1": nn.LayerNorm(width),
            "norm2": nn.LayerNorm(width),
        }
    )


class ErnieMModel(BareLayout):
    """The tensors of the bare model."""

    config_class = ErnieMConfig
    base_model_prefix = "ernie_m"

    def __init__(self, config: ErnieMConfig, add_pooling_layer: bool = True):
        width = config.hidden_size
        tables = {
            "position_embeddings": nn.Embedding(config.max_position_embeddings, width),
            "layer_norm": nn.LayerNorm(width),
        }
        layers = [_layer(config) for _ in range(config.num_hidden_layers)]
        super().__init__(config, tables, "layers", layers, add_pooling_layer)


class _Headed(Layout):
    """The tensors of a model with linear outputs: `pooled` says whether it has a pooler, `outputs` which there are."""

    config_class = ErnieMConfig
    base_model_prefix = "ernie_m"

    pooled = True
    outputs: tuple[str, ...] = ("classifier",)
    width: int | None = None  # of them; `None`: one for each label

    def __init__(self, config: ErnieMConfig):
        super().__init__(config)
        self.ernie_m = ErnieMModel(config, add_pooling_layer=self.pooled)
        for name in self.outputs:
            self.add_module(name, nn.Linear(config.hidden_size, self.width or config.num_labels or 0))
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.ernie_m.get_input_embeddings()


class ErnieMForSequenceClassification(_Headed):
    pass


class ErnieMForMultipleChoice(_Headed):
    width = 1


class ErnieMForTokenClassification(_Headed):
    pooled = False


class ErnieMForQuestionAnswering(_Headed):
    pooled, outputs = False, ("qa_outputs",)


class ErnieMForInformationExtraction(_Headed):
    outputs, width = ("linear_start", "linear_end"), 1


CLASSES: tuple[Any, ...] = (
    *(ErnieMModel, ErnieMForSequenceClassification, ErnieMForTokenClassification, ErnieMForQuestionAnswering),
    *(ErnieMForMultipleChoice, ErnieMForInformationExtraction),
)
