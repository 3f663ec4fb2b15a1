# SPDX-License-Identifier: Apache-2.0
"""BART: `bart` <-> `xf_bart`, and what its relatives (mBART, Marian, PEGASUS, M2M-100) have in common with it.

Without `position_ids`, transformers counts padding on the left as positions and ours does not. `final_logits_bias` is
a buffer there and the output projection's bias, a parameter, here: our model counts `vocab_size` more parameters. Both
towers of ours read one token table; with `tie_word_embeddings=False` transformers keeps three, which convert while
they are equal.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import activation, feedforward
from ..base import Converter, Groups, Head, register
from ..rules import Rule, copied, only_theirs, row, shared

# What all of the relatives have.
TOWER_FIELDS = {
    "hidden_size": "d_model",
    "num_hidden_layers": "encoder_layers",
    "num_decoder_layers": "decoder_layers",
    "num_attention_heads": "encoder_attention_heads",
    "intermediate_size": "encoder_ffn_dim",
    "max_position_embeddings": "max_position_embeddings",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "activation_dropout_prob": "activation_dropout",
    "initializer_range": "init_std",
    "decoder_start_token_id": "decoder_start_token_id",
}
FIELDS = {**TOWER_FIELDS, "classifier_dropout": "classifier_dropout"}
# Their field -> ours, for what may differ between the towers.
DECODER_FIELDS = {"decoder_attention_heads": "num_attention_heads", "decoder_ffn_dim": "intermediate_size"}
LAYER_DROPS = ("encoder_layerdrop", "decoder_layerdrop")


def sublayer(
    their_layer: str, our_layer: str, their_name: str, our_name: str, *, bias: bool = True
) -> tuple[Rule, ...]:
    """An attention of a layer, whose projections may have biases, and its norm."""
    end = "*" if bias else "weight"
    projections = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "out_proj": "o_proj"}
    return (
        *(
            copied(f"{their_layer}.{their_name}.{a}.{end}", f"{our_layer}.{our_name}.{b}.{end}")
            for a, b in projections.items()
        ),
        copied(f"{their_layer}.{their_name}_layer_norm.*", f"{our_layer}.{our_name}_residual.norm.*"),
    )


def dense_feedforward(their_layer: str, our_layer: str) -> tuple[Rule, ...]:
    """The feed-forward sublayer of a layer, and its norm."""
    return (
        copied(f"{their_layer}.fc1.*", f"{our_layer}.feedforward.up_proj.*"),
        copied(f"{their_layer}.fc2.*", f"{our_layer}.feedforward.down_proj.*"),
        copied(f"{their_layer}.final_layer_norm.*", f"{our_layer}.feedforward_residual.norm.*"),
    )


def around_layers(theirs: str, ours: str, config: XFormerConfig) -> tuple[Rule, ...]:
    """What a tower has before and after its layers, as far as the config has it."""
    rules = []
    if config.position.type == "learned_absolute":
        rules.append(copied(f"@{theirs}.embed_positions.weight", f"@{ours}.position.table.weight"))
    if config.embedding.normalizes():
        rules.append(copied(f"@{theirs}.layernorm_embedding.*", f"@{ours}.embedding.norm.*"))
    if config.residual.final_norm:
        rules.append(copied(f"@{theirs}.layer_norm.*", f"@{ours}.final_norm.*"))
    return tuple(rules)


def tower(theirs: str, ours: str, layer: str, config: XFormerConfig, *, cross: bool) -> tuple[Rule, ...]:
    """The rules of one tower; `layer`: its placeholder."""
    their_layer, our_layer = f"@{theirs}.layers.{layer}", f"@{ours}.layers.{layer}"
    return (
        *around_layers(theirs, ours, config),
        *sublayer(their_layer, our_layer, "self_attn", "attention"),
        *(sublayer(their_layer, our_layer, "encoder_attn", "cross_attention") if cross else ()),
        *dense_feedforward(their_layer, our_layer),
    )


def token_tables(config: XFormerConfig) -> tuple[Rule, ...]:
    """The token table, which stands under a name for each tower, or those of both."""
    if not config.shares_token_table:
        return (
            copied("@encoder.embed_tokens.weight", "@trunk.embedding.tokens.weight"),
            copied("@decoder.embed_tokens.weight", "@decoder.embedding.tokens.weight"),
        )
    table = shared(
        ("@shared.weight", "@encoder.embed_tokens.weight", "@decoder.embed_tokens.weight"),
        ("@trunk.embedding.tokens.weight", "@decoder.embedding.tokens.weight"),
    )
    return (table,)


def backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    """Both towers, or the decoder by itself."""
    if not config.is_encoder_decoder:
        table = copied("@decoder.embed_tokens.weight", "@trunk.embedding.tokens.weight")
        return (table, *tower("decoder", "trunk", "{i}", config, cross=False))
    return (
        *token_tables(config),
        *tower("encoder", "trunk", "{i}", config, cross=False),
        *tower("decoder", "decoder", "{j}", config, cross=True),
    )


def unread_cross(config: XFormerConfig, *, bias: bool = True) -> tuple[Rule, ...]:
    """What a decoder by itself keeps for encoder states that it may be given; ours has no such layers."""
    layer, end = "@decoder.layers.{i}.encoder_attn", "*" if bias else "weight"
    names = (f"{layer}.{name}_proj.{end}" for name in ("q", "k", "v", "out"))
    return () if config.is_encoder_decoder else (only_theirs(*names, f"{layer}_layer_norm.*"),)


# Theirs reads the state at the last end token, ours at the last token, which is the same in what tokenizers make.
HIDDEN_HEAD = (
    copied("classification_head.dense.*", "transform.dense.*"),
    copied("classification_head.out_proj.*", "classifier.*"),
)
HIDDEN = {"classifier_transform": "dense", "classifier_activation": "tanh", "classifier_bias": True}
GROUPS: dict[str, Groups] = {
    "backbone": backbone,
    "cross": unread_cross,
    # the token table again, as a rule: present where the rest of the head is not
    "projection": (copied("lm_head.weight", "lm_head.decoder.weight"),),
    "lm": (row("final_logits_bias", "lm_head.decoder.bias"),),
    "sequence": HIDDEN_HEAD,
    "spans": (copied("qa_outputs.*", "classifier.*"),),
}


def heads(
    name: str,
    *,
    generator: str = "ForConditionalGeneration",
    classifiers: bool = True,
    extra: tuple[str, ...] = (),
    prefix: str = "model.",
) -> tuple[Head, ...]:
    """The class pairs of a relative whose classes start with `name`; extra: further groups of every class; prefix: of
    the base model under a head."""
    base, lm = ("backbone", *extra), ("projection", "lm")
    of_texts = (
        Head(
            f"{name}ForSequenceClassification",
            "ForSequenceClassification",
            prefix,
            (*base, "sequence"),
            two_towers=True,
            settings=HIDDEN,
        ),
        Head(f"{name}ForQuestionAnswering", "ForQuestionAnswering", prefix, (*base, "spans"), two_towers=True),
    )
    return (
        Head(f"{name}Model", "Model", "", base, two_towers=True),
        Head(f"{name}{generator}", "ForSeq2SeqLM", prefix, (*base, *lm), two_towers=True),
        *(of_texts if classifiers else ()),
        Head(
            f"{name}ForCausalLM",
            "ForCausalLM",
            prefix,
            (*base, "cross", "projection"),
            two_towers=False,
            causal=True,
        ),
    )


def to_ours(config: PreTrainedConfig, **components: Any) -> dict[str, Any]:
    """components: those of the variant that BART's has not."""
    scale = bool(getattr(config, "scale_embedding", False))  # LED has no such field
    common = {
        "layer_norm_eps": 1e-5,
        "embedding": {"type": "token", "normalize": True, "scale": scale},
        "feedforward": feedforward(config.activation_function),
        **components,
    }
    if not config.is_encoder_decoder:
        return {
            **common,
            "num_hidden_layers": config.decoder_layers,
            "num_decoder_layers": None,
            **{ours: getattr(config, theirs) for theirs, ours in DECODER_FIELDS.items()},
            "is_encoder_decoder": False,
            "is_decoder": config.is_decoder,
            "head": "linear",  # without the bias
            "labels_in_place": True,
        }
    decoder = {
        ours: getattr(config, theirs)
        for theirs, ours in DECODER_FIELDS.items()
        if getattr(config, theirs) != getattr(config, str(TOWER_FIELDS[ours]))
    }
    return {**common, "is_encoder_decoder": True, "decoder": decoder or None}


def towers_to_theirs(config: XFormerConfig) -> dict[str, Any]:
    """The fields that all relatives have."""
    decoder = config.tower("decoder") if config.is_encoder_decoder else config
    return {
        "decoder_layers": decoder.num_hidden_layers,
        **{theirs: getattr(decoder, ours) for theirs, ours in DECODER_FIELDS.items()},
        "scale_embedding": getattr(config.embedding, "scale", False),
        "activation_function": activation(config.feedforward)[0],
        "is_encoder_decoder": config.is_encoder_decoder,
        "is_decoder": config.is_decoder and not config.is_encoder_decoder,
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    dropout = config.classifier_dropout
    return {
        **towers_to_theirs(config),
        "classifier_dropout": config.hidden_dropout_prob if dropout is None else dropout,
    }


CONVERTER = register(
    Converter(
        model_type="bart",
        variant="xf_bart",
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups=GROUPS,
        heads=heads("Bart"),
        unread_alone=("encoder_layers", "encoder_attention_heads", "encoder_ffn_dim"),
        # a generation setting, which travels with the generation config
        unread=("forced_eos_token_id", "activation_function"),
        training_only=LAYER_DROPS,
    )
)
