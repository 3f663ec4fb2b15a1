"""BART: `bart` <-> `xf_bart`.

Without `position_ids`, transformers counts padding on the left as positions and ours does not. `final_logits_bias` is
a buffer there and the output projection's bias, a parameter, here: our model counts `vocab_size` more parameters. Both
towers of ours read one token table; with `tie_word_embeddings=False` transformers keeps three, which convert while
they are equal.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..base import Converter, Head, activation, feedforward, register
from ..rules import Rule, copied, only_ours, only_theirs, row, shared

FIELDS = {
    "hidden_size": "d_model",
    "num_hidden_layers": "encoder_layers",
    "num_decoder_layers": "decoder_layers",
    "num_attention_heads": "encoder_attention_heads",
    "intermediate_size": "encoder_ffn_dim",
    "max_position_embeddings": "max_position_embeddings",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "activation_dropout_prob": "activation_dropout",
    "classifier_dropout": "classifier_dropout",
    "initializer_range": "init_std",
    "decoder_start_token_id": "decoder_start_token_id",
}
# Their field -> ours, for what may differ between the towers.
DECODER_FIELDS = {"decoder_attention_heads": "num_attention_heads", "decoder_ffn_dim": "intermediate_size"}


def _tower(theirs: str, ours: str, layer: str, cross: bool) -> tuple[Rule, ...]:
    """The rules of one tower; `layer`: its placeholder."""

    def sublayer(their_name: str, our_name: str) -> tuple[Rule, ...]:
        projections = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "out_proj": "o_proj"}
        return (
            *(
                copied(f"@{theirs}.layers.{layer}.{their_name}.{a}.*", f"@{ours}.layers.{layer}.{our_name}.{b}.*")
                for a, b in projections.items()
            ),
            copied(
                f"@{theirs}.layers.{layer}.{their_name}_layer_norm.*",
                f"@{ours}.layers.{layer}.{our_name}_residual.norm.*",
            ),
        )

    return (
        copied(f"@{theirs}.embed_positions.weight", f"@{ours}.position.table.weight"),
        copied(f"@{theirs}.layernorm_embedding.*", f"@{ours}.embedding.norm.*"),
        *sublayer("self_attn", "attention"),
        *(sublayer("encoder_attn", "cross_attention") if cross else ()),
        copied(f"@{theirs}.layers.{layer}.fc1.*", f"@{ours}.layers.{layer}.feedforward.up_proj.*"),
        copied(f"@{theirs}.layers.{layer}.fc2.*", f"@{ours}.layers.{layer}.feedforward.down_proj.*"),
        copied(f"@{theirs}.layers.{layer}.final_layer_norm.*", f"@{ours}.layers.{layer}.feedforward_residual.norm.*"),
    )


def _backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    if not config.is_encoder_decoder:
        table = copied("@decoder.embed_tokens.weight", "@trunk.embedding.tokens.weight")
        return (table, *_tower("decoder", "trunk", "{i}", cross=False))
    return (
        shared(
            ("@shared.weight", "@encoder.embed_tokens.weight", "@decoder.embed_tokens.weight"),
            ("@trunk.embedding.tokens.weight", "@decoder.embedding.tokens.weight"),
        ),
        *_tower("encoder", "trunk", "{i}", cross=False),
        *_tower("decoder", "decoder", "{j}", cross=True),
    )


def _cross(config: XFormerConfig) -> tuple[Rule, ...]:
    """What a decoder by itself keeps for encoder states that it may be given; ours has no such layers."""
    layer = "@decoder.layers.{i}.encoder_attn"
    names = (f"{layer}.{name}_proj.*" for name in ("q", "k", "v", "out"))
    return () if config.is_encoder_decoder else (only_theirs(*names, f"{layer}_layer_norm.*"),)


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    if not config.is_encoder_decoder:
        return {
            "num_hidden_layers": config.decoder_layers,
            "num_decoder_layers": None,
            **{ours: getattr(config, theirs) for theirs, ours in DECODER_FIELDS.items()},
            **_common(config),
            "is_encoder_decoder": False,
            "is_decoder": config.is_decoder,
            "head": "linear",  # without the bias
        }
    decoder = {
        ours: getattr(config, theirs)
        for theirs, ours in DECODER_FIELDS.items()
        if getattr(config, theirs) != getattr(config, str(FIELDS[ours]))
    }
    return {**_common(config), "decoder": decoder or None}


def _common(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        "layer_norm_eps": 1e-5,
        "embedding": {"type": "token", "normalize": True, "scale": bool(config.scale_embedding)},
        "feedforward": feedforward(config.activation_function),
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    decoder = config.tower("decoder") if config.is_encoder_decoder else config
    dropout = config.classifier_dropout
    return {
        "decoder_layers": decoder.num_hidden_layers,
        **{theirs: getattr(decoder, ours) for theirs, ours in DECODER_FIELDS.items()},
        "classifier_dropout": config.hidden_dropout_prob if dropout is None else dropout,
        "scale_embedding": getattr(config.embedding, "scale", False),
        "activation_function": activation(config.feedforward)[0],
        "is_encoder_decoder": config.is_encoder_decoder,
        "is_decoder": config.is_decoder and not config.is_encoder_decoder,
    }


CONVERTER = register(
    Converter(
        model_type="bart",
        variant="xf_bart",
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={
            "backbone": _backbone,
            "cross": _cross,
            # the token table again, as a rule: present where the rest of the head is not
            "projection": (copied("lm_head.weight", "lm_head.decoder.weight"),),
            "lm": (row("final_logits_bias", "lm_head.decoder.bias"),),
            # Theirs reads the state at the last end token through a hidden layer, ours the last state at once.
            "sequence": (
                only_theirs("classification_head.dense.*", "classification_head.out_proj.*"),
                only_ours("classifier.*"),
            ),
            "spans": (copied("qa_outputs.*", "classifier.*"),),
        },
        heads=(
            Head("BartModel", "Model", "", ("backbone",), two_towers=True),
            Head(
                "BartForConditionalGeneration",
                "ForSeq2SeqLM",
                "model.",
                ("backbone", "projection", "lm"),
                two_towers=True,
            ),
            Head(
                "BartForSequenceClassification",
                "ForSequenceClassification",
                "model.",
                ("backbone", "sequence"),
                two_towers=True,
            ),
            Head("BartForQuestionAnswering", "ForQuestionAnswering", "model.", ("backbone", "spans"), two_towers=True),
            Head(
                "BartForCausalLM",
                "ForCausalLM",
                "model.",
                ("backbone", "cross", "projection"),
                two_towers=False,
                causal=True,
            ),
        ),
        unread_alone=("encoder_layers", "encoder_attention_heads", "encoder_ffn_dim"),
        # a generation setting, which travels with the generation config
        unread=("forced_eos_token_id", "activation_function"),
        training_only=("encoder_layerdrop", "decoder_layerdrop"),
    )
)
