"""Decoders whose layers, or most of them, have a state that decays."""

from tests.conversion.architectures import VOCAB, Architecture
from tests.conversion.architectures.experts import EXPERTS, ROUTING, SPARSE_OTHERS
from tests.conversion.architectures.latent import BASES, HEADS, LATENT, biased
from tests.conversion.architectures.llama import BASE, OTHERS, SCALINGS, TINY, heads, rope

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
UNTURNED = {"rope_parameters": {"rope_theta": None, "rope_type": "default"}}
STARTS = ("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor")
MULTIPLIERS = {
    **{"lm_head_multiplier": 0.3, "embedding_multiplier": 2.5, "key_multiplier": 0.7, "attention_in_multiplier": 1.3},
    **{"attention_out_multiplier": 0.8, "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.6},
    **{"mlp_multipliers": [0.9, 0.4], "ssm_multipliers": [0.8, 1.2, 0.7, 1.4, 0.6]},
}
FACTORS = ("full_attn_alpha_factor", "linear_attn_alpha_factor", "mlp_alpha_factor")


def without(fields: dict, *names: str) -> dict:
    return {name: value for name, value in fields.items() if name not in names}


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
    Architecture(
        model_type="olmo_hybrid",
        ours="xformer",
        tiny={**TINY, **LINEAR, "num_hidden_layers": 4, "rms_norm_eps": 1e-3, **rope("default")},
        heads={"OlmoHybridModel": "Model", "OlmoHybridForCausalLM": "ForCausalLM"},
        variations={
            "published": {**UNTURNED, "linear_num_value_heads": 2, "linear_conv_kernel_dim": 4},
            "full_first": {"layer_types": ["full_attention", *["linear_attention"] * 3], "attention_bias": True},
            "positive": {"linear_allow_neg_eigval": False, "tie_word_embeddings": True, "num_key_value_heads": 4},
            "rope_yarn": SCALINGS["rope_yarn"],
        },
        base={**BASE, "num_key_value_heads": 12, **UNTURNED},
        refused=frozenset({"hidden_act"}),
        unread=frozenset(STARTS),
        other_values={
            **OTHERS,
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
        },
        tolerance=5e-5,
    ),
    Architecture(
        model_type="kimi_linear",
        ours="xformer",
        tiny={
            **{**without(LATENT, "n_routed_experts"), "num_local_experts": 8, "q_lora_rank": None},
            **{"num_hidden_layers": 5, "linear_num_heads": 3, "linear_head_dim": 6, "linear_conv_kernel_dim": 3},
            **{"n_group": 4, "topk_group": 2},
        },
        heads={"KimiLinearModel": "Model", "KimiLinearForCausalLM": "ForCausalLM"},
        variations={
            "published": {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "linear_conv_kernel_dim": 4},
            "full_first": {"layer_types": ["full_attention", *["linear_attention"] * 4], "attention_bias": True},
            "ranked": {"q_lora_rank": 20, "norm_topk_prob": False, "rms_norm_eps": 1e-3},
            "dense_between": {"mlp_layer_types": ["sparse", "dense", "sparse", "dense", "dense"]},
        },
        base={**without(BASES, "n_routed_experts", "first_k_dense_replace"), "num_local_experts": 8},
        refused=ROUTING["refused"] | {"hidden_act", "tie_word_embeddings", *HEADS},
        unread=frozenset({"pretraining_tp"}),
        other_values={
            **{"n_group": 2, "topk_group": 3, "num_key_value_heads": 2, "num_experts_per_tok": 4},
            **{"mlp_layer_types": ["sparse", "dense", "sparse", "dense", "dense"], "num_local_experts": 12},
            "layer_types": ["full_attention", *["linear_attention"] * 3, "full_attention"],
        },
        ready=biased,
        tolerance=5e-5,
    ),
    Architecture(
        model_type="mamba2",
        ours="xf_mamba2",
        tiny={
            **{"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_heads": 4, "head_dim": 16},
            **{"state_size": 6, "n_groups": 2, "conv_kernel": 3, "chunk_size": 4, "initializer_range": 0.2},
            "pad_token_id": 0,
        },
        heads={"Mamba2Model": "Model", "Mamba2ForCausalLM": "ForCausalLM"},
        variations={
            "published": {"n_groups": 1, "conv_kernel": 4, "tie_word_embeddings": True},
            "biases": {"use_bias": True, "chunk_size": 256},
            "wide": {"expand": 3, "head_dim": 24, "layer_norm_epsilon": 1e-3},
            "bounds": {"time_step_limit": (0.3, 0.9)},
        },
        base={
            **{"vocab_size": 50288, "hidden_size": 768, "num_hidden_layers": 24, "num_heads": 24, "n_groups": 1},
            "tie_word_embeddings": True,
        },
        refused=frozenset({"hidden_act", "use_conv_bias", "num_heads", "head_dim", "hidden_size", "expand"}),
        unread=frozenset(
            {
                *("time_step_rank", "time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual"),
                "residual_in_fp32",
            }
        ),
        other_values={"time_step_limit": (0.1, 0.5), "time_step_rank": 7},
        # theirs begin behind the first layer, and have the last one twice, without the final norm and with it
        renamed={f"hidden_states.{index}": f"hidden_states.{index + 1}" for index in range(7)},
        raw_last_state=True,
        tolerance=5e-5,
    ),
    Architecture(
        model_type="falcon_h1",
        ours="xformer",
        tiny={
            **{**TINY, **rope("default"), **MULTIPLIERS, "mamba_rms_norm": True},
            **{"mamba_n_heads": 6, "mamba_d_head": 5, "mamba_d_ssm": 30, "mamba_n_groups": 2, "mamba_d_state": 7},
            **{"mamba_d_conv": 3, "mamba_chunk_size": 4},
        },
        heads={"FalconH1Model": "Model", "FalconH1ForCausalLM": "ForCausalLM"},
        variations={
            "published": {
                **{"mamba_rms_norm": False, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_chunk_size": 256},
                "tie_word_embeddings": True,
            },
            "gate_first": {"mamba_norm_before_gate": False, "head_dim": 12},
            "bounds": {"num_key_value_heads": 4, "time_step_limit": (0.3, 0.9)},
            "biases": {"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "projectors_bias": True},
            "plain": {**dict.fromkeys(MULTIPLIERS, 1.0), "mlp_multipliers": None, "ssm_multipliers": None},
            "automatic": {"mamba_d_ssm": 48, "mamba_d_head": "auto", "mamba_n_heads": 4},
            "rope_llama3": SCALINGS["rope_llama3"],
        },
        base={**BASE, "num_key_value_heads": 4, "mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_state": 128},
        refused=frozenset({"hidden_act", "mamba_conv_bias", "mamba_n_heads", "mamba_d_head", "mamba_d_ssm"}),
        unread=frozenset({"mamba_expand", "num_logits_to_keep"}),
        other_values={
            **{**OTHERS, "time_step_limit": (0.1, 0.5), "mlp_multipliers": [0.5, 3.0], "mamba_n_groups": 3},
            "hidden_size": 48,
            "ssm_multipliers": [0.9, 1.9, 0.7, 1.1, 0.3],
        },
        tolerance=5e-5,
    ),
    Architecture(
        model_type="minimax",
        ours="xformer",
        tiny={
            **{**TINY, "num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 4},
            **dict.fromkeys(FACTORS, 1.7),
        },
        heads=heads("MiniMax", "ForTokenClassification", "ForQuestionAnswering"),
        variations={
            "published": {"block_size": 256, "layer_types": [*["linear_attention"] * 3, "full_attention"]},
            "plain": {**dict.fromkeys(FACTORS, 1.0), "tie_word_embeddings": True, "head_dim": 12},
            "three_of_five": {"num_local_experts": 5, "num_experts_per_tok": 3, "num_key_value_heads": 1},
        },
        base={**BASE, "num_key_value_heads": 4, "num_local_experts": 4},
        noted=ROUTING["noted"] | {"router_jitter_noise"},
        refused=ROUTING["refused"]
        | {"hidden_act", "sliding_window", *FACTORS, *(name.replace("alpha", "beta") for name in FACTORS)},
        other_values={**OTHERS, "head_dim": 12, "layer_types": ["linear_attention", *["full_attention"] * 3]},
        uncompared=tuple(f"hidden_states.{index}" for index in range(8)),  # theirs are not normalised
        tolerance=5e-5,
    ),
)
