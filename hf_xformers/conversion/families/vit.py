# SPDX-License-Identifier: Apache-2.0
"""Vision Transformers: `vit` and `deit` <-> `xf_vision_transformer`.

transformers' hidden states end with what the last layer gives, ours with what the final norm makes of it. Heads that
reconstruct masked patches convert where their squares are the patches (`encoder_stride`). DeiT's two classifiers,
whose outputs are averaged, have no counterpart: the bare model is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor
from transformers import PreTrainedConfig

from ...configuration_xformer import XFormerConfig
from ..activations import activation, feedforward
from ..base import Converter, Head, register
from ..rules import Operation, Rule, copied, only_theirs, row

FIELDS = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "hidden_dropout_prob": "hidden_dropout_prob",
    "attention_probs_dropout_prob": "attention_probs_dropout_prob",
    "initializer_range": "initializer_range",
    "layer_norm_eps": "layer_norm_eps",
    "image_size": "image_size",
    "patch_size": "patch_size",
    "num_channels": "num_channels",
    "pooler_activation": "pooler_act",
}


def _vector(tensors: list[Tensor]) -> list[Tensor]:
    return [tensors[0].flatten()]


def _only_token(tensors: list[Tensor]) -> list[Tensor]:
    return [tensors[0].view(1, 1, -1)]


TOKEN = Operation("row of a matrix", _vector, _only_token, plain=True)  # [1, 1, D] and [D]


def backbone(config: XFormerConfig) -> tuple[Rule, ...]:
    layer, mine, embedding = "@layers.{i}", "@trunk.layers.{i}", "@trunk.embedding"
    second = Rule(("@embeddings.distillation_token",), (f"{embedding}.distillation_token",), TOKEN)
    return (
        Rule(("@embeddings.cls_token",), (f"{embedding}.class_token",), TOKEN),
        *((second,) if config.embedding.distillation_token else ()),
        row("@embeddings.position_embeddings", f"{embedding}.positions"),
        copied("@embeddings.patch_embeddings.projection.*", f"{embedding}.tokens.*"),
        *(copied(f"{layer}.attention.{a}_proj.*", f"{mine}.attention.{a}_proj.*") for a in "qkvo"),
        copied(f"{layer}.layernorm_before.*", f"{mine}.attention_residual.norm.*"),
        copied(f"{layer}.layernorm_after.*", f"{mine}.feedforward_residual.norm.*"),
        copied(f"{layer}.mlp.fc1.*", f"{mine}.feedforward.up_proj.*"),
        copied(f"{layer}.mlp.fc2.*", f"{mine}.feedforward.down_proj.*"),
        copied("@layernorm.*", "@trunk.final_norm.*"),
    )


def pixels(config: XFormerConfig) -> tuple[Rule, ...]:
    """What stands for a hidden patch, and the map from a patch's state to its pixels, a convolution of theirs."""
    read: Any = config
    outputs = read.num_channels * read.patch_shape[0] * read.patch_shape[1]

    def as_matrix(tensors: list[Tensor]) -> list[Tensor]:
        rows = len(tensors[0])
        if rows != outputs:
            raise ValueError(
                f"it makes {rows} pixels of each patch, which has {outputs}, as `encoder_stride` is not `patch_size`;"
                " convert the bare model with `head='Model'`"
            )
        return [tensors[0].flatten(1)]

    def as_convolution(tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0][:, :, None, None]]

    convolved = Operation("convolution of one pixel", as_matrix, as_convolution, plain=True)
    return (
        Rule(("@embeddings.mask_token",), ("decoder.mask_token",), TOKEN),
        Rule(("decoder.0.weight",), ("decoder.pixels.weight",), convolved),
        copied("decoder.0.bias", "decoder.pixels.bias"),
    )


def _square_patches(config: XFormerConfig) -> str | None:
    tall, wide = cast(Any, config).patch_shape
    return None if tall == wide else f"patches of {tall} x {wide} pixels are no squares, which alone it reconstructs"


def _to_ours(distilled: bool) -> Callable[[PreTrainedConfig], dict[str, Any]]:
    def to_ours(config: PreTrainedConfig) -> dict[str, Any]:
        return {
            "embedding": {"type": "patch", "distillation_token": distilled},
            "feedforward": feedforward(config.hidden_act),
        }

    return to_ours


def to_theirs(config: XFormerConfig) -> dict[str, Any]:
    tall, wide = cast(Any, config).patch_shape
    return {
        **({"encoder_stride": tall} if tall == wide else {}),
        "hidden_act": activation(config.feedforward)[0],
        "qkv_bias": True,
        "pooler_output_size": config.hidden_size,
    }


VIT = register(
    Converter(
        model_type="vit",
        variant="xf_vision_transformer",
        fields=FIELDS,
        to_ours=_to_ours(distilled=False),
        to_theirs=to_theirs,
        groups={
            "backbone": backbone,
            "pooler": (copied("@pooler.dense.*", "@pooler.dense.*"),),
            "classifier": (copied("classifier.*", "classifier.*"),),
            "pixels": pixels,
        },
        heads=(
            Head("ViTModel", "Model", "", ("backbone", "pooler")),
            Head(
                "ViTForImageClassification",
                "ForImageClassification",
                "vit.",
                ("backbone", "classifier"),
                pooling="first",
            ),
            Head(
                "ViTForMaskedImageModeling",
                "ForMaskedImageModeling",
                "vit.",
                ("backbone", "pixels"),
                refuses=_square_patches,
            ),
        ),
        # the stride is checked with the weights of the head that reconstructs patches
        unread=("encoder_stride", "hidden_act"),
        # of texts
        unread_ours=("vocab_size", "max_position_embeddings"),
    )
)


register(
    dataclasses.replace(
        VIT,
        model_type="deit",
        native=False,
        to_ours=_to_ours(distilled=True),
        groups={**VIT.groups, "teacher": (only_theirs("cls_classifier.*", "distillation_classifier.*"),)},
        heads=(
            *(head.renamed("ViT", "DeiT", "deit.") for head in VIT.heads),
            Head("DeiTForImageClassificationWithTeacher", "Model", "deit.", ("backbone", "pooler", "teacher")),
        ),
    )
)
