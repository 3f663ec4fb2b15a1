"""Trains a sentence encoder that was converted to read long texts to see there what its source sees in pieces.

    hf-xformers convert --from models/minilm --attention longformer --max-length 4096 --to models/minilm-4096
    python scripts/long_encoder.py --model models/minilm-4096 --teacher models/minilm --text FILE --output_dir DIR

Each step reads a stretch of an article in one pass. The vector of every piece of it, the mean state of its tokens
(late chunking), follows the vectors that the teacher has of the piece and, with the weight `--context`, of its
neighbors, each read alone; the vector of the stretch follows their mean. Single sentences keep their vectors, so that
queries stay where they are. The text is WikiText's: articles with headings such as ` = Title = `.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

import hf_xformers  # noqa: F401  (registers the variants)
from hf_xformers.inference import pool_spans

PIECE = (64, 160)  # tokens: shortest and longest pieces of a stretch
RECORD = "long_encoder.json"  # in the folder of the result: how it was trained
DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")  # what is followed is exact
STRETCH = 1200  # tokens of the longest: as positions repeat after 512, what is learned there holds for all


def articles(path: str | Path) -> list[list[str]]:
    """The sentences and headings of each article of a WikiText file, without `<unk>`."""
    lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    found: list[list[str]] = []
    for before, line, after in zip(["", *lines], lines, [*lines[1:], ""]):
        if re.fullmatch(r"= [^=].*[^=] =", line) and not before and not after:
            found.append([])
        if line and found:
            plain = re.sub(r" @(.)@ ", r"\1", line.replace("<unk>", "")).strip("= ")
            found[-1] += [" ".join(sentence.split()) for sentence in re.split(r"(?<= [.?!]) ", plain)]
    return [[sentence for sentence in article if len(sentence) > 2] for article in found]


class FollowPieces(nn.Module):
    """1 - cosine of each piece's vector, and of each text's, with what the teacher makes of the pieces."""

    def __init__(self, model: SentenceTransformer, teacher: SentenceTransformer, context: float) -> None:
        super().__init__()
        self.model, self.context = model, context
        self.teacher = [teacher.eval().requires_grad_(False)]  # in a list: no part of what is trained
        self.random = random.Random(0)

    def forward(self, features: list[dict[str, Tensor]], labels: Any = None) -> Tensor:
        return torch.stack([self.loss_of(texts) for texts in features]).sum()

    def loss_of(self, texts: dict[str, Tensor]) -> Tensor:
        size = self.random.randint(*PIECE)
        rows = [row[mask.bool()] for row, mask in zip(texts["input_ids"], texts["attention_mask"])]
        pieces = [row[1:-1].tensor_split(max(1, round(len(row) / size))) for row in rows]
        spans = []
        for own in pieces:  # the special tokens go with the first and the last piece
            ends = list(itertools.accumulate((len(piece) for piece in own), initial=1))
            ends[0], ends[-1] = 0, ends[-1] + 1
            spans.append(list(itertools.pairwise(ends)))
        output = self.model(dict(texts))
        vectors = pool_spans(output["token_embeddings"], texts["attention_mask"], spans)
        losses = []
        for row, own, found, whole in zip(rows, pieces, vectors, output["sentence_embedding"]):
            single = self.of_teacher([torch.cat([row[:1], piece, row[-1:]]) for piece in own])
            losses.append(1 - cosine_similarity(found, single + self.context * neighbors(single)).mean())
            losses.append(1 - cosine_similarity(whole, single.mean(0), dim=0))
        return torch.stack(losses).mean()

    def of_teacher(self, pieces: list[Tensor]) -> Tensor:
        """Tokens of texts -> [texts, D]."""
        teacher = self.teacher[0]
        batch = teacher.tokenizer.pad({"input_ids": pieces}, return_tensors="pt").to(pieces[0].device)
        with torch.no_grad():
            return teacher(dict(batch))["sentence_embedding"]


def neighbors(vectors: Tensor) -> Tensor:
    """The mean of each row's neighbors; the single row's own. [N, D] -> [N, D]."""
    if len(vectors) == 1:
        return vectors
    before, after = vectors[:-1], vectors[1:]
    return torch.cat([after[:1], (before[:-1] + after[1:]) / 2, before[-1:]])


def examples(texts: list[list[str]], tokenizer: Any, count: int, seed: int) -> Dataset:
    """Stretches of up to `STRETCH` tokens that begin with any sentence of any article, each with a sentence."""
    drawn = random.Random(seed)
    lengths = [[len(ids) for ids in tokenizer(article, add_special_tokens=False).input_ids] for article in texts]
    starts = [(article, place) for article, own in enumerate(texts) for place in range(len(own))]
    rows = []
    for article, place in drawn.choices(starts, k=count):
        total, end = 0, place
        while end < len(texts[article]) and total + lengths[article][end] < STRETCH:
            total, end = total + lengths[article][end], end + 1
        other = drawn.choice(texts[article])
        rows.append({"stretch": " ".join(texts[article][place : max(end, place + 1)]), "sentence": other})
    return Dataset.from_list(rows)


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    model = SentenceTransformer(options.model, config_kwargs=dict.fromkeys(DROPOUTS, 0.0))
    teacher = SentenceTransformer(options.teacher, device=str(model.device))
    for name, parameter in model.named_parameters():  # words mean what they meant, and positions repeat
        parameter.requires_grad_("embedding" not in name and "position" not in name)
    rows = examples(articles(options.text), model.tokenizer, options.steps * options.batch, options.seed)
    arguments = SentenceTransformerTrainingArguments(
        f"{options.output_dir}/training",
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        learning_rate=options.learning_rate,
        warmup_steps=options.steps // 10,
        lr_scheduler_type="cosine",
        logging_steps=20,
        save_strategy="no",
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to="none",
        seed=options.seed,
    )
    trainer = SentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=rows, loss=FollowPieces(model, teacher, options.context)
    )
    begun = time.process_time()
    trainer.train()
    minutes = (time.process_time() - begun) / 60
    model.requires_grad_(True).save_pretrained(options.output_dir)
    record = {name: getattr(options, name) for name in ("steps", "batch", "learning_rate", "context", "seed")}
    record["training, min"] = round(minutes, 1)
    (Path(options.output_dir) / RECORD).write_text(json.dumps(record) + "\n", encoding="utf-8")
    print(f"{options.output_dir}: {options.steps} steps in {minutes:.1f} processor minutes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the converted encoder")
    parser.add_argument("--teacher", required=True, help="folder of its source")
    parser.add_argument("--text", required=True, help="a file of WikiText")
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=1, help="stretches of a step")
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument(
        "--context", type=float, default=0.5, help="weight of a piece's neighbors in what its vector follows"
    )
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
