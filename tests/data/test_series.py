"""Times, their features, windows and naive forecasts against calendars and loops."""

import datetime

import numpy as np
import pytest

from hf_xformers.data.series import (
    Frequency,
    cut_windows,
    frequency_of,
    last_value,
    parse_times,
    seasonal_naive,
    time_features,
    window_starts,
)


def row(number):
    return f"row {number}"


def times(*texts):
    return parse_times(texts, "date", row)


@pytest.mark.parametrize(
    ("texts", "expected", "name", "season"),
    [
        (("2024-01-01 00:00", "2024-01-01 01:00", "2024-01-01 02:00"), Frequency(3600), "1 hour", 24),
        (("2024-01-01", "2024-01-02", "2024-01-03"), Frequency(86400), "1 day", 7),
        (("2024-01-01 00:00", "2024-01-01 00:15"), Frequency(900), "15 minutes", 96),
        (("2024-01-05", "2024-02-05", "2024-03-05"), Frequency(months=1), "1 month", 12),
        (("2023-12-31", "2024-01-31", "2024-02-29"), Frequency(months=1, at_end=True), "1 month", 12),
        (("2021-01-01", "2022-01-01", "2023-01-01", "2024-01-01", "2025-01-01"), Frequency(months=12), "12 months", 1),
        (("2024-01-01 00:00:00", "2024-01-01 00:00:07"), Frequency(7), "7 seconds", 1),
    ],
)
def test_frequency(texts, expected, name, season):
    found = frequency_of(times(*texts), row)
    assert (found, str(found), found.season) == (expected, name, season)


def test_times_after():
    assert Frequency(3600).after(np.datetime64("2024-02-28T23:00:00"), 2).astype(str).tolist() == [
        "2024-02-29T00:00:00",
        "2024-02-29T01:00:00",
    ]
    month_ends = Frequency(months=1, at_end=True).after(np.datetime64("2024-01-31T00:00:00"), 2)
    assert month_ends.astype("datetime64[D]").astype(str).tolist() == ["2024-02-29", "2024-03-31"]
    quarters = Frequency(months=3).after(np.datetime64("2023-11-30T00:00:00"), 2)
    assert quarters.astype("datetime64[D]").astype(str).tolist() == ["2024-02-29", "2024-05-30"]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("2024-01-01",), "two rows at least"),
        (("2024-01-02", "2024-01-01"), "row 1 has the time.*not after.*sort the rows"),
        (("2024-01-01", "2024-01-01"), "not after"),
        (("2024-01-01", "2024-01-02", "2024-01-04", "2024-01-05"), "row 2 comes 2 days after.*most rows 1 day"),
    ],
)
def test_times_that_are_no_series(texts, message):
    with pytest.raises(ValueError, match=message):
        frequency_of(times(*texts), row)
    with pytest.raises(ValueError, match="row 1 has 'soon' in column 'date'.*no date"):
        parse_times(["2024-01-01", "soon"], "date", row)


def test_features():
    """Hour, weekday, day of the month and of the year, by the standard library's calendar."""
    first = datetime.datetime(2024, 2, 27, 5)
    moments = [first + datetime.timedelta(hours=step) for step in range(80)]
    found = time_features(times(*map(str, moments)), Frequency(3600))
    for moment, features in zip(moments, found):
        day = moment.timetuple().tm_yday - 1
        expected = [moment.hour / 23, moment.weekday() / 6, (moment.day - 1) / 30, day / 365]
        np.testing.assert_allclose(features, np.array(expected) - 0.5, atol=1e-6)
    counts = {str(f): time_features(times("2024-01-01"), f).shape[1] for f in (Frequency(60), Frequency(86400))}
    assert counts == {"1 minute": 5, "1 day": 3}
    assert [time_features(times("2024-01-01"), Frequency(months=m)).shape[1] for m in (1, 3, 12, 24)] == [1, 1, 1, 0]


def test_windows():
    values = np.arange(20.0).reshape(10, 2)
    starts = window_starts(10, 3, 2)
    assert starts.tolist() == [0, 1, 2, 3, 4, 5]
    assert cut_windows(values, starts, 3, 2)[5].tolist() == values[8:10].tolist()
    assert window_starts(10, 3, 2, first_target=7).tolist() == [4, 5]  # no earlier future
    assert not len(window_starts(4, 3, 2))


def test_naive_forecasts():
    past = np.arange(6.0)[None, :, None]
    assert last_value(past, 3)[0, :, 0].tolist() == [5, 5, 5]
    assert seasonal_naive(past, 5, 4)[0, :, 0].tolist() == [2, 3, 4, 5, 2]
    assert seasonal_naive(past, 2, 7)[0, :, 0].tolist() == [5, 5]
