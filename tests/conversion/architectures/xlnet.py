"""XLNet as an encoder of one or two texts; tests/conversion/test_xlnet.py has its second stream."""

import torch
from torch import Tensor

from tests.conversion.architectures import VOCAB, Architecture

HEADS = {
    "XLNetLMHeadModel": "ForMaskedLM",
    "XLNetModel": "Model",
    "XLNetForTokenClassification": "ForTokenClassification",
    "XLNetForQuestionAnsweringSimple": "ForQuestionAnswering",
    "XLNetForSequenceClassification": "ForSequenceClassification",
    "XLNetForMultipleChoice": "ForMultipleChoice",
}
SUMMARIES = ("XLNetForSequenceClassification", "XLNetForMultipleChoice")


def inputs(head: str, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Two texts in a row, and a third type for its last token; none for the bare model. What reads the last slot, be
    it padding or not, is given rows whose last slot is a token."""
    if head in SUMMARIES:
        given["attention_mask"] = given["attention_mask"].sort(-1).values
    if head == "XLNetModel":
        return given
    types = torch.zeros_like(given["input_ids"])
    types[..., 4:] = 1
    types[..., -1] = 2
    return {**given, "token_type_ids": types}


ARCHITECTURE = Architecture(
    model_type="xlnet",
    ours="xf_xlnet",
    tiny=dict(vocab_size=VOCAB, d_model=32, n_layer=2, n_head=4, d_inner=48, layer_norm_eps=1e-5),
    heads=HEADS,
    headless={"XLNetForQuestionAnswering": "Model"},
    variations={
        "clamped": {"clamp_len": 2},
        "untied": {"tie_word_embeddings": False, "ff_activation": "relu"},
        "two heads": {"n_head": 2, "dropout": 0.2},
        "first token": {"summary_type": "first", "summary_activation": "gelu"},
    },
    tried_with={"first token": "XLNetForSequenceClassification"},
    base=dict(d_model=768, n_layer=12, n_head=12, d_inner=3072),
    inputs=inputs,
    other_values={
        "clamp_len": 3,
        "ff_activation": "relu",
        "attn_type": "uni",
        "d_head": None,
        "summary_type": "first",
        "summary_activation": "relu",
        "mem_len": 4,
        "reuse_len": 4,
    },
    refused=frozenset({"attn_type", "bi_data", "summary_use_proj"}),
    unread=frozenset(
        {
            *("same_length", "mem_len", "reuse_len", "use_mems_eval", "use_mems_train", "summary_last_dropout"),
            *("start_n_top", "end_n_top"),
        }
    ),
)
