# SPDX-License-Identifier: Apache-2.0
"""Transformer-XL: `transfo-xl` -> `xf_transformer_xl` with an adaptive vocabulary; one way, since transformers has no
class for it any more.

Its last release let the first segment attend to a memory of zeros, of which neither the paper nor the code that the
model was trained with knows; here a text begins without memory, so outputs equal that release's from the segment on at
which the memory is full.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..base import Converter, Head, register
from ..layouts.transfo_xl import TransfoXLLMHeadModel, TransfoXLModel
from ..rules import Rule, copied, fused_by_head, only_theirs, shared

FIELDS = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "head_dim": "d_head",
    "intermediate_size": "d_inner",
    "max_position_embeddings": "tgt_len",
    "hidden_dropout_prob": "dropout",
    "activation_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "dropatt",
    "layer_norm_eps": "layer_norm_epsilon",
    "initializer_range": "init_std",
}
_LAYER, _OURS = "@layers.{i}.", "@trunk.layers.{i}."
_TIED = {"after_first": [False, True], "all": [True, True], "none": [False, False]}


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    for name, wanted in {"attn_type": 0, "pre_lnorm": False, "adaptive": True, "tie_weight": True}.items():
        if getattr(config, name) != wanted:
            raise ValueError(
                f"A 'transfo-xl' model with {name}={getattr(config, name)!r} does not convert: no checkpoint of it was"
                f" published, and {name}={wanted!r} is what converts."
            )
    if config.div_val < 2:
        raise ValueError(
            f"A 'transfo-xl' model with div_val={config.div_val!r} does not convert: its clusters share one table;"
            " those with div_val of 2 and more do."
        )
    if config.mem_len < 1:
        raise ValueError(f"A 'transfo-xl' model converts with its memory, got mem_len={config.mem_len!r}; set it.")
    if config.cutoffs and config.cutoffs[-1] >= config.vocab_size:
        raise ValueError(
            f"cutoffs={config.cutoffs!r} have to lie within the vocabulary of {config.vocab_size}; correct"
            " config.json."
        )
    clusters = {"cutoffs": tuple(config.cutoffs), "factor": config.div_val, "width": config.d_embed}
    return {
        "embedding": {"type": "adaptive", "scale": True, **clusters},
        "head": {"type": "adaptive", "bias": True, "tied_projections": _tied_projections(config), **clusters},
        "attention": {
            "type": "transformer_xl",
            "bias": False,
            "share_biases": not config.untie_r,
            "clamp": config.clamp_len if config.clamp_len > 0 else None,
            "reach": config.mem_len - 1 if config.same_length else None,
        },
        "stack": {"type": "segment_recurrent", "memory_length": config.mem_len},
        "is_decoder": True,
    }


def _tied_projections(config: PreTrainedConfig) -> str:
    """How our head says their `tie_projs`."""
    for name, (first, later) in _TIED.items():
        if list(config.tie_projs) == [first] + [later] * len(config.cutoffs):
            return name
    raise ValueError(
        f"tie_projs={config.tie_projs!r} does not convert: the projections of all clusters, of all but the first, or"
        " of none are tied."
    )


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    embedding, head, attention = (config.embedding.to_dict(), config.head.to_dict(), config.attention.to_dict())
    first, later = _TIED[head["tied_projections"]]
    return {
        "cutoffs": list(embedding["cutoffs"]),
        "div_val": embedding["factor"],
        "d_embed": embedding["width"],
        "tie_projs": [first] + [later] * len(embedding["cutoffs"]),
        "untie_r": not attention["share_biases"],
        "clamp_len": attention["clamp"] or -1,
        "same_length": attention["reach"] is not None,
        "mem_len": config.stack.to_dict()["memory_length"],
    }


def _backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    indices = range(len(config.embedding.clusters(config) or ()))
    biases = (("r_w_bias", "content_bias"), ("r_r_bias", "position_bias"))
    if config.attention.to_dict()["share_biases"]:
        layers = range(config.num_hidden_layers)
        terms = tuple(
            shared(
                (f"@{theirs}", *(f"@layers.{index}.dec_attn.{theirs}" for index in layers)),
                (f"@trunk.layers.0.attention.{ours}",),
            )
            for theirs, ours in biases
        )
    else:
        terms = tuple(copied(f"{_LAYER}dec_attn.{theirs}", f"{_OURS}attention.{ours}") for theirs, ours in biases)
    queries, keys, values = (f"{_OURS}attention.{name}_proj.weight" for name in "qkv")
    return (
        *(copied(f"@word_emb.emb_layers.{i}.weight", f"@trunk.embedding.tokens.tables.{i}.weight") for i in indices),
        *(copied(f"@word_emb.emb_projs.{i}", f"@trunk.embedding.tokens.projections.{i}.weight") for i in indices),
        fused_by_head(f"{_LAYER}dec_attn.qkv_net.weight", queries, keys, values, groups=1),
        copied(f"{_LAYER}dec_attn.o_net.weight", f"{_OURS}attention.o_proj.weight"),
        copied(f"{_LAYER}dec_attn.r_net.weight", f"{_OURS}attention.r_proj.weight"),
        *terms,
        copied(f"{_LAYER}dec_attn.layer_norm.*", f"{_OURS}attention_residual.norm.*"),
        copied(f"{_LAYER}pos_ff.CoreNet.0.*", f"{_OURS}feedforward.up_proj.*"),
        copied(f"{_LAYER}pos_ff.CoreNet.3.*", f"{_OURS}feedforward.down_proj.*"),
        copied(f"{_LAYER}pos_ff.layer_norm.*", f"{_OURS}feedforward_residual.norm.*"),
    )


def _head(config: XFormerConfig) -> tuple[Rule, ...]:
    indices = range(len(config.head.clusters(config) or ()))
    tied = config.head.tied(config)

    def output(theirs: str, table: str, ours: str) -> Rule:
        """A tensor of the output, equal to the input's `table` where the two are tied."""
        if ours in tied:
            return shared((theirs, f"@word_emb.{table}"), (f"lm_head.{ours}",))
        return copied(theirs, f"lm_head.{ours}")

    return (
        *(output(f"crit.out_layers.{i}.weight", f"emb_layers.{i}.weight", f"tables.{i}.weight") for i in indices),
        *(copied(f"crit.out_layers.{i}.bias", f"lm_head.tables.{i}.bias") for i in indices),
        *(output(f"crit.out_projs.{i}", f"emb_projs.{i}", f"projections.{i}.weight") for i in indices),
        copied("crit.cluster_weight", "lm_head.cluster.weight"),
        copied("crit.cluster_bias", "lm_head.cluster.bias"),
    )


CONVERTER = register(
    Converter(
        model_type="transfo-xl",
        variant="xf_transformer_xl",
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={
            "backbone": _backbone,
            "frequencies": (only_theirs("@pos_emb.inv_freq"),),
            "lm": _head,
        },
        heads=(
            Head("TransfoXLModel", "Model", "", ("backbone",)),
            Head("TransfoXLLMHeadModel", "ForCausalLM", "transformer.", ("backbone", "lm")),
        ),
        # what `to_ours` checks, what starts a training, and what only a call of that code reads
        unread=(
            *("attn_type", "pre_lnorm", "adaptive", "tie_weight", "proj_share_all_but_first", "clamp_len"),
            *("init", "init_range", "proj_init_std", "sample_softmax", "ext_len"),
        ),
        native=False,
        layouts=(TransfoXLModel, TransfoXLLMHeadModel),
    )
)
