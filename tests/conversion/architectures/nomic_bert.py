"""NomicBERT."""

from tests.conversion.architectures import VOCAB, Architecture
from tests.conversion.architectures.big_bird import one_bias

ARCHITECTURE = Architecture(
    model_type="nomic_bert",
    ours="xformer",
    tiny=dict(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=24,
    ),
    heads={
        "NomicBertForMaskedLM": "ForMaskedLM",
        "NomicBertModel": "Model",
        "NomicBertForSequenceClassification": "ForSequenceClassification",
        "NomicBertForTokenClassification": "ForTokenClassification",
    },
    variations={
        "head width": {"head_dim": 6, "hidden_act": "gelu"},
        "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
        "untied": {"tie_word_embeddings": False},
    },
    ready=one_bias,
    other_values={"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0}, "head_dim": 10},
    refused=frozenset({"rope_parameters"}),
)
