# SPDX-License-Identifier: Apache-2.0
"""Source and target in one row, for an encoder that writes by telling masks (UniLM)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...core.mask_modes import ALL_TYPES, MODES, SEQ2SEQ, target_types
from ...objectives import build_objective
from ...objectives.base import read_row
from ...objectives.sentence_pairs import LABEL
from ...objectives.unilm import UniLMCollator

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

# Share of a target's tokens that are masked in training (Dong et al. 2019, arXiv 1905.03197, section 3.1).
MASKED = 0.7


def joined(sources: Sequence[list[int]], targets: Sequence[list[int]] | None) -> dict[str, list[list[int]]]:
    """Columns of rows [SOS] S1 [EOS] S2 [EOS], of which the second part is of type 1; without targets of sources."""
    second = [[] for _ in sources] if targets is None else targets
    pairs = list(zip(sources, second, strict=True))
    return {
        "input_ids": [[*source, *target] for source, target in pairs],
        "token_type_ids": [[0] * len(source) + [1] * len(target) for source, target in pairs],
    }


class ClozeCollator(UniLMCollator):
    """Batches of rows that [`joined`] makes: tokens of targets are masked and told. Sources alone are left as they
    are, and have no labels."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, *, seed: int = 0) -> None:
        self.types = target_types(config.type_vocab_size)
        objective = build_objective(
            {
                "type": "unilm",
                "mode_probs": (0, 1, 0, 0),
                "target_mask_prob": MASKED,
                "segment_ids_per_mode": config.type_vocab_size >= ALL_TYPES,
            }
        )
        super().__init__(objective, tokenizer, seed=seed)  # type: ignore[arg-type]

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        if any(1 in feature["token_type_ids"] for feature in features):
            batch = super().__call__(features)
            del batch[LABEL]
            return batch
        rows = [read_row(feature, ("token_type_ids",)) for feature in features]
        batch = self.pad_inputs(rows)
        batch["token_type_ids"] = torch.full_like(batch["token_type_ids"], self.types[0])
        batch[MODES] = torch.tensor([[SEQ2SEQ, len(row)] for row in rows])
        return batch
