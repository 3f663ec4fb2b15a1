"""The gated recurrences compared with the chunked functions in plain torch that transformers has for them; below 1 is
a gain.

    OMP_NUM_THREADS=1 python benchmarks/ops_recurrent.py [--lengths 512,2048,8192] [--rounds 5] [--only delta] [--save]

One call is the recurrence on float32 inputs of one text: the gated delta rule with 8 heads of queries and keys and 16
of values, all of width 128 (queries and keys of length one; transformers is given them 16 times, as its layer makes
them), and the scan of Mamba-2 with 24 heads of width 64 that share queries and keys of width 128. `memory` is the
growth of the peak over the inputs in forward + backward.
"""

from __future__ import annotations

import argparse
import contextlib
import io

import torch
from measure import interleaved_seconds, memory_in_fresh_process, ratios, write_results
from torch.nn.functional import normalize

from hf_xformers.ops.linear.decayed_scan import decayed_scan
from hf_xformers.ops.linear.gated_delta import gated_delta_rule

THEIRS = "transformers"


def inputs(kind: str, length: int) -> list[torch.Tensor]:
    """query, key, value, strengths and log decays, heads first."""
    torch.manual_seed(0)
    groups, heads, width, value = (8, 16, 128, 128) if kind == "gated delta rule" else (1, 24, 128, 64)
    query, key = (normalize(torch.randn(1, groups, length, width), dim=-1) for _ in range(2))
    beta, decay = torch.rand(1, heads, length), -torch.rand(1, heads, length)
    return [query, key, torch.randn(1, heads, length, value), beta, decay]


def run_ours(kind: str, query, key, value, beta, decay):
    if kind == "gated delta rule":
        return gated_delta_rule(query, key, value, beta, decay)
    return decayed_scan(query, key, value * beta[..., None], decay * beta)


def run_theirs(kind: str, query, key, value, beta, decay):
    query, key, value, beta, decay = (x.transpose(1, 2) for x in (query, key, value, beta, decay))
    with contextlib.redirect_stderr(io.StringIO()):  # a warning that there are kernels for it
        if kind == "gated delta rule":
            from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as chunked

            query, key = (x.repeat_interleave(value.shape[2] // x.shape[2], dim=2) for x in (query, key))
            options = {"chunk_size": 64, "initial_state": None, "output_final_state": False}
            return chunked(query * query.shape[-1] ** 0.5, key, value, decay, beta, **options)[0].transpose(1, 2)
        from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

        # Its decay is a constant of a head times a step of each token.
        rates = decay.mean((0, 1))
        found = mamba2_chunk_scan(value, beta, rates, key, query, chunk_size=256)
        return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)


def call(name: str, length: int, train: bool = True):
    """A callable that runs the engine forward, or forward and backward. name: of the recurrence, and whose."""
    kind, whose = name.split(", ")
    given = inputs(kind, length)
    grad, run = torch.randn_like(given[2]), run_theirs if whose == THEIRS else run_ours
    if not train:
        return torch.no_grad()(lambda: run(kind, *given))
    given = [x.requires_grad_() for x in given]
    return lambda: torch.autograd.grad(run(kind, *given), given, grad, allow_unused=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="recurrences whose name contains this")
    parser.add_argument("--save", action="store_true", help="write results/ops_recurrent.*")
    arguments = parser.parse_args()
    rows = []
    for length in map(int, arguments.lengths.split(",")):
        for kind in (kind for kind in ("gated delta rule", "scan of Mamba-2") if arguments.only in kind):
            ours, base = f"{kind}, ours", f"{kind}, {THEIRS}"
            row = {"recurrence": kind, "against": THEIRS, "T": length}
            for column, train in (("forward", False), ("train", True)):
                calls = {name: call(name, length, train) for name in (ours, base)}
                row[column] = ratios(interleaved_seconds(calls, arguments.rounds), base)[ours]
            row["memory"] = memory_in_fresh_process(call, ours, length) / memory_in_fresh_process(call, base, length)
            rows.append(row)
            print("  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{v}" for k, v in row.items()), flush=True)
    if arguments.save:
        columns = ["recurrence", "against", "T", "forward", "train", "memory"]
        title = "Gated recurrences against transformers' functions in plain torch"
        print(write_results("ops_recurrent", rows, columns, title, " ".join(__doc__.split("\n\n")[2].split())))


if __name__ == "__main__":
    main()
