"""LongT5 with local attention."""

from tests.conversion.architectures import Architecture
from tests.conversion.architectures.mt5 import BASE, TINY, VARIATIONS, own_output

ARCHITECTURE = Architecture(
    model_type="longt5",
    ours="xformer",
    tiny={**TINY, "local_radius": 2, "decoder_start_token_id": 0},
    base=BASE,
    heads={
        "LongT5ForConditionalGeneration": "ForSeq2SeqLM",
        "LongT5Model": "Model",
        "LongT5EncoderModel": "Model",
    },
    variations={
        **{name: fields for name, fields in VARIATIONS.items() if name != "relu"},
        "gated": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        "wider": {"local_radius": 5},
    },
    ready=own_output,
    # its config says that it has two towers
    back_as={"LongT5EncoderModel": "LongT5EncoderModel"},
    other_values={
        "feed_forward_proj": "gated-silu",
        "relative_attention_num_buckets": 10,
        "encoder_attention_type": "transient-global",
    },
    refused=frozenset({"is_decoder", "encoder_attention_type"}),
    unread=frozenset({"global_block_size"}),
)
