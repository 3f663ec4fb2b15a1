"""Megatron-BERT."""

from tests.conversion.architectures import VOCAB, Architecture


def one_bias(model) -> None:
    """An untied output has a second bias that nothing reads."""
    head = getattr(getattr(model, "cls", None), "predictions", None)
    if head is not None:
        head.bias.copy_(head.decoder.bias)


ARCHITECTURE = Architecture(
    model_type="megatron-bert",
    ours="xf_megatron",
    tiny=dict(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=24,
    ),
    heads={
        "MegatronBertForMaskedLM": "ForMaskedLM",
        "MegatronBertModel": "Model",
        "MegatronBertForPreTraining": "ForPreTraining",
        "MegatronBertForCausalLM": "ForCausalLM",
        "MegatronBertForNextSentencePrediction": "ForNextSentencePrediction",
        "MegatronBertForSequenceClassification": "ForSequenceClassification",
        "MegatronBertForTokenClassification": "ForTokenClassification",
        "MegatronBertForQuestionAnswering": "ForQuestionAnswering",
        "MegatronBertForMultipleChoice": "ForMultipleChoice",
    },
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
