# SPDX-License-Identifier: Apache-2.0
"""XLM: `xlm` <-> the free mix, with learned positions or sinusoids.

Languages are an `id_tables` of the embedding, with transformers' name `langs` for the input; without that input no
language is added. transformers reads `token_type_ids` as further tokens, whose vectors it adds; ours leaves them out,
as the paper does. Without an attention mask it leaves the padding token out, and ours reads every token.
Its generation puts a mask token behind the text; ours has no generation for an encoder. The heads for several choices
(two linear layers) and for answers by beam search have no counterpart, `XLMForQuestionAnsweringSimple` has one.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ...embedding.token import LANGUAGES
from ..activations import activation, feedforward
from ..base import Converter, Head, register
from ..rules import Rule, copied, only_theirs
from .bert import COMPONENTS
from .distilbert import position_rule

FIELDS = {
    "hidden_size": "emb_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "max_position_embeddings": "max_position_embeddings",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "initializer_range": "init_std",
    "layer_norm_eps": "layer_norm_eps",
}


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    several = config.use_lang_emb and config.n_langs > 1
    names = _names(config) if several else ()
    tables = ((LANGUAGES, config.n_langs),) if several and not names else ()
    embedding = {"type": "token", "normalize": True, "id_tables": tables, "languages": names, "absent_ids": "none"}
    return {
        "type_vocab_size": 0,
        "intermediate_size": 4 * config.emb_dim,
        "embedding": embedding,
        "position": "sinusoidal_absolute" if config.sinusoidal_embeddings else "learned_absolute",
        "feedforward": feedforward("gelu" if config.gelu_activation else "relu"),
        "head": {"type": "linear", "bias": True},
    }


def _names(config: PreTrainedConfig) -> tuple[str, ...]:
    """The names of the languages in the order of their numbers, where the configuration has them all."""
    numbers = getattr(config, "lang2id", None) or {}
    complete = sorted(numbers.values()) == list(range(config.n_langs))
    return tuple(sorted(numbers, key=lambda name: numbers[name])) if complete else ()


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    tables, names = dict(getattr(config.embedding, "all_id_tables", ())), getattr(config.embedding, "languages", ())
    named = {"id2lang": dict(enumerate(names)), "lang2id": {name: place for place, name in enumerate(names)}}
    return {
        **(named if names else {}),
        "n_langs": tables.get(LANGUAGES, 1),
        "gelu_activation": activation(config.feedforward)[0] == "gelu",
        "sinusoidal_embeddings": config.position.type == "sinusoidal_absolute",
    }


def _backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    ours = "@trunk.layers.{i}"
    languages = copied("@lang_embeddings.weight", f"@trunk.embedding.id_tables.{LANGUAGES}.weight")
    return (
        copied("@embeddings.weight", "@trunk.embedding.tokens.weight"),
        position_rule("@position_embeddings.weight", config),
        *((languages,) if LANGUAGES in config.embedding.inputs else ()),
        copied("@layer_norm_emb.*", "@trunk.embedding.norm.*"),
        copied("@attentions.{i}.q_lin.*", f"{ours}.attention.q_proj.*"),
        copied("@attentions.{i}.k_lin.*", f"{ours}.attention.k_proj.*"),
        copied("@attentions.{i}.v_lin.*", f"{ours}.attention.v_proj.*"),
        copied("@attentions.{i}.out_lin.*", f"{ours}.attention.o_proj.*"),
        copied("@layer_norm1.{i}.*", f"{ours}.attention_residual.norm.*"),
        copied("@ffns.{i}.lin1.*", f"{ours}.feedforward.up_proj.*"),
        copied("@ffns.{i}.lin2.*", f"{ours}.feedforward.down_proj.*"),
        copied("@layer_norm2.{i}.*", f"{ours}.feedforward_residual.norm.*"),
    )


BEAM_SEARCH = (
    only_theirs(
        "qa_outputs.start_logits.dense.*",
        "qa_outputs.end_logits.dense_0.*",
        "qa_outputs.end_logits.LayerNorm.*",
        "qa_outputs.end_logits.dense_1.*",
        "qa_outputs.answer_class.dense_0.*",
    ),
    only_theirs("qa_outputs.answer_class.dense_1.weight"),
)

CONVERTER = register(
    Converter(
        model_type="xlm",
        variant="xformer",
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={
            "backbone": _backbone,
            # the token table again, as a rule: present where the bias is not
            "projection": (copied("pred_layer.proj.weight", "lm_head.decoder.weight"),),
            "mlm": (copied("pred_layer.proj.bias", "lm_head.decoder.bias"),),
            "sequence": (copied("sequence_summary.summary.*", "classifier.*"),),
            "token": (copied("classifier.*", "classifier.*"),),
            "spans": (copied("qa_outputs.*", "classifier.*"),),
            "beam_search": BEAM_SEARCH,
            "choice": (only_theirs("sequence_summary.summary.*", "logits_proj.*"),),
        },
        heads=(
            Head("XLMModel", "Model", "", ("backbone",)),
            Head("XLMWithLMHeadModel", "ForMaskedLM", "transformer.", ("backbone", "projection", "mlm")),
            Head(
                "XLMForSequenceClassification",
                "ForSequenceClassification",
                "transformer.",
                ("backbone", "sequence"),
                pooling="first",
            ),
            Head("XLMForTokenClassification", "ForTokenClassification", "transformer.", ("backbone", "token")),
            Head("XLMForQuestionAnsweringSimple", "ForQuestionAnswering", "transformer.", ("backbone", "spans")),
            Head("XLMForQuestionAnswering", "Model", "transformer.", ("backbone", "beam_search")),
            Head("XLMForMultipleChoice", "Model", "transformer.", ("backbone", "choice")),
        ),
        unread=(
            # of languages, where there are none; else the rows of the table say it
            "n_langs",
            "use_lang_emb",
            # of the tokenizer, of generation and of heads that do not convert
            "unk_index",
            "mask_index",
            "mask_token_id",
            "lang_id",
            "lang2id",
            "id2lang",
            "start_n_top",
            "end_n_top",
        ),
        training_only=("embed_init_std", "summary_first_dropout"),
        native=False,
        components=COMPONENTS
        | {
            "position": ("learned_absolute", "sinusoidal_absolute"),
            "feedforward": ("relu", "gelu"),
            "head": ("linear",),
        },
    )
)
