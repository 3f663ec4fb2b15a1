# SPDX-License-Identifier: Apache-2.0
"""Time series: regular times and their features, windows of a past and a future, and forecasts that need no model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MINUTE, HOUR, DAY = 60, 3600, 86400
# Steps of a season by what lies between two of them (seconds; months are negative).
_SEASONS = {
    MINUTE: 60,
    15 * MINUTE: 96,
    30 * MINUTE: 48,
    HOUR: 24,
    DAY: 7,
    7 * DAY: 52,
    -1: 12,
    -3: 4,
}


@dataclass(frozen=True)
class Frequency:
    """What lies between two steps: seconds, or months where `months` is not 0; at_end: each is a month's last day."""

    seconds: int = 0
    months: int = 0
    at_end: bool = False

    def __str__(self) -> str:
        for name, unit, count in (
            ("month", 1, self.months),
            ("day", DAY, 0),
            ("hour", HOUR, 0),
            ("minute", MINUTE, 0),
        ):
            count = count or (self.seconds // unit if name != "month" and self.seconds % unit == 0 else 0)
            if count:
                return f"{count} {name}{'s' if count > 1 else ''}"
        return f"{self.seconds} seconds"

    @property
    def season(self) -> int:
        """Steps after which such a series usually repeats itself; 1 where nothing is usual."""
        return _SEASONS.get(-self.months if self.months else self.seconds, 1)

    def after(self, last: np.datetime64, steps: int) -> np.ndarray:
        """The times [steps] that follow `last`."""
        number = np.arange(1, steps + 1)
        if not self.months:
            return last + number * np.timedelta64(self.seconds, "s")
        months = last.astype("datetime64[M]") + number * self.months
        ends = (months + 1).astype("datetime64[D]") - 1
        if self.at_end:
            return ends.astype("datetime64[s]")
        return np.minimum(months.astype("datetime64[D]") + (_day(last) - 1), ends).astype("datetime64[s]")


def _day(times: Any) -> Any:
    """Day of the month, from 1 on."""
    return (times.astype("datetime64[D]") - times.astype("datetime64[M]").astype("datetime64[D]")).astype(int) + 1


def frequency_of(times: np.ndarray, row: Callable[[int], str]) -> Frequency:
    """What lies between the times [N] (datetime64[s]), in order.

    row: names a row, for messages. Raises ValueError for one time alone, and for times that are not in order or not
    regular.
    """
    if len(times) < 2:
        raise ValueError("a time series needs two rows at least to tell how far steps lie apart; give more rows")
    gaps = np.diff(times).astype(int)
    if (gaps <= 0).any():
        at = int((gaps <= 0).argmax()) + 1
        raise ValueError(
            f"{row(at)} has the time {times[at]}, which is not after the {times[at - 1]} of the row before; sort the"
            " rows by time, and keep one of each"
        )
    if (gaps == gaps[0]).all():
        return Frequency(seconds=int(gaps[0]))
    months = np.diff(times.astype("datetime64[M]").astype(int))
    ends = _day(times + np.timedelta64(DAY, "s")) == 1
    if months[0] > 0 and (months == months[0]).all() and (ends.all() or (_day(times) == _day(times)[0]).all()):
        return Frequency(months=int(months[0]), at_end=bool(ends.all()))
    usual = Counter(gaps.tolist()).most_common(1)[0][0]
    at = int((gaps != usual).argmax()) + 1
    raise ValueError(
        f"{row(at)} comes {Frequency(int(gaps[at - 1]))} after the row before, and most rows {Frequency(usual)}; give"
        " a row for every step (fill in what is missing), or leave out the time column"
    )


def time_features(times: np.ndarray, frequency: Frequency) -> np.ndarray:
    """times [N] -> [N, F] numbers in [-0.5, 0.5] that tell them, float32: minute of the hour, hour of the day, day of
    the week, day of the month, day of the year, as far as steps of `frequency` tell them apart (Zhou et al. 2021,
    appendix B, in the form of the released code)."""
    seconds = frequency.months * 28 * DAY or frequency.seconds
    days = times.astype("datetime64[D]")
    within = (times - days).astype(int)
    of_year = (days - times.astype("datetime64[Y]").astype("datetime64[D]")).astype(int)
    every = (
        (seconds < HOUR, (within % HOUR) // MINUTE, 59),
        (seconds < DAY, within // HOUR, 23),
        (seconds < 7 * DAY, (days.astype(int) + 3) % 7, 6),
        (seconds < 28 * DAY, _day(times) - 1, 30),
        (seconds < 365 * DAY, of_year, 365),
    )
    found = [value / most - 0.5 for wanted, value, most in every if wanted]
    return np.stack(found, axis=-1).astype(np.float32) if found else np.zeros((len(times), 0), np.float32)


def parse_times(values: Sequence[Any], column: str, row: Callable[[int], str]) -> np.ndarray:
    """Dates and times as datetime64[s], [N]. Raises ValueError for a value that is none."""
    import pandas

    found = pandas.to_datetime(pandas.Series(list(values), dtype="object"), errors="coerce", utc=True)
    bad = found.isna().to_numpy() | np.array([isinstance(value, (int, float)) for value in values])
    if bad.any():
        at = int(bad.argmax())
        raise ValueError(
            f"{row(at)} has {values[at]!r} in column {column!r}, which is no date or time; correct it, or name the"
            " column of times with --time_column"
        )
    return found.dt.tz_localize(None).to_numpy().astype("datetime64[s]")


def window_starts(length: int, context: int, horizon: int, first_target: int = 0) -> np.ndarray:
    """The first steps of all windows of `context` + `horizon` steps in a series of `length`, whose futures begin at
    `first_target` or later."""
    return np.arange(max(first_target - context, 0), max(length - context - horizon + 1, 0))


def cut_windows(values: np.ndarray, starts: np.ndarray, offset: int, length: int) -> np.ndarray:
    """values [N, C] -> [len(starts), length, C], from `offset` steps after each start on."""
    return values[starts[:, None] + offset + np.arange(length)]


def last_value(past: np.ndarray, horizon: int) -> np.ndarray:
    """past [W, T, C] -> [W, horizon, C]: the last value again and again."""
    return np.repeat(past[:, -1:], horizon, axis=1)


def seasonal_naive(past: np.ndarray, horizon: int, season: int) -> np.ndarray:
    """past [W, T, C] -> [W, horizon, C]: the value of the season before. A past shorter than a season has the last
    value."""
    if past.shape[1] < season:
        return last_value(past, horizon)
    return past[:, past.shape[1] - season + np.arange(horizon) % season]
