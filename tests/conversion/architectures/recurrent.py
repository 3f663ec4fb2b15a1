"""Decoders most of whose layers have a state that decays: Qwen3-Next and Qwen 3.5."""

from tests.conversion.architectures import Architecture
from tests.conversion.architectures.experts import EXPERTS, ROUTING, SPARSE_OTHERS
from tests.conversion.architectures.llama import BASE, TINY, heads

LINEAR = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6},
    **{"linear_value_head_dim": 5, "linear_conv_kernel_dim": 3},
}
PARTLY = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}

HYBRID = {
    **{**TINY, **LINEAR, "head_dim": 8, "rope_parameters": PARTLY, "num_hidden_layers": 4},  # the last reads all
}
HYBRID_OTHERS = {
    "rope_parameters": {**PARTLY, "partial_rotary_factor": 0.25},
    "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
}

ARCHITECTURES = (
    Architecture(
        model_type="qwen3_next",
        ours="xformer",
        tiny={**HYBRID, **EXPERTS, "shared_expert_intermediate_size": 28},
        heads=heads("Qwen3Next", "ForTokenClassification", "ForQuestionAnswering"),
        variations={
            "as_many_values": {"linear_num_value_heads": 2, "norm_topk_prob": False, "attention_bias": True},
            "full_first": {"layer_types": ["full_attention", *["linear_attention"] * 3]},
            "dense_between": {"mlp_only_layers": [1], "tie_word_embeddings": True, "head_dim": 12},
        },
        base={**BASE, "num_key_value_heads": 4, "head_dim": 64, "num_experts": 8},
        noted=ROUTING["noted"],
        refused=ROUTING["refused"] | {"hidden_act"},
        other_values={**SPARSE_OTHERS, **HYBRID_OTHERS},
        tolerance=5e-5,
    ),
    Architecture(
        model_type="qwen3_5_text",
        ours="xformer",
        tiny=HYBRID,
        heads=heads("Qwen3_5", stem="Qwen3_5Text"),
        variations={
            "as_many_values": {"linear_num_value_heads": 2, "attention_bias": True},
            "full_first": {"layer_types": ["full_attention", *["linear_attention"] * 3]},
            "tied": {"tie_word_embeddings": True, "head_dim": 12},
        },
        base={**BASE, "num_key_value_heads": 4, "head_dim": 64},
        refused=frozenset({"hidden_act"}),
        other_values=HYBRID_OTHERS,
        tolerance=5e-5,  # a state of sums over a text, in float32
    ),
)
