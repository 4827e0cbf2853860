"""The score of a broker's health, and the levels of its consumers."""

from __future__ import annotations

import pytest

from sparrow.kernel import vitals
from sparrow.model.health import Status


def test_a_value_beyond_its_limit_is_critical_near_it_degraded() -> None:
    found = [vitals.most("x", value, 100, 10, "", "do").status for value in (50, 85, 100, 101)]
    assert found == [Status.HEALTHY, Status.DEGRADED, Status.DEGRADED, Status.CRITICAL]
    found = [vitals.least("x", value, 0.1, 10, "", "do").status for value in (0.5, 0.15, 0.05)]
    assert found == [Status.HEALTHY, Status.DEGRADED, Status.CRITICAL]


def test_advice_is_given_only_where_something_is_to_be_done() -> None:
    assert vitals.most("x", 1, 100, 10, "", "do this").advice == ""
    assert vitals.most("x", 101, 100, 10, "", "do this").advice == "do this"


def test_a_strained_dimension_of_little_weight_does_not_change_the_whole() -> None:
    fine = vitals.sound("disk", Status.HEALTHY, 90, "", "")
    bad = vitals.sound("pending", Status.CRITICAL, 10, "", "")
    assert vitals.score([fine, bad]) == 90.0
    assert vitals.judge([fine, bad], can_write=True) is Status.HEALTHY


def test_the_whole_is_degraded_then_critical_as_the_score_falls() -> None:
    def whole(status: Status) -> Status:
        parts = [vitals.sound("a", status, 50, "", ""), vitals.sound("b", Status.HEALTHY, 50, "", "")]
        return vitals.judge(parts, can_write=True)

    assert whole(Status.DEGRADED) is Status.DEGRADED
    assert whole(Status.CRITICAL) is Status.DEGRADED
    assert vitals.judge([vitals.sound("a", Status.CRITICAL, 1, "", "")], can_write=True) is Status.CRITICAL


def test_a_broker_that_cannot_write_is_critical_whatever_its_score() -> None:
    assert vitals.judge([vitals.sound("a", Status.HEALTHY, 1, "", "")], can_write=False) is Status.CRITICAL


@pytest.mark.parametrize(
    ("silent_s", "level"),
    [
        (0, "healthy"),
        (10, "healthy"),
        (11, "warning"),
        (20, "suspicious"),
        (29, "suspicious"),
        (30, "failed"),
    ],
)
def test_a_consumer_sinks_with_every_heartbeat_it_misses(silent_s: float, level: str) -> None:
    assert vitals.consumer_level(silent_s, 10.0, 30.0) == level
