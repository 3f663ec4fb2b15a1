"""Batches of waiting texts: the best of all plans, by brute force, and results that know nothing of the plan."""

import random

import pytest
import torch

from examples.batch_plan import BatchCosts, measure_batch_costs, plan_batches, run_in_batches
from tests.common.cases import CASES
from tests.helpers import close, pad, tokens

LENGTHS = [17, 18, 52, 63, 77]


def price(plan, lengths, cost):
    return sum(cost(max(lengths[place] for place in batch), len(batch)) for batch in plan)


@pytest.mark.parametrize(
    ("start", "batches", "total"),
    [
        (10, [[17, 18], [52], [63], [77]], 268),
        (40, [[17, 18], [52, 63, 77]], 347),
        (1000, [LENGTHS], 1385),
        (0, [[17], [18], [52], [63], [77]], 227),
    ],
)
def test_by_hand(start, batches, total):
    """A batch costs `start` and a unit for each of its places: the fewer of them, the dearer a start is."""

    def cost(length, batch):
        return start + length * batch

    mixed = [63, 17, 77, 52, 18]
    plan = plan_batches(mixed, cost)
    assert [[mixed[place] for place in batch] for batch in plan] == batches
    assert price(plan, mixed, cost) == total
    assert price([range(5)], mixed, lambda length, batch: 40 + length * batch) == 425


def partitions(items):
    """All ways to cut a set into parts."""
    if not items:
        yield []
        return
    first, *rest = items
    for parts in partitions(rest):
        yield [[first], *parts]
        for index in range(len(parts)):
            yield [*parts[:index], [first, *parts[index]], *parts[index + 1 :]]


@pytest.mark.parametrize("most", [None, 3])
def test_no_set_partition_is_better(most):
    draw = random.Random(0)
    every = list(partitions(list(range(6))))
    assert len(every) == 203
    for _ in range(100):
        lengths = [draw.randint(1, 40) for _ in range(6)]
        rates = [0.0]
        for _ in range(6):  # a further text costs less and less, or more and more
            rates.append(rates[-1] + draw.random())
        start = draw.choice([0.0, 5.0, 50.0])

        def cost(length, batch, start=start, rates=rates):
            return start + (length + 0.1 * length**2) * rates[batch]

        allowed = [plan for plan in every if most is None or max(map(len, plan)) <= most]
        best = min(price(plan, lengths, cost) for plan in allowed)
        plan = plan_batches(lengths, cost, most)
        assert plan in [[sorted(batch, key=lambda place: (lengths[place], place)) for batch in plan]]
        assert sorted(place for batch in plan for place in batch) == list(range(6))
        assert price(plan, lengths, cost) == pytest.approx(best)


def test_measured_costs():
    """Between measurements costs are linear, beyond them in proportion; a slip downwards counts as none."""
    costs = BatchCosts({(10, 1): 1.0, (10, 4): 4.0, (20, 1): 3.0, (20, 4): 2.0})
    assert costs(10, 1) == 1.0 and costs(5, 1) == 1.0 and costs(10, 2) == 2.0
    assert costs(20, 4) == 4.0, "the shorter batch took as long"
    assert costs(15, 1) == 2.0 and costs(40, 8) == 4 * costs(20, 4)
    seen = []
    measured = measure_batch_costs(lambda *size: seen.append(size), (4, 2), (1, 3), repeats=2)
    assert seen == [size for pair in ((2, 1), (2, 3), (4, 1), (4, 3)) for size in [pair] * 3]
    assert measured.lengths == [2, 4] and measured(4, 3) >= measured(2, 1) > 0


def test_results_do_not_depend_on_the_plan():
    """Each text's states are the same alone, with all, and as planned, and come back in the order of the texts."""
    model = next(case for case in CASES if str(case) == "xf_bert-encoder").shared()
    texts = [tokens(length, seed=length) for length in (9, 3, 12, 4, 4, 1)]

    def run(rows):
        ids, mask = pad(rows, max(map(len, rows)), "right")
        with torch.no_grad():
            logits = model(ids, attention_mask=mask).logits
        return [row[: len(text)] for row, text in zip(logits, rows)]

    alone = [run([text])[0] for text in texts]
    lengths = list(map(len, texts))
    plans = [plan_batches(lengths, lambda length, batch, a=a: a + length * batch) for a in (0, 6, 1000)]
    assert len(plans[0]) == 6 > len(plans[1]) > len(plans[2]) == 1
    for plan in plans:
        for found, expected in zip(run_in_batches(texts, plan, run), alone, strict=True):
            close(found, expected)


def test_refusals():
    def cost(length, batch):
        return 1.0

    assert plan_batches([], cost) == [] and run_in_batches([], [], len) == []
    for lengths, most, message in (
        ([3, 0], None, "text 1 has a length of 0; leave empty texts out"),
        ([3], 0, "`max_batch` must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            plan_batches(lengths, cost, most)
    with pytest.raises(ValueError, match="a batch of 1 texts of 3 tokens costs nan"):
        plan_batches([3], lambda length, batch: float("nan"))
    with pytest.raises(ValueError, match="3 costs do not cover 2 lengths and 2 batches"):
        BatchCosts({(1, 1): 1.0, (1, 2): 1.0, (2, 2): 1.0})
    with pytest.raises(ValueError, match="have to be above 0"):
        BatchCosts({(1, 1): 0.0})
    with pytest.raises(ValueError, match="does not have each of 3 rows once"):
        run_in_batches("abc", [[0, 1], [1]], list)
    with pytest.raises(ValueError, match="a batch of 2 rows has 1 results"):
        run_in_batches("abc", [[0, 1], [2]], lambda rows: rows[:1])
