# SPDX-License-Identifier: Apache-2.0
"""The layout of NEZHA checkpoints, as transformers 4 wrote them."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from .shared import BareLayout, Layout, dense_and_norm, parts


class NezhaConfig(PreTrainedConfig):
    """Fields of its config.json: BERT's, and max_relative_position, the distance beyond which all count as it."""

    model_type = "nezha"

    vocab_size: int = 21128
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.1
    max_position_embeddings: int = 512
    max_relative_position: int = 64
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    classifier_dropout: float | int | None = 0.1
    is_decoder: bool = False
    use_cache: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 2
    eos_token_id: int | None = 3
    tie_word_embeddings: bool = True


def _layer(config: NezhaConfig) -> nn.Module:
    width, inner = config.hidden_size, config.intermediate_size
    projections = parts({name: nn.Linear(width, width) for name in ("query", "key", "value")})
    return parts(
        {
            "attention": parts({"self": projections, "output": dense_and_norm(config, width)}),
            "intermediate": parts({"dense": nn.Linear(width, inner)}),
            "output": dense_and_norm(config, inner),
        }
    )


class NezhaModel(BareLayout):
    """The tensors of the bare model."""

    config_class = NezhaConfig
    base_model_prefix = "nezha"

    def __init__(self, config: NezhaConfig, add_pooling_layer: bool = True):
        width = config.hidden_size
        tables = {
            "token_type_embeddings": nn.Embedding(config.type_vocab_size, width),
            "LayerNorm": nn.LayerNorm(width),
        }
        layers = [_layer(config) for _ in range(config.num_hidden_layers)]
        super().__init__(config, tables, "layer", layers, add_pooling_layer)


class _Headed(Layout):
    """The tensors of a model with the outputs that its class says."""

    config_class = NezhaConfig
    base_model_prefix = "nezha"

    pooled = True
    predicts_tokens = predicts_pairs = False
    labels: str | None = None  # name of a projection onto labels

    def __init__(self, config: NezhaConfig):
        super().__init__(config)
        width = config.hidden_size
        self.nezha = NezhaModel(config, add_pooling_layer=self.pooled)
        outputs: dict[str, nn.Module] = {}
        self._tied_weights_keys = {}
        if self.predicts_tokens:
            predictions = parts(
                {"transform": dense_and_norm(config, width), "decoder": nn.Linear(width, config.vocab_size)}
            )
            predictions.register_parameter("bias", nn.Parameter(predictions.get_parameter("decoder.bias").clone()))
            outputs["predictions"] = predictions
            self._tied_weights_keys = {
                "cls.predictions.decoder.weight": "nezha.embeddings.word_embeddings.weight",
                "cls.predictions.decoder.bias": "cls.predictions.bias",
            }
        if self.predicts_pairs:
            outputs["seq_relationship"] = nn.Linear(width, 2)
        if outputs:
            self.cls = parts(outputs)
        if self.labels is not None:
            choices = 1 if type(self).__name__.endswith("MultipleChoice") else config.num_labels or 0
            self.add_module(self.labels, nn.Linear(width, choices))
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.nezha.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module | None:
        return self.get_submodule("cls.predictions.decoder") if self.predicts_tokens else None


class NezhaForPreTraining(_Headed):
    predicts_tokens = predicts_pairs = True


class NezhaForMaskedLM(_Headed):
    pooled, predicts_tokens = False, True


class NezhaForNextSentencePrediction(_Headed):
    predicts_pairs = True


class NezhaForSequenceClassification(_Headed):
    labels = "classifier"


class NezhaForMultipleChoice(_Headed):
    labels = "classifier"


class NezhaForTokenClassification(_Headed):
    pooled, labels = False, "classifier"


class NezhaForQuestionAnswering(_Headed):
    pooled, labels = False, "qa_outputs"


CLASSES: tuple[Any, ...] = (
    *(NezhaModel, NezhaForPreTraining, NezhaForMaskedLM, NezhaForNextSentencePrediction),
    *(NezhaForSequenceClassification, NezhaForTokenClassification),
    *(NezhaForQuestionAnswering, NezhaForMultipleChoice),
)
