"""`python -m tests.mixes --count 10000 --seed 0`: draws mixes, and prints those that are neither refused nor work."""

from __future__ import annotations

import argparse
import multiprocessing
from collections import Counter

from rich.console import Console
from rich.progress import track

from tests.mixes.run import one, prepare


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="how many mixes")
    parser.add_argument("--seed", type=int, default=0, help="the first mix's number; the others follow")
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    console, counts = Console(soft_wrap=True, highlight=False), Counter()
    seeds = range(arguments.seed, arguments.seed + arguments.count)
    if arguments.processes == 1:
        prepare()
        pool, results = None, map(one, seeds)
    else:
        pool = multiprocessing.get_context("spawn").Pool(arguments.processes, initializer=prepare)
        results = pool.imap_unordered(one, seeds, chunksize=8)
    for seed, kind, detail, line in track(results, "mixes", total=len(seeds), console=console):
        counts[kind] += 1
        if line:
            console.print(f"[{seed}] {kind}: {detail}\n    {line}", markup=False)
    if pool is not None:
        pool.terminate()
    console.print(", ".join(f"{number} {kind}" for kind, number in counts.most_common()))
    return int(any(kind not in ("refused", "works") for kind in counts))


if __name__ == "__main__":
    raise SystemExit(main())
