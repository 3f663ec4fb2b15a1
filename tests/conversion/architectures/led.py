"""LED, with global tokens that are given, and without any."""

import torch

from tests.conversion.architectures import Architecture
from tests.conversion.architectures.mbart import TINY, VARIATIONS, WIDE, read

NEEDLESS = ("max_position_embeddings", "forced_eos_token_id")


def one_table(model) -> None:
    """Our towers read one token table, and the output's bias is a buffer that starts at zero."""
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.normal_()
    base = getattr(model, "led", model)
    for tower in (base.encoder, base.decoder):
        tower.embed_tokens.weight.copy_(base.shared.weight)


def with_globals(head, given):
    """The bare model gets global tokens."""
    given = read(head, given)
    if head != "LEDModel":
        return given
    chosen = torch.zeros_like(given["attention_mask"])
    chosen[0, [0, 4]] = chosen[1, 5] = 1
    return {**given, "global_attention_mask": chosen * given["attention_mask"]}


ARCHITECTURE = Architecture(
    model_type="led",
    ours="xf_longformer",
    tiny={
        **{name: value for name, value in TINY.items() if name not in NEEDLESS},
        "max_encoder_position_embeddings": 24,
        "max_decoder_position_embeddings": 16,
        "attention_window": [4, 4],
    },
    heads={
        "LEDForConditionalGeneration": "ForSeq2SeqLM",
        "LEDModel": "Model",
        "LEDForQuestionAnswering": "ForQuestionAnswering",
    },
    variations={
        **{name: fields for name, fields in VARIATIONS.items() if name != "scaled"},
        "windows": {"attention_window": [4, 8], "max_decoder_position_embeddings": 24},
    },
    base={**WIDE, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072},
    sides=("right",),  # positions count padding on the left
    inputs=with_globals,
    ready=one_table,
    noted=frozenset({"encoder_layerdrop", "decoder_layerdrop"}),
    other_values={"attention_window": [8, 4]},
)
