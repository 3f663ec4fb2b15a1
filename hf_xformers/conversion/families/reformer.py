# SPDX-License-Identifier: Apache-2.0
"""Reformer: `reformer` <-> `xf_reformer`, with LSH layers, local layers, or both.

LSH layers read what transformers' do where both hash with the same rotations: with a `hash_seed`, which draws the same
ones in every call, on a CPU and in float32. Without one transformers draws others in each call, and ours keeps those
of its checkpoint. LSH decoders read the released code's chunks, whose borders later tokens move, and cannot generate.
A token that finds itself alone in several rounds is weighted there by exp(-1e5 - logsumexp), which float32 rounds by
up to 0.4 %; that concerns a text's first tokens in a decoder with several hashes.

In an encoder the first local chunk reads the last one of the text; transformers counts padding of the batch as text
there, ours does not: the two agree in rows without padding. Positions count padding on the left in transformers. Where
a text has fewer chunks than a token reads (possible with more than one neighbor), transformers counts some of them
twice. transformers has dropout where ours has none, and another way round; that acts in training alone.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ...compat import reformer_adds_bias
from ...configuration_xformer import XFormerConfig
from ...core.components import build_spec
from ..activations import activation, feedforward
from ..base import Converter, Head, register
from ..rules import Operation, Rule, copied, only_ours, only_theirs

FIELDS = {
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "intermediate_size": "feed_forward_size",
    "hidden_dropout_prob": "hidden_dropout_prob",
    "classifier_dropout": "classifier_dropout",
    "max_position_embeddings": "max_position_embeddings",
    "initializer_range": "initializer_range",
    "layer_norm_eps": "layer_norm_eps",
    "is_decoder": "is_decoder",
}


# ------------------------------------------------------------------------------------------------------ configs


def _position(config: PreTrainedConfig) -> dict[str, Any]:
    if not config.axial_pos_embds:
        return {"type": "learned_absolute"}
    return {
        "type": "axial",
        "shape": tuple(config.axial_pos_shape),
        "widths": tuple(config.axial_pos_embds_dim),
        "std": config.axial_norm_std,
    }


def _lsh(config: PreTrainedConfig) -> dict[str, Any]:
    if config.num_buckets is None:
        raise ValueError(
            "num_buckets=None does not convert: transformers sets it by the first long text that a model reads; set"
            " it to that number."
        )
    buckets = config.num_buckets
    return {
        "type": "reformer",
        "scale": 1.0,  # keys are divided by sqrt(d) there
        "num_hashes": config.num_hashes,
        "num_buckets": buckets if isinstance(buckets, int) else tuple(buckets),
        "chunk_length": config.lsh_attn_chunk_length,
        "chunks_before": config.lsh_num_chunks_before,
        "chunks_after": config.lsh_num_chunks_after,
        "sets": "chunk",
        "causal_form": "paper" if config.is_decoder else "strict",
        "hash_seed": config.hash_seed or 0,
        "share_rotations": config.hash_seed is not None,
    }


def _local(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        "type": "block_local_attention",
        "bias": False,
        "block_size": config.local_attn_chunk_length,
        "blocks_before": config.local_num_chunks_before,
        "blocks_after": config.local_num_chunks_after,
        "ring": not config.is_decoder and config.local_num_chunks_before + config.local_num_chunks_after > 0,
    }


_KINDS = {"lsh": _lsh, "local": _local}
# what layers of a kind alone read
_OWN_FIELDS = {
    "lsh": (
        *("hash_seed", "num_hashes", "num_buckets", "lsh_attn_chunk_length", "lsh_attention_probs_dropout_prob"),
        *("lsh_num_chunks_before", "lsh_num_chunks_after"),
    ),
    "local": (
        *("local_attn_chunk_length", "local_attention_probs_dropout_prob"),
        *("local_num_chunks_before", "local_num_chunks_after"),
    ),
}
_DROPOUTS = {"lsh": "lsh_attention_probs_dropout_prob", "local": "local_attention_probs_dropout_prob"}


def _is_lsh_decoder(config: PreTrainedConfig) -> bool:
    return bool(config.is_decoder) and "lsh" in config.attn_layers


def _check_chunks(config: PreTrainedConfig) -> None:
    """Texts are padded to a common multiple of both chunk lengths there, whose chunks of padding LSH rounds and the
    local layers of an encoder read in a ring."""
    if {*config.attn_layers} != {"lsh", "local"}:
        return
    lsh, local = config.lsh_attn_chunk_length, config.local_attn_chunk_length
    whole = math.lcm(lsh, local)
    if whole != lsh or (not config.is_decoder and whole != local):
        wanted = "a divisor of it" if config.is_decoder else "the same number"
        raise ValueError(
            f"lsh_attn_chunk_length={lsh} and local_attn_chunk_length={local} do not convert together: transformers"
            f" would pad texts with whole chunks, which count there; make the second {wanted}."
        )


def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
    unknown = {*config.attn_layers} - {*_KINDS}
    if unknown:
        raise ValueError(f"attn_layers has {sorted(unknown)}, but Reformer's layers are 'lsh' or 'local'.")
    _check_chunks(config)
    layers = [
        {"attention": _KINDS[kind](config), "attention_probs_dropout_prob": getattr(config, _DROPOUTS[kind])}
        for kind in config.attn_layers
    ]
    alike = all(layer == layers[0] for layer in layers)
    own_width = config.attention_head_size * config.num_attention_heads != config.hidden_size
    return {
        **layers[0],
        "per_layer_config": None if alike else dict(enumerate(layers)),
        "num_hidden_layers": len(layers),
        "head_dim": config.attention_head_size if own_width else None,
        "activation_dropout_prob": config.hidden_dropout_prob,
        "add_pooler": True,
        "pooler_activation": "tanh",
        **({"use_cache": False} if _is_lsh_decoder(config) else {}),
        "initializer": "normal",
        "embedding": "token",
        "position": _position(config),
        "residual": "pre_ln",
        "feedforward": feedforward(config.hidden_act),
        "stack": {"type": "reversible", "output": "concatenation"},
        "head": {"type": "linear", "bias": reformer_adds_bias()},
    }


def _axial(config: XFormerConfig) -> dict[str, Any]:
    position = config.position
    if position.type != "axial":
        return {"axial_pos_embds": False}
    shape, widths = position.grid(config), position.axis_widths(config)
    if len(shape) != 2 or position.combine != "concatenation":
        raise ValueError(
            f"position 'axial' of {len(shape)} axes with combine={position.combine!r} has no counterpart in"
            " transformers: 'reformer' models concatenate the vectors of two axes."
        )
    return {
        "axial_pos_embds": True,
        "axial_pos_shape": shape,
        "axial_pos_embds_dim": widths,
        "axial_norm_std": position.std,
    }


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    trunk = config.tower("trunk")
    views = [trunk.layer(index) for index in range(trunk.num_hidden_layers)]
    if not views:
        raise ValueError("num_hidden_layers=0 has no counterpart in transformers: a 'reformer' model has some.")
    kinds = ["lsh" if view.attention.type == "reformer" else "local" for view in views]
    head = {"type": "linear", "bias": getattr(config.head, "bias", False) and reformer_adds_bias()}
    if config.head != build_spec("head", head):
        raise ValueError(
            f"head={config.head.to_dict()} has no counterpart in transformers: a 'reformer' model has {head} there."
        )
    fields: dict[str, Any] = {
        "attn_layers": kinds,
        "attention_head_size": config.head_width,
        "hidden_act": activation(config.feedforward)[0],
        **_axial(config),
    }
    # layers of a kind are alike there: the first says what all have, and the config's way back tells others
    for kind, view in reversed(list(zip(kinds, views, strict=True))):
        spec = view.attention
        fields[_DROPOUTS[kind]] = view.attention_probs_dropout_prob
        if kind == "local":
            fields |= {
                "local_attn_chunk_length": spec.block_size,
                "local_num_chunks_before": spec.blocks_before,
                "local_num_chunks_after": spec.blocks_after,
            }
            continue
        if spec.num_buckets is None:
            raise ValueError(
                "attention 'reformer' with `num_buckets=None` has no counterpart in transformers, whose models have a"
                " number of buckets; set it."
            )
        fields |= {
            "num_hashes": spec.num_hashes,
            "num_buckets": spec.num_buckets if isinstance(spec.num_buckets, int) else list(spec.num_buckets),
            "lsh_attn_chunk_length": spec.chunk_length,
            "lsh_num_chunks_before": spec.chunks_before,
            "lsh_num_chunks_after": spec.chunks_after,
            "hash_seed": spec.hash_seed if spec.share_rotations else None,
            **({"use_cache": True} if config.is_decoder else {}),
        }
    return fields


def _idle(config: PreTrainedConfig) -> tuple[str, ...]:
    of_layers = [name for kind, names in _OWN_FIELDS.items() if kind not in config.attn_layers for name in names]
    of_grid = () if config.axial_pos_embds else ("axial_pos_shape", "axial_pos_embds_dim", "axial_norm_std")
    return (*of_layers, *of_grid, *(("use_cache",) if _is_lsh_decoder(config) else ()))


def _remarks(config: PreTrainedConfig) -> tuple[str, ...]:
    found = []
    if _is_lsh_decoder(config):
        found.append("LSH layers of a decoder read chunks whose borders later tokens move: ours cannot generate text")
    lsh, local = "lsh" in config.attn_layers, "local" in config.attn_layers
    if lsh and config.hash_seed is None:
        found.append("hash_seed=None hashes with new rotations in every call of transformers; ours keeps its own")
    neighbours = (
        (lsh, "lsh", config.lsh_num_chunks_before + config.lsh_num_chunks_after),
        (local, "local", config.local_num_chunks_before + config.local_num_chunks_after),
    )
    for there, kind, count in neighbours:
        if there and count > 1:
            found.append(
                f"{kind} layers read {count + 1} chunks, some of them twice in transformers where a text has fewer"
            )
    return tuple(found)


# ------------------------------------------------------------------------------------------------------ weights


def _rotations(config: XFormerConfig, index: int) -> Rule:
    """They draw theirs anew in every call, from `hash_seed`; ours are a buffer."""
    view = config.tower("trunk").layer(index)
    spec, name = view.attention, f"@trunk.layers.{index}.attention.rotations"
    if not spec.share_rotations:
        return only_ours(name)

    def drawn() -> Tensor:
        half = sum(spec.bucket_factors(view)) // 2
        shape = (view.num_attention_heads, view.head_width, spec.num_hashes, half)
        table = torch.randn(shape, generator=torch.Generator().manual_seed(spec.hash_seed))
        return table.permute(2, 0, 1, 3).contiguous()

    def check(tensors: list[Tensor]) -> list[Tensor]:
        if not torch.equal(tensors[0].float().cpu(), drawn().to(tensors[0].dtype).float()):
            raise ValueError(f"it is not what hash_seed={spec.hash_seed} draws, and the other side draws it so")
        return []

    return Rule((), (name,), Operation("drawn from `hash_seed`", lambda _: [drawn()], check))


def _layer(config: XFormerConfig, index: int) -> tuple[Rule, ...]:
    theirs, ours = f"@encoder.layers.{index}", f"@trunk.layers.{index}"
    attention, mine = f"{theirs}.attention.self_attention", f"{ours}.attention"
    if config.tower("trunk").layer(index).attention.type == "reformer":
        projections: tuple[Rule, ...] = (
            copied(f"{attention}.query_key.weight", f"{mine}.q_proj.weight"),
            _rotations(config, index),
        )
    else:
        projections = (
            copied(f"{attention}.query.weight", f"{mine}.q_proj.weight"),
            copied(f"{attention}.key.weight", f"{mine}.k_proj.weight"),
        )
    return (
        *projections,
        copied(f"{attention}.value.weight", f"{mine}.v_proj.weight"),
        copied(f"{theirs}.attention.output.dense.weight", f"{mine}.o_proj.weight"),
        copied(f"{theirs}.attention.layer_norm.*", f"{ours}.attention_residual.norm.*"),
        copied(f"{theirs}.feed_forward.layer_norm.*", f"{ours}.feedforward_residual.norm.*"),
        copied(f"{theirs}.feed_forward.dense.dense.*", f"{ours}.feedforward.up_proj.*"),
        copied(f"{theirs}.feed_forward.output.dense.*", f"{ours}.feedforward.down_proj.*"),
    )


def _axis(axis: int) -> Rule:
    """Their tables have an axis of length 1 for the other side of the grid."""
    widened = Operation(
        "row or column of a grid",
        lambda t: [t[0].squeeze(1 - axis)],
        lambda t: [t[0].unsqueeze(1 - axis)],
        plain=True,
    )
    name = f"@embeddings.position_embeddings.weights.{axis}"
    return Rule((name,), (f"@trunk.position.tables.{axis}",), widened)


def _backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    positions: tuple[Rule, ...] = (
        copied("@embeddings.position_embeddings.embedding.weight", "@trunk.position.table.weight"),
    )
    if config.position.type == "axial":
        positions = (_axis(0), _axis(1))
    layers = [rule for index in range(config.num_hidden_layers) for rule in _layer(config, index)]
    return (
        copied("@embeddings.word_embeddings.weight", "@trunk.embedding.tokens.weight"),
        *positions,
        *layers,
        copied("@encoder.layer_norm.*", "@trunk.final_norm.*"),
    )


def _tokens(config: XFormerConfig) -> tuple[Rule, ...]:
    # `lm_head.bias` is one that nothing adds; that of `decoder` starts at zero, where ours has none.
    name = "lm_head.decoder.bias"
    bias = copied(name, name) if config.head.bias else only_theirs(name)
    return (
        copied("lm_head.decoder.weight", "lm_head.decoder.weight"),
        only_theirs("lm_head.bias"),
        *((bias,) if reformer_adds_bias() else ()),
    )


CONVERTER = register(
    Converter(
        model_type="reformer",
        variant="xf_reformer",
        fields=FIELDS,
        to_ours=to_ours,
        to_theirs=to_theirs,
        groups={
            "backbone": _backbone,
            "lm": _tokens,
            "sequence": (
                copied("classifier.dense.*", "@pooler.dense.*"),
                copied("classifier.out_proj.*", "classifier.*"),
            ),
            "spans": (copied("qa_outputs.*", "classifier.*"),),
        },
        heads=(
            Head("ReformerModel", "Model", "", ("backbone",), settings={"add_pooler": False}),
            Head("ReformerModelWithLMHead", "ForCausalLM", "reformer.", ("backbone", "lm"), causal=True),
            Head("ReformerForMaskedLM", "ForMaskedLM", "reformer.", ("backbone", "lm"), causal=False),
            Head(
                "ReformerForSequenceClassification",
                "ForSequenceClassification",
                "reformer.",
                ("backbone", "sequence"),
                causal=False,
            ),
            Head("ReformerForQuestionAnswering", "ForQuestionAnswering", "reformer.", ("backbone", "spans")),
        ),
        training_only=("hidden_dropout_prob",),
        unread=("chunk_size_lm_head", "hidden_act"),
        unread_ours=("head",),  # without a bias, theirs is zero
        per_layer=True,
        components={"attention": ("reformer", "block_local_attention"), "position": ("axial", "learned_absolute")},
        remarks=_remarks,
        idle=_idle,
    )
)
