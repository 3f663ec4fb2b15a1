"""GPT-NeoX: sublayers side by side, queries, keys and values in one projection, rotary on a part of each head."""

from tests.conversion.architectures import SMALL, SPECIAL, TASKS, Architecture, named


def half(rope_type: str, **fields) -> dict:
    """A rotary type on half of each head."""
    parameters = {"rope_type": rope_type, "rope_theta": 10000.0, "partial_rotary_factor": 0.5, **fields}
    return {"rope_parameters": parameters}


ARCHITECTURE = Architecture(
    model_type="gpt_neox",
    ours="xformer",
    tiny=dict(
        **SMALL,
        **SPECIAL,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
    heads=named("GPTNeoX", "Model", "ForCausalLM", *TASKS),
    variations={
        "one_after_the_other": {"use_parallel_residual": False},
        "no_attention_biases": {"attention_bias": False, "tie_word_embeddings": True},
        "whole_heads_rotated": {
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}
        },
        "rope_linear": half("linear", factor=3.0),
        "rope_yarn": half("yarn", factor=5.0, original_max_position_embeddings=8),
        "rope_longrope": half(
            "longrope",
            short_factor=[1.0, 1.1],
            long_factor=[1.0, 3.0],
            factor=4.0,
            original_max_position_embeddings=10,
        ),
        "odd_heads": {
            "num_attention_heads": 2,
            "hidden_size": 36,
            "hidden_act": "relu",
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.34},
        },
    },
    base=dict(
        vocab_size=50304,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        intermediate_size=3072,
    ),
    unread=frozenset({"is_decoder"}),
    other_values={
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
        "hidden_size": 64,
    },
)
