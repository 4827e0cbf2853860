"""Means, rates, levels and slopes that forget with time."""

from __future__ import annotations

import pytest

from sparrow.kernel.trend import Level, Mean, Rate, Slope

SECOND_US = 1_000_000


def test_a_mean_weighs_a_batch_by_its_count() -> None:
    mean = Mean(SECOND_US)
    assert mean.value is None
    mean.add(30, 3, 0)
    mean.add(40, 1, 0)
    assert mean.value == 17.5


def test_a_mean_forgets_the_older() -> None:
    mean = Mean(SECOND_US)
    mean.add(1000, 10, 0)
    mean.add(10, 10, 10 * SECOND_US)
    assert mean.value == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("second", [1, 5, 100])
def test_a_rate_is_right_from_the_start_and_later(second: int) -> None:
    rate = Rate(10 * SECOND_US, 0)
    for tick in range(1, second * 10 + 1):
        rate.add(100, tick * SECOND_US // 10)
    assert rate.per_s(second * SECOND_US) == pytest.approx(1000, rel=0.06)


def test_a_rate_falls_when_nothing_is_told() -> None:
    rate = Rate(SECOND_US, 0)
    rate.add(1000, SECOND_US)
    assert rate.per_s(20 * SECOND_US) < 0.001


def test_one_wild_sample_hardly_moves_a_level() -> None:
    level = Level(10 * SECOND_US)
    level.observe(100, 0)
    assert level.observe(10_000, SECOND_US // 10) < 200


def test_a_level_gets_where_the_signal_is() -> None:
    level = Level(SECOND_US)
    for second in range(20):
        level.observe(7 if second else 0, second * SECOND_US)
    assert level.value == pytest.approx(7)


def test_a_slope_is_that_of_a_straight_line_and_needs_three_samples() -> None:
    slope = Slope(30 * SECOND_US)
    slope.observe(0, 0)
    slope.observe(50, SECOND_US)
    assert slope.per_s() == 0
    for second in range(2, 100):
        slope.observe(50 * second, second * SECOND_US)
    assert slope.per_s() == pytest.approx(50)


def test_a_slope_holds_few_samples_however_often_it_is_told() -> None:
    slope = Slope(SECOND_US)
    for tick in range(10_000):
        slope.observe(tick, tick * 1000)
    assert slope.per_s() == pytest.approx(1000, rel=0.01)
    assert len(slope._samples) <= 33
