# SPDX-License-Identifier: Apache-2.0
"""Masked image modeling: patches are hidden, and the model says what their pixels were."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import can_return_tuple

from ..core import outputs
from ..core.reading_weights import weight_of
from ..core.weight_decay import Undecayed
from ..modeling_base import XFormerPreTrainedModel
from .image import XFormerImageModel


class PixelDecoder(Undecayed, nn.Module):
    """The vector that stands for a hidden patch [D], and a linear map from a patch's state to its pixels (Xie et al.
    2022, SimMIM, arXiv 2111.09886, sections 3.1 and 3.3)."""

    undecayed = ("mask_token",)

    def __init__(self, config, width: int):
        super().__init__()
        self.mask_token = nn.Parameter(torch.empty(config.hidden_size))
        self.patch, self.channels = config.patch_shape, config.num_channels
        self.pixels = nn.Linear(width, self.channels * self.patch[0] * self.patch[1])

    def initialize(self, config, init) -> None:
        init.normal_(self.mask_token, mean=0.0, std=config.initializer_range)

    def forward(self, states: Tensor, grid: tuple[int, int]) -> Tensor:
        """States [B, N, D] of the patches of a grid, row by row -> images [B, C, H, W]."""
        pixels = self.pixels(states).unflatten(-1, (self.channels, *self.patch)).unflatten(1, grid)
        return pixels.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)  # [B, C, rows, P, columns, P]


class XFormerForMaskedImageModeling(XFormerPreTrainedModel):
    """Masked image modeling: the pixels of hidden patches, from the others."""

    main_input_name = "pixel_values"
    input_modalities = ["image"]
    accepts_loss_kwargs = False  # a mean over hidden patches: Trainer has to divide it by accumulation steps

    def __init__(self, config):
        config = self.shaped(config, is_decoder=False, is_encoder_decoder=False)
        super().__init__(config)
        self.model = XFormerImageModel(config, add_pooling_layer=False)
        self.model.under_a_head = True
        self.decoder = PixelDecoder(config, config.stack.output_width(config))
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor | None = None,
        bool_masked_pos: Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        **kwargs: Any,
    ) -> outputs.XFormerMaskedImageOutput:
        """
        Args:
            pixel_values: [B, C, H, W].
            bool_masked_pos: [B, N], 1 = a patch that is hidden, row by row. With it there is a loss: the mean absolute
                error of the pixels of hidden patches.

        reconstruction: [B, C, H, W].

        Raises:
            ValueError: a mask of other patches than the image has.
        """
        masked = None
        if bool_masked_pos is not None and pixel_values is not None:
            bool_masked_pos = self._checked(bool_masked_pos, pixel_values)
            masked = (bool_masked_pos, weight_of(self.decoder, "mask_token"))
        base = self.model(
            pixel_values, interpolate_pos_encoding=interpolate_pos_encoding, hidden_patches=masked, **kwargs
        )
        states = base.last_hidden_state[:, self.config.embedding.leading_tokens :]
        image: Any = pixel_values  # it is there, or the model has refused
        tall, wide = self.config.patch_shape
        grid = (image.shape[2] // tall, image.shape[3] // wide)
        made = self.decoder(states, grid)
        loss = None
        if bool_masked_pos is not None:
            hidden = bool_masked_pos.view(-1, 1, *grid).repeat_interleave(tall, 2).repeat_interleave(wide, 3)
            wide_type = torch.promote_types(made.dtype, torch.float32)
            error = (made.to(wide_type) - image.to(wide_type)).abs().masked_fill(~hidden, 0.0)
            loss = error.sum() / (hidden.sum() * self.config.num_channels).clamp(min=1)
        return outputs.XFormerMaskedImageOutput(
            loss=self.with_aux_losses(loss, base),
            reconstruction=made,
            hidden_states=base.hidden_states,
            attentions=base.attentions,
            aux_losses=self.reported(base.aux_losses, loss),
        )

    def _checked(self, mask: Tensor, pixel_values: Tensor) -> Tensor:
        tall, wide = self.config.patch_shape
        patches = (pixel_values.shape[-2] // tall) * (pixel_values.shape[-1] // wide)
        if tuple(mask.shape) != (pixel_values.shape[0], patches):
            raise ValueError(
                f"`bool_masked_pos` must be [batch, patches] = {[pixel_values.shape[0], patches]}, got"
                f" {list(mask.shape)}."
            )
        return mask.to(pixel_values.device) != 0
