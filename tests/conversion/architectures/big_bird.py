"""BigBird on texts that it reads whole; the sparse pattern is tried in `test_sparse_encoders.py`."""

import torch
from torch import Tensor

from tests.conversion.architectures import SMALL, TASKS, Architecture, named, one_bias


def inputs(head: str, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The head for questions makes token types of separators where none are given."""
    if head.endswith("ForQuestionAnswering"):
        given["token_type_ids"] = torch.zeros_like(given["input_ids"])
    return given


ARCHITECTURE = Architecture(
    model_type="big_bird",
    ours="xf_bigbird",
    tiny=dict(**SMALL, sep_token_id=4, block_size=1, num_random_blocks=2),
    heads=named("BigBird", "ForMaskedLM", "Model", "ForPreTraining", *TASKS[:2], "ForMultipleChoice"),
    headless={"BigBirdForQuestionAnswering": "Model"},
    variations={
        "dense": {"attention_type": "original_full"},
        "untied": {"tie_word_embeddings": False},
        "scaled": {"rescale_embeddings": True, "hidden_act": "relu"},
    },
    sides=("right",),
    idle=dict.fromkeys(
        ("BigBirdForMaskedLM", "BigBirdForSequenceClassification", "BigBirdForTokenClassification"),
        ("pooler.weight", "pooler.bias"),
    ),
    inputs=inputs,
    ready=one_bias,
    other_values={"attention_type": "original_full"},
    refused=frozenset({"use_bias", "is_decoder", "add_cross_attention"}),
)
