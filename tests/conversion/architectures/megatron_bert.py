"""Megatron-BERT."""

from tests.conversion.architectures import SMALL, TASKS, Architecture, named, one_bias

ARCHITECTURE = Architecture(
    model_type="megatron-bert",
    ours="xf_megatron",
    tiny=SMALL,
    heads=named(
        "MegatronBert",
        "ForMaskedLM",
        "Model",
        "ForPreTraining",
        "ForCausalLM",
        "ForNextSentencePrediction",
        *TASKS,
        "ForMultipleChoice",
    ),
    settings={"MegatronBertForCausalLM": {"is_decoder": True}},
    variations={
        "relu": {"hidden_act": "relu"},
        "types": {"type_vocab_size": 3, "layer_norm_eps": 1e-5},
        "two heads": {"num_attention_heads": 2, "hidden_dropout_prob": 0.2},
    },
    base=dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072),
    sides=("right",),
    ready=one_bias,
    refused=frozenset({"add_cross_attention"}),
)
