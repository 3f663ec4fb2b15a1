# SPDX-License-Identifier: Apache-2.0
"""From the probabilities of labels at each frame to a text of labels: connectionist temporal classification."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def best_path(logits: Tensor, mask: Tensor | None, blank: int) -> list[list[int]]:
    """The labels of the most probable path of each row: repeated labels once, blanks left out (Graves et al. 2006,
    section 3.2, best path decoding). Another text may have more probability over all its paths.

    logits [B, T, V], mask [B, T] boolean (None: all frames are real).
    """
    path = logits.argmax(-1)
    before = torch.nn.functional.pad(path[:, :-1], (1, 0), value=blank)
    kept = (path != before) & (path != blank)
    kept = kept if mask is None else kept & mask
    return [row[keep].tolist() for row, keep in zip(path.cpu(), kept.cpu())]


def prefix_beam_search(log_probs: Tensor, num_beams: int, blank: int) -> list[tuple[list[int], float]]:
    """The texts of labels with the most probability over all their paths, best first, each with its logarithm (Graves
    et al. 2006, section 3.2; as a beam search Hannun et al. 2014, arXiv 1408.2873, Algorithm 1, without a language
    model).

    log_probs [T, V]: of one row's real frames. num_beams: how many beginnings of texts are kept after each frame; with
    as many as there are the result is exact. All numbers are float64.

    Raises:
        ValueError: less than one beam, or another shape.
    """
    if num_beams < 1:
        raise ValueError(f"`num_beams` must be at least 1, got {num_beams}.")
    if log_probs.ndim != 2:
        raise ValueError(f"`log_probs` must be [frames, labels] of one row, got {list(log_probs.shape)}.")
    frames = log_probs.detach().double().cpu().numpy()
    labels = frames.shape[1]
    prefixes: list[tuple[int, ...]] = [()]
    # Of paths that end in a blank, and of those that end in the prefix's last label.
    ends_blank, ends_label = np.zeros(1), np.full(1, -np.inf)
    for frame in frames:
        total = np.logaddexp(ends_blank, ends_label)
        last = np.array([prefix[-1] if prefix else blank for prefix in prefixes])
        rows = np.arange(len(prefixes))
        stays_blank = total + frame[blank]
        stays_label = np.where(last == blank, -np.inf, ends_label + frame[last])
        grown = total[:, None] + frame[None]  # [beams, V]: one more label
        grown[rows, last] = ends_blank + frame[last]  # the same label once more needs a blank between
        grown[:, blank] = -np.inf
        place = {prefix: index for index, prefix in enumerate(prefixes)}
        for index, prefix in enumerate(prefixes):  # one that another beam grows into is kept once
            parent = place.get(prefix[:-1]) if prefix else None
            if parent is not None:
                stays_label[index] = np.logaddexp(stays_label[index], grown[parent, prefix[-1]])
                grown[parent, prefix[-1]] = -np.inf
        scores = np.concatenate([np.logaddexp(stays_blank, stays_label), grown.ravel()])
        chosen = np.argsort(-scores, kind="stable")[:num_beams]
        chosen = chosen[np.isfinite(scores[chosen])] if np.isfinite(scores[chosen]).any() else chosen[:1]
        kept = [
            prefixes[index] if index < len(prefixes) else _grown(prefixes, index - len(prefixes), labels)
            for index in chosen.tolist()
        ]
        stayed = chosen < len(prefixes)
        held = np.where(stayed, chosen, 0)
        ends_blank = np.where(stayed, stays_blank[held], -np.inf)
        ends_label = np.where(stayed, stays_label[held], scores[chosen])
        prefixes = kept
    total = np.logaddexp(ends_blank, ends_label)
    order = np.argsort(-total, kind="stable").tolist()
    return [(list(prefixes[index]), float(total[index])) for index in order]


def _grown(prefixes: list[tuple[int, ...]], index: int, labels: int) -> tuple[int, ...]:
    row, label = divmod(index, labels)
    return (*prefixes[row], label)
