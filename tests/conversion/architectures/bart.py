"""BART."""

from tests.conversion.architectures import VOCAB, Architecture
from tests.conversion.architectures.mbart import WIDE, classes, one_table, read

ARCHITECTURE = Architecture(
    model_type="bart",
    ours="xf_bart",
    tiny=dict(
        **dict(vocab_size=VOCAB, d_model=32, encoder_layers=2, decoder_layers=1, max_position_embeddings=24),
        **dict(encoder_attention_heads=4, decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=40),
    ),
    heads={
        **classes("Bart"),
        "BartForQuestionAnswering": "ForQuestionAnswering",
        "BartForSequenceClassification": "ForSequenceClassification",
    },
    settings={"BartForCausalLM": {"decoder_attention_heads": 4}},
    variations={"scaled": {"scale_embedding": True, "activation_function": "gelu_new"}},
    tried_with={"scaled": "BartModel"},
    base={**WIDE, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072},
    sides=("right",),  # positions count padding on the left
    inputs=read,
    ready=one_table,
    back_as={"BartForCausalLM": "BartForCausalLM"},  # cross-attention that nothing reads starts anew
    refused=frozenset({"is_decoder"}),
    noted=frozenset({"encoder_layerdrop", "decoder_layerdrop"}),
    unread=frozenset({"forced_eos_token_id"}),  # it travels with the generation settings
)
