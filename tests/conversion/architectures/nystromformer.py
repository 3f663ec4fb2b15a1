"""Nystromformer in rows without padding, which its convolution reads in transformers."""

import torch
from torch import Tensor

from tests.conversion.architectures import VOCAB, Architecture
from tests.conversion.architectures.big_bird import one_bias


def inputs(head: str, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Padding becomes text."""
    ids = given["input_ids"]
    given["input_ids"] = ids.masked_fill(given["attention_mask"] == 0, 8)
    given["attention_mask"] = torch.ones_like(ids)
    return given


ARCHITECTURE = Architecture(
    model_type="nystromformer",
    ours="xf_nystromformer",
    tiny=dict(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=24,
        conv_kernel_size=5,
        num_landmarks=3,
        segment_means_seq_len=9,
    ),
    heads={
        "NystromformerForMaskedLM": "ForMaskedLM",
        "NystromformerModel": "Model",
        "NystromformerForSequenceClassification": "ForSequenceClassification",
        "NystromformerForTokenClassification": "ForTokenClassification",
        "NystromformerForQuestionAnswering": "ForQuestionAnswering",
        "NystromformerForMultipleChoice": "ForMultipleChoice",
    },
    variations={
        "exact": {"num_landmarks": 64, "segment_means_seq_len": 64},
        "untied": {"tie_word_embeddings": False, "num_landmarks": 1},
        "relu": {"hidden_act": "relu", "conv_kernel_size": 1},
    },
    sides=("right",),
    inputs=inputs,
    ready=one_bias,
    other_values={"conv_kernel_size": 7, "num_landmarks": 9, "segment_means_seq_len": 12},
    refused=frozenset({"inv_coeff_init_option", "add_cross_attention"}),
)
