"""Decoders near Llama with factors, other norms or sublayers side by side: Gemma, Granite, Cohere and Cohere 2,
OLMo 3, SmolLM 3, StableLM, Phi, StarCoder 2."""

from tests.conversion.architectures import Architecture
from tests.conversion.architectures.gemma import TWO_RATES
from tests.conversion.architectures.llama import BASE, OTHERS, SCALINGS, TINY, heads

GROUPED = {**BASE, "num_key_value_heads": 4}
ONE_RATE = {"rope_type": "default", "rope_theta": 500.0}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 8}
PARTLY = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
PARTLY_SCALED = {**PARTLY, "rope_type": "linear", "factor": 3.0}

ARCHITECTURES = (
    Architecture(
        model_type="gemma",
        ours="xformer",
        tiny={**TINY, "head_dim": 10},
        heads=heads("Gemma", "ForTokenClassification"),
        variations={
            "one_key_head": {"num_key_value_heads": 1, "hidden_act": "gelu"},  # as published: the tanh form is meant
            "untied": {"tie_word_embeddings": False, "attention_bias": True},
            "silu": {"hidden_act": "silu", "head_dim": 8},
            "rope_linear": SCALINGS["rope_linear"],
        },
        base={**GROUPED, "head_dim": 64},
        refused=frozenset({"use_bidirectional_attention"}),
        other_values={**OTHERS, "use_bidirectional_attention": True},
    ),
    Architecture(
        model_type="granite",
        ours="xformer",
        tiny={
            **TINY,
            "embedding_multiplier": 12.0,
            "logits_scaling": 3.3,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.015625,
        },
        heads=dict(list(heads("Granite").items())[:2]),
        variations={
            "plain": {
                **{"embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0},
                "attention_multiplier": 8**-0.5,
            },
            "whole_numbers": {"embedding_multiplier": 2, "logits_scaling": 8, "attention_multiplier": 1},
            "biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
            "free_width": {"head_dim": 12, "hidden_act": "gelu"},
            "rope_yarn": SCALINGS["rope_yarn"],
        },
        base=BASE,
        other_values=OTHERS,
    ),
    Architecture(
        model_type="cohere",
        ours="xformer",
        tiny={**TINY, "logit_scale": 0.8},
        heads=dict(list(heads("Cohere").items())[:2]),
        variations={
            "norms_of_heads": {"use_qk_norm": True},
            "norms_of_all_heads": {"use_qk_norm": True, "num_key_value_heads": 4, "attention_bias": True},
            "untied": {"tie_word_embeddings": False, "logit_scale": 1.0},
            "free_width": {"head_dim": 12, "hidden_act": "gelu"},
            "rope_linear": SCALINGS["rope_linear"],
        },
        base=BASE,
        other_values=OTHERS,
    ),
    Architecture(
        model_type="cohere2",
        ours="xformer",
        tiny={**TINY, "logit_scale": 0.8, "sliding_window": 4, "num_hidden_layers": 4},
        heads=dict(list(heads("Cohere2").items())[:2]),
        variations={
            "untied": {"tie_word_embeddings": False, "logit_scale": 1.0, "attention_bias": True},
            "every_head": {"num_key_value_heads": 4, "hidden_act": "gelu"},
            "full": {"layer_types": ["full_attention"] * 4, "sliding_window": 4096},
            "rope_linear": SCALINGS["rope_linear"],
        },
        base=BASE,
        other_values={**OTHERS, "layer_types": ["full_attention", *["sliding_attention"] * 3]},
    ),
    Architecture(
        model_type="olmo3",
        ours="xformer",
        tiny={**TINY, "rope_parameters": TWO_RATES, "sliding_window": 3, "num_hidden_layers": 4},
        heads=heads("Olmo3"),
        variations={
            "biases": {"attention_bias": True, "tie_word_embeddings": True},
            "free_width": {"head_dim": 12, "num_key_value_heads": 1},
            "published": {"rope_parameters": {"full_attention": YARN, "sliding_attention": ONE_RATE}},
            "full": {"layer_types": ["full_attention"] * 4, "hidden_act": "gelu", "sliding_window": 4096},
        },
        base=BASE,
        other_values={
            "rope_parameters": {**TWO_RATES, "sliding_attention": {"rope_type": "default", "rope_theta": 7.0}},
            "layer_types": ["full_attention", *["sliding_attention"] * 3],
        },
    ),
    Architecture(
        model_type="smollm3",
        ours="xformer",
        tiny={**TINY, "num_hidden_layers": 4},
        heads=heads("SmolLM3", "ForTokenClassification", "ForQuestionAnswering"),
        variations={
            "every_second": {"no_rope_layer_interval": 2, "attention_bias": True, "mlp_bias": True},
            "windows": {"use_sliding_window": True, "sliding_window": 4},
            "chosen": {
                **{"no_rope_layers": [0, 1, 1, 0], "use_sliding_window": True, "sliding_window": 3},
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
            },
            "untied": {"tie_word_embeddings": False, "no_rope_layers": [1, 1, 1, 1], "head_dim": 12},
            "rope_yarn": SCALINGS["rope_yarn"],
        },
        base=GROUPED,
        refused=frozenset({"layer_types"}),  # windows need their size as well
        unread=frozenset({"sliding_window", "use_sliding_window"}),
        other_values={
            **OTHERS,
            "no_rope_layers": [0, 1, 0, 1],
            "layer_types": ["sliding_attention", "full_attention", "full_attention", "full_attention"],
            "no_rope_layer_interval": 3,
        },
    ),
    Architecture(
        model_type="stablelm",
        ours="xformer",
        tiny={**TINY, "rope_parameters": PARTLY},
        heads=heads("StableLm", "ForTokenClassification"),
        variations={
            "second": {"use_qkv_bias": True, "use_parallel_residual": True, "qk_layernorm": True},
            "every_head": {"num_key_value_heads": 4, "qk_layernorm": True, "hidden_act": "gelu"},
            "tied": {"tie_word_embeddings": True, "rope_parameters": {**PARTLY, "partial_rotary_factor": 0.25}},
            "stretched": {"rope_parameters": PARTLY_SCALED},
        },
        base=BASE,
        other_values={"rope_parameters": {**PARTLY, "partial_rotary_factor": 0.25}},
    ),
    Architecture(
        model_type="phi",
        ours="xformer",
        tiny=TINY,
        heads=heads("Phi", "ForTokenClassification"),
        variations={
            "normed": {"qk_layernorm": True},
            "tied": {"tie_word_embeddings": True, "num_key_value_heads": 4},
            "free_width": {"head_dim": 12, "hidden_act": "relu"},
            "stretched": {"rope_parameters": {**PARTLY_SCALED, "partial_rotary_factor": 0.75}},
        },
        base=BASE,
        noted=frozenset({"embd_pdrop"}),
        other_values={"rope_parameters": {**PARTLY, "partial_rotary_factor": 0.25}},
    ),
    Architecture(
        model_type="starcoder2",
        ours="xformer",
        tiny={**TINY, "sliding_window": 4},
        heads=heads("Starcoder2", "ForTokenClassification"),
        variations={
            "no_window": {"sliding_window": None, "tie_word_embeddings": False},
            "no_biases": {"use_bias": False, "hidden_act": "relu"},
            "free_width": {"head_dim": 12, "num_key_value_heads": 1},
            "rope_yarn": SCALINGS["rope_yarn"],
        },
        base=GROUPED,
        noted=frozenset({"embedding_dropout"}),
        other_values=OTHERS,
    ),
)
