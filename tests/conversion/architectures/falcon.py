"""Falcon, the older architecture and the newer one with grouped heads."""

from tests.conversion.architectures import SPECIAL, TASKS, VOCAB, Architecture, named

ARCHITECTURE = Architecture(
    model_type="falcon",
    ours="xformer",
    tiny=dict(
        **SPECIAL,
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_hidden_size=48,
        max_position_embeddings=24,
    ),
    heads=named("Falcon", "Model", "ForCausalLM", *TASKS),
    variations={
        "new": {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 2},
        "new_with_one_norm": {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        "one_after_the_other": {"parallel_attn": False, "multi_query": False, "bias": True},
        "other_rotation": {
            "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
            "tie_word_embeddings": False,
            "activation": "relu",
        },
    },
    base=dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12),
    refused=frozenset({"alibi"}),
    unread=frozenset({"num_kv_heads", "num_ln_in_parallel_attn"}),  # of the newer architecture alone
    other_values={
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "num_kv_heads": 2,
        "num_ln_in_parallel_attn": 1,
        "activation": "relu",
    },
)
