# SPDX-License-Identifier: Apache-2.0
"""Which waiting texts go into one padded batch, so that all are done soonest (Fang et al. 2021, arXiv 2010.05680,
section 5: TurboTransformers' scheduler).

```python
costs = measure_batch_costs(run, lengths=(16, 64, 256), batches=(1, 4, 16))
plan = plan_batches([len(text) for text in texts], costs, max_batch=16)
results = run_in_batches(texts, plan, encode)
```
"""

from __future__ import annotations

import bisect
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

Row = TypeVar("Row")
Result = TypeVar("Result")


def plan_batches(
    lengths: Sequence[int], cost: Callable[[int, int], float], max_batch: int | None = None
) -> list[list[int]]:
    """Places in `lengths` of the texts of each batch, such that the sum of costs is the smallest there is.

    Texts are taken in order of their lengths, l_1 <= ... <= l_n, and
    best(i) = min_b best(i - b) + cost(l_i, b), 1 <= b <= `max_batch`: O(n `max_batch`) steps. Batches of neighbors
    lose nothing as long as a longer batch costs no less.

    Args:
        lengths: tokens of each text.
        cost: of a padded batch (its longest text's length, number of texts), in any unit, such as [`BatchCosts`].
        max_batch: texts of a batch at most; `None`: all.

    Raises:
        ValueError: a length or `max_batch` below 1, or a cost that is no number.
    """
    for place, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"text {place} has a length of {length}; leave empty texts out of the plan.")
    if max_batch is not None and max_batch < 1:
        raise ValueError(f"`max_batch` must be at least 1, got {max_batch}; leave it out for no limit.")
    order = sorted(range(len(lengths)), key=lambda place: lengths[place])
    most = len(order) if max_batch is None else max_batch
    best, sizes = [0.0], [0]
    known: dict[tuple[int, int], float] = {}
    for count in range(1, len(order) + 1):
        length, found, size = lengths[order[count - 1]], math.inf, 0
        for batch in range(1, min(count, most) + 1):
            price = known.get((length, batch))
            if price is None:
                price = known[length, batch] = float(cost(length, batch))
                if not math.isfinite(price):
                    raise ValueError(f"a batch of {batch} texts of {length} tokens costs {price}; give a number.")
            if best[count - batch] + price < found:
                found, size = best[count - batch] + price, batch
        best.append(found)
        sizes.append(size)
    plan, count = [], len(order)
    while count:
        plan.append(order[count - sizes[count] : count])
        count -= sizes[count]
    return plan[::-1]


class BatchCosts:
    """The cost of any padded batch from those of some: linear between measured lengths and batches, in proportion
    beyond the largest. Measurements scatter, but a larger batch never costs less here.

    seconds: (length, batch) -> cost, for every pair of some lengths and some batches.

    Raises `ValueError` where a pair is missing, or a cost is not above 0.
    """

    def __init__(self, seconds: Mapping[tuple[int, int], float]):
        self.lengths, self.batches = (sorted({key[axis] for key in seconds}) for axis in (0, 1))
        if not seconds or len(seconds) < len(self.lengths) * len(self.batches):
            raise ValueError(
                f"{len(seconds)} costs do not cover {len(self.lengths)} lengths and {len(self.batches)} batches; give"
                " one for each pair."
            )
        if min(seconds.values()) <= 0 or self.lengths[0] < 1 or self.batches[0] < 1:
            raise ValueError("costs, lengths and batches have to be above 0.")
        rows = [[float(seconds[length, batch]) for batch in self.batches] for length in self.lengths]
        rows = [list(itertools.accumulate(row, max)) for row in rows]
        self.table = list(map(list, zip(*(itertools.accumulate(column, max) for column in zip(*rows)))))

    def __call__(self, length: int, batch: int) -> float:
        factor = max(length / self.lengths[-1], 1.0) * max(batch / self.batches[-1], 1.0)
        rows = [_between(self.batches, row, batch) for row in self.table]
        return factor * _between(self.lengths, rows, length)


def _between(places: Sequence[int], values: Sequence[float], at: int) -> float:
    """The value at a place on the line through the next ones; at the ends, that of the end."""
    after = bisect.bisect_left(places, at)
    if after == 0:
        return values[0]
    if after == len(places):
        return values[-1]
    share = (at - places[after - 1]) / (places[after] - places[after - 1])
    return values[after - 1] + share * (values[after] - values[after - 1])


def measure_batch_costs(
    run: Callable[[int, int], object], lengths: Iterable[int], batches: Iterable[int], repeats: int = 2
) -> BatchCosts:
    """Seconds of `run(length, batch)`, which runs a model on a batch of that size and waits for the result, the
    shortest of `repeats` after one that warms up. Costs belong to the machine that they are measured on."""
    seconds = {}
    for length, batch in itertools.product(sorted(set(lengths)), sorted(set(batches))):
        run(length, batch)
        taken = []
        for _ in range(repeats):
            begin = time.perf_counter()
            run(length, batch)
            taken.append(time.perf_counter() - begin)
        seconds[length, batch] = max(min(taken), 1e-9)
    return BatchCosts(seconds)


def run_in_batches(
    rows: Sequence[Row], plan: Iterable[Sequence[int]], run: Callable[[list[Row]], Sequence[Result]]
) -> list[Result]:
    """The results of `run` on the batches of a plan, in the order of `rows`.

    Raises `ValueError` for a plan that leaves a row out or has it twice, and for a batch without a result for each of
    its rows.
    """
    plan = [list(batch) for batch in plan]
    if sorted(place for batch in plan for place in batch) != list(range(len(rows))):
        raise ValueError(
            f"the plan does not have each of {len(rows)} rows once; make it of the lengths of these rows."
        )
    found: dict[int, Result] = {}
    for batch in plan:
        results = run([rows[place] for place in batch])
        if len(results) != len(batch):
            raise ValueError(f"a batch of {len(batch)} rows has {len(results)} results; let `run` give one for each.")
        found.update(zip(batch, results))
    return [found[place] for place in range(len(rows))]


__all__ = ["BatchCosts", "measure_batch_costs", "plan_batches", "run_in_batches"]
