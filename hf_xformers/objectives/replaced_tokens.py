# SPDX-License-Identifier: Apache-2.0
"""Replaced token detection (Clark et al. 2020, ELECTRA, arXiv 2003.10555): which tokens did a generator put there?

The corrupted text is made in two steps. This file masks tokens for the generator; what it then draws from the
generator's distribution, the model does in its forward pass, with the numbers that the batch carries for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..core.components import bounded
from ..core.pretraining_specs import changed_pretraining
from .base import IGNORE_INDEX, TOKEN_COLUMNS, Collator, Objective, Row, pad_rows, register

_ROUNDING = 0.005  # by which the released code widens the room for masked tokens


@dataclass
class ReplacementNoise:
    """All that is random about a row: `positions` int64 [k], where the generator predicts, in order; `masked` bool
    [k], where it does not see the token either; `draws` float64 [k], with which to draw from its distribution."""

    positions: Tensor
    masked: Tensor
    draws: Tensor


def num_draws(length: int, mask_prob: float) -> int:
    """How many positions are drawn in a row of so many tokens, special ones included."""
    return max(1, min(int((mask_prob + _ROUNDING) * length), round(mask_prob * length)))


def sample_noise(special: Tensor, objective: ReplacedTokenObjective, generator: torch.Generator) -> ReplacementNoise:
    """Draw the noise of one row; special [n] bool: positions that are never replaced. A row of nothing else has
    none."""
    free = (~special).nonzero().squeeze(1)
    count = num_draws(len(special), objective.mask_prob)
    if not len(free):
        chosen = free
    elif objective.with_replacement:
        chosen = free[torch.randint(len(free), (count,), generator=generator)].unique()
    else:
        chosen = free[torch.randperm(len(free), generator=generator)[:count]].sort().values
    masked = torch.rand(len(chosen), generator=generator, dtype=torch.float64) < objective.mask_token_prob
    return ReplacementNoise(chosen, masked, torch.rand(len(chosen), generator=generator, dtype=torch.float64))


def apply_noise(ids: Tensor, noise: ReplacementNoise, mask_token_id: int) -> Tensor:
    """What the generator reads, [n]."""
    masked = ids.clone()
    masked[noise.positions[noise.masked]] = mask_token_id
    return masked


def replace_tokens(ids: Tensor, positions: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
    """(what the discriminator reads, its labels), each [n], for tokens drawn [k] at positions [k]. A token that is
    drawn in its own place is an original one."""
    replaced = ids.scatter(0, positions, drawn)
    return replaced, (replaced != ids).long()


class ReplacedTokenCollator(Collator):
    """Batches with `input_ids` (masked), `attention_mask`, `labels` [B, T] (what stands in the text, -100 at padding),
    and `target_positions`, `sampling_draws` [B, N] (-1: none), of which a row of T tokens has at most N."""

    objective: ReplacedTokenObjective
    columns = (*TOKEN_COLUMNS, "special_tokens_mask")

    def __init__(self, objective: ReplacedTokenObjective, tokenizer: Any, **settings: Any) -> None:
        super().__init__(objective, tokenizer, **settings)
        if tokenizer.mask_token_id is None:
            raise ValueError(
                f"{type(tokenizer).__name__} has no mask token: add one with "
                "add_special_tokens({'mask_token': '[MASK]'}) and resize the embeddings"
            )

    def collate(self, rows: list[Row]) -> dict[str, Tensor]:
        noises = [self.noise(row) for row in rows]
        masked = [
            Row(apply_noise(row.ids, noise, self.tokenizer.mask_token_id), row.columns, row.width)
            for row, noise in zip(rows, noises, strict=True)
        ]
        batch = self.pad_inputs(masked)
        width = batch["input_ids"].shape[1]
        room = num_draws(width, self.objective.mask_prob)
        starts = [width - len(row) if self.padding_side == "left" else 0 for row in rows]
        places = [noise.positions + start for noise, start in zip(noises, starts, strict=True)]
        batch["labels"] = pad_rows([row.ids for row in rows], IGNORE_INDEX, width, self.padding_side)
        batch["target_positions"] = pad_rows(places, -1, room)
        batch["sampling_draws"] = pad_rows([noise.draws for noise in noises], 0, room).float()
        return batch

    def noise(self, row: Row) -> ReplacementNoise:
        special = self.special_tokens(row)
        return sample_noise(special, self.objective, self.generator(row.ids))


@register("replaced_token_detection", aliases=("rtd", "electra"))
class ReplacedTokenObjective(Objective):
    """Tell the tokens that a generator, trained next to the model, put into a text from those that stood there.

    Args:
        mask_prob: share of a row's tokens that the generator predicts (ELECTRA: .15, large .25).
        mask_token_prob: share of these that it does not see; it sees the others, and predicts them all the same.
        with_replacement: positions are drawn independently, so that some are drawn twice and fewer tokens are masked,
            as in the released code; False: all are different.
        generator_size: the generator's width, as a share of the model's; this and the following None: the variant's
            own (ELECTRA's base model: a third, DeBERTaV3: all of it).
        generator_depth: its number of layers, as a share of the model's (ELECTRA: all, DeBERTaV3: half).
        generator_sharing: what both share: "tied", one token table and one position table; "gradient_disentangled",
            the model's token vectors are the generator's, whose gradient it leaves alone, and a difference of its own;
            "untied", nothing.
        generator_temperature: of the draw from what the generator predicts.
        generator_avoids_original: whether a token is never drawn in its own place.
        detection_weight: of the detection's loss next to the generator's.
        detection_context: whether a token is judged next to the text's first one (DeBERTaV3).
    """

    mask_prob: float | int = bounded(0.15, above=0, below=1)
    mask_token_prob: float | int = bounded(0.85, least=0, most=1)
    with_replacement: bool = True
    generator_size: float | int | None = None
    generator_depth: float | int | None = None
    generator_sharing: Literal["tied", "gradient_disentangled", "untied"] | None = None
    generator_temperature: float | int | None = None
    generator_avoids_original: bool | None = None
    detection_weight: float | int | None = None
    detection_context: bool | None = None

    summary: ClassVar[str] = "which tokens of a text a small generator has put there (ELECTRA)"
    head: ClassVar[str] = "ReplacedTokenPreTraining"
    collates = ReplacedTokenCollator
    target = "label"
    needed_tokens: ClassVar[tuple[str, ...]] = ("pad", "cls", "sep", "mask")
    add_special_tokens: ClassVar[bool] = True

    def check_fields(self) -> None:
        changed_pretraining({}, self.config_fields().get("pretraining", {}))  # refuses values out of range

    def config_fields(self) -> dict[str, Any]:
        settings = {
            "generator_size": self.generator_size,
            "generator_depth": self.generator_depth,
            "generator_sharing": self.generator_sharing,
            "generator_temperature": self.generator_temperature,
            "generator_avoids_original": self.generator_avoids_original,
            "detection_weight": self.detection_weight,
            "detection_context": self.detection_context,
        }
        given = {name: value for name, value in settings.items() if value is not None}
        return {"pretraining": {"replaced_tokens": given}} if given else {}
