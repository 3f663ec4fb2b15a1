# SPDX-License-Identifier: Apache-2.0
"""Models that read images."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.utils import can_return_tuple

from ..attention.shared.multihead_block import MultiheadPooling
from ..core import outputs
from ..core.losses import class_loss
from ..modeling_base import XFormerPreTrainedModel, objects_for_heads
from ..modeling_xformer import XFormerModel
from .classifier_transform import build_transform
from .label_layer import LabelLayer


class XFormerImageModel(XFormerModel):
    """The bare X-former of images: hidden states of the patches without a head."""

    main_input_name = "pixel_values"
    input_modalities = ["image"]

    @objects_for_heads
    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        hidden_patches: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> outputs.XFormerModelOutput:
        """
        Args:
            pixel_values: [B, C, H, W], as an image processor gives them.
            interpolate_pos_encoding: allow another H and W than the config's `image_size`; positions are resized.
            hidden_patches: which patches are hidden [B, N] boolean, and the vector that stands in their place [D].
        """
        if pixel_values is None:
            raise ValueError("Give `pixel_values` [batch, channels, height, width].")
        size = tuple(pixel_values.shape[2:])
        if size != self.config.image_shape and any(
            layer.attention.token_grid(layer) is not None for layer in self.config.layer_configs()
        ):
            raise ValueError(
                f"The image has {size[0]} x {size[1]} pixels, but attention {self.config.attention.type!r} reads"
                f" images as the grid of {self.config.image_shape[0]} x {self.config.image_shape[1]}; resize it."
            )
        embeds, further = self.trunk.embedding.read(pixel_values, interpolate_pos_encoding, hidden_patches)
        return super().forward(inputs_embeds=embeds, **further, **kwargs)


class XFormerForImageClassification(XFormerPreTrainedModel):
    """Classification of whole images: a linear map of the class token's state, or of the patches' mean."""

    main_input_name = "pixel_values"
    input_modalities = ["image"]
    accepts_loss_kwargs = False  # a mean over images: Trainer has to divide it by accumulation steps

    def __init__(self, config):
        config = self.shaped(config, is_decoder=False, is_encoder_decoder=False)
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = XFormerImageModel(config, add_pooling_layer=False)
        self.model.under_a_head = True
        self.transform = build_transform(config)
        self.pooling = MultiheadPooling(config) if config.classifier_pooling == "attention" else None
        self.dropout = nn.Dropout(config.classifier_dropout or 0.0)
        width = config.stack.output_width(config) if self.pooling is None else config.hidden_size
        self.classifier = LabelLayer(width, config.num_labels)
        self.post_init()

    def pooled(self, hidden_states: Tensor) -> Tensor:
        """[B, T, D] -> [B, D] by `classifier_pooling`: `first` and `auto` are the class token, `mean` is that of all
        patches; without a class token `auto` is the mean. What the transform makes of it, or the mean of what it
        makes of every patch (`late_mean`), or what attention reads of all patches (`attention`)."""
        embedding, how = self.config.embedding, self.config.classifier_pooling
        transform = nn.Identity() if self.transform is None else self.transform
        if self.pooling is not None:
            return transform(self.pooling(hidden_states[:, embedding.leading_tokens :]))
        if how == "late_mean":
            return transform(hidden_states[:, embedding.leading_tokens :]).mean(dim=1)
        if how == "mean" or (how == "auto" and not embedding.class_token):
            return transform(hidden_states[:, embedding.leading_tokens :].mean(dim=1))
        return transform(hidden_states[:, -1 if how == "last" else 0])

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        **kwargs: Any,
    ) -> outputs.XFormerImageClassifierOutput:
        """pixel_values: [B, C, H, W]; labels: [B] class ids, [B] or [B, num_labels] numbers (regression), or
        [B, num_labels] 0/1 (multi-label). logits: [B, num_labels]."""
        base = self.model(pixel_values, interpolate_pos_encoding=interpolate_pos_encoding, **kwargs)
        logits = self.classifier(self.dropout(self.pooled(base.last_hidden_state)))
        loss = None
        if labels is not None:
            loss = class_loss(self, labels, logits)
        return outputs.XFormerImageClassifierOutput(
            loss=self.with_aux_losses(loss, base),
            logits=logits,
            hidden_states=base.hidden_states,
            attentions=base.attentions,
            aux_losses=self.reported(base.aux_losses, loss),
        )
