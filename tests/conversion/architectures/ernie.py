"""ERNIE."""

import torch
from torch import Tensor

from tests.conversion.architectures import SMALL, TASKS, Architecture, named, one_bias

READ_TASKS = ("ErnieModel", "ErnieForSequenceClassification", "ErnieForTokenClassification")


def with_tasks(head: str, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Some classes are told tasks, the others take task 0 (transformers cannot flatten those of several choices)."""
    if head not in READ_TASKS:
        return given
    generator = torch.Generator().manual_seed(9)
    return {**given, "task_type_ids": torch.randint(0, 3, given["input_ids"].shape, generator=generator)}


ARCHITECTURE = Architecture(
    model_type="ernie",
    ours="xf_bert",
    tiny=dict(**SMALL, use_task_id=True),
    heads=named(
        "Ernie",
        "Model",
        "ForPreTraining",
        "ForMaskedLM",
        "ForCausalLM",
        "ForNextSentencePrediction",
        *TASKS,
        "ForMultipleChoice",
    ),
    settings={"ErnieForCausalLM": {"is_decoder": True}},
    variations={
        "no tasks": {"use_task_id": False},
        "many tasks": {"task_type_vocab_size": 9, "hidden_act": "relu"},
        "untied": {"tie_word_embeddings": False},
    },
    sides=("right",),
    ready=one_bias,
    inputs=with_tasks,
    refused=frozenset({"add_cross_attention"}),
)
