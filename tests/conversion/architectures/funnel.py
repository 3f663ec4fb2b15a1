"""Funnel-Transformer in rows without padding, which transformers pools with text."""

import torch
from torch import Tensor

from tests.conversion.architectures import VOCAB, Architecture, nystromformer


def inputs(head: str, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without padding; two texts in a row, and the first token in both."""
    given = nystromformer.inputs(head, given)
    types = torch.zeros_like(given["input_ids"])
    types[..., 4:] = 1
    types[..., 0] = 2
    return {**given, "token_type_ids": types}


HEADS = {
    "FunnelForMaskedLM": "ForMaskedLM",
    "FunnelModel": "Model",
    "FunnelBaseModel": "Model",
    "FunnelForSequenceClassification": "ForSequenceClassification",
    "FunnelForTokenClassification": "ForTokenClassification",
    "FunnelForQuestionAnswering": "ForQuestionAnswering",
    "FunnelForMultipleChoice": "ForMultipleChoice",
    "FunnelForPreTraining": "ForReplacedTokenDetection",
}
ARCHITECTURE = Architecture(
    model_type="funnel",
    ours="xf_funnel_transformer",
    tiny=dict(
        vocab_size=VOCAB,
        block_sizes=[1, 2, 1],
        num_decoder_layers=2,
        d_model=32,
        n_head=4,
        d_head=8,
        d_inner=48,
        layer_norm_eps=1e-5,
    ),
    heads=HEADS,
    variations={
        "maxima": {"pooling_type": "max", "d_head": 6, "hidden_act": "relu"},
        "pooled keys": {"pool_q_only": False},
        "whole lengths": {"truncate_seq": False, "num_decoder_layers": 1},
        "no first token": {"separate_cls": False, "block_repeats": [1, 2, 1]},
        "untied": {"tie_word_embeddings": False},
    },
    base=dict(block_sizes=[4, 4, 4]),
    sides=("right",),
    # theirs have the up-sampled states before those of the last layers
    uncompared=tuple(f"hidden_states.{index}" for index in range(5, 10)),
    inputs=inputs,
    other_values={
        "block_sizes": [2, 1, 1],
        "block_repeats": [1, 1, 2],
        "pooling_type": "max",
        "attention_type": "factorized",
        "initializer_std": 0.5,
    },
    unread=frozenset({"attention_type", "initializer_std"}),
)
