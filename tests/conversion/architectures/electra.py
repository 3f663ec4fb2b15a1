"""ELECTRA."""

from tests.conversion.architectures import SMALL, TASKS, Architecture, named

ARCHITECTURE = Architecture(
    model_type="electra",
    ours="xf_electra",
    tiny=dict(**SMALL, embedding_size=16),
    heads={
        **named("Electra", "Model", "ForMaskedLM", "ForCausalLM", *TASKS, "ForMultipleChoice"),
        "ElectraForPreTraining": "ForReplacedTokenDetection",
    },
    settings={"ElectraForCausalLM": {"is_decoder": True}},
    variations={
        "wavy discriminator": {"hidden_act": "silu"},
        "wide": {"embedding_size": 32},
        "untied": {"tie_word_embeddings": False},
        "relu": {"hidden_act": "relu"},
        "types": {"type_vocab_size": 3, "layer_norm_eps": 1e-5},
    },
    tried_with={"wavy discriminator": "ElectraForPreTraining"},
    base=dict(embedding_size=768, hidden_size=768, num_attention_heads=12, intermediate_size=3072),
    sides=("right",),
    refused=frozenset({"add_cross_attention", "summary_type", "summary_use_proj", "summary_activation"}),
    noted=frozenset({"summary_last_dropout"}),
)
