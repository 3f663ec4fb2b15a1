"""What a recurrent state loses in bfloat16, token by token: error of the output by the length of the text.

    OMP_NUM_THREADS=1 python benchmarks/state_precision.py [--lengths 256,1024,4096,16384] [--seeds 0,1,2] [--print]

Random queries, keys and values of one head of width 64 go through the step that generation takes, with its state in
float32 as the package keeps it, and rounded to bfloat16 after every token; float64 is what is right. Two minutes.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from measure import write_results
from torch import Tensor
from torch.nn.functional import elu, logsigmoid, normalize

from hf_xformers.ops.linear.attention import LinearState, linear_attention
from hf_xformers.ops.linear.decayed_scan import decayed_scan
from hf_xformers.ops.linear.gated_delta import gated_delta_rule

WIDTH, READ = 64, 64  # of a head; last tokens that the error is a mean of
COLUMNS = ["recurrence", "T", "float32", "bfloat16", "spread", "seeds"]
NOTE = (
    f"One head of width {WIDTH}, random inputs: the error of the outputs of the last {READ} of T tokens, in percent of"
    " their norm, against the same recurrence in float64, a mean over seeds; `spread` is that of `bfloat16`, highest"
    " less lowest. `float32`: the state as the package keeps it, whatever the dtype of the model; `bfloat16`: rounded"
    " after every token, inputs and sums still in float32. Decays of a token are those of a sigmoid gate around 0.98."
    " Linear attention adds up all tokens: what a new one brings to its denominator is soon smaller than the last"
    " digit of the sum, which stops growing. What forgets, by a decay or by writing over, loses no more after some"
    " hundred tokens."
)


def inputs(seed: int, length: int) -> tuple[Tensor, ...]:
    """Queries, keys and values [1, 1, T, width], gates and log decays [1, 1, T], in float64."""
    draw = torch.Generator().manual_seed(seed)
    query, key, value = torch.randn(3, 1, 1, length, WIDTH, generator=draw, dtype=torch.float64)
    gate, decay = torch.randn(2, 1, 1, length, generator=draw, dtype=torch.float64)
    return query, key, value, gate.sigmoid(), logsigmoid(4 + decay)


def sums(state: Any, query: Tensor, key: Tensor, value: Tensor, gate: Tensor, decay: Tensor) -> tuple[Tensor, Any]:
    features = elu(query) + 1, elu(key) + 1
    return linear_attention(*features, value, causal=True, state=state, return_state=True)


def scan(state: Any, query: Tensor, key: Tensor, value: Tensor, gate: Tensor, decay: Tensor) -> tuple[Tensor, Any]:
    return decayed_scan(query, key, value, decay, state=state, return_state=True)


def delta(state: Any, query: Tensor, key: Tensor, value: Tensor, gate: Tensor, decay: Tensor) -> tuple[Tensor, Any]:
    return gated_delta_rule(query, normalize(key, dim=-1), value, gate, decay, state=state, return_state=True)


def undecayed(state: Any, query: Tensor, key: Tensor, value: Tensor, gate: Tensor, decay: Tensor) -> Any:
    return delta(state, query, key, value, gate, torch.zeros_like(decay))


STEPS = {"linear attention": sums, "decayed scan": scan, "delta rule": undecayed, "gated delta rule": delta}


def rounded(state: Any) -> Any:
    if isinstance(state, LinearState):
        return LinearState(*(None if part is None else rounded(part) for part in state))
    return state.bfloat16().to(state.dtype)


def written(name: str, given: tuple[Tensor, ...], low: bool) -> list[Tensor]:
    """What is read by each token, one token at a time."""
    state, found = None, []
    for place in range(given[0].shape[2]):
        out, state = STEPS[name](state, *(x[:, :, place : place + 1] for x in given))
        state = rounded(state) if low else state
        found.append(out[0, 0, 0])
    return found


@torch.inference_mode()
def errors(name: str, seed: int, lengths: list[int]) -> dict[int, tuple[float, float]]:
    """By length, that of float32 and of bfloat16."""
    exact = inputs(seed, max(lengths))
    right = STEPS[name](None, *exact)[0][0, 0]
    found = [written(name, tuple(x.float() for x in exact), low) for low in (False, True)]

    def error(outputs: list[Tensor], length: int) -> float:
        last = slice(length - READ, length)
        return ((torch.stack(outputs[last]) - right[last]).norm() / right[last].norm()).item()

    return {length: (error(found[0], length), error(found[1], length)) for length in lengths}


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=numbers, default="256,1024,4096,16384")
    parser.add_argument("--seeds", type=numbers, default="0,1,2")
    parser.add_argument("--print", action="store_true", help="print rows and write nothing")
    options = parser.parse_args()
    rows = []
    for name in STEPS:
        runs = [errors(name, seed, options.lengths) for seed in options.seeds]
        for length in options.lengths:
            single, low = ([100 * run[length][place] for run in runs] for place in (0, 1))
            row = {"recurrence": name, "T": length, "float32": f"{statistics.mean(single):.0e}"}
            row |= {"bfloat16": statistics.mean(low), "spread": max(low) - min(low), "seeds": len(runs)}
            rows.append(row)
            print(row, flush=True)
    if not options.print:
        write_results("state_precision", rows, COLUMNS, "A recurrent state in bfloat16", NOTE)


if __name__ == "__main__":
    main()
