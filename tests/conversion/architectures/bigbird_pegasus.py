"""BigBird-Pegasus on texts that it reads whole; the sparse pattern is tried in `test_sparse_encoders.py`."""

from tests.conversion.architectures import Architecture
from tests.conversion.architectures.mbart import TINY, VARIATIONS, WIDE, classes, one_table, read

ARCHITECTURE = Architecture(
    model_type="bigbird_pegasus",
    ours="xformer",
    tiny={
        **{name: value for name, value in TINY.items() if name != "forced_eos_token_id"},
        "block_size": 1,
        "num_random_blocks": 2,
        "init_std": 0.2,
    },
    heads={
        **classes("BigBirdPegasus"),
        "BigBirdPegasusForQuestionAnswering": "ForQuestionAnswering",
        "BigBirdPegasusForSequenceClassification": "ForSequenceClassification",
    },
    variations={
        **VARIATIONS,
        "scaled": {"scale_embedding": False},
        "dense": {"attention_type": "original_full"},
        "biases": {"use_bias": True},
    },
    base={**WIDE, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072},
    sides=("right",),  # positions count padding on the left
    inputs=read,
    ready=one_table,
    # a decoder by itself keeps cross-attention that nothing reads
    back_as={"BigBirdPegasusForCausalLM": "BigBirdPegasusForCausalLM"},
    refused=frozenset({"is_decoder"}),
    noted=frozenset({"encoder_layerdrop", "decoder_layerdrop"}),
    other_values={"attention_type": "original_full"},
)
