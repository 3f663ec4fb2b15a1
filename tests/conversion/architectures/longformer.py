"""Longformer, with global tokens that are given, that the head chooses, and without any."""

import torch
from torch import Tensor

from tests.conversion.architectures import SMALL, TASKS, Architecture, named, one_bias

SEPARATOR = 2


def inputs(head: str, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rows for questions and choices have the three separators that RoBERTa puts into pairs, and room for them. The
    bare model and the head for tokens get global tokens; so does that for texts where padding comes first, which
    transformers would make global."""
    ids, mask = given["input_ids"], given["attention_mask"]
    if head.endswith(("ForQuestionAnswering", "ForMultipleChoice")):
        rows, real = ids.view(-1, ids.shape[-1]), mask.view(-1, ids.shape[-1])
        short = real.sum(-1) < 6
        rows[short], real[short] = rows[~short][0], real[~short][0]
        for row, kept in zip(rows, real, strict=True):
            places = kept.nonzero().flatten()
            row[places[[2, 3, -1]]] = SEPARATOR
        return given
    chosen = torch.zeros_like(mask)
    chosen[0, [0, 4]] = chosen[1, 5] = 1
    if head.endswith(("LongformerModel", "ForTokenClassification")):
        return {**given, "global_attention_mask": chosen}
    if head.endswith("ForSequenceClassification") and not mask[:, 0].all():
        return {**given, "global_attention_mask": chosen}
    return given


ARCHITECTURE = Architecture(
    model_type="longformer",
    ours="xf_longformer",
    tiny=dict(**SMALL, type_vocab_size=1, attention_window=[4, 4]),
    heads=named("Longformer", "Model", "ForMaskedLM", *TASKS, "ForMultipleChoice"),
    variations={
        "windows": {"attention_window": [4, 8]},
        "untied": {"tie_word_embeddings": False},
        "relu": {"hidden_act": "relu", "pad_token_id": 0},
    },
    base=dict(vocab_size=50265, max_position_embeddings=4098, type_vocab_size=1),
    inputs=inputs,
    ready=one_bias,
    other_values={"attention_window": [8, 4]},
    unread=frozenset({"onnx_export"}),
)
