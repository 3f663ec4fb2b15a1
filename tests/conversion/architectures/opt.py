"""OPT, with norms before sublayers and after them, and a token table narrower than the model."""

from tests.conversion.architectures import VOCAB, Architecture, named

ARCHITECTURE = Architecture(
    model_type="opt",
    ours="xformer",
    tiny=dict(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=48,
        word_embed_proj_dim=32,
        max_position_embeddings=24,
    ),
    heads=named("OPT", "Model", "ForCausalLM", "ForSequenceClassification", "ForQuestionAnswering"),
    variations={
        "350m": {"word_embed_proj_dim": 12, "do_layer_norm_before": False},
        "narrow_untied": {"word_embed_proj_dim": 12, "tie_word_embeddings": False},
        "no_biases": {"enable_bias": False, "activation_function": "gelu"},
        "plain_norms": {"layer_norm_elementwise_affine": False},
        "no_final_norm": {"_remove_final_layer_norm": True},
    },
    # the last states, led back to the table's width, stand in our head
    apart={"350m": ("hidden_states.2",), "narrow_untied": ("hidden_states.2",)},
    noted=frozenset({"layerdrop"}),
    # the width of a table of 64 would be another model's
    other_values={"hidden_size": 64, "word_embed_proj_dim": 12, "activation_function": "gelu"},
)
