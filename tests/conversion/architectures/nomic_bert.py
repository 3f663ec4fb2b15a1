"""NomicBERT."""

from tests.conversion.architectures import SMALL, Architecture, named, one_bias

ARCHITECTURE = Architecture(
    model_type="nomic_bert",
    ours="xformer",
    tiny=SMALL,
    heads=named("NomicBert", "ForMaskedLM", "Model", "ForSequenceClassification", "ForTokenClassification"),
    variations={
        "head width": {"head_dim": 6, "hidden_act": "gelu"},
        "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
        "untied": {"tie_word_embeddings": False},
    },
    ready=one_bias,
    other_values={"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0}, "head_dim": 10},
    refused=frozenset({"rope_parameters"}),
)
