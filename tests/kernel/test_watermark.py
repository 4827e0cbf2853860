"""Hysteresis that holds: noise does not flap it, and what it does it does gradually."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.kernel.watermark import Watermark

SECOND_US = 1_000_000
TICK_US = 100_000


def fed(watermark: Watermark, values: list[float], start_us: int = 0) -> Watermark:
    for place, value in enumerate(values):
        watermark.observe(value, start_us + place * TICK_US)
    return watermark


def test_one_sample_however_high_changes_nothing() -> None:
    watermark = Watermark(5, 10, hold_us=0)
    assert not watermark.observe(1e9, 0)
    assert not watermark.is_on


def test_it_turns_on_when_the_signal_has_held() -> None:
    watermark = Watermark(5, 10, hold_us=SECOND_US)
    fed(watermark, [10] * 10)
    assert not watermark.is_on
    assert watermark.observe(10, SECOND_US)
    assert watermark.is_on


def test_a_dip_begins_the_holding_anew() -> None:
    watermark = fed(Watermark(5, 10, hold_us=SECOND_US), [10] * 9 + [9] + [10] * 9)
    assert not watermark.is_on


def test_between_the_marks_nothing_changes() -> None:
    watermark = fed(Watermark(5, 10), [10] * 20)
    fed(watermark, [5, 9, 7] * 100, 2 * SECOND_US)
    assert watermark.is_on
    assert watermark.changes == 1


def test_it_turns_off_when_the_signal_stayed_below_low() -> None:
    watermark = fed(Watermark(5, 10), [10] * 20)
    fed(watermark, [4.9] * 11, 2 * SECOND_US)
    assert not watermark.is_on


def test_intensity_ramps_up_and_down_gradually() -> None:
    watermark = fed(Watermark(5, 10, ramp_up_us=2 * SECOND_US, ramp_down_us=5 * SECOND_US), [10] * 11)
    assert watermark.intensity == pytest.approx(0.05)
    watermark.observe(10, 2 * SECOND_US)
    assert watermark.intensity == pytest.approx(0.55)
    fed(watermark, [10] * 20, 3 * SECOND_US)
    assert watermark.intensity == 1
    fed(watermark, [0] * 26, 5 * SECOND_US)
    assert watermark.intensity == pytest.approx(0.48, abs=0.03)


def test_intensity_follows_the_place_in_the_band() -> None:
    watermark = fed(Watermark(5, 10), [10] * 50)
    fed(watermark, [7.5] * 100, 5 * SECOND_US)
    assert watermark.intensity == pytest.approx(0.5)


def test_new_marks_count_when_the_signal_has_held_against_them() -> None:
    watermark = fed(Watermark(5, 10), [10] * 20)
    watermark.change(50, 100)
    assert watermark.is_on
    fed(watermark, [10] * 12, 2 * SECOND_US)
    assert not watermark.is_on


def test_what_keeps_coming_back_is_let_go_ever_more_seldom() -> None:
    watermark = Watermark(5, 10, hold_us=SECOND_US)
    fed(watermark, ([10] * 20 + [0] * 20) * 30)
    assert watermark.changes <= 5


def test_what_came_back_after_a_long_time_is_let_go_as_at_first() -> None:
    watermark = fed(Watermark(5, 10, hold_us=SECOND_US), [10] * 20 + [0] * 20)
    fed(watermark, [10] * 20 + [0] * 12, 100 * SECOND_US)
    assert watermark.changes == 4


def test_low_must_be_below_high() -> None:
    with pytest.raises(AssertionError):
        Watermark(10, 10)


def test_a_clock_that_runs_backwards_moves_nothing() -> None:
    watermark = Watermark(5, 10)
    watermark.observe(10, 10 * SECOND_US)
    watermark.observe(10, 0)
    assert not watermark.is_on


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=400))
def test_any_noise_changes_it_at_most_once_in_the_holding_time(values: list[float]) -> None:
    watermark = fed(Watermark(-1, 1, hold_us=SECOND_US), values)
    assert watermark.changes <= len(values) * TICK_US // SECOND_US


@given(st.lists(st.floats(-0.49, 0.49), max_size=300), st.floats(0, 20))
def test_noise_narrower_than_the_band_changes_it_at_most_once(noise: list[float], middle: float) -> None:
    watermark = fed(Watermark(9.5, 10.5, hold_us=0), [middle + each for each in noise])
    assert watermark.changes <= 1


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=200))
def test_intensity_stays_within_bounds_and_never_jumps(values: list[float]) -> None:
    watermark = Watermark(-1, 1, hold_us=0, ramp_up_us=SECOND_US, ramp_down_us=SECOND_US)
    before = 0.0
    for place, value in enumerate(values):
        watermark.observe(value, place * TICK_US)
        assert 0 <= watermark.intensity <= 1
        assert abs(watermark.intensity - before) <= TICK_US / SECOND_US + 1e-9
        before = watermark.intensity
