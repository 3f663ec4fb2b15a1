# SPDX-License-Identifier: Apache-2.0
"""What the objectives of encoder-decoders share: a batch of corrupted rows and of the targets that go with them."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import IGNORE_INDEX, Collator, Row, pad_rows, round_up


def shift_right(labels: Tensor, start_token_id: int, pad_token_id: int | None = None) -> Tensor:
    """Decoder inputs [B, T]: the labels one step later behind the start token; -100 becomes padding (default: the
    start token)."""
    shifted = torch.full_like(labels, start_token_id)
    shifted[:, 1:] = labels[:, :-1]
    return shifted.masked_fill(shifted == IGNORE_INDEX, start_token_id if pad_token_id is None else pad_token_id)


class Seq2SeqCollator(Collator):
    """Batches with `input_ids`, `attention_mask` [B, T_in], `labels`, `decoder_input_ids` [B, T_out].

    Decoder rows are padded on the right, and start with `start_token_id`.
    """

    start_token_id: int

    def collate(self, rows: list[Row]) -> dict[str, Tensor]:
        pairs = [self.corrupt(row) for row in rows]
        inputs, targets = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        side = self.padding_side
        width_in, width_out = (round_up(max(map(len, part)), self.pad_to_multiple_of) for part in (inputs, targets))
        labels = pad_rows(targets, IGNORE_INDEX, width_out)
        return {
            "input_ids": pad_rows(inputs, self.pad_token_id, width_in, side),
            "attention_mask": pad_rows([torch.ones_like(row) for row in inputs], 0, width_in, side),
            "labels": labels,
            "decoder_input_ids": shift_right(labels, self.start_token_id, self.pad_token_id),
        }

    def corrupt(self, row: Row) -> tuple[Tensor, Tensor]:
        """(what the encoder reads, what the decoder writes) of a row."""
        raise NotImplementedError
