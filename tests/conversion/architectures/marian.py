"""Marian, PEGASUS and M2M-100: sinusoids in BART's frame."""

from tests.conversion.architectures import Architecture
from tests.conversion.architectures.mbart import TINY, VARIATIONS, WIDE, classes, one_table

PLAIN = {name: value for name, value in TINY.items() if name not in ("bos_token_id", "forced_eos_token_id")}
BASE = {**WIDE, "vocab_size": 50265, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072}
COMMON = dict(
    ours="xformer",
    ready=one_table,
    noted=frozenset({"encoder_layerdrop", "decoder_layerdrop"}),
)
MARIAN = Architecture(
    model_type="marian",
    tiny={
        **TINY,
        "activation_function": "swish",
        "scale_embedding": True,
        "eos_token_id": 0,
        "forced_eos_token_id": 0,
    },
    base={**BASE, "decoder_start_token_id": 0, "pad_token_id": 1},
    heads=classes("Marian", "MTModel"),
    variations={
        **VARIATIONS,
        "scaled": {"scale_embedding": False},
        "odd width": {"d_model": 36},
        "own tables": {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 70},
        "own tables and output": {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
    },
    sides=("right",),  # positions count padding on the left
    back_as={"MarianForCausalLM": "MarianForCausalLM"},  # it keeps cross-attention that nothing reads
    refused=frozenset({"decoder_vocab_size", "is_decoder"}),
    unread=frozenset({"forced_eos_token_id"}),
    **COMMON,
)
PEGASUS = Architecture(
    model_type="pegasus",
    tiny={**PLAIN, "eos_token_id": 1, "pad_token_id": 0, "forced_eos_token_id": 1, "init_std": 0.2},
    base=BASE,
    heads=classes("Pegasus"),
    variations=VARIATIONS,
    sides=("right",),
    back_as={"PegasusForCausalLM": "PegasusForCausalLM"},
    refused=frozenset({"is_decoder"}),
    unread=frozenset({"forced_eos_token_id"}),
    **COMMON,
)
M2M_100 = Architecture(
    model_type="m2m_100",
    tiny={**PLAIN, "bos_token_id": 0},
    base=BASE,
    heads={name: ours for name, ours in classes("M2M100").items() if ours != "ForCausalLM"},
    variations={
        **VARIATIONS,
        "scaled": {"scale_embedding": False},
        "activation": {"activation_function": "gelu"},
        "other padding": {"pad_token_id": 3},
    },
    **COMMON,
)
ARCHITECTURES = (MARIAN, PEGASUS, M2M_100)
