"""What does not read text: forecasts of series by Informer, properties of graphs by Graphormer.

python benchmarks/series_and_graphs.py [--seeds 2] [--part series]

Series: weekly carbon dioxide on Mauna Loa, which comes with the package `statsmodels` (`pip install --no-deps
statsmodels` is enough; gaps are filled with the week before), and hours with two waves and noise of known strength.
The last tenth is forecast by the command `hf-xformers finetune --task forecasting`, with its weights after the last
step. Graphs: whether nodes form one ring or two, which no count of neighbors tells, and whether there is a triangle
among as many random edges. Each model stands next to its controls without what the paper adds, and compared with what
needs no model.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from measure import write_results
from seeds import together, trained
from transformers import AutoModelForSequenceClassification

sys.path.append(str(Path(__file__).resolve().parent.parent))

from examples.graphs import ring_graphs
from hf_xformers.data.graphs import Graph, GraphCollator
from hf_xformers.variants.graphormer import XFGraphormerConfig

COLUMNS = ["data", "model", "parameters", "metric", "seeds", "held out", "spread", "baseline", "of"]
COLUMNS += ["processor seconds"]
SERIES_SIZE = "--hidden_size 64 --num_attention_heads 4 --intermediate_size 128 --num_hidden_layers 2"
SERIES_SIZE += " --num_decoder_layers 1 --size tiny"
SERIES_RUN = "--eval_strategy no --save_strategy no --load_best_model_at_end false --report_to none --use_cpu true"
SERIES_RUN += " --disable_tqdm true --learning_rate 1e-3 --per_device_train_batch_size 16"
SERIES_STEPS, NOISE = 200, 0.3
FORECASTERS: dict[str, list[str]] = {
    "xf_informer": [],
    "with dense attention": ["--attention", "dense"],
    "with dense attention in layers of one length": ["--attention", "dense", "--stack", "plain"],
}
NODES, EDGES, GRAPHS, HELD_OUT, GRAPH_STEPS, BATCH = 12, 12, 2048, 512, 800, 64
GRAPH_RATE = 5e-3
GRAPH_SIZE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
CLASSIFIERS: dict[str, dict[str, Any]] = {
    "xf_graphormer": {},
    "without paths": {"position": "none"},
    "without paths and degrees": {"position": "none", "embedding": "token"},
}


# ------------------------------------------------------------------------------------------------ series


def carbon_dioxide() -> list[tuple[str, float]]:
    found = find_spec("statsmodels")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("The series comes with statsmodels: pip install --no-deps statsmodels")
    path = Path(found.submodule_search_locations[0]) / "datasets" / "co2" / "co2.csv"
    rows, last = [], math.nan
    for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines()):
        last = float(row["co2"] or last)
        day = datetime.datetime.strptime(row["date"], "%Y%m%d")
        rows.append((str(day), last))
    return rows


def waves(hours: int = 1600) -> list[tuple[str, float]]:
    """A daily wave, one of 16 hours and normal noise."""
    drawn = np.random.default_rng(0).normal(0.0, NOISE, hours)
    start = datetime.datetime(2024, 1, 1)
    return [
        (
            str(start + datetime.timedelta(hours=t)),
            math.sin(2 * math.pi * t / 24) + math.sin(2 * math.pi * t / 16) + float(drawn[t]),
        )
        for t in range(hours)
    ]


def forecasts(seeds: int) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as scratch:
        for name, rows, lengths in (
            ("carbon dioxide, 26 weeks ahead", carbon_dioxide(), (104, 26)),
            ("two waves and noise, 24 hours ahead", waves(), (96, 24)),
        ):
            data = Path(scratch) / "series.csv"
            with data.open("w", newline="") as file:
                csv.writer(file).writerows([("date", "value"), *rows])
            for model, options in FORECASTERS.items():
                words = ["finetune", "--task", "forecasting", "--variant", "informer", "--data", str(data), *options]
                words += f"--context_length {lengths[0]} --prediction_length {lengths[1]}".split()
                words += [*SERIES_SIZE.split(), *SERIES_RUN.split(), "--max_steps", str(SERIES_STEPS), "--seed"]
                runs = [
                    trained([*words, str(seed)], Path(scratch) / name / model / str(seed)) for seed in range(seeds)
                ]
                known = {"data": name, "model": model, "parameters": runs[0][0]["parameters"]}
                known |= {"metric": "squared error", "baseline": runs[0][0]["baseline_validation"]["mse"]}
                known["of"] = "the better of the last value and the season before"
                yield together([summary["eval_mse"] for summary, _ in runs], [spent for _, spent in runs], **known)


# ------------------------------------------------------------------------------------------------ graphs


def triangles(count: int, seed: int) -> list[Graph]:
    """Graphs of as many random edges, by turns with triangles (label 1) and without any."""
    random, pairs = Random(seed), [(i, j) for i in range(NODES) for j in range(i)]
    made: list[Graph] = []
    while len(made) < count:
        edges = random.sample(pairs, EDGES)
        matrix = np.zeros((NODES, NODES), dtype=np.int64)
        for i, j in edges:
            matrix[i, j] = matrix[j, i] = 1
        if bool(np.trace(matrix @ matrix @ matrix)) == bool(len(made) % 2):
            made.append(Graph((3,) * NODES, tuple(edges), label=len(made) % 2))
    return made


def classified(fields: dict[str, Any], batches: list[dict[str, Any]], held: dict[str, Any], seed: int) -> Any:
    """Held-out accuracy, parameters and processor seconds of a model that is trained here."""
    torch.manual_seed(seed)
    config = XFGraphormerConfig(
        **{"vocab_size": 8, "num_labels": 2, "max_position_embeddings": 32, **GRAPH_SIZE, **fields},
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = AutoModelForSequenceClassification.from_config(config)
    reads = ["input_ids", "attention_mask", "labels"]
    reads += [] if "embedding" in fields else ["in_degree", "out_degree"]
    reads += [] if "position" in fields else ["spatial_pos", "edge_paths"]
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, GRAPH_RATE, total_steps=GRAPH_STEPS, pct_start=0.1)
    start = time.process_time()
    for step in range(GRAPH_STEPS):
        batch = batches[step % len(batches)]
        model(**{name: batch[name] for name in reads}).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    seconds = time.process_time() - start
    with torch.no_grad():
        answers = model.eval()(**{name: held[name] for name in reads}).logits.argmax(-1)
    right = (answers == held["labels"]).double().mean().item()
    return right, model.num_parameters(), seconds


def graphs(seeds: int) -> Iterator[dict[str, Any]]:
    collate = GraphCollator(graph_token_id=2, pad_token_id=0)
    for name, made in (
        ("one ring or two", ring_graphs(GRAPHS + HELD_OUT, NODES, node_types=(3, 4), seed=0)),
        ("a triangle or none", triangles(GRAPHS + HELD_OUT, seed=0)),
    ):
        held, rest = collate(made[:HELD_OUT]), made[HELD_OUT:]
        batches = [collate(rest[start : start + BATCH]) for start in range(0, len(rest), BATCH)]
        for model, fields in CLASSIFIERS.items():
            runs = [classified(fields, batches, held, seed) for seed in range(seeds)]
            known = {"data": name, "model": model, "parameters": runs[0][1], "metric": "accuracy", "baseline": 0.5}
            yield together([run[0] for run in runs], [run[2] for run in runs], **known, of="chance")


def write(rows: list[dict[str, Any]]) -> None:
    noise = NOISE**2 / np.var([value for _, value in waves()])
    note = (
        "Means over seeds and their spread, largest less smallest. Series: Informer of two encoder layers and one"
        f" decoder layer, {SERIES_STEPS} steps of 16 windows, on the last tenth of the rows; squared errors are"
        f" divided by the training rows' variance. The noise of the waves alone is {noise:.3f} of their variance, less"
        f" than which no forecast can reach. Graphs of {NODES} nodes: {GRAPHS} to learn from and {HELD_OUT} held out,"
        f" {GRAPH_STEPS} steps of {BATCH}; the controls read nodes without their paths or without degrees as well."
        " Both classes are as frequent, and have as many edges."
    )
    write_results("series_and_graphs", rows, COLUMNS, "Forecasts of series and properties of graphs", note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--part", choices=("all", "series", "graphs"), default="all")
    given = parser.parse_args()
    stored = Path(__file__).parent / "results" / "series_and_graphs.json"
    rows = json.loads(stored.read_text())["rows"] if stored.exists() and given.part != "all" else []
    for part, run in (("series", forecasts), ("graphs", graphs)):
        if given.part not in ("all", part):
            continue
        for row in run(given.seeds):
            print(row, flush=True)
            rows = [old for old in rows if (old["data"], old["model"]) != (row["data"], row["model"])] + [row]
            write(rows)


if __name__ == "__main__":
    main()
