"""DeBERTa, first version."""

from tests.conversion.architectures import VOCAB, Architecture


def one_bias(model) -> None:
    """The head has a second bias that nothing reads."""
    head = getattr(model, "cls", None)
    if head is not None:
        head.predictions.bias.copy_(head.predictions.decoder.bias)


ARCHITECTURE = Architecture(
    model_type="deberta",
    ours="xf_deberta",
    tiny=dict(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=24,
        relative_attention=True,
        position_biased_input=False,
        pos_att_type=["c2p", "p2c"],
    ),
    heads={
        "DebertaModel": "Model",
        "DebertaForMaskedLM": "ForMaskedLM",
        "DebertaForSequenceClassification": "ForSequenceClassification",
        "DebertaForTokenClassification": "ForTokenClassification",
        "DebertaForQuestionAnswering": "ForQuestionAnswering",
    },
    variations={
        "absolute positions too": {"position_biased_input": True},
        "short reach": {"max_relative_positions": 4},
        "c2p": {"pos_att_type": ["c2p"]},
        "p2c": {"pos_att_type": ["p2c"], "num_attention_heads": 2},
        "types": {"type_vocab_size": 2, "hidden_act": "relu"},
    },
    base=dict(relative_attention=True, position_biased_input=False, pos_att_type=["c2p", "p2c"]),
    ready=one_bias,
    refused=frozenset({"relative_attention"}),
    noted=frozenset({"pooler_dropout"}),
    unread=frozenset({"legacy"}),
)
