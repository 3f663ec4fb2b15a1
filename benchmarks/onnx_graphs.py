"""Time of an exported graph under onnxruntime next to that of its model.

    python benchmarks/onnx_graphs.py --model runs/long [--lengths 128,1500,4096] [--repeats 7] [--int8]

Exports the saved encoder (its base model) to a folder that is removed afterwards, and runs both on the same texts of
one row, alternately, on one thread; the median of `--repeats` runs counts. Prints one line for each length, with the
largest difference. `--int8` adds the graph with weights of 8 bits that onnxruntime's `quantize_dynamic` makes of it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from transformers import AutoModel

import hf_xformers  # noqa: F401  (registers the variants)
from hf_xformers.export import export_onnx


def session(path: Path) -> Callable[[dict[str, torch.Tensor]], np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    made = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda given: made.run(["last_hidden_state"], {name: x.numpy() for name, x in given.items()})[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, metavar="DIR")
    parser.add_argument("--lengths", type=lambda x: [int(n) for n in x.split(",")], default=[128, 1500, 4096])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--int8", action="store_true")
    given = parser.parse_args()

    torch.set_num_threads(1)
    model = AutoModel.from_pretrained(given.model).eval()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        path, small = Path(folder) / "model.onnx", Path(folder) / "int8.onnx"
        report = export_onnx(model, path)
        print(f"{type(model).__name__}: {report.attention}; {path.stat().st_size / 1e6:.1f} MB")
        runs = {"model": lambda batch: model(**batch).last_hidden_state.numpy(), "graph": session(path)}
        if given.int8:
            from onnxruntime.quantization import quantize_dynamic

            quantize_dynamic(path, small, per_channel=True)
            print(f"int8: {small.stat().st_size / 1e6:.1f} MB")
            runs["int8"] = session(small)
        for length in given.lengths:
            ids = torch.randint(5, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
            known = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
            batch = {name: known[name] for name in report.inputs}
            times: dict[str, list[float]] = {name: [] for name in runs}
            found = {}
            for repeat in range(given.repeats + 1):
                for name, run in runs.items():
                    begin = time.perf_counter()
                    found[name] = run(batch)
                    if repeat:  # the first run warms up
                        times[name].append(time.perf_counter() - begin)
            medians = {name: statistics.median(of) for name, of in times.items()}
            ratios = (f"{name} {t * 1e3:.1f} ms ({t / medians['model']:.2f})" for name, t in medians.items())
            apart = np.abs(found["graph"] - found["model"]).max()
            print(f"{length:6d} tokens: {', '.join(ratios)}; largest difference {apart:.1e}")


if __name__ == "__main__":
    main()
