"""DeBERTa, all versions."""

from tests.conversion.architectures import SMALL, TASKS, Architecture, named, one_bias

SIZES = dict(**SMALL, relative_attention=True, position_biased_input=False, pos_att_type=["c2p", "p2c"])
LATER = {"position_buckets": 4, "share_att_key": True, "norm_rel_ebd": "layer_norm"}  # as published, smaller
OWN = {"position_buckets": -1, "share_att_key": False, "norm_rel_ebd": "none", "type_vocab_size": 2}


def ready(model):
    """Biases of position keys change no output."""
    one_bias(model)
    for name, tensor in model.named_parameters():
        if "pos_key_proj.bias" in name:
            tensor.zero_()


FIRST = Architecture(
    model_type="deberta",
    ours="xf_deberta",
    tiny=SIZES,
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
SECOND = Architecture(
    model_type="deberta-v2",
    ours="xf_deberta",
    tiny={**SIZES, **LATER, "cls_dropout": 0.2},
    heads=named("DebertaV2", "ForMaskedLM", "Model", *TASKS, "ForMultipleChoice"),
    settings={
        "DebertaV2ForTokenClassification": OWN,
        "DebertaV2ForSequenceClassification": {"num_labels": 3},
        "DebertaV2ForMultipleChoice": {"pooler_hidden_act": "tanh"},
    },
    variations={
        "c2p": {**OWN, "pos_att_type": ["c2p"]},
        "p2c": {"max_relative_positions": 6, "pos_att_type": ["p2c"]},
        "untied": {**OWN, "tie_word_embeddings": False},
        "convolution": {"conv_kernel_size": 3, "conv_groups": 2, "conv_act": "gelu"},  # v2-xlarge, v2-xxlarge
        "wide convolution": {**OWN, "conv_kernel_size": 5},
    },
    base=dict(
        **dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072),
        **dict(relative_attention=True, position_biased_input=False, pos_att_type=["c2p", "p2c"]),
        **dict(position_buckets=256, share_att_key=True, norm_rel_ebd="layer_norm"),
    ),
    first_slot=("DebertaV2ForSequenceClassification", "DebertaV2ForMultipleChoice"),
    ready=ready,
    refused=frozenset({"relative_attention"}),
    noted=frozenset({"pooler_dropout"}),
    unread=frozenset({"legacy"}),
    other_values={"max_relative_positions": 6},
)
ARCHITECTURES = (FIRST, SECOND)
