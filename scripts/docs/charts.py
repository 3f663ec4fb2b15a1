"""Which charts a result file has: what is on which axis, in what unit, and which rows make a line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Row = dict[str, Any]
MOST_LINES = 9  # in one chart; more are drawn in further ones
MOST_DOTS = 26


@dataclass(frozen=True)
class Chart:
    """A chart to draw. points: label of a line -> its (x, y), or label of a line of dots -> (name of the value, x).

    kind: `lines` over an axis of lengths, or `dots`, a row for each label. even: where it says "as dense".
    """

    name: str
    kind: Literal["lines", "dots"]
    title: str
    x: str
    y: str
    points: dict[str, list[tuple[Any, float]]]
    log: bool = False
    even: str = ""

    @property
    def alt(self) -> str:
        what = f"{self.y} over {self.x}" if self.kind == "lines" else self.x
        return f"{self.title}: {what}"


@dataclass(frozen=True)
class Plan:
    """What of a file is drawn. label: the columns that name a line; values: the columns that are drawn, each with its
    axis title (`lines`: a chart each; `dots`: all in one, whose axis is `axis`); group: a column, or "section", with a
    chart for each of its values; last: the column of which only the largest value is drawn."""

    kind: Literal["lines", "dots"]
    label: tuple[str, ...]
    values: dict[str, str]
    over: tuple[str, str] = ("T", "tokens")
    axis: str = ""
    group: tuple[str, ...] = ()
    last: str = ""
    log: bool = False
    even: str = ""
    title: str = ""
    rows: str = "rows"
    where: dict[str, Any] = field(default_factory=dict)


_RATIOS = {
    "time ratio": "time / dense attention's",
    "memory ratio": "peak memory / dense attention's",
}
_DENSE = "as dense attention"
_HELD_OUT = {"held out": "held out", "baseline": "trivial baseline"}
_COMPRESSED = Plan(
    "dots", ("method",), {"test": "test", "baseline": "trivial baseline"}, axis="percent", group=("task", "metric")
)
PLANS: dict[str, list[Plan]] = {
    "mechanisms": [Plan("lines", ("case",), _RATIOS, group=("section",), log=True, even=_DENSE)],
    "stacks": [
        Plan(
            "lines",
            ("case",),
            {"time ratio": "time / a dense stack's", "memory ratio": "peak memory / a dense stack's"},
            log=True,
            even="as a dense stack",
            title="Stacks",
        )
    ],
    "dense_baseline": [
        Plan(
            "lines",
            ("model",),
            {"time ratio": "time / transformers'", "memory ratio": "peak memory / transformers'"},
            even="as transformers",
            title="Against transformers",
        )
    ],
    "decoding": [
        Plan(
            "lines",
            ("model",),
            {"tokens/s": "tokens per second", "cache KiB": "cache, KiB"},
            over=("context", "tokens read before"),
            log=True,
            title="Generation",
        )
    ],
    "ops_recurrent": [
        Plan(
            "lines",
            ("recurrence",),
            {
                "forward": "time / transformers', forward",
                "train": "time / transformers', forward and backward",
                "memory": "peak memory / transformers'",
            },
            log=True,
            even="as transformers",
            title="Gated recurrences",
        )
    ],
    "state_precision": [
        Plan(
            "lines",
            ("recurrence",),
            {"bfloat16": "error of the output, percent"},
            log=True,
            title="State in bfloat16",
        )
    ],
    "sequence_traffic": [
        Plan(
            "lines",
            ("attention",),
            {"KiB": "sent per layer, KiB"},
            over=("tokens", "tokens of the text"),
            log=True,
            title="Between processes",
        )
    ],
    "inference": [
        Plan(
            "dots",
            ("model",),
            {"against transformers": "tokens per second"},
            axis="tokens per second / transformers' Bert or Llama",
            group=("what",),
            log=True,
            even="as transformers",
        )
    ],
    "gpu_models": [
        Plan(
            "dots",
            ("model",),
            {"against transformers": "tokens per second"},
            axis="tokens per second / transformers' Bert or Llama",
            group=("task", "T"),
            log=True,
            even="as transformers",
        )
    ],
    "linearization": [
        Plan(
            "lines",
            ("model",),
            {"tokens per second": "tokens per second", "state, bytes": "state, bytes"},
            over=("context", "tokens read before"),
            log=True,
            title="Generation",
            rows="Generation, one row of text",
        )
    ],
    "constant_state": [
        Plan(
            "lines",
            ("model",),
            {"swapped - source": "nats per token", "trained - source": "nats per token, trained"},
            over=("tokens", "tokens of a row"),
            title="Above the source",
            rows="Losses",
        ),
        Plan(
            "lines",
            ("model",),
            {"tokens per second": "tokens per second", "state, MB": "state, MB"},
            over=("context", "tokens read before"),
            log=True,
            title="Generation",
            rows="Generation, one row of text",
        ),
    ],
    "feedforwards": [
        Plan(
            "dots",
            ("case",),
            {"time ratio": "time", "memory ratio": "memory"},
            axis="ratio to a dense feed-forward",
            group=("T",),
            log=True,
            even="as dense",
            title="tokens",
        )
    ],
    "components": [
        Plan(
            "dots",
            ("component",),
            {"time ratio": "time", "memory ratio": "memory"},
            axis="ratio to the plain choice, longest texts",
            group=("slot",),
            last="T",
            log=True,
            even="as the plain choice",
        )
    ],
    "pretraining": [
        Plan(
            "dots",
            ("variant", "position"),
            {
                "loss": "variant",
                "dense, at equal time": "dense, equal time",
                "rotary, at equal time": "dense and rotary, equal time",
            },
            axis="held-out loss, nats per token",
            group=("architecture",),
        )
    ],
    "objectives": [
        Plan(
            "dots",
            ("objective",),
            {
                "probe": "probe",
                "probe, random weights": "probe, random",
                "fine-tuned": "tuned",
                "fine-tuned, random weights": "tuned, random",
            },
            axis="accuracy on SST-2",
            title="What the encoder is worth",
        ),
        Plan(
            "dots",
            ("objective",),
            {"loss": "held-out loss", "trivial baseline": "frequencies of targets"},
            axis="nats per target",
            title="What was learned",
        ),
    ],
    "few_labels": [
        Plan(
            "dots",
            ("labels",),
            {
                "probe": "probe",
                "probe, random weights": "probe, random",
                "fine-tuned": "tuned",
                "fine-tuned, random weights": "tuned, random",
            },
            axis="accuracy on SST-2, percent",
            group=("objective", "steps"),
            title="by labeled sentences",
        ),
    ],
    "exits": [
        Plan(
            "dots",
            ("setting",),
            {"accuracy": "with exits", "majority": "majority class"},
            axis="accuracy on SST-2, percent",
            group=("variant",),
            title="by setting",
        ),
        Plan(
            "dots",
            ("setting",),
            {"time": "time"},
            axis="time / that of all layers",
            group=("variant",),
            title="by setting",
        ),
    ],
    "transfer": [
        Plan(
            "dots",
            ("method",),
            {"test": "test", "baseline": "trivial baseline"},
            axis="percent",
            group=("task", "metric"),
        )
    ],
    "finetuning": [
        Plan(
            "dots",
            ("variant", "epochs", "rate"),
            {"test": "test", "validation": "validation", "baseline": "trivial baseline"},
            axis="percent",
            group=("task", "metric"),
        )
    ],
    "compression": [_COMPRESSED],
    "compression_published": [_COMPRESSED],
    "images": [
        Plan("dots", ("model",), {"bits per pixel": "bits per pixel"}, axis="bits per pixel", title="Held-out images")
    ],
    "series_and_graphs": [
        Plan("dots", ("model",), _HELD_OUT, axis="squared error (less is better) or accuracy", group=("data",))
    ],
    "sounds": [Plan("dots", ("model",), _HELD_OUT, axis="word error rate or perplexity", group=("data",))],
    "recall": [
        Plan(
            "lines",
            ("mechanism",),
            {"accuracy": "share of values that are recalled"},
            over=("state", "numbers in the state"),
            title="Values looked up by their keys",
        )
    ],
    "long_documents": [
        Plan(
            "dots",
            ("reader", "vectors"),
            {"recall@1": "first", "recall@5": "among five"},
            axis="queries whose document is found, percent",
            title="Documents found",
            rows="Retrieval",
        )
    ],
    "uptraining": [
        Plan(
            "dots",
            ("swap",),
            {
                "source": "source",
                "swapped": "swapped",
                "uptrained": "uptrained",
                "with teacher": "with a teacher",
            },
            axis="held-out loss, nats per masked token",
            title="After a swap",
        )
    ],
    "training_claims": [
        Plan(
            "dots",
            ("model", "learning rate", "warm-up", "steps"),
            {"loss": "loss"},
            axis="held-out loss, nats per token",
            group=("claim",),
        )
    ],
}


def charts_of(name: str, tables: dict[str, list[Row]], section: Callable[[Row], str]) -> list[Chart]:
    """The charts of a result file, in the order of the page. section: what `group=("section",)` groups by."""
    return [
        chart
        for index, plan in enumerate(PLANS.get(name, ()))
        for chart in _of_plan(f"{name}-{index}", plan, tables.get(plan.rows, []), section)
    ]


def _of_plan(name: str, plan: Plan, rows: Sequence[Row], section: Callable[[Row], str]) -> list[Chart]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        title = section(row) if plan.group == ("section",) else ", ".join(str(row.get(key)) for key in plan.group)
        groups.setdefault(title, []).append(row)
    charts: list[Chart] = []
    for title in sorted(groups) if plan.group == ("section",) else groups:
        heading = f"{title} {plan.title}".strip()
        if plan.kind == "lines":
            for column, axis in plan.values.items():
                charts += _lines(name, heading, plan, column, axis, groups[title], len(charts))
        else:
            charts += _dots(name, heading, plan, groups[title], len(charts))
    return charts


def _label(row: Row, plan: Plan, rows: Sequence[Row]) -> str:
    """The first column that names a row, and of the others those that tell it from its namesakes."""
    same = [other for other in rows if other.get(plan.label[0]) == row.get(plan.label[0])]
    telling = [key for key in plan.label[1:] if len({str(other.get(key)) for other in same}) > 1]
    words = [str(row.get(key)).removeprefix("xf_") for key in (plan.label[0], *telling)]
    return ", ".join(word if len(word) <= 26 else word[:24] + "…" for word in words)


def _lines(name: str, title: str, plan: Plan, column: str, axis: str, rows: Sequence[Row], first: int) -> list[Chart]:
    lines: dict[str, list[tuple[Any, float]]] = {}
    for row in rows:
        if isinstance(row.get(column), (int, float)):
            lines.setdefault(_label(row, plan, rows), []).append((row[plan.over[0]], row[column]))
    lines = {label: sorted(points) for label, points in lines.items()}
    several = -(-len(lines) // MOST_LINES)
    made, items = [], list(lines.items())
    for part in range(several):
        size = -(-len(items) // several)
        chosen = dict(items[part * size : (part + 1) * size])
        heading = f"{title} ({part + 1} of {several})" if several > 1 else title
        made.append(Chart(f"{name}-{first + part}", "lines", heading, plan.over[1], axis, chosen, plan.log, plan.even))
    return made


def _dots(name: str, title: str, plan: Plan, rows: Sequence[Row], first: int) -> list[Chart]:
    if plan.last:
        rows = [row for row in rows if row.get(plan.last) == max(other.get(plan.last, 0) for other in rows)]
    dots: dict[str, list[tuple[Any, float]]] = {}
    for row in rows:
        values = [
            (text, row[column]) for column, text in plan.values.items() if isinstance(row.get(column), (int, float))
        ]
        if values:
            label = _label(row, plan, rows)
            while label in dots:
                label += " "
            dots[label] = values
    made, items = [], list(dots.items())
    several = -(-len(items) // MOST_DOTS)
    for part in range(several):
        size = -(-len(items) // several)
        chosen = dict(items[part * size : (part + 1) * size])
        heading = f"{title} ({part + 1} of {several})" if several > 1 else title
        made.append(Chart(f"{name}-{first + part}", "dots", heading, plan.axis, "", chosen, plan.log, plan.even))
    return made
