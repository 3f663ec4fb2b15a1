"""ALBERT."""

from tests.conversion.architectures import VOCAB, Architecture


def one_bias(model) -> None:
    """An untied output has a second bias that nothing reads."""
    head = getattr(model, "predictions", None)
    if head is not None:
        head.bias.copy_(head.decoder.bias)


ARCHITECTURE = Architecture(
    model_type="albert",
    ours="xf_albert",
    tiny=dict(
        vocab_size=VOCAB,
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=24,
    ),
    heads={
        "AlbertModel": "Model",
        "AlbertForPreTraining": "ForPreTraining",
        "AlbertForMaskedLM": "ForMaskedLM",
        "AlbertForSequenceClassification": "ForSequenceClassification",
        "AlbertForTokenClassification": "ForTokenClassification",
        "AlbertForQuestionAnswering": "ForQuestionAnswering",
        "AlbertForMultipleChoice": "ForMultipleChoice",
    },
    variations={
        "groups": {"num_hidden_groups": 2},
        "a group for every step": {"num_hidden_groups": 3, "inner_group_num": 2},
        "several layers to a step": {"inner_group_num": 2},
        "wide": {"embedding_size": 32},
        "relu": {"hidden_act": "relu"},
    },
    base=dict(hidden_size=768, num_attention_heads=12, intermediate_size=3072),
    sides=("right",),
    ready=one_bias,
    renamed={"sentence_order_label": "next_sentence_label", "sop_logits": "seq_relationship_logits"},
)
