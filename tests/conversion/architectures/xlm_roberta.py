"""XLM-RoBERTa and CamemBERT."""

from tests.conversion.architectures import SMALL, TASKS, Architecture, named, one_bias

ARCHITECTURES = tuple(
    Architecture(
        model_type=model_type,
        ours="xf_roberta",
        tiny=dict(**SMALL, type_vocab_size=1),
        heads=named(name, "Model", "ForMaskedLM", "ForCausalLM", *TASKS, "ForMultipleChoice"),
        settings={f"{name}ForCausalLM": {"is_decoder": True}},
        variations={"untied": {"tie_word_embeddings": False}, "relu": {"hidden_act": "relu"}},
        left_prompts=False,
        generates_as_forward=False,
        ready=one_bias,
        refused=frozenset({"add_cross_attention"}),
    )
    for model_type, name in (("xlm-roberta", "XLMRoberta"), ("camembert", "Camembert"))
)
