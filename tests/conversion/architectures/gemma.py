"""Decoders that normalise otherwise or fuse projections: OLMo 2, Gemma 2, Gemma 3, Phi-3."""

from tests.conversion.architectures import Architecture
from tests.conversion.architectures.llama import BASE, OTHERS, SCALINGS, TINY, heads

GEMMA = {**TINY, "head_dim": 10, "query_pre_attn_scalar": 10, "sliding_window": 4}
GEMMA_OTHERS = {
    "hidden_activation": "silu",
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
}
TWO_RATES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 900.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 11.0},
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "partial_rotary_factor": 1.0,
    "short_factor": [1.0, 1.1, 1.3, 1.9],
    "long_factor": [1.0, 2.0, 4.0, 9.0],
    "original_max_position_embeddings": 24,
}

ARCHITECTURES = (
    Architecture(
        model_type="olmo2",
        ours="xformer",
        tiny=TINY,
        heads=heads("Olmo2"),
        variations={
            "biases": {"attention_bias": True},
            "free_width": {"head_dim": 12},
            "tied": {"tie_word_embeddings": True},
            "every_head": {"num_key_value_heads": 4, "hidden_act": "gelu"},
            "rope_yarn": SCALINGS["rope_yarn"],
        },
        base=BASE,
        other_values=OTHERS,
    ),
    Architecture(
        model_type="gemma2",
        ours="xformer",
        tiny={**GEMMA, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0},
        settings={name: {"attn_implementation": "eager"} for name in heads("Gemma2", "ForTokenClassification")},
        heads=heads("Gemma2", "ForTokenClassification"),
        variations={
            "plain": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
            "untied": {"tie_word_embeddings": False, "attention_bias": True},
            "scalar": {"query_pre_attn_scalar": 3, "hidden_activation": "silu"},
            "no_windows": {"layer_types": ["full_attention"] * 3, "num_key_value_heads": 1, "sliding_window": 4096},
        },
        base={**BASE, "num_key_value_heads": 4, "head_dim": 64},
        refused=frozenset({"use_bidirectional_attention"}),
        other_values={**OTHERS, **GEMMA_OTHERS, "use_bidirectional_attention": True},
    ),
    Architecture(
        model_type="gemma3_text",
        ours="xformer",
        tiny={**GEMMA, "rope_parameters": TWO_RATES, "sliding_window": 3, "layer_types": None},
        heads=heads("Gemma3", stem="Gemma3Text"),
        variations={
            "caps": {"final_logit_softcapping": 4.0},
            "untied": {"tie_word_embeddings": False, "attention_bias": True},
            "mixed": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            "full": {"layer_types": ["full_attention"] * 3, "sliding_window": 4096},
            "scalar": {"query_pre_attn_scalar": 3, "hidden_activation": "silu"},
        },
        base={**BASE, "num_key_value_heads": 4, "head_dim": 64},
        refused=frozenset({"use_bidirectional_attention", "attn_logit_softcapping"}),
        other_values={
            "rope_parameters": {**TWO_RATES, "sliding_attention": {"rope_type": "default", "rope_theta": 7.0}},
            **GEMMA_OTHERS,
        },
    ),
    Architecture(
        model_type="phi3",
        ours="xformer",
        tiny=TINY,
        heads=heads("Phi3", "ForTokenClassification"),
        variations={
            "tied": {"tie_word_embeddings": True},
            "free_width": {"head_dim": 12},
            "window": {"sliding_window": 4},
            "every_head": {"num_key_value_heads": 4, "hidden_act": "gelu"},
            "longrope": {"rope_parameters": LONG, "original_max_position_embeddings": 24},
            "partial": {
                "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
            },
        },
        base={**BASE, "vocab_size": 32064},
        noted=frozenset({"embd_pdrop"}),
        unread=frozenset({"original_max_position_embeddings"}),
        other_values={
            "rope_parameters": {"rope_theta": 77.0, "rope_type": "default", "partial_rotary_factor": 0.5},
        },
    ),
)
