"""ERNIE."""

import torch
from torch import Tensor

from tests.conversion.architectures import VOCAB, Architecture

READ_TASKS = ("ErnieModel", "ErnieForSequenceClassification", "ErnieForTokenClassification")


def one_bias(model) -> None:
    """An untied output has a second bias that nothing reads."""
    head = getattr(model, "cls", None)
    if head is not None and hasattr(head, "predictions"):
        head.predictions.bias.copy_(head.predictions.decoder.bias)


def with_tasks(head: str, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Some classes are told tasks, the others take task 0 (transformers cannot flatten those of several choices)."""
    if head not in READ_TASKS:
        return given
    generator = torch.Generator().manual_seed(9)
    return {**given, "task_type_ids": torch.randint(0, 3, given["input_ids"].shape, generator=generator)}


ARCHITECTURE = Architecture(
    model_type="ernie",
    ours="xf_bert",
    tiny=dict(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=24,
        use_task_id=True,
    ),
    heads={
        "ErnieModel": "Model",
        "ErnieForPreTraining": "ForPreTraining",
        "ErnieForMaskedLM": "ForMaskedLM",
        "ErnieForCausalLM": "ForCausalLM",
        "ErnieForNextSentencePrediction": "ForNextSentencePrediction",
        "ErnieForSequenceClassification": "ForSequenceClassification",
        "ErnieForTokenClassification": "ForTokenClassification",
        "ErnieForQuestionAnswering": "ForQuestionAnswering",
        "ErnieForMultipleChoice": "ForMultipleChoice",
    },
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
