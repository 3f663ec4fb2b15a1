"""LongT5 with local and with transient global attention."""

from tests.conversion.architectures import Architecture
from tests.conversion.architectures.mt5 import BASE, TINY, VARIATIONS, own_output

HEADS = {
    "LongT5ForConditionalGeneration": "ForSeq2SeqLM",
    "LongT5Model": "Model",
    "LongT5EncoderModel": "Model",
}
COMMON = dict(
    model_type="longt5",
    ours="xformer",
    heads=HEADS,
    ready=own_output,
    # its config says that it has two towers
    back_as={"LongT5EncoderModel": "LongT5EncoderModel"},
)
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
LOCAL = {**TINY, "local_radius": 2, "decoder_start_token_id": 0}
VALUES = {"feed_forward_proj": "gated-silu", "relative_attention_num_buckets": 10}


class TransientGlobal(Architecture):
    def __str__(self) -> str:
        return "longt5 (transient global)"


ARCHITECTURES = (
    Architecture(
        **COMMON,
        tiny=LOCAL,
        base=BASE,
        variations={
            **{name: fields for name, fields in VARIATIONS.items() if name != "relu"},
            "gated": GATED,
            "wider": {"local_radius": 5},
        },
        other_values={**VALUES, "encoder_attention_type": "transient-global"},
        refused=frozenset({"is_decoder"}),
        unread=frozenset({"global_block_size"}),
    ),
    TransientGlobal(
        **COMMON,
        tiny={**LOCAL, "encoder_attention_type": "transient-global", "global_block_size": 3},
        base={**BASE, "encoder_attention_type": "transient-global"},
        # there, blocks begin where the padding in front of a text does
        sides=("right",),
        variations={
            "blocks of 2": {"global_block_size": 2, "local_radius": 1},
            "no whole block": {"global_block_size": 10},
            "buckets": VARIATIONS["buckets"],
            "free head width": {**GATED, "d_kv": 6},
        },
        other_values={**VALUES, "encoder_attention_type": "local"},
        refused=frozenset({"is_decoder"}),
    ),
)
