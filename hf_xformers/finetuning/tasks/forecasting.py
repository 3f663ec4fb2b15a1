# SPDX-License-Identifier: Apache-2.0
"""Forecasting: the coming steps of a time series, all at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...data.series import (
    Frequency,
    cut_windows,
    frequency_of,
    last_value,
    parse_times,
    seasonal_naive,
    time_features,
    window_starts,
)
from ...data.splitting import check_fraction
from ..names import TIMES
from ..origin import RowNames, columns_of
from .base import Encoded, Task, Trivial

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from ..options import TaskData, TaskOptions

_BEGIN = "__begin__"  # the column that says at which row of the whole series a held-out part begins


class Forecasting(Task):
    """Steps to come of all value columns. Metrics: mean squared and mean absolute error of values that are divided by
    the training rows' standard deviation, so that columns count alike.

    The validation rows are the last ones in time: no future of a training window reaches into them. Next to the
    metrics stand those of two forecasts that need no model.
    """

    id = "forecasting"
    head = "TimeSeriesPrediction"
    metric = "mse"
    metric_names = ("mse", "mae")
    reads = (
        "value_columns",
        "time_column",
        "context_length",
        "prediction_length",
        "label_length",
        "season",
        "forecast_loss",
        "forecast_scaling",
    )
    reads_text = False

    def __init__(self, options: TaskOptions) -> None:
        super().__init__(options)
        self.context, self.horizon, self.label = (
            options.context_length or 96,
            options.prediction_length or 24,
            options.label_length,
        )
        for name in ("context_length", "prediction_length", "season"):
            value = getattr(options, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} {value} must be at least 1")
        if self.label is not None and not 0 <= self.label <= self.context:
            raise ValueError(
                f"--label_length {self.label} must be between 0 and the {self.context} steps of --context_length"
            )
        self.max_length = self.context
        self._trained = False
        self._beyond = False  # whether to forecast what comes after the last row
        self.frequency: Frequency | None = None
        self.season = 1
        self.location = self.spread = np.zeros(0)

    def extent(self) -> str:
        return f"of up to {self.max_length} steps"

    # ------------------------------------------------------------------------------------------------ data

    def load(self, source: TaskData) -> dict[str, Dataset]:
        from ..sources import load_rows

        check_fraction(source.validation_fraction)
        splits = load_rows(dataclasses.replace(source, validation_fraction=0.0), origins=True)
        if "validation" not in splits and source.validation_fraction > 0:
            whole = splits["train"]
            begin = len(whole) - round(len(whole) * source.validation_fraction)
            held_out = whole.add_column(_BEGIN, [begin] * len(whole))  # its first windows have a past before it
            if source.max_eval_rows is not None:
                held_out = held_out.select(range(min(begin + source.max_eval_rows, len(whole))))
            splits = {**splits, "train": whole.select(range(begin)), "validation": held_out}
        return splits

    def settle(self, splits: Mapping[str, Dataset], config: PreTrainedConfig | None) -> None:
        train = splits["train"]
        if config is not None:
            self._take_lengths(config)
        self.find_columns(train)
        self._beyond = False
        where = RowNames(train, "train")
        if self.time_column is not None:
            times = parse_times(list(train[self.time_column]), self.time_column, where.__getitem__)
            self.frequency = frequency_of(times, where.__getitem__)
        self.season = self.options.season or (self.frequency.season if self.frequency else 1)
        values = self._values(train, where)
        self.location, self.spread = values.mean(0), values.std(0)
        rounding = 1e-9 * np.abs(values).max(0)  # what is left of a column that is all alike
        self.spread = np.where(self.spread > rounding, self.spread, 1.0)
        if config is not None and config.embedding.channels != len(self.value_columns):
            raise ValueError(
                f"the model forecasts {config.embedding.channels} columns, and the data has {self.value_columns}; name"
                " as many with --value_columns, or start anew with --variant"
            )

    def find_columns(self, rows: Dataset, answers: bool = True) -> None:
        names, wanted = [name for name in columns_of(rows) if name != _BEGIN], self.options.time_column
        usual = next((name for name in names if name.strip().lower() in TIMES), None)
        self.time_column = self.column(rows, wanted, (), "time", "time_column") if wanted else usual
        chosen = list(self.options.value_columns)
        for name in chosen:
            self.column(rows, name, (), "value", "value_columns")
        if not chosen:
            numeric = [name for name in names if _is_numeric(rows.features[name])]
            chosen = [name for name in numeric if name != self.time_column]
        if not chosen:
            raise ValueError(
                f"no column holds numbers to forecast; the columns are {names}: name them with --value_columns"
            )
        self.value_columns = chosen
        self._beyond = not answers

    def columns(self) -> dict[str, Any]:
        return {"time_column": self.time_column, "value_columns": self.value_columns}

    def _take_lengths(self, config: Any) -> None:
        """A trained model's lengths, which are its own."""
        head, self._trained = config.head, True
        for name, value in (("context_length", head.context_length), ("prediction_length", head.prediction_length)):
            given = getattr(self.options, name)
            if given not in (None, value):
                raise ValueError(f"--{name} {given} is not the {value} of the model; leave it out")
        self.context, self.horizon, self.label = head.context_length, head.prediction_length, head.label_length
        self.max_length = self.context

    def _values(self, rows: Dataset, where: RowNames) -> np.ndarray:
        """[N, C] in float64. Raises ValueError for what is no finite number."""
        columns = []
        for name in self.value_columns:
            given = list(rows[name])
            for row, value in enumerate(given):
                number = isinstance(value, (int, float)) and not isinstance(value, bool)
                if not number or not np.isfinite(value):
                    raise ValueError(
                        f"{where[row]} has {value!r} in column {name!r}, which is no finite number; fill it in (for"
                        " example with the value before), or leave the column out of --value_columns"
                    )
            columns.append(np.asarray(given, np.float64))
        return np.stack(columns, axis=1)

    def recorded(self) -> dict[str, Any]:
        lengths = {"context_length": self.context, "prediction_length": self.horizon, "season": self.season}
        return {**super().recorded(), **lengths, "max_length": None}

    def facts(self) -> dict[str, Any]:
        frequency = None if self.frequency is None else dataclasses.asdict(self.frequency)
        statistics = {"location": self.location.tolist(), "spread": self.spread.tolist()}
        return {"frequency": frequency, "season": self.season, **statistics}

    def restore(self, config: PreTrainedConfig, facts: Mapping[str, Any]) -> None:
        if "spread" not in facts:
            raise ValueError(
                "the model does not say what it was trained on (`training_summary.json`); take one that `hf-xformers"
                " finetune --task forecasting` has trained"
            )
        self._take_lengths(config)
        self.frequency = None if facts["frequency"] is None else Frequency(**facts["frequency"])
        self.season = facts["season"]
        self.location, self.spread = np.asarray(facts["location"]), np.asarray(facts["spread"])

    def config_fields(self) -> dict[str, Any]:
        if not len(self.spread) or self._trained:  # a trained model has its own
            return {}
        features = 0
        if self.frequency is not None:
            features = time_features(np.zeros(1, "datetime64[s]"), self.frequency).shape[1]
        scaling = self.options.forecast_scaling
        fixed = {"location": tuple(self.location.tolist()), "spread": tuple(self.spread.tolist())}
        head = {
            **{"type": "forecast", "context_length": self.context, "prediction_length": self.horizon},
            **{"label_length": self.label, "loss": self.options.forecast_loss, "scaling": scaling},
            **(fixed if scaling == "fixed" else {}),
        }
        return {
            "embedding": {"type": "series", "channels": len(self.value_columns), "time_features": features},
            "head": head,
            "is_encoder_decoder": True,
        }

    def encode(self, rows: Dataset, tokenizer: PreTrainedTokenizerBase | None, split: str) -> Encoded:
        from datasets import Dataset

        where = RowNames(rows, split)
        values, times = self._values(rows, where), None
        if self.frequency is not None:
            if self.time_column is None:
                raise ValueError("the model knows times, and the rows have none; name their column with --time_column")
            times = parse_times(list(rows[self.time_column]), self.time_column, where.__getitem__)
            following = len(times) > 0 and np.array_equal(self.frequency.after(times[0], len(times) - 1), times[1:])
            found = self.frequency if following else frequency_of(times, where.__getitem__)
            if found != self.frequency:
                raise ValueError(
                    f"the steps of the {split} rows lie {found} apart, and those of the training rows"
                    f" {self.frequency}; give rows of the same frequency"
                )
        least = self.context + (0 if self._beyond else self.horizon)
        if len(values) < least:
            raise ValueError(
                f"the {split} rows are {len(values)}, too few for a window of {self.context} past"
                f" {'steps' if self._beyond else f'and {self.horizon} future steps'}; give more, or lower"
                " --context_length or --prediction_length"
            )
        if self._beyond:
            starts = np.array([len(values) - self.context])
            if times is not None and self.frequency is not None:
                times = np.concatenate([times, self.frequency.after(times[-1], self.horizon)])
        else:
            begin = int(rows[0][_BEGIN]) if _BEGIN in rows.column_names else 0
            starts = window_starts(len(values), self.context, self.horizon, begin)
            if not len(starts):
                raise ValueError(
                    f"the {split} rows leave no whole future of {self.horizon} steps; raise --validation_fraction, or"
                    " lower --prediction_length"
                )
        columns = {"past_values": cut_windows(values, starts, 0, self.context)}
        if times is not None and self.frequency is not None:
            features = time_features(times, self.frequency)
            if features.shape[1]:
                columns["past_time_features"] = cut_windows(features, starts, 0, self.context)
                columns["future_time_features"] = cut_windows(features, starts, self.context, self.horizon)
        if not self._beyond:
            columns["future_values"] = cut_windows(values, starts, self.context, self.horizon)
        told = starts if times is None else np.datetime_as_string(times)
        kept = [
            {"first": str(told[start + self.context]) if times is not None else int(start + self.context)}
            for start in starts
        ]
        single = {name: array.astype(np.float32) for name, array in columns.items()}
        features_of = Dataset.from_dict({name: list(array) for name, array in single.items()}).with_format("torch")
        return Encoded(features_of, kept, not self._beyond, columns)

    def collator(self, tokenizer: PreTrainedTokenizerBase, model: Any, seed: int) -> Any:
        from transformers import default_data_collator

        return default_data_collator

    # ------------------------------------------------------------------------------------------------ results

    def reduce(self, outputs: Any, inputs: Mapping[str, Any], next_token: bool) -> tuple[Tensor, ...]:
        return (outputs["prediction_outputs"],)

    def predictions(self, kept: Sequence[np.ndarray], encoded: Encoded) -> list[dict[str, Any]]:
        return self._rows(kept[0].astype(np.float64), encoded)

    def _rows(self, forecasts: np.ndarray, encoded: Encoded) -> list[dict[str, Any]]:
        truth = encoded.notes.get("future_values")
        found = []
        for number, (row, forecast) in enumerate(zip(encoded.rows, forecasts)):
            entry = {**row, "prediction": self._by_column(forecast)}
            found.append(entry if truth is None else {**entry, "reference": self._by_column(truth[number])})
        return found

    def _by_column(self, values: np.ndarray) -> dict[str, list[float]]:
        return {name: values[:, column].tolist() for column, name in enumerate(self.value_columns)}

    def score(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        guess, gold = (
            np.stack([np.stack([row[side][name] for name in self.value_columns], axis=-1) for row in rows])
            for side in ("prediction", "reference")
        )
        error = (guess - gold) / self.spread
        return {"mse": float(np.square(error).mean()), "mae": float(np.abs(error).mean())}

    def trivial(self, train: Encoded) -> Trivial | None:
        season = f"the value {self.season} steps before" if self.season > 1 else "the same"
        return Trivial(f"the better of the last value and {season}", self.season)

    def baseline(self, trivial: Trivial, predicted: Sequence[Mapping[str, Any]], encoded: Encoded) -> dict[str, float]:
        past = encoded.notes["past_values"]
        last = self.score(self._rows(last_value(past, self.horizon), encoded))
        season = self.score(self._rows(seasonal_naive(past, self.horizon, trivial.answer), encoded))
        return {
            **{name: min(last[name], season[name]) for name in last},
            **{f"{name}_of_last_value": value for name, value in last.items()},
            **{f"{name}_of_season_before": value for name, value in season.items()},
        }


def _is_numeric(feature: Any) -> bool:
    return str(getattr(feature, "dtype", "")).startswith(("int", "uint", "float"))
