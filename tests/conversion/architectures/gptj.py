"""GPT-J: sublayers side by side behind one norm, rotary in neighbouring channels on a part of each head."""

from tests.conversion.architectures import SPECIAL, VOCAB, Architecture, named

ARCHITECTURE = Architecture(
    model_type="gptj",
    ours="xformer",
    tiny=dict(**SPECIAL, vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=24, rotary_dim=4),
    heads=named("GPTJ", "Model", "ForCausalLM", "ForSequenceClassification", "ForQuestionAnswering"),
    variations={
        "whole_heads_rotated": {"rotary_dim": 8},
        "other_sizes": {"n_inner": 48, "n_head": 2, "n_embd": 44, "rotary_dim": 14, "activation_function": "relu"},
        "tied": {"tie_word_embeddings": True},
    },
    base=dict(n_embd=768, n_layer=12, n_head=12, rotary_dim=32),
    noted=frozenset({"embd_pdrop"}),
    other_values={"n_head": 2, "n_embd": 64, "activation_function": "relu"},
)
