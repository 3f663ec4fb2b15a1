"""BERT and RoBERTa."""

import torch

from tests.conversion.architectures import SMALL, TASKS, Architecture, named, one_bias

POOLED = ("ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction", "ForPreTraining")


def places_and_types(head, given):
    """Positions, which would count padding on the left, and two texts in a row."""
    mask = given["attention_mask"]
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    return {**given, "position_ids": places, "token_type_ids": torch.arange(mask.shape[-1]).expand_as(mask) % 2}


BERT = Architecture(
    model_type="bert",
    ours="xf_bert",
    tiny=SMALL,
    heads={**named("Bert", "ForMaskedLM", "Model", *TASKS, *POOLED[1:]), "BertLMHeadModel": "ForCausalLM"},
    settings={"BertLMHeadModel": {"is_decoder": True}, "BertForSequenceClassification": {"num_labels": 3}},
    variations={"untied": {"hidden_act": "gelu_new", "tie_word_embeddings": False}},
    tried_with={"untied": "BertForMaskedLM"},
    first_slot=tuple(f"Bert{head}" for head in POOLED),
    inputs=places_and_types,
    left_prompts=False,
    ready=one_bias,
    refused=frozenset({"add_cross_attention"}),
)
ROBERTA = Architecture(
    model_type="roberta",
    ours="xf_roberta",
    tiny={**SMALL, "type_vocab_size": 1, "layer_norm_eps": 1e-5},
    heads=named("Roberta", "ForMaskedLM", "Model", "ForCausalLM", *TASKS, "ForMultipleChoice"),
    settings={"RobertaForCausalLM": {"is_decoder": True}, "RobertaForSequenceClassification": {"num_labels": 3}},
    variations={"padded otherwise": {"hidden_act": "relu", "pad_token_id": 3}},
    tried_with={"padded otherwise": "RobertaForMaskedLM"},
    first_slot=("RobertaForSequenceClassification", "RobertaForMultipleChoice"),
    left_prompts=False,
    generates_as_forward=False,
    refused=frozenset({"add_cross_attention"}),
)
ARCHITECTURES = (BERT, ROBERTA)
