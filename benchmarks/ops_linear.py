"""The linear and compressed engines against dense scaled_dot_product_attention: ratios, below 1 is a gain.

    OMP_NUM_THREADS=1 python benchmarks/ops_linear.py [--lengths 2048,4096] [--rounds 5] [--only elu] [--save]

One call is the engine on q, k, v of shape [1, 8, T, 64] in float32, its feature map included. Causal engines are
compared with causal dense attention. `memory` is the growth of the peak over the inputs in forward + backward; `total`
counts the inputs and the gradient of the output as well, in both.
"""

from __future__ import annotations

import argparse

import torch
from measure import interleaved_seconds, memory_in_fresh_process, ratios, write_results
from torch.nn.functional import scaled_dot_product_attention

from hf_xformers.ops.linear.attention import delta_rule, kernel_attention, linear_attention
from hf_xformers.ops.linear.feature_maps import dpfp, elu_plus_one, positive_features, random_matrix, sum_normalize
from hf_xformers.ops.nystrom import nystrom_attention

HEADS, DIM = 8, 64
BASELINES = {False: "dense", True: "dense causal"}


def softmax_features(x, projection):
    return positive_features(x * DIM**-0.25, projection)


def sum_elu(x):
    return sum_normalize(elu_plus_one(x))


def dpfp3(x):
    return dpfp(x, 3, normalize=True)


def engine(name: str, length: int):
    """The engine of that name as a function of q, k, v, beta."""
    projection = random_matrix(256, DIM, generator=torch.Generator().manual_seed(0))
    padding = torch.arange(length)[None] < length - 5
    return {
        "dense": lambda q, k, v, _: scaled_dot_product_attention(q, k, v),
        "dense causal": lambda q, k, v, _: scaled_dot_product_attention(q, k, v, is_causal=True),
        "elu": lambda q, k, v, _: linear_attention(elu_plus_one(q), elu_plus_one(k), v, causal=False),
        "favor+ 256": lambda q, k, v, _: kernel_attention(q, k, v, softmax_features, projection, causal=False),
        "nystrom 64": lambda q, k, v, _: nystrom_attention(q, k, v, num_landmarks=64),
        "nystrom 64 padded": lambda q, k, v, _: nystrom_attention(
            q, k, v, num_landmarks=64, key_padding_mask=padding, query_padding_mask=padding
        ),
        "nystrom 256": lambda q, k, v, _: nystrom_attention(q, k, v, num_landmarks=256),
        "elu causal": lambda q, k, v, _: linear_attention(elu_plus_one(q), elu_plus_one(k), v, causal=True),
        "elu causal, map inside": lambda q, k, v, _: kernel_attention(q, k, v, elu_plus_one, causal=True),
        "elu causal padded": lambda q, k, v, _: linear_attention(
            elu_plus_one(q), elu_plus_one(k), v, causal=True, key_padding_mask=padding
        ),
        "favor+ 256 causal": lambda q, k, v, _: kernel_attention(q, k, v, softmax_features, projection, causal=True),
        "delta elu causal": lambda q, k, v, beta: delta_rule(q, k, v, beta, feature_map=sum_elu),
        "delta dpfp-3 causal": lambda q, k, v, beta: delta_rule(q, k, v, beta, feature_map=dpfp3),
    }[name]


ENGINES = [
    "elu", "favor+ 256", "nystrom 64", "nystrom 64 padded", "nystrom 256", "elu causal", "elu causal, map inside",
    "elu causal padded", "favor+ 256 causal", "delta elu causal", "delta dpfp-3 causal",
]  # fmt: skip


def call(name: str, length: int, train: bool = True):
    """A callable that runs the engine forward, or forward and backward."""
    torch.manual_seed(0)
    inputs = [torch.randn(1, HEADS, length, DIM) for _ in range(3)]
    beta, grad, run = torch.rand(1, HEADS, length), torch.randn(1, HEADS, length, DIM), engine(name, length)
    if not train:
        return torch.no_grad()(lambda: run(*inputs, beta))
    inputs = [x.requires_grad_() for x in inputs]
    # The result is bound, as a model would hold it; what grad() returns is dropped with it.
    return lambda: torch.autograd.grad(run(*inputs, beta), inputs, grad)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="2048,4096,8192,16384")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="engines whose name contains this")
    parser.add_argument("--save", action="store_true", help="write results/ops_linear.*")
    arguments = parser.parse_args()
    rows = []
    for length in map(int, arguments.lengths.split(",")):
        held = 4 * HEADS * length * DIM * 4
        base_memory = {name: memory_in_fresh_process(call, name, length) for name in BASELINES.values()}
        for name in (name for name in ENGINES if arguments.only in name):
            base = BASELINES["causal" in name]
            row = {"engine": name, "against": base, "T": length}
            for column, train in (("forward", False), ("train", True)):
                calls = {other: call(other, length, train) for other in (name, base)}
                row[column] = ratios(interleaved_seconds(calls, arguments.rounds), base)[name]
            memory = memory_in_fresh_process(call, name, length)
            row["memory"] = memory / base_memory[base]
            row["total"] = (memory + held) / (base_memory[base] + held)
            rows.append(row)
            print("  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{v}" for k, v in row.items()), flush=True)
    if arguments.save:
        columns = ["engine", "against", "T", "forward", "train", "memory", "total"]
        title = "Linear and compressed engines against dense attention"
        print(write_results("ops_linear", rows, columns, title, " ".join(__doc__.split("\n\n")[2].split())))


if __name__ == "__main__":
    main()
