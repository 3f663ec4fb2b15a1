"""Switch Transformers."""

from tests.conversion.architectures import VOCAB, Architecture

TINY = dict(
    vocab_size=VOCAB,
    d_model=32,
    d_kv=8,
    d_ff=48,
    num_layers=4,
    num_decoder_layers=2,
    num_sparse_encoder_layers=2,
    num_sparse_decoder_layers=1,
    num_heads=4,
    num_experts=4,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=6,
    decoder_start_token_id=0,
    initializer_factor=0.1,  # tied tables of usual size repeat a token for ever
    # router losses are added where a call asks for them there, and always here
    router_z_loss_coef=0.0,
    router_aux_loss_coef=0.0,
)


def one_table(model) -> None:
    """Our towers read one token table."""
    for tower in (model.encoder, getattr(model, "decoder", model.encoder)):
        tower.embed_tokens.weight.copy_(model.shared.weight)


ARCHITECTURE = Architecture(
    model_type="switch_transformers",
    ours="xf_switch_transformer",
    tiny=TINY,
    base=dict(num_layers=6, num_decoder_layers=6, num_experts=4),
    heads={
        "SwitchTransformersForConditionalGeneration": "ForSeq2SeqLM",
        "SwitchTransformersModel": "Model",
        "SwitchTransformersEncoderModel": "Model",
    },
    variations={
        "every fourth layer": {"num_sparse_encoder_layers": 1},
        "all layers": {"num_sparse_encoder_layers": 4, "num_sparse_decoder_layers": 2},
        "no layer of the decoder": {"num_sparse_decoder_layers": 3},
        "untied": {"tie_word_embeddings": False},
        "full experts": {"expert_capacity": 1},
        "free head width": {"d_kv": 6, "dense_act_fn": "gelu"},
    },
    ready=one_table,
    # its config says that it has two towers
    back_as={"SwitchTransformersEncoderModel": "SwitchTransformersEncoderModel"},
    refused=frozenset({"router_bias", "router_dtype", "is_decoder", "add_cross_attention"}),
    unread=frozenset({"router_ignore_padding_tokens", "add_router_probs"}),
    other_values={
        "dense_act_fn": "gelu",
        "router_dtype": "bfloat16",
        "relative_attention_num_buckets": 10,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 2,
    },
)
