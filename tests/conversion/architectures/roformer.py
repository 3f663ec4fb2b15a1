"""RoFormer."""

import torch

from tests.conversion.architectures import SMALL, TASKS, Architecture, named


def read(head, given):
    """Two texts in a row. The head for several choices reads the last slot, whether it is padding or not."""
    if "MultipleChoice" in head:
        given["attention_mask"] = given["attention_mask"].sort(-1).values
    return {**given, "token_type_ids": torch.arange(given["input_ids"].shape[-1]).expand_as(given["input_ids"]) % 2}


ARCHITECTURE = Architecture(
    model_type="roformer",
    ours="xf_roformer",
    tiny={**SMALL, "layer_norm_eps": 1e-5},
    heads=named("RoFormer", "ForMaskedLM", "Model", *TASKS, "ForMultipleChoice", "ForCausalLM"),
    settings={
        **{"RoFormerForCausalLM": {"is_decoder": True}, "RoFormerForSequenceClassification": {"num_labels": 3}},
        "RoFormerForTokenClassification": {"embedding_size": 40},
    },
    variations={
        "turned values": {"rotary_value": True, "hidden_act": "relu"},
        "a decoder's turned values": {"rotary_value": True, "is_decoder": True},
        "narrow": {"embedding_size": 12},
    },
    tried_with={"turned values": "RoFormerModel", "narrow": "RoFormerForMaskedLM"},
    first_slot=("RoFormerForSequenceClassification",),
    inputs=read,
    left_prompts=False,
    refused=frozenset({"add_cross_attention"}),
)
