"""A sentence encoder that reads 4,096 tokens: does it find what stands far inside a document, and what does it cost?

python benchmarks/long_documents.py --source models/minilm --converted models/minilm-4096 --text wikitext2/test.txt
    [--trained models/minilm-long ...] [--only retrieval|trained|timing] [--no-write]

Articles of WikiText are cut between sentences into documents of up to 4,000 tokens; those of 1,400 and more are kept.
A query is a sentence of a document's last quarter, beyond token 1,000, that was taken out of the document: what is to
be found is what stands around it. `scripts/long_encoder.py` trains on other articles. Timing takes two minutes of an
idle machine. `--only trained` measures the folders of `--trained` alone; what else was written stays.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from measure import interleaved_seconds, machine, memory_in_fresh_process, ratios
from sentence_transformers import SentenceTransformer
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoModel

sys.path.insert(0, os.fspath(Path(__file__).parents[1]))
from hf_xformers.benchmark import tables
from hf_xformers.core.saved_files import write_text
from hf_xformers.inference import late_chunks
from scripts.long_encoder import RECORD, articles

RESULTS = Path(__file__).parent / "results"
RETRIEVAL, TIMING = "Retrieval", "Time and memory of a document of 4,096 tokens"
LONGEST, SHORTEST, FIRST, QUERIES = 4000, 1400, 1000, 6  # tokens of documents, queries of each
PASSAGES = (100, 250)  # tokens at most


class Task:
    """documents: lists of sentences; queries: (sentence, place of its document)."""

    def __init__(self, path: str, tokenizer: Any) -> None:
        self.count = cache(lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids))
        self.documents: list[list[str]] = []
        self.queries: list[tuple[str, int]] = []
        self.articles = 0
        for article in articles(path):
            before = len(self.documents)
            for document in self.cut(article, LONGEST):
                self.add(document)
            self.articles += len(self.documents) > before

    def cut(self, sentences: list[str], limit: int) -> list[list[str]]:
        """Consecutive groups of sentences of up to `limit` tokens."""
        groups, size = [[sentences[0]]], self.count(sentences[0])
        for sentence in sentences[1:]:
            size += self.count(sentence)
            if size > limit:
                groups.append([])
                size = self.count(sentence)
            groups[-1].append(sentence)
        return groups

    def add(self, document: list[str]) -> None:
        sizes = [self.count(sentence) for sentence in document]
        total, read, chosen = sum(sizes), 0, []
        if total < SHORTEST:
            return
        for place, size in enumerate(sizes):
            apart = not chosen or place > chosen[-1] + 1
            if read >= max(FIRST, 3 * total / 4) and apart and 12 <= len(document[place].split()) <= 60:
                chosen.append(place)
            read += size
        if len(chosen) > QUERIES:
            step = (len(chosen) - 1) / (QUERIES - 1)
            chosen = [chosen[round(step * place)] for place in range(QUERIES)]
        self.queries += [(document[place], len(self.documents)) for place in chosen]
        self.documents.append([text for place, text in enumerate(document) if place not in chosen])

    def passages(self, size: int) -> list[list[str]]:
        """Of each document; a space joins them."""
        return [[" ".join(group) for group in self.cut(document, size)] for document in self.documents]

    def measured(self, queries: Tensor, vectors: list[Tensor]) -> dict[str, float]:
        """A document is as near as the nearest of its vectors. Queries [Q, D], for each document [n, D], of length
        1."""
        scores = torch.stack([(queries @ own.T).amax(1) for own in vectors], dim=1)
        right = scores.gather(1, torch.tensor([[document] for _, document in self.queries]))
        rank = (scores > right).sum(1) + 1
        shares = {f"recall@{most}": 100 * (rank <= most).double().mean().item() for most in (1, 5)}
        return {**shares, "MRR": 100 * (1 / rank).double().mean().item()}


def encode(model: Any, texts: list[str], length: int) -> Tensor:
    model.max_seq_length = length
    return model.encode(texts, batch_size=32, convert_to_tensor=True, normalize_embeddings=True)


class Retrieval:
    """rows: what was measured, of the source and of models that read a whole document in one pass."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.source = SentenceTransformer(options.source, device="cpu")
        self.task = Task(options.text, self.source.tokenizer)
        self.sentences = [sentence for sentence, _ in self.task.queries]
        self.texts = [" ".join(document) for document in self.task.documents]
        self.passages = {size: self.task.passages(size) for size in PASSAGES}
        self.rows: list[dict[str, Any]] = []

    def add(self, reader: str, vectors: str, queries: Tensor, found: Any, seconds: float, **known: Any) -> None:
        figures = {key: round(value, 1) for key, value in self.task.measured(queries, list(found)).items()}
        self.rows.append({"reader": reader, "vectors": vectors, **known, **figures, "reading, s": round(seconds, 1)})
        print(json.dumps(self.rows[-1]), flush=True)

    def of_source(self) -> None:
        queries = encode(self.source, self.sentences, 256)
        for length in (256, 512):
            found, seconds = timed(encode, self.source, self.texts, length)
            self.add(f"source, cut at {length}", "one", queries, found[:, None], seconds)
        for size, passages in self.passages.items():
            flat, seconds = timed(encode, self.source, [text for own in passages for text in own], 512)
            chunks = flat.split([len(own) for own in passages])
            means = [normalize(own.mean(0, keepdim=True), dim=-1) for own in chunks]
            self.add(f"source, chunks of {size}", "their mean", queries, means, seconds)
            self.add(f"source, chunks of {size}", "each", queries, chunks, seconds)

    def of_model(self, folder: str) -> None:
        model = SentenceTransformer(folder, device="cpu")
        record = Path(folder) / RECORD
        known = json.loads(record.read_text()) if record.exists() else {}
        reader = "converted and trained" if known else "converted"
        queries = encode(model, self.sentences, model.max_seq_length)
        spans = [[(0, len(text))] for text in self.texts]
        for passages in self.passages.values():
            for own, chosen in zip(spans, passages):
                own += places(chosen)
        found, seconds = timed(late_chunks, model, self.texts, spans)
        self.add(reader, "one", queries, [vectors[:1] for vectors in found], seconds, **known)
        first = [1] * len(found)
        for size, passages in self.passages.items():
            last = [start + len(own) for start, own in zip(first, passages)]
            chunks = [vectors[start:end] for vectors, start, end in zip(found, first, last)]
            self.add(reader, f"passages of {size}", queries, chunks, seconds, **known)
            first = last


def places(passages: list[str]) -> list[tuple[int, int]]:
    """Their spans in the text that they make, joined by spaces."""
    ends = list(itertools.accumulate(len(passage) + 1 for passage in passages))
    return [(end - 1 - len(passage), end - 1) for passage, end in zip(passages, ends)]


def timed(call: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """What it returns, and its processor seconds."""
    begun = time.process_time()
    return call(*arguments), time.process_time() - begun


def reader_of(folder: str, how: str) -> Callable[[], Any]:
    """A pass over 4,096 tokens. how: `chunks` (16 texts of 256), or an attention of transformers' or ours."""
    attention = {} if how in ("ours", "chunks") else {"attn_implementation": how}
    model = AutoModel.from_pretrained(folder, **attention).eval()
    shape = (16, 256) if how == "chunks" else (1, 4096)
    ids = torch.randint(1000, model.config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if how in ("eager", "sdpa"):  # the source has 512 positions, which repeat here as they do in the converted model
        batch |= {"position_ids": torch.arange(4096)[None] % 512, "token_type_ids": torch.zeros_like(ids)}

    def read() -> None:
        with torch.inference_mode():
            model(**batch)

    return read


def timing(options: argparse.Namespace) -> list[dict[str, Any]]:
    cases = {
        "source, 16 chunks of 256": (options.source, "chunks"),
        "transformers' BERT, eager": (options.source, "eager"),
        "transformers' BERT, sdpa": (options.source, "sdpa"),
        "converted": (options.converted, "ours"),
    }
    memory = {name: memory_in_fresh_process(reader_of, *case, repeats=1) for name, case in cases.items()}
    seconds = interleaved_seconds({name: reader_of(*case) for name, case in cases.items()}, rounds=3)
    chunks, eager = ratios(seconds, "source, 16 chunks of 256"), ratios(seconds, "transformers' BERT, eager")
    rows = [
        {
            "reader": name,
            "seconds": round(sorted(seconds[name])[1], 2),
            "time / chunks": round(chunks[name], 2),
            "time / eager": round(eager[name], 2),
            "peak MiB": round(memory[name] / 2**20),
            "others busy": round(seconds.others_busy, 2),
        }
        for name in cases
    ]
    for row in rows:
        print(json.dumps(row), flush=True)
    return rows


def write(found: dict[str, Any]) -> None:
    counts = found.get("test", {})
    note = (
        "all-MiniLM-L6-v2 as it is and as a Longformer of 4,096 tokens (window 512). Articles of WikiText-2's test"
        f" split are cut between sentences into documents of {SHORTEST:,} to {LONGEST:,} tokens:"
        f" {counts.get('documents')} of {counts.get('articles')} articles. Each of {counts.get('queries')} queries is"
        " a sentence of a document's last quarter, beyond token 1,000, which was taken out of it. With several"
        " vectors a document is as near as the nearest of them. Passages are sentences of up to so many tokens"
        " together: the source reads each by itself, the converted model all in one pass (late chunking). Training saw"
        " other articles (the validation split). Figures in percent, times in processor time; that of"
        " training was taken next to other work. A pass"
        " over 4,096 tokens stands next to 16 chunks of 256, the same number."
    )
    tables.write_json(RESULTS / "long_documents.json", found)
    parts = ["# A sentence encoder that reads 4,096 tokens", note, tables.about(found["machine"])]
    for title in (RETRIEVAL, TIMING):
        rows = found.get(title, [])
        columns = list(dict.fromkeys(column for row in rows for column in row))
        parts += [f"## {title}", tables.folded(rows, columns, f"long_documents/{title}")] if rows else []
    write_text(RESULTS / "long_documents.md", "\n\n".join(parts) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, help="folder of the short encoder")
    parser.add_argument("--converted", required=True, help="folder of the same, converted")
    parser.add_argument("--trained", nargs="*", default=[], help="folders that scripts/long_encoder.py wrote")
    parser.add_argument("--text", help="a file of WikiText that was not trained on")
    parser.add_argument("--only", choices=("retrieval", "trained", "timing"))
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    path = RESULTS / "long_documents.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    if options.only != "timing":
        if options.text is None:
            parser.error("what is found is measured on --text")
        measured = Retrieval(options)
        if options.only != "trained":
            measured.of_source()
            measured.of_model(options.converted)
        for folder in options.trained:
            measured.of_model(folder)
        anew = [identity(row) for row in measured.rows]
        found[RETRIEVAL] = [row for row in found.get(RETRIEVAL, []) if identity(row) not in anew] + measured.rows
        task = measured.task
        found["test"] = dict(
            zip(("documents", "articles", "queries"), (len(task.documents), task.articles, len(task.queries)))
        )
    if options.only in (None, "timing"):
        found[TIMING] = timing(options)
    if not options.no_write:
        write({"machine": machine(), **{key: found[key] for key in ("test", RETRIEVAL, TIMING) if key in found}})


def identity(row: dict[str, Any]) -> dict[str, Any]:
    """What was measured, without the figures."""
    figures = ("recall@1", "recall@5", "MRR", "reading, s", "training, min")
    return {column: value for column, value in row.items() if column not in figures}


if __name__ == "__main__":
    main()
