"""Time series: bounded, with holes where nothing was told."""

from __future__ import annotations

import pytest

from sparrow.kernel.series import MINUTES, RAW_SPAN_S, Point, Series, SeriesSet

START_S = 1_000_000 * 60


def test_samples_of_the_last_minutes_come_back_as_they_were_told() -> None:
    series = Series(5)
    for step in range(12):
        series.add(float(step), START_S + 5 * step)
    found = series.points(30, START_S + 55, 100)
    assert found == [Point(START_S + 5 * step, step, step, step) for step in range(5, 12)]


def test_a_time_without_a_sample_is_a_hole() -> None:
    series = Series(5)
    series.add(1.0, START_S)
    series.add(2.0, START_S + 20)
    assert [point.at_s - START_S for point in series.points(60, START_S + 20, 100)] == [0, 20]


def test_after_an_hour_there_are_minutes_with_mean_least_and_most() -> None:
    series = Series(5)
    for step in range(24):
        series.add(float(step % 12), START_S + 5 * step)
    (first, second) = series.points(2 * RAW_SPAN_S, START_S + 115, 100)
    assert first == Point(START_S, 5.5, 0.0, 11.0)
    assert second == Point(START_S + 60, 5.5, 0.0, 11.0)


def test_a_day_later_the_first_minute_is_gone_and_its_place_used_again() -> None:
    series = Series(5)
    size = series.nbytes
    for minute in range(MINUTES + 10):
        series.add(float(minute), START_S + 60 * minute)
    now_s = START_S + 60 * (MINUTES + 9)
    found = series.points(24 * 3600, now_s, 10 * MINUTES)
    assert found[0].value == 9.0
    assert found[-1].value == MINUTES + 9
    assert series.nbytes == size


def test_a_gap_longer_than_the_ring_leaves_nothing_old_behind() -> None:
    series = Series(5)
    series.add(1.0, START_S)
    later_s = START_S + 3 * RAW_SPAN_S
    series.add(2.0, later_s)
    assert [point.value for point in series.points(RAW_SPAN_S, later_s, 1000)] == [2.0]


def test_more_points_than_wanted_are_put_together_without_losing_a_peak() -> None:
    series = Series(1)
    for second in range(1000):
        series.add(100.0 if second == 500 else 1.0, START_S + second)
    found = series.points(1000, START_S + 999, 100)
    assert len(found) <= 100
    assert max(point.most for point in found) == 100.0


def test_a_set_takes_no_more_series_than_it_may_and_forgets_those_that_are_gone() -> None:
    series = SeriesSet(5, 3)
    for name in ("a", "b", "c", "d"):
        series.add(("depth", name), 1.0, START_S)
    assert series.names() == [("depth", "a"), ("depth", "b"), ("depth", "c")]
    assert series.points(("depth", "d"), 60, START_S) == []
    series.keep("depth", {"b"})
    series.add(("depth", "d"), 2.0, START_S)
    assert series.names() == [("depth", "b"), ("depth", "d")]


@pytest.mark.parametrize("raw_s", [1, 5, 60])
def test_a_series_takes_about_twenty_kilobytes(raw_s: int) -> None:
    assert Series(raw_s).nbytes < 33_000
    assert Series(5).nbytes < 21_000
