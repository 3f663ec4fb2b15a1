"""MPNet."""

from tests.conversion.architectures import VOCAB, Architecture


def one_bias(model) -> None:
    """An untied output has a second bias that nothing reads."""
    head = getattr(model, "lm_head", None)
    if head is not None:
        head.bias.copy_(head.decoder.bias)


ARCHITECTURE = Architecture(
    model_type="mpnet",
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
        "MPNetModel": "Model",
        "MPNetForMaskedLM": "ForMaskedLM",
        "MPNetForSequenceClassification": "ForSequenceClassification",
        "MPNetForTokenClassification": "ForTokenClassification",
        "MPNetForQuestionAnswering": "ForQuestionAnswering",
        "MPNetForMultipleChoice": "ForMultipleChoice",
    },
    variations={"relu": {"hidden_act": "relu"}, "wider heads": {"num_attention_heads": 2, "layer_norm_eps": 1e-5}},
    ready=one_bias,
    refused=frozenset({"relative_attention_num_buckets", "pad_token_id"}),
)
