"""Reformer: LSH and local layers, encoders and decoders."""

from torch import Tensor

from tests.conversion.architectures import VOCAB, Architecture, nystromformer

HEADS = {
    "ReformerForMaskedLM": "ForMaskedLM",
    "ReformerModel": "Model",
    "ReformerModelWithLMHead": "ForCausalLM",
    "ReformerForSequenceClassification": "ForSequenceClassification",
    "ReformerForQuestionAnswering": "ForQuestionAnswering",
}

# as they are where no layer reads them
NO_LSH = {"lsh_attn_chunk_length": 64, "num_buckets": None, "num_hashes": 1, "hash_seed": None}
NO_LOCAL = {"local_attn_chunk_length": 64}
LSH = {"lsh_attn_chunk_length": 4, "num_buckets": 4, "num_hashes": 2, "hash_seed": 7}


def inputs(head: str, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Padding becomes text where chunks of padding stand in a ring: everywhere but in local decoders."""
    return given if head == "ReformerModelWithLMHead" else nystromformer.inputs(head, given)


ARCHITECTURE = Architecture(
    model_type="reformer",
    ours="xf_reformer",
    tiny=dict(
        vocab_size=VOCAB,
        hidden_size=32,
        num_attention_heads=4,
        attention_head_size=8,
        feed_forward_size=48,
        attn_layers=["local", "lsh", "local"],
        axial_pos_shape=[4, 6],
        axial_pos_embds_dim=[12, 20],
        max_position_embeddings=24,
        local_attn_chunk_length=4,
        lsh_attn_chunk_length=4,
        num_buckets=4,
        num_hashes=2,
        hash_seed=7,
    ),
    heads=HEADS,
    settings={
        # LSH decoders of the released code cannot generate
        "ReformerModelWithLMHead": {"is_decoder": True, "attn_layers": ["local", "local"], **NO_LSH},
        "ReformerForSequenceClassification": {"num_buckets": [2, 4], "local_num_chunks_before": 0},
        "ReformerForQuestionAnswering": {"local_num_chunks_after": 1, "lsh_num_chunks_after": 1},
    },
    variations={
        "lsh alone": {
            **LSH,
            "attn_layers": ["lsh", "lsh"],
            "num_buckets": [2, 4],
            "num_hashes": 1,
            "local_attn_chunk_length": 64,
        },
        "both": {**LSH, "attn_layers": ["lsh", "local"], "lsh_attn_chunk_length": 8, "num_hashes": 1},
        "one table": {"axial_pos_embds": False, "axial_pos_shape": [64, 64], "axial_pos_embds_dim": [64, 192]},
        "free head width": {"attention_head_size": 6, "hidden_act": "gelu", "local_num_chunks_before": 0},
    },
    base=dict(
        hidden_size=768,
        num_attention_heads=12,
        attention_head_size=64,
        feed_forward_size=3072,
        attn_layers=["local", "lsh"] * 6,
        axial_pos_embds_dim=[256, 512],
        num_buckets=32,
        hash_seed=0,
    ),
    sides=("right",),
    left_prompts=False,
    inputs=inputs,
    # two streams there, of padded texts; and weights by chunks
    uncompared=tuple(f"{name}.{index}" for name in ("hidden_states", "attentions") for index in range(4)),
    other_values={
        "attn_layers": ["lsh", "local"],
        "axial_pos_shape": [6, 4],
        "axial_pos_embds_dim": [16, 16],
        "num_buckets": [2, 2],
        "hash_seed": 8,
    },
    refused=frozenset({"hidden_size", "local_attn_chunk_length", "lsh_attn_chunk_length", "tie_word_embeddings"}),
    unread=frozenset({"chunk_size_lm_head"}),
    idle=dict.fromkeys(("ReformerForMaskedLM", "ReformerModelWithLMHead"), ("lm_head.bias",)),
)
