"""Decoders with multi-head latent or differential attention: DeepSeek-V2 and V3, DiffLlama."""

import torch

from tests.conversion.architectures import Architecture
from tests.conversion.architectures.experts import ROUTING
from tests.conversion.architectures.llama import BASE, OTHERS, SCALINGS, TINY, heads, rope

LATENT = {
    **{**TINY, "num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 20, "qk_nope_head_dim": 6},
    **{"qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 8, "n_shared_experts": 2},
    **{"num_experts_per_tok": 3, "moe_intermediate_size": 20, "routed_scaling_factor": 2.5},
}
YARN = rope("yarn", factor=40.0, original_max_position_embeddings=8, mscale=0.707, mscale_all_dim=0.9, beta_fast=2.0)
BASES = {
    **{**BASE, "num_key_value_heads": 12, "kv_lora_rank": 256, "q_lora_rank": None, "n_routed_experts": 8},
    **{"moe_intermediate_size": 256, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
}


HEADS = ("num_attention_heads", "num_key_value_heads")  # which are alike: one alone makes no model
FEW = {"first_k_dense_replace": 2, "num_experts_per_tok": 4}


def biased(model) -> None:
    """Experts are chosen by biases that are not zero."""
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            buffer.copy_(0.3 * torch.randn_like(buffer))


ARCHITECTURES = (
    Architecture(
        model_type="deepseek_v2",
        ours="xformer",
        tiny={**LATENT, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
        heads=heads("DeepseekV2"),
        variations={
            "v2": {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, **YARN},
            "lite": {"q_lora_rank": None, "routed_scaling_factor": 1.0, "first_k_dense_replace": 0},
            "biases": {"attention_bias": True, "tie_word_embeddings": True, "first_k_dense_replace": 2},
        },
        base=BASES,
        refused=ROUTING["refused"] | {"mlp_bias", *HEADS},
        unread=frozenset({"pretraining_tp", "norm_topk_prob", "topk_method", "n_group", "topk_group"}),
        other_values={**OTHERS, "topk_method": "group_limited_greedy", "n_group": 2, "num_key_value_heads": 2, **FEW},
    ),
    Architecture(
        model_type="deepseek_v3",
        ours="xformer",
        tiny={**LATENT, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2},
        heads=heads("DeepseekV3", "ForTokenClassification"),
        variations={
            "yarn": YARN,
            "without_rank": {"q_lora_rank": None, "norm_topk_prob": False, "n_shared_experts": 1},
            "halves": {"rope_interleave": False, "attention_bias": True, "first_k_dense_replace": 2},
            "one_group": {"n_group": 1, "topk_group": 1, "tie_word_embeddings": True, "first_k_dense_replace": 0},
        },
        base={**BASES, "n_group": 1, "topk_group": 1},
        refused=ROUTING["refused"] | {*HEADS},
        unread=frozenset({"pretraining_tp", "num_mtp_layers"}),
        other_values={**OTHERS, "n_group": 2, "topk_group": 3, "num_key_value_heads": 2, **FEW},
        ready=biased,
    ),
    Architecture(
        model_type="diffllama",
        ours="xformer",
        tiny=TINY,
        heads=heads("DiffLlama", "ForTokenClassification", "ForQuestionAnswering"),
        variations={
            "biases": {"attention_bias": True, "hidden_act": "gelu"},
            "every_head": {"num_key_value_heads": 4, "tie_word_embeddings": True},
            "free_width": {"head_dim": 12},
            "rope_yarn": SCALINGS["rope_yarn"],
        },
        base={**BASE, "num_key_value_heads": 4},
        other_values=OTHERS,
    ),
)
