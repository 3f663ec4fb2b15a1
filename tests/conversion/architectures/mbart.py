"""mBART."""

import torch

from tests.conversion.architectures import VOCAB, Architecture

TINY = dict(
    vocab_size=VOCAB,
    d_model=32,
    encoder_layers=2,
    decoder_layers=1,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    max_position_embeddings=24,
    pad_token_id=1,
    bos_token_id=0,
    eos_token_id=2,
    forced_eos_token_id=2,
    decoder_start_token_id=2,
)
VARIATIONS = {
    "scaled": {"scale_embedding": True},
    "untied": {"tie_word_embeddings": False},
    "two geometries": {"decoder_attention_heads": 2, "decoder_ffn_dim": 40, "decoder_layers": 3},
    "activation": {"activation_function": "relu"},
}


WIDE = dict(encoder_layers=6, decoder_layers=6, d_model=768, encoder_attention_heads=12, decoder_attention_heads=12)


def one_table(model) -> None:
    """Our towers read one token table, and the output's bias is a buffer that starts at zero."""
    if getattr(model, "final_logits_bias", None) is not None:
        model.final_logits_bias.normal_()
    base = getattr(model, "model", model)
    if hasattr(base, "shared"):
        for tower in (base.encoder, base.decoder):
            tower.embed_tokens.weight.copy_(base.shared.weight)


def classes(name: str, generator: str = "ForConditionalGeneration") -> dict[str, str]:
    return {f"{name}{generator}": "ForSeq2SeqLM", f"{name}Model": "Model", f"{name}ForCausalLM": "ForCausalLM"}


def ended(given, token) -> None:
    """Every row ends with its end token, where classifiers of two towers read it; the decoder's text is the same."""
    for name in ("decoder_input_ids", "decoder_attention_mask"):
        given.pop(name, None)
    places = torch.arange(given["input_ids"].shape[1])
    last = (given["attention_mask"] * places).argmax(1)
    given["input_ids"][torch.arange(len(last)), last] = token


def read(head, given):
    """Spans read the decoder's states at places of `input_ids`."""
    if "SequenceClassification" in head:
        ended(given, 2)
    if "QuestionAnswering" in head:
        given["decoder_input_ids"], given["decoder_attention_mask"] = given["input_ids"], given["attention_mask"]
    return given


ARCHITECTURE = Architecture(
    model_type="mbart",
    ours="xformer",
    tiny=TINY,
    heads={**classes("MBart"), "MBartForQuestionAnswering": "ForQuestionAnswering"},
    variations={**VARIATIONS, "language starts": {"decoder_start_token_id": None}},
    base=WIDE,
    sides=("right",),  # positions count padding on the left
    inputs=read,
    ready=one_table,
    # a decoder by itself keeps cross-attention that nothing reads
    back_as={"MBartForCausalLM": "MBartForCausalLM"},
    refused=frozenset({"is_decoder"}),
    noted=frozenset({"encoder_layerdrop", "decoder_layerdrop"}),
    unread=frozenset({"forced_eos_token_id"}),
)
