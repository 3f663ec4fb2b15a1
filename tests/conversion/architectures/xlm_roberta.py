"""XLM-RoBERTa and CamemBERT."""

from tests.conversion.architectures import VOCAB, Architecture

HEADS = {
    "Model": "Model",
    "ForMaskedLM": "ForMaskedLM",
    "ForCausalLM": "ForCausalLM",
    "ForSequenceClassification": "ForSequenceClassification",
    "ForTokenClassification": "ForTokenClassification",
    "ForQuestionAnswering": "ForQuestionAnswering",
    "ForMultipleChoice": "ForMultipleChoice",
}
TINY = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    max_position_embeddings=24,
    type_vocab_size=1,
)


def one_bias(model) -> None:
    """An untied output has a second bias that nothing reads."""
    head = getattr(model, "lm_head", None)
    if head is not None:
        head.bias.copy_(head.decoder.bias)


ARCHITECTURES = tuple(
    Architecture(
        model_type=model_type,
        ours="xf_roberta",
        tiny=TINY,
        heads={f"{name}{head}": ours for head, ours in HEADS.items()},
        settings={f"{name}ForCausalLM": {"is_decoder": True}},
        variations={"untied": {"tie_word_embeddings": False}, "relu": {"hidden_act": "relu"}},
        left_prompts=False,
        generates_as_forward=False,
        ready=one_bias,
        refused=frozenset({"add_cross_attention"}),
    )
    for model_type, name in (("xlm-roberta", "XLMRoberta"), ("camembert", "Camembert"))
)
