"""BLOOM: ALiBi, a norm after the embedding, queries, keys and values in one projection."""

from tests.conversion.architectures import SPECIAL, TASKS, VOCAB, Architecture, named

ARCHITECTURE = Architecture(
    model_type="bloom",
    ours="xformer",
    tiny=dict(**SPECIAL, vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4),
    heads=named("Bloom", "Model", "ForCausalLM", *TASKS),
    variations={
        "six_heads": {"n_head": 6, "hidden_size": 36},
        "untied": {"tie_word_embeddings": False, "layer_norm_epsilon": 1e-3},
    },
    base=dict(vocab_size=50304, hidden_size=768, n_layer=12, n_head=12),
    refused=frozenset({"apply_residual_connection_post_layernorm"}),
    unread=frozenset({"pretraining_tp", "slow_but_exact"}),
)
