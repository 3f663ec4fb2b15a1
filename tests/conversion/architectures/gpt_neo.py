"""GPT-Neo: global and local layers in turn."""

from tests.conversion.architectures import SPECIAL, TASKS, VOCAB, Architecture, named

ARCHITECTURE = Architecture(
    model_type="gpt_neo",
    ours="xformer",
    tiny=dict(
        **SPECIAL,
        vocab_size=VOCAB,
        hidden_size=32,
        num_layers=3,
        attention_types=[[["global", "local", "local"], 1]],
        num_heads=4,
        window_size=3,
        max_position_embeddings=24,
    ),
    heads=named("GPTNeo", "Model", "ForCausalLM", *TASKS),
    variations={
        "all_global": {"attention_types": [[["global"], 3]], "window_size": 256},
        "all_local": {"attention_types": [[["local"], 3]]},
        "other_sizes": {"intermediate_size": 48, "activation_function": "relu", "tie_word_embeddings": False},
        "window_of_one": {"window_size": 1},
    },
    base=dict(hidden_size=768, num_layers=12, num_heads=12, attention_types=[[["global", "local"], 6]]),
    sides=("right",),  # positions count padding on the left
    noted=frozenset({"embed_dropout"}),
    other_values={
        "num_layers": 3,  # no other fits `attention_types`
        "attention_types": [[["local", "global", "global"], 1]],
        "activation_function": "relu",
    },
)
