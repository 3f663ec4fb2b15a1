# SPDX-License-Identifier: Apache-2.0
"""Cards of objectives: what each predicts, corrupts and needs, its settings, and one corrupted example."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.field_docs import meanings
from ..objectives import OBJECTIVES, Objective, build_objective
from ..objectives.description import needs

# Every document has several sentences and every word comes often: a vocabulary of whole words is small then.
TEXTS = (
    "The cat sat on the mat. A dog saw the cat and ran to the mat. The cat left the house.",
    "Snow fell on the hill. The old man made a fire in the house. Then he read a book.",
    "A ship came over the sea. The man on the ship saw a light on the hill. He was at home.",
)
LENGTH = 32


def example(name: str, seed: int = 0) -> str:
    """A row as it was and the tensors that the objective's collator makes of it, as words; `·` is no target."""
    from datasets import Dataset

    from ..training.text import make_rows, train_tokenizer_for

    objective = build_objective(name)
    if objective.rows == "images":
        return _example_of_image(objective, seed)
    if objective.rows == "parallel":
        from ..data.phrases import phrase_pairs

        pairs = phrase_pairs(40)
        texts = Dataset.from_dict({"text": [a for a, _ in pairs], "translation": [b for _, b in pairs]})
    else:
        texts = Dataset.from_dict({"text": list(TEXTS)})
    often = texts if objective.rows == "parallel" else Dataset.from_dict({"text": list(TEXTS) * 8})
    tokenizer = train_tokenizer_for(objective, often, kind="bpe", vocab_size=2000, max_length=None)
    length = LENGTH if objective.rows != "parallel" else 2 * LENGTH
    row = make_rows(texts, tokenizer, objective, length, whole=False)[0]
    if objective.rows == "blocks":
        many = Dataset.from_dict({"text": list(TEXTS) * 40})
        with contextlib.suppress(ValueError):  # what it wants to know is not in this text: it does without
            objective = objective.fitted(make_rows(many, tokenizer, objective, length, whole=False), tokenizer)
    batch = objective.collator(tokenizer, seed=seed, static=True)([row])

    def words(ids: Any) -> str:
        return " ".join("·" if token < 0 else str(tokenizer.decode([token])).strip() or "_" for token in ids)

    lines = [f"row: {words(row['input_ids'])}"]
    for key, value in batch.items():
        if not isinstance(value, Tensor) or key.endswith("attention_mask"):
            continue
        flat = value[0] if value.ndim else value
        of_tokens = key.endswith("input_ids") or (key == "labels" and objective.target == "token")
        if of_tokens and flat.ndim == 1 and not flat.is_floating_point():
            lines.append(f"{key}: {words(flat.tolist())}")
        elif of_tokens and flat.ndim == 2:
            lines += [f"{key}, sentence {number}: {words(ids.tolist())}" for number, ids in enumerate(flat)]
        elif flat.numel() <= 2 * length:
            lines.append(f"{key}: {' '.join(map(str, torch.atleast_1d(flat).flatten().tolist()))}")
    return "\n".join(lines)


def _example_of_image(objective: Objective, seed: int) -> str:
    """An image of 8 x 8 pixels with patches of 2 x 2, as bytes, and what is hidden of it."""
    from ..data.patch_processors import patch_processor

    pixels = (16 * torch.arange(8)[:, None] + 16 * torch.arange(8)).to(torch.uint8)[None]
    batch = objective.collator(patch_processor((8, 8), 1), seed=seed, static=True, patch=(2, 2))(  # type: ignore[call-arg]
        [{"pixel_values": pixels}]
    )
    hidden = batch["bool_masked_pos"][0].view(4, 4)
    shown = hidden.repeat_interleave(2, 0).repeat_interleave(2, 1)
    lines = []
    for row, out in zip(pixels[0].tolist(), shown.tolist()):
        before = " ".join(f"{value:3d}" for value in row)
        after = " ".join("  ?" if one else f"{value:3d}" for value, one in zip(row, out))
        lines.append(f"row: {before}   read: {after}")
    return "\n".join([*lines, f"bool_masked_pos: {' '.join(map(str, hidden.flatten().tolist()))}"])


def objective_card(name: str) -> str:
    """The card of an objective, in Markdown."""
    from ..training.building import objectives_for
    from ..variants import config_class, model_types

    cls = OBJECTIVES[name]
    fitting = [kind for kind in model_types() if name in objectives_for(config_class(kind))]
    explained = meanings(cls)
    settings = "\n".join(
        f"| `{entry.name}` | `{_shown(entry)}` | {explained.get(entry.name, '')} |"
        for entry in dataclasses.fields(cls)
    )
    table = f"| setting | default | meaning |\n|---|---|---|\n{settings}\n" if settings else "It has no settings.\n"
    corrupts = f"- corrupts: {cls.corrupts}\n" if cls.corrupts else ""
    usual = {"encoder": "bert", "decoder": "gpt2", "seq2seq": "t5" if cls.tokenizer_style == "t5" else "bart"}[
        cls.shape
    ]
    data = "--data FOLDER " if cls.rows == "images" else ""
    no_target = "`?` is a pixel of a hidden patch." if data else "`·` is a place that is no target."
    variant = usual if f"xf_{usual}" in fitting else fitting[0].removeprefix("xf_") if fitting else "NAME"
    return (
        f"# Objective `{name}`\n\n"
        f"- predicts: {cls.summary}\n{corrupts}- needs: {needs(cls)}\n"
        f"- variants that have what it needs: {len(fitting)} of {len(model_types())}\n\n"
        f"## Settings\n\n{table}\n"
        "## A row and what is made of it\n\n"
        f"{no_target}\n\n```text\n{example(name)}\n```\n\n"
        "## Use\n\n"
        f"```bash\nhf-xformers pretrain --variant {variant} --objective {name} {data}--output_dir runs/{name}\n```\n"
    )


def _shown(entry: Any) -> str:
    value = entry.default
    if isinstance(value, Objective):
        return value.type
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def write_objective_cards(folder: Path) -> list[Path]:
    """Writes the card of every objective to `folder`; the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name in OBJECTIVES:
        path = folder / f"{name}.md"
        path.write_text(objective_card(name), encoding="utf-8")
        paths.append(path)
    return paths
