# SPDX-License-Identifier: Apache-2.0
"""The configuration of X-formers that read sound."""

from __future__ import annotations

from typing import ClassVar, Literal

from .configuration_xformer import XFormerConfig
from .core.components import SpecLike
from .embedding.frames import SUBSAMPLING


class XFormerSoundConfig(XFormerConfig):
    """Fields of an X-former whose input is sound, as features of frames; base of the families that read sound.
    `vocab_size` and `pad_token_id` are those of transcripts: the padding token is the blank of CTC.

    Args:
        num_mel_bins: features of a frame.
        hop_length: samples from one frame to the next, by which pipelines tell the time.
        ctc_loss_reduction: `mean` (of each row's loss by label, then of rows, as torch has it) or `sum`.
        ctc_zero_infinity: whether a row whose labels do not fit into its frames counts as 0, and not as infinite.
    """

    modality: ClassVar[str] = "sound"
    keys_to_ignore_at_inference: ClassVar[list[str]] = [*XFormerConfig.keys_to_ignore_at_inference, "frame_mask"]

    num_mel_bins: int = 80
    hop_length: int = 160
    ctc_loss_reduction: Literal["mean", "sum"] = "mean"
    ctc_zero_infinity: bool = True
    embedding: SpecLike = "frames"
    position: SpecLike = "none"  # in the attention's scores

    @property
    def inputs_to_logits_ratio(self) -> int:
        """Samples of sound to a state: transformers' question, to divide long sounds and to tell times."""
        return SUBSAMPLING * self.hop_length

    def check_layers(self) -> None:
        super().check_layers()
        for name in ("num_mel_bins", "hop_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
