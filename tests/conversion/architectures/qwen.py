"""Decoders whose layers read all tokens or a sliding window: Mistral, Qwen 2, Qwen 3."""

from tests.conversion.architectures import Architecture
from tests.conversion.architectures.llama import BASE, OTHERS, SCALINGS, TINY, heads

CLASSIFIERS = ("ForTokenClassification", "ForQuestionAnswering")
WINDOWS = {
    "windows": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "one_window": {
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
# Windows are asked for in several fields; one alone changes nothing, or is half of what is needed.
APART = {"refused": frozenset({"layer_types"}), "unread": frozenset({"use_sliding_window", "max_window_layers"})}

ARCHITECTURES = (
    Architecture(
        model_type="mistral",
        ours="xformer",
        tiny={**TINY, "sliding_window": 4},
        heads=heads("Mistral", *CLASSIFIERS),
        variations={
            "no_window": {"sliding_window": None},
            "tied": {"tie_word_embeddings": True},
            "free_width": {"head_dim": 12, "num_key_value_heads": 1},
            "rope_yarn": SCALINGS["rope_yarn"],
        },
        base={**BASE, "num_key_value_heads": 4},
        other_values=OTHERS,
    ),
    Architecture(
        model_type="qwen2",
        ours="xformer",
        tiny=TINY,
        heads=heads("Qwen2", *CLASSIFIERS),
        variations={
            **WINDOWS,
            "tied": {"tie_word_embeddings": True},
            "free_width": {"head_dim": 12},
            "every_head": {"num_key_value_heads": 4, "hidden_act": "gelu"},
            "rope_yarn": SCALINGS["rope_yarn"],
        },
        base={**BASE, "num_key_value_heads": 4},
        **APART,
        other_values={**OTHERS, "layer_types": ["sliding_attention"] * 3},
    ),
    Architecture(
        model_type="qwen3",
        ours="xformer",
        tiny={**TINY, "head_dim": 10},
        heads=heads("Qwen3", *CLASSIFIERS),
        variations={
            **WINDOWS,
            "tied": {"tie_word_embeddings": True},
            "biases": {"attention_bias": True},
            "even_width": {"head_dim": 8, "num_key_value_heads": 1},
            "rope_llama3": SCALINGS["rope_llama3"],
        },
        base={**BASE, "num_key_value_heads": 4},
        **APART,
        other_values={**OTHERS, "layer_types": ["sliding_attention"] * 3},
    ),
)
