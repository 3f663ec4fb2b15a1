"""DeBERTa, first version."""

from tests.conversion.architectures import SMALL, TASKS, Architecture, named, one_bias

ARCHITECTURE = Architecture(
    model_type="deberta",
    ours="xf_deberta",
    tiny=dict(**SMALL, relative_attention=True, position_biased_input=False, pos_att_type=["c2p", "p2c"]),
    heads=named("Deberta", "Model", "ForMaskedLM", *TASKS),
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
