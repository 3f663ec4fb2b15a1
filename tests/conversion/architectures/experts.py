"""Decoders with gated experts: Mixtral, Qwen 2 and 3 with experts, GPT-OSS."""

from tests.conversion.architectures import Architecture
from tests.conversion.architectures.llama import BASE, OTHERS, SCALINGS, TINY, heads, rope

CLASSIFIERS = ("ForTokenClassification", "ForQuestionAnswering")
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "decoder_sparse_step": 1}
ROUTING = {"noted": frozenset({"router_aux_loss_coef"}), "refused": frozenset({"output_router_logits"})}
SPARSE_OTHERS = {**OTHERS, "decoder_sparse_step": 2, "mlp_only_layers": [0]}
BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
YARN = rope("yarn", factor=5.0, original_max_position_embeddings=8, truncate=False, **BETAS)

ARCHITECTURES = (
    Architecture(
        model_type="mixtral",
        ours="xformer",
        tiny={**TINY, "num_local_experts": 4, "num_experts_per_tok": 2},
        heads=heads("Mixtral", *CLASSIFIERS),
        variations={
            "window": {"sliding_window": 4, "hidden_act": "gelu"},
            "three_of_five": {"num_local_experts": 5, "num_experts_per_tok": 3, "tie_word_embeddings": True},
            "free_width": {"head_dim": 12, "num_key_value_heads": 1},
            "rope_yarn": {**SCALINGS["rope_yarn"], "head_dim": 12},
        },
        base={**BASE, "num_key_value_heads": 4, "num_local_experts": 4},
        **{**ROUTING, "noted": ROUTING["noted"] | {"router_jitter_noise"}},
        other_values={**OTHERS, "head_dim": 12},
    ),
    Architecture(
        model_type="qwen2_moe",
        ours="xformer",
        tiny={**TINY, **EXPERTS, "shared_expert_intermediate_size": 28},
        heads=heads("Qwen2Moe", *CLASSIFIERS),
        variations={
            "normed": {"norm_topk_prob": True, "qkv_bias": False, "hidden_act": "gelu"},
            "every_second": {"decoder_sparse_step": 2},
            "first_dense": {"mlp_only_layers": [0], "tie_word_embeddings": True},
            "windows": {"use_sliding_window": True, "sliding_window": 3, "mlp_only_layers": [1]},
        },
        base={**BASE, "num_key_value_heads": 4, "num_experts": 8},
        noted=ROUTING["noted"],
        refused=ROUTING["refused"] | {"layer_types"},
        unread=frozenset({"max_window_layers"}),
        other_values={**SPARSE_OTHERS, "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    ),
    Architecture(
        model_type="qwen3_moe",
        ours="xformer",
        tiny={**TINY, **EXPERTS},
        heads=heads("Qwen3Moe", *CLASSIFIERS),
        variations={
            "normed": {"norm_topk_prob": True, "attention_bias": True},
            "every_second": {"decoder_sparse_step": 2, "head_dim": 12},
            "last_dense": {"mlp_only_layers": [2], "tie_word_embeddings": True},
            "window": {"use_sliding_window": True, "sliding_window": 3},
        },
        base={**BASE, "num_key_value_heads": 4, "num_experts": 8},
        **ROUTING,
        other_values=SPARSE_OTHERS,
    ),
    Architecture(
        model_type="gpt_oss",
        ours="xformer",
        tiny={
            **{**TINY, **YARN, "head_dim": 10, "sliding_window": 4, "layer_types": None, "swiglu_limit": 0.9},
            **{"num_local_experts": 4, "num_experts_per_tok": 2},
        },
        heads=heads("GptOss", "ForTokenClassification"),
        variations={
            "published": {"swiglu_limit": 7.0, "num_experts_per_tok": 3, "rope_parameters": None},
            "full": {"layer_types": ["full_attention"] * 3, "sliding_window": 128, "attention_bias": False},
            "tied": {"tie_word_embeddings": True, "swiglu_alpha": 1.1, **SCALINGS["rope_default"]},
        },
        base={**BASE, "num_key_value_heads": 4, "head_dim": 64, "num_local_experts": 8},
        **ROUTING,
        unread=frozenset({"hidden_act"}),
        other_values={**OTHERS, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
)
