"""Llama and its nearest relatives."""

from tests.conversion.architectures import SMALL, SPECIAL, Architecture

TINY = {**SMALL, **SPECIAL, "num_hidden_layers": 3, "num_key_value_heads": 2, "max_position_embeddings": 40}
BASE = dict(vocab_size=32000, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=2048)


def heads(name: str, *others: str, stem: str | None = None) -> dict[str, str]:
    """The classes of a family and ours."""
    stem = name if stem is None else stem
    return {
        f"{stem}Model": "Model",
        f"{name}ForCausalLM": "ForCausalLM",
        f"{stem}ForSequenceClassification": "ForSequenceClassification",
        **{f"{name}{other}": other for other in others},
    }


def rope(rope_type: str, **fields) -> dict:
    return {"rope_parameters": {"rope_theta": 500.0, "rope_type": rope_type, **fields}}


SCALINGS = {
    "rope_default": rope("default"),
    "rope_linear": rope("linear", factor=3.0),
    "rope_dynamic": rope("dynamic", factor=2.0),
    "rope_yarn": rope("yarn", factor=5.0, original_max_position_embeddings=8),
    "rope_yarn_full": rope(
        "yarn",
        factor=5.0,
        original_max_position_embeddings=8,
        beta_fast=2.0,
        beta_slow=0.5,
        mscale=0.7,
        mscale_all_dim=1.2,
        truncate=False,
    ),
    "rope_llama3": rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
    ),
    "rope_longrope": rope(
        "longrope",
        short_factor=[1.0, 1.1, 1.3, 1.9],
        long_factor=[1.0, 2.0, 4.0, 9.0],
        factor=4.0,
        original_max_position_embeddings=10,
    ),
    "rope_proportional": rope("proportional", partial_rotary_factor=0.5, factor=2.0),
}
# Special tokens and the field that only makes memory say nothing about what is computed.
OTHERS = {"rope_parameters": {"rope_theta": 77.0, "rope_type": "default"}}

ARCHITECTURES = (
    Architecture(
        model_type="llama",
        ours="xformer",
        tiny=TINY,
        heads=heads("Llama", "ForTokenClassification", "ForQuestionAnswering"),
        variations={
            "biases": {"attention_bias": True, "mlp_bias": True},
            "tied": {"tie_word_embeddings": True},
            "free_width": {"head_dim": 12, "num_key_value_heads": 1},
            "every_head": {"num_key_value_heads": 4, "hidden_act": "gelu"},
            **SCALINGS,
        },
        base=BASE,
        refused=frozenset({"pretraining_tp"}),
        other_values=OTHERS,
    ),
)
