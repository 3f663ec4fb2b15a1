"""Time and peak memory of block-sparse attention against dense scaled_dot_product_attention on the CPU.

    OMP_NUM_THREADS=1 python benchmarks/ops_block_sparse.py --lengths 1024 4096 --patterns band bigbird

Every cell runs in a process of its own. Times are the least CPU time of several runs in milliseconds (forward under
no_grad, and forward + backward). Memory is the growth of the resident set during the first forward + backward beyond
its inputs. Columns "x" are dense divided by sparse time, so above 1 is a gain. Causal patterns are compared with dense
causal attention.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_xformers.ops.block_sparse.attention import block_sparse_attention
from hf_xformers.ops.block_sparse.patterns import (
    Pattern,
    band,
    block_local,
    causal,
    dilated,
    fixed,
    global_,
    random_blocks,
    strided,
)

PATTERNS: dict[str, tuple[Pattern, bool]] = {
    "band": (band(256, 256), False),
    "band_causal": (band(255, 0), True),
    "band_narrow": (band(32, 32), False),
    "dilated": (dilated(64, 64, 4), False),
    "block_local": (block_local(256), False),
    "longformer": (band(256, 256) | global_(first=16), False),
    "bigbird": (
        block_local(64, 1, 1)
        | global_(first=64, last=64)
        | random_blocks(3, 64, before=1, after=1, first=1, last=1, vary_heads=True),
        False,
    ),
    "strided_causal": ((band(63, 0) | strided(64)) & causal(), True),
    "fixed_causal": (fixed(128, 8) & causal(), True),
}
HEADS, WIDTH = 8, 64


def resident(field: str) -> int:
    """A line of /proc/self/status in KiB."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field))


def cpu_time(run: Callable[[], object], repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats + 1):
        start = time.process_time()
        run()
        best = min(best, time.process_time() - start)
    return 1e3 * best


class Copy(torch.nn.Module):
    """Stands for a projection; a copy, because the layer below changes its queries in place."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


def longformer_layer(length: int) -> Callable[..., Tensor]:
    """The attention of transformers' Longformer with window 512, fed with ready heads instead of projections."""
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    config = LongformerConfig(hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, attention_window=[512])
    layer = LongformerSelfAttention(config, 0).eval()
    layer.query, layer.key, layer.value = (Copy() for _ in range(3))
    mask = torch.zeros(1, length)
    nothing = torch.zeros(1, length, dtype=torch.bool)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # The layer projects one input three times, so here one tensor serves as q, k and v.
        hidden = q.transpose(1, 2).reshape(1, length, HEADS * WIDTH)
        out = layer(hidden, mask, is_index_masked=nothing, is_index_global_attn=nothing, is_global_attn=False)[0]
        return out.view(1, length, HEADS, WIDTH).transpose(1, 2)

    return run


def measure(name: str, length: int, repeats: int) -> dict[str, float]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, length, HEADS, WIDTH).transpose(1, 2).requires_grad_() for _ in range(3))
    grad = torch.randn(1, length, HEADS, WIDTH).transpose(1, 2)
    if name.startswith("dense"):

        def run(*qkv: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(*qkv, is_causal=name == "dense_causal")

    elif name == "hf_longformer":
        run = longformer_layer(length)
    else:

        def run(*qkv: Tensor) -> Tensor:
            return block_sparse_attention(*qkv, PATTERNS[name][0])

    def both() -> None:
        q.grad = k.grad = v.grad = None
        run(q, k, v).backward(grad)

    with torch.no_grad():
        run(*(x[:, :, :128] for x in (q, k, v)) if name != "hf_longformer" else (q, k, v))  # load the libraries
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # resets the peak
    before = resident("VmRSS")
    both()
    peak = (resident("VmHWM") - before) / 1024
    with torch.no_grad():
        forward = cpu_time(lambda: run(q, k, v), repeats)
    return {"forward": forward, "both": cpu_time(both, repeats), "peak": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--patterns", nargs="+", choices=[*PATTERNS, "hf_longformer"], default=list(PATTERNS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cell", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        print(json.dumps(measure(args.cell[0], int(args.cell[1]), args.repeats)))
        return

    def cell(name: str, length: int) -> dict[str, float]:
        command = [sys.executable, __file__, "--repeats", str(args.repeats), "--cell", name, str(length)]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    print(f"{'T':>6} {'pattern':16} {'fwd ms':>8} {'x':>6} {'fwd+bwd':>9} {'x':>6} {'peak MiB':>9} {'of dense':>8}")
    for length in args.lengths:
        dense: dict[bool, dict[str, float]] = {}
        for name in args.patterns:
            is_causal = name in PATTERNS and PATTERNS[name][1]
            if is_causal not in dense:
                label = "dense_causal" if is_causal else "dense"
                dense[is_causal] = base = cell(label, length)
                print(
                    f"{length:6} {label:16} {base['forward']:8.1f} {'':6} {base['both']:9.1f} {'':6}"
                    f" {base['peak']:9.1f}"
                )
            base, own = dense[is_causal], cell(name, length)
            print(
                f"{length:6} {name:16} {own['forward']:8.1f} {base['forward'] / own['forward']:6.2f}"
                f" {own['both']:9.1f} {base['both'] / own['both']:6.2f} {own['peak']:9.1f}"
                f" {own['peak'] / base['peak']:8.2f}"
            )


if __name__ == "__main__":
    main()
