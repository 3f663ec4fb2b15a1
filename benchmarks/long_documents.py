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
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from measure import interleaved_seconds, machine, memory_in_fresh_process, ratios
from sentence_transformers import SentenceTransformer
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoConfig, AutoModel

sys.path.insert(0, os.fspath(Path(__file__).parents[1]))
from hf_xformers.benchmark import tables
from hf_xformers.core.saved_files import write_text
from hf_xformers.inference import late_chunks
from scripts.long_encoder import RECORD, articles

RESULTS = Path(__file__).parent / "results"
CHUNKS = "source, 41 chunks of 100"
RETRIEVAL, TIMING = "Retrieval", "Time and memory of a document of 4,096 tokens"
RUNS = "runs"  # what RETRIEVAL has means of, over the seeds of training
FIGURES = ("recall@1", "recall@5", "MRR")
LONGEST, SHORTEST, FIRST, QUERIES = 4000, 1400, 1000, 6  # tokens of documents, queries of each
SIZE = 100  # tokens of a passage at most
KINDS = {f"of {SIZE}": False, f"of {SIZE}, overlapping by half": True}  # of passages, and of the source's chunks


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

    def passages(self, overlapping: bool) -> list[list[tuple[int, int]]]:
        """Of each document, as (start, end) in characters: sentences of up to SIZE tokens together; overlapping: each
        begins where the first half of the one before it ends."""
        found = []
        for document in self.documents:
            places = list(itertools.accumulate((len(sentence) + 1 for sentence in document), initial=0))
            groups = self.groups(document, overlapping)
            found.append([(places[own.start], places[own.stop] - 1) for own in groups])
        return found

    def groups(self, document: list[str], overlapping: bool) -> Iterator[range]:
        """Numbers of the sentences of each passage."""
        sizes, start, end = [self.count(sentence) for sentence in document], 0, 0
        while end < len(document):
            end = start + 1
            while end < len(document) and sum(sizes[start : end + 1]) <= SIZE:
                end += 1
            yield range(start, end)
            halves = [at for at in range(start + 1, end) if 2 * sum(sizes[start:at]) <= sum(sizes[start:end])]
            start = max([start + 1, *halves]) if overlapping else end

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
        self.passages = {name: self.task.passages(overlapping) for name, overlapping in KINDS.items()}
        self.rows: list[dict[str, Any]] = []

    def add(self, reader: str, vectors: str, queries: Tensor, found: Any, seconds: float, **known: Any) -> None:
        figures = {key: round(value, 1) for key, value in self.task.measured(queries, list(found)).items()}
        self.rows.append({"reader": reader, "vectors": vectors, **known, **figures})
        print(json.dumps({**self.rows[-1], "reading, s": round(seconds, 1)}), flush=True)

    def of_source(self) -> None:
        queries = encode(self.source, self.sentences, 256)
        for length in (256, 512):
            found, seconds = timed(encode, self.source, self.texts, length)
            self.add(f"source, cut at {length}", "one", queries, found[:, None], seconds)
        for kind, passages in self.passages.items():
            parts = [text[start:end] for text, own in zip(self.texts, passages) for start, end in own]
            flat, seconds = timed(encode, self.source, parts, 512)
            self.add_passages(f"source, chunks {kind}", queries, flat.split([len(own) for own in passages]), seconds)

    def of_model(self, folder: str) -> None:
        model = SentenceTransformer(folder, device="cpu")
        record = Path(folder) / RECORD
        known = json.loads(record.read_text()) if record.exists() else {}
        window = model[0].auto_model.config.attention.attention_window
        reader = f"window {window}, trained" if known else f"window {window}"
        queries = encode(model, self.sentences, model.max_seq_length)
        spans = [[(0, len(text))] for text in self.texts]
        found, seconds = timed(late_chunks, model, self.texts, spans)
        self.add(reader, "one", queries, [normalize(vectors, dim=-1) for vectors in found], seconds, **known)
        for kind, passages in self.passages.items():
            found, seconds = timed(late_chunks, model, self.texts, passages)
            self.add_passages(f"{reader}, passages {kind}", queries, found, seconds, **known)

    def add_passages(self, reader: str, queries: Tensor, found: Any, seconds: float, **known: Any) -> None:
        chunks = [normalize(vectors, dim=-1) for vectors in found]
        means = [normalize(vectors.mean(0, keepdim=True), dim=-1) for vectors in chunks]
        self.add(reader, "their mean", queries, means, seconds, **known)
        self.add(reader, "each", queries, chunks, seconds, **known)


def timed(call: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """What it returns, and its processor seconds."""
    begun = time.process_time()
    return call(*arguments), time.process_time() - begun


def reader_of(folder: str, how: str, chunks: int = 1, length: int = 4096) -> Callable[[], Any]:
    """A pass over 4,096 tokens, as `chunks` texts of this length. how: an attention of transformers, or `as it is`."""
    attention = {} if how == "as it is" else {"attn_implementation": how}
    model = AutoModel.from_pretrained(folder, **attention).eval()
    shape = (chunks, length)
    ids = torch.randint(1000, model.config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if attention:  # the source has 512 positions, which repeat here as they do in the converted model
        batch |= {"position_ids": torch.arange(4096)[None] % 512, "token_type_ids": torch.zeros_like(ids)}

    def read() -> None:
        with torch.inference_mode():
            model(**batch)

    return read


def timing(options: argparse.Namespace) -> list[dict[str, Any]]:
    window = AutoConfig.from_pretrained(options.converted).attention.attention_window
    cases = {
        CHUNKS: (options.source, "as it is", 41, 100),
        "source, 82 chunks of 100, overlapping by half": (options.source, "as it is", 82, 100),
        "source, 16 chunks of 256": (options.source, "as it is", 16, 256),
        "transformers' BERT, eager": (options.source, "eager"),
        "transformers' BERT, sdpa": (options.source, "sdpa"),
        f"converted, window {window}": (options.converted, "as it is"),
    }
    memory = {name: memory_in_fresh_process(reader_of, *case, repeats=1) for name, case in cases.items()}
    seconds = interleaved_seconds({name: reader_of(*case) for name, case in cases.items()}, rounds=3)
    chunks, eager = ratios(seconds, CHUNKS), ratios(seconds, "transformers' BERT, eager")
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
        "all-MiniLM-L6-v2 as it is and as a Longformer of 4,096 tokens. Articles of WikiText-2's test"
        f" split are cut between sentences into documents of {SHORTEST:,} to {LONGEST:,} tokens:"
        f" {counts.get('documents')} of {counts.get('articles')} articles. Each of {counts.get('queries')} queries is"
        " a sentence of a document's last quarter, beyond token 1,000, which was taken out of it. With several"
        " vectors a document is as near as the nearest of them. Passages and chunks are sentences of up to so many"
        " tokens together: the source reads each chunk by itself, the converted model all passages in one pass (late"
        " chunking), overlapping or not. Training saw other articles (the validation split); `lowest` and `highest`"
        " are recall@1 over so many seeds of it, the others their mean. Figures in percent, times in processor time."
        " A pass over 4,096 tokens stands next to as many in chunks, and to chunks of which each token is in two."
    )
    tables.write_dated(RESULTS / "long_documents.json", found)
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
        found[RUNS] = [row for row in found.get(RUNS, []) if identity(row) not in anew] + measured.rows
        found[RETRIEVAL] = means(found[RUNS])
        task = measured.task
        found["test"] = dict(
            zip(("documents", "articles", "queries"), (len(task.documents), task.articles, len(task.queries)))
        )
    if options.only in (None, "timing"):
        found[TIMING] = timing(options)
    if not options.no_write:
        write({"machine": machine(), **{key: found[key] for key in ("test", RETRIEVAL, RUNS, TIMING) if key in found}})


def identity(row: dict[str, Any]) -> dict[str, Any]:
    """What was measured, without the figures."""
    return {column: value for column, value in row.items() if column not in (*FIGURES, "training, min")}


def means(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows that are alike but for the seed as one, with the lowest and the highest share at the first place."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        alike = {column: value for column, value in identity(row).items() if column != "seed"}
        groups.setdefault(json.dumps(alike), []).append(row)
    found = []
    for alike, runs in groups.items():
        spread = {}
        if "seed" in runs[0]:
            first = [run["recall@1"] for run in runs]
            spread = {"seeds": len(runs), "lowest": min(first), "highest": max(first)}
        figures = {key: round(sum(run[key] for run in runs) / len(runs), 1) for key in FIGURES}
        found.append({**json.loads(alike), **figures, **spread})
    return found


if __name__ == "__main__":
    main()
