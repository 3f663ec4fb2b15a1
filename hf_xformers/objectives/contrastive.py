# SPDX-License-Identifier: Apache-2.0
"""Two views of a text, told apart from views of other texts.

Sources: van den Oord, Li and Vinyals 2018 (InfoNCE, arXiv 1807.03748), Collobert and Weston 2008 (ranking), Gutmann
and Hyvarinen 2010 (noise contrast), Mikolov et al. 2013 (negative sampling); Giorgi et al. 2021 (spans of a document
as views, arXiv 2006.03659), Gao et al. 2021 (dropout as the only difference, arXiv 2104.08821).
"""

from __future__ import annotations

import hashlib
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..core.components import bounded
from .base import AnyObjective, Collator, Objective, Row, pad_rows, register, round_up


def sample_noise(length: int, ratio: float, generator: torch.Generator) -> Tensor:
    """Where two crops of a text of `length` tokens start, and their length: (first, second, size), [3]. The size is
    round(ratio * length), at least 1 token; every place is as likely, and the crops may overlap."""
    size = min(max(round(ratio * length), 1), length)
    starts = torch.randint(0, length - size + 1, (2,), generator=generator)
    return torch.cat([starts, torch.tensor([size])])


def apply_noise(ids: Tensor, begin: int, end: int, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Two crops of ids [n], whose text stands in begin..end; what is before and behind it stays."""
    first, second, size = noise.tolist()
    views = (ids[begin + start : begin + start + size] for start in (first, second))
    one, two = (torch.cat([ids[:begin], view, ids[end:]]) for view in views)
    return one, two


def text_key(ids: Tensor) -> int:
    """A number of 48 bits that is equal for equal texts, and for others almost never."""
    numbers = ids.contiguous().numpy().astype("<i8", copy=False)
    return int.from_bytes(hashlib.blake2b(numbers.tobytes(), digest_size=6).digest(), "little")


class ContrastiveCollator(Collator):
    """Batches with `input_ids`, `attention_mask` [B, T], `labels` [B] (0: every text is told apart), `text_keys` [B],
    for crops `second_input_ids` and `second_attention_mask` [B, T2], and where wrong answers are drawn
    `negative_draws` [B, k] in [0, 1)."""

    objective: ContrastiveObjective
    columns = ()

    def collate(self, rows: list[Row]) -> dict[str, Tensor]:
        batch = {
            "labels": torch.zeros(len(rows), dtype=torch.int64),
            "text_keys": torch.tensor([text_key(row.ids) for row in rows]),
        }
        draws = self.objective.drawn_negatives
        generators = [self.generator(row.ids) for row in rows]
        if draws is not None:
            batch["negative_draws"] = torch.stack([torch.rand(draws, generator=item) for item in generators])
        if self.objective.views == "dropout":
            return self.pad_inputs(rows) | batch
        pairs = [self.views(row, generator) for row, generator in zip(rows, generators, strict=True)]
        for name, views in zip(("", "second_"), zip(*pairs), strict=True):
            length = round_up(max(map(len, views)), self.pad_to_multiple_of)
            batch[f"{name}input_ids"] = pad_rows(views, self.pad_token_id, length, self.padding_side)
            ones = [torch.ones_like(view) for view in views]
            batch[f"{name}attention_mask"] = pad_rows(ones, 0, length, self.padding_side)
        return batch

    def views(self, row: Row, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Two crops of a row, between the special tokens at its ends; a row of these alone is its own crop."""
        text = (~self.special_tokens(row)).nonzero().squeeze(1)
        if not len(text):
            return row.ids, row.ids
        begin, end = int(text[0]), int(text[-1]) + 1
        return apply_noise(row.ids, begin, end, sample_noise(end - begin, self.objective.crop_ratio, generator))


@register("contrastive")
class ContrastiveObjective(Objective):
    """Find the other view of a text among those of the texts in the batch.

    Args:
        views: what two views are: random `crops` of the text, or the same text twice, with other `dropout`.
        crop_ratio: share of the text's tokens in a crop.
        loss: "info_nce": softmax over all candidates;
            "ctl": softmax over the right one and one wrong one;
            "ranking": the right one is to be better by `margin` than each wrong one;
            "nce": right from wrong ones, corrected for how likely each is drawn;
            "negative_sampling": the same without the correction.
        temperature: what the cosine of two vectors is divided by to be their score.
        margin: of "ranking".
        num_negatives: wrong answers that are drawn for each text, with replacement; None: all in the batch ("ctl": 1).
        noise_power: a text is drawn by its count in the batch to this power.
        gather_negatives: whether texts of the other processes are wrong answers, too.

    A batch has at least two texts. Those that are equal to a text are no wrong answers for it.
    """

    views: Literal["crops", "dropout"] = "crops"
    crop_ratio: float | int = bounded(0.5, above=0, most=1)
    loss: Literal["info_nce", "ctl", "ranking", "nce", "negative_sampling"] = "info_nce"
    temperature: float | int = bounded(0.05, above=0)
    margin: float | int = bounded(1.0, least=0)
    num_negatives: int | None = bounded(None, least=1)
    noise_power: float | int = 0.75
    gather_negatives: bool = True

    summary: ClassVar[str] = "the other view of a text, among those of other texts (InfoNCE and its kin)"
    corrupts: ClassVar[str] = "two crops of half the text"
    head: ClassVar[str] = "TextContrast"
    collates = ContrastiveCollator
    target: ClassVar[Literal["token", "label"]] = "label"
    needed_tokens: ClassVar[tuple[str, ...]] = ("pad", "cls", "sep")
    add_special_tokens: ClassVar[bool] = True
    rows_at_once: ClassVar[int] = 2

    def check_fields(self) -> None:
        self._require(
            self.loss != "ctl" or self.num_negatives in (None, 1),
            f"loss 'ctl' has one wrong answer, not num_negatives={self.num_negatives}: leave it None, or take"
            " loss='info_nce'",
        )

    @property
    def drawn_negatives(self) -> int | None:
        """Wrong answers that are drawn for a text; None: all of the batch."""
        return 1 if self.loss == "ctl" else self.num_negatives

    def config_fields(self) -> dict[str, Any]:
        settings = {
            "loss": self.loss,
            "temperature": self.temperature,
            "margin": self.margin,
            "noise_power": self.noise_power,
            "gather_negatives": self.gather_negatives,
        }
        return {"pretraining": {"text_contrast": settings}}

    def bound_to(self: AnyObjective, config: Any) -> AnyObjective:
        rates = ("hidden_dropout_prob", "attention_probs_dropout_prob", "activation_dropout_prob")
        silent = not any(getattr(config, name, 0) for name in rates)
        if getattr(self, "views", None) == "dropout" and silent:
            raise ValueError(
                "contrastive: views='dropout' makes two equal views where nothing is dropped (hidden_dropout_prob 0);"
                " raise that, or take views='crops'"
            )
        return self
