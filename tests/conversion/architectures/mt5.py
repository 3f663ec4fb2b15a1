"""T5, mT5 and UMT5."""

import torch

from tests.conversion.architectures import VOCAB, Architecture
from tests.conversion.architectures.mbart import ended

TINY = dict(
    vocab_size=VOCAB,
    d_model=32,
    d_kv=8,
    d_ff=48,
    num_layers=2,
    num_heads=4,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=6,
)
BASE = dict(vocab_size=32128, d_model=768, d_kv=64, d_ff=2048, num_layers=6, num_heads=12)
VARIATIONS = {
    "free head width": {"d_kv": 6},
    "relu": {"feed_forward_proj": "relu"},
    "silu": {"feed_forward_proj": "gated-silu"},
    "deeper decoder": {"num_decoder_layers": 3},
    "buckets": {"relative_attention_num_buckets": 12, "relative_attention_max_distance": 9},
}


def classes(name: str) -> dict[str, str]:
    return {
        f"{name}ForConditionalGeneration": "ForSeq2SeqLM",
        f"{name}Model": "Model",
        f"{name}EncoderModel": "Model",
        f"{name}ForQuestionAnswering": "ForQuestionAnswering",
        f"{name}ForSequenceClassification": "ForSequenceClassification",
    }


def own_output(model) -> None:
    """Published checkpoints have an output table of their own, whatever their config says."""
    if hasattr(model, "lm_head") and (model.config.model_type != "t5" or model.config.is_gated_act):
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))


def read(head, given):
    """Classifiers and spans read the decoder's states at places of `input_ids`."""
    if "SequenceClassification" in head:
        ended(given, 1)
    if "SequenceClassification" in head or "QuestionAnswering" in head:
        given["decoder_input_ids"], given["decoder_attention_mask"] = given["input_ids"], given["attention_mask"]
    if "TokenClassification" in head:
        return {name: given[name] for name in ("input_ids", "attention_mask")}
    return given


COMMON = dict(
    tiny=TINY,
    base=BASE,
    inputs=read,
    ready=own_output,
    variations=VARIATIONS,
    other_values={"feed_forward_proj": "gated-silu", "relative_attention_num_buckets": 10},
)
MT5 = Architecture(
    model_type="mt5",
    ours="xf_t5",
    heads=classes("MT5"),
    headless={"MT5ForTokenClassification": "Model"},
    refused=frozenset({"is_decoder"}),
    **COMMON,
)
OWN = {"tie_word_embeddings": False}  # v1.1
UMT5 = Architecture(
    model_type="umt5",
    ours="xformer",
    heads={**classes("UMT5"), "UMT5ForTokenClassification": "ForTokenClassification"},
    # their configs say that they have two towers
    back_as={name: name for name in ("UMT5EncoderModel", "UMT5ForTokenClassification")},
    refused=frozenset({"is_decoder"}),
    **{**COMMON, "variations": {**VARIATIONS, "outputs that are not scaled": OWN}},
)
T5 = Architecture(
    **{
        **COMMON,
        **{"model_type": "t5", "ours": "xf_t5", "refused": frozenset({"is_decoder"}), "base": {}},
        "tiny": {
            **TINY,
            "d_kv": 6,
            "num_decoder_layers": 1,
            "decoder_start_token_id": 0,
            "relative_attention_max_distance": 10,
        },
        "heads": classes("T5"),
        "headless": {"T5ForTokenClassification": "Model"},
        "variations": {
            "gelu": {**OWN, "feed_forward_proj": "gated-gelu"},
            "silu": {**OWN, "feed_forward_proj": "gated-silu"},
        },
        "other_values": {},
    }
)
ARCHITECTURES = (T5, MT5, UMT5)
