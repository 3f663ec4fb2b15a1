"""Nystromformer in rows without padding, which its convolution reads in transformers."""

import torch
from torch import Tensor

from tests.conversion.architectures import SMALL, TASKS, Architecture, named, one_bias


def inputs(head: str, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Padding becomes text."""
    ids = given["input_ids"]
    given["input_ids"] = ids.masked_fill(given["attention_mask"] == 0, 8)
    given["attention_mask"] = torch.ones_like(ids)
    return given


ARCHITECTURE = Architecture(
    model_type="nystromformer",
    ours="xf_nystromformer",
    tiny=dict(**SMALL, conv_kernel_size=5, num_landmarks=3, segment_means_seq_len=9),
    heads=named("Nystromformer", "ForMaskedLM", "Model", *TASKS, "ForMultipleChoice"),
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
