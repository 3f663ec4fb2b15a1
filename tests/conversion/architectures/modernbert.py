"""Encoders of today: ModernBERT and EuroBERT."""

from tests.conversion.architectures import SMALL, SPECIAL, TASKS, Architecture, named
from tests.conversion.architectures.llama import BASE, OTHERS, SCALINGS, TINY

TWO_RATES = {
    "full_attention": {"rope_type": "default", "rope_theta": 900.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 11.0},
}

ARCHITECTURES = (
    Architecture(
        model_type="modernbert",
        ours="xformer",
        tiny={
            **{**SMALL, **SPECIAL, "num_hidden_layers": 4, "max_position_embeddings": 40},
            **{"local_attention": 4, "rope_parameters": TWO_RATES},
        },
        heads=named("ModernBert", "Model", "ForMaskedLM", *TASKS, "ForMultipleChoice"),
        settings={"ModernBertForMultipleChoice": {"classifier_pooling": "mean"}},
        first_slot=("ModernBertForSequenceClassification",),
        tried_with={
            **dict.fromkeys(("biased_mlm", "untied"), "ModernBertForMaskedLM"),
            "biased_labels": "ModernBertForTokenClassification",
            **dict.fromkeys(("mean", "other_labels"), "ModernBertForSequenceClassification"),
        },
        variations={
            "biases": {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "decoder_bias": False},
            "biased_mlm": {"classifier_bias": True, "classifier_activation": "relu", "norm_bias": True},
            "biased_labels": {"classifier_bias": True, "norm_bias": True},
            "mean": {"classifier_pooling": "mean"},
            "other_labels": {"classifier_activation": "silu", "num_labels": 5, "classifier_dropout": 0.3},
            "untied": {"tie_word_embeddings": False},
            "activations": {"hidden_activation": "silu", "classifier_activation": "relu"},
            "other_layers": {
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
                "local_attention": 2,
            },
            "scaled": {
                "rope_parameters": {
                    **TWO_RATES,
                    "full_attention": {
                        **TWO_RATES["full_attention"],
                        **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
                    },
                }
            },
        },
        base={"num_hidden_layers": 12},
        refused=frozenset({"sparse_prediction"}),
        noted=frozenset({"initializer_cutoff_factor"}),
        unread=frozenset({"deterministic_flash_attn", "sparse_pred_ignore_index"}),
        other_values={
            "hidden_activation": "silu",
            "classifier_activation": "relu",
            "classifier_pooling": "mean",
            "layer_types": ["sliding_attention"] * 4,
            "rope_parameters": {**TWO_RATES, "sliding_attention": {"rope_type": "default", "rope_theta": 7.0}},
            "sparse_pred_ignore_index": -1,
        },
    ),
    Architecture(
        model_type="eurobert",
        ours="xformer",
        tiny=TINY,
        heads=named("EuroBert", "Model", "ForMaskedLM", "ForTokenClassification", "ForSequenceClassification"),
        tried_with=dict.fromkeys(("bos", "mean"), "EuroBertForSequenceClassification"),
        variations={
            "bos": {"classifier_pooling": "bos"},
            "mean": {"classifier_pooling": "mean"},
            "biases": {"attention_bias": True, "mlp_bias": True},
            "tied": {"tie_word_embeddings": True},
            "free_width": {"head_dim": 12, "num_key_value_heads": 1},
            "rope_llama3": SCALINGS["rope_llama3"],
        },
        base={**BASE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        refused=frozenset({"pretraining_tp"}),
        other_values={**OTHERS, "classifier_pooling": "mean"},
    ),
)
