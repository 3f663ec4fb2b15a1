"""GPT and GPT-2."""

from tests.conversion.architectures import SPECIAL, VOCAB, Architecture

TINY = dict(**SPECIAL, vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=24)
SUMMARY = {f"summary_{name}" for name in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")}


def places(head, given):
    """Positions, which would count padding on the left."""
    return {**given, "position_ids": (given["attention_mask"].cumsum(-1) - 1).clamp(min=0)}


GPT2 = Architecture(
    model_type="gpt2",
    ours="xf_gpt2",
    tiny={**TINY, "n_inner": 48},
    heads={
        "GPT2LMHeadModel": "ForCausalLM",
        "GPT2Model": "Model",
        "GPT2ForSequenceClassification": "ForSequenceClassification",
        "GPT2ForTokenClassification": "ForTokenClassification",
        "GPT2ForQuestionAnswering": "ForQuestionAnswering",
    },
    headless={"GPT2DoubleHeadsModel": "ForCausalLM"},
    settings={"GPT2ForSequenceClassification": {"num_labels": 3}},
    variations={"unscaled": {"scale_attn_weights": False, "tie_word_embeddings": False}},
    inputs=places,
    refused=frozenset({"scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"}),
    noted=frozenset({"embd_pdrop"}),
    unread=frozenset(SUMMARY),  # the head for several choices has no counterpart
)
GPT = Architecture(
    model_type="openai-gpt",
    ours="xf_gpt",
    tiny=TINY,
    heads={
        "OpenAIGPTForSequenceClassification": "ForSequenceClassification",
        "OpenAIGPTModel": "Model",
        "OpenAIGPTLMHeadModel": "ForCausalLM",
    },
    headless={"OpenAIGPTDoubleHeadsModel": "ForCausalLM"},
    settings={"OpenAIGPTForSequenceClassification": {"num_labels": 3}},
    inputs=places,
    left_prompts=False,
    noted=frozenset({"embd_pdrop"}),
    unread=frozenset(SUMMARY),
)
ARCHITECTURES = (GPT2, GPT)
