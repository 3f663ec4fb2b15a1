"""ALBERT."""

from tests.conversion.architectures import SMALL, TASKS, Architecture, named, one_bias

ARCHITECTURE = Architecture(
    model_type="albert",
    ours="xf_albert",
    tiny={**SMALL, "embedding_size": 16, "num_hidden_layers": 3},
    heads=named("Albert", "Model", "ForPreTraining", "ForMaskedLM", *TASKS, "ForMultipleChoice"),
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
