"""The lag meter: what it measures, when it warns, and where it says things are heading."""

from __future__ import annotations

import json

import msgspec
import pytest

from sparrow.kernel.lag import LagLevel, LagMeter
from sparrow.model.flow import LagLimits

SECOND_US = 1_000_000
OK, WARN, CRITICAL = LagLevel.OK, LagLevel.WARN, LagLevel.CRITICAL


class Story:
    """A meter fed by the second."""

    def __init__(self, limits: LagLimits | None = None) -> None:
        self.meter = LagMeter(limits or LagLimits(), 0)
        self.second = 0
        self.depth = 0

    def run(
        self,
        seconds: int,
        *,
        published: int = 0,
        acked: int = 0,
        waited_s: float = 0.1,
        worked_s: float = 0.1,
        oldest_s: float = 0.0,
    ) -> LagMeter:
        for _ in range(seconds):
            self.second += 1
            now_us = self.second * SECOND_US
            self.depth = max(0, self.depth + published - acked)
            self.meter.published(published, now_us)
            if acked:
                work_us, wait_us = round(worked_s * SECOND_US), round(waited_s * SECOND_US)
                self.meter.handed_over(acked, acked * (now_us - wait_us), now_us)
                self.meter.acked(
                    acked, acked * (now_us - work_us - wait_us), acked * (now_us - work_us), now_us
                )
            self.meter.observe(self.depth, round(oldest_s * SECOND_US), now_us)
        return self.meter

    def level(self, metric: str) -> LagLevel:
        return self.meter.report(self.second * SECOND_US).levels[metric]


def test_the_three_parts_of_the_way_are_measured() -> None:
    story = Story()
    story.run(60, published=100, acked=100, waited_s=0.5, worked_s=1.5)
    report = story.meter.report(60 * SECOND_US)
    assert report.assignment_s == pytest.approx(0.5)
    assert report.processing_s == pytest.approx(1.5)
    assert report.end_to_end_s == pytest.approx(2.0)
    assert report.acked_per_s == pytest.approx(100, rel=0.05)
    assert report.level is OK


@pytest.mark.parametrize(
    ("metric", "waited_s", "worked_s", "level"),
    [
        ("end_to_end", 1, 3, OK),
        ("end_to_end", 1, 5, WARN),
        ("end_to_end", 1, 15, CRITICAL),
        ("assignment", 1.9, 0, OK),
        ("assignment", 2.1, 0, WARN),
        ("assignment", 5.1, 0, CRITICAL),
        ("processing", 0, 9, OK),
        ("processing", 0, 11, WARN),
        ("processing", 0, 31, CRITICAL),
    ],
)
def test_each_part_has_the_limits_of_the_specification(
    metric: str, waited_s: float, worked_s: float, level: LagLevel
) -> None:
    story = Story()
    story.run(30, published=10, acked=10, waited_s=waited_s, worked_s=worked_s)
    assert story.level(metric) is level


@pytest.mark.parametrize(("depth", "level"), [(900, OK), (1100, WARN), (5100, CRITICAL)])
def test_depth_has_its_limits(depth: int, level: LagLevel) -> None:
    story = Story()
    story.depth = depth
    story.run(20)
    assert story.level("depth") is level


def test_a_level_must_be_sustained() -> None:
    story = Story(LagLimits(hold_s=5))
    story.run(4, published=10, acked=10, worked_s=100)
    assert story.meter.level is OK
    story.run(3, published=10, acked=10, worked_s=100)
    assert story.meter.level is CRITICAL


def test_a_level_ends_when_the_value_is_clearly_below_and_stays_there() -> None:
    story = Story()
    story.depth = 2000
    story.run(20)
    story.depth = 900
    story.run(60)
    assert story.level("depth") is WARN
    story.depth = 700
    story.run(60)
    assert story.level("depth") is OK


def test_when_nothing_is_acked_any_more_the_age_of_the_oldest_tells() -> None:
    story = Story()
    story.run(60, published=10, acked=10)
    for second in range(20):
        story.run(1, published=10, oldest_s=second)
    assert story.level("end_to_end") is WARN
    report = story.meter.report(story.second * SECOND_US)
    assert report.oldest_age_s == 19
    assert report.is_healthy


def test_health_has_a_limit_of_its_own() -> None:
    story = Story()
    story.run(2, published=1, oldest_s=301)
    assert not story.meter.report(2 * SECOND_US).is_healthy


def test_throughput_is_judged_by_its_own_baseline() -> None:
    story = Story()
    story.depth = 10**6
    story.run(600, acked=100)
    assert story.meter.report(600 * SECOND_US).baseline_per_s == pytest.approx(100, rel=0.05)
    story.run(150, acked=40)
    assert story.level("throughput") is OK
    story.run(300, acked=40)
    assert story.level("throughput") is WARN
    story.run(600, acked=10)
    assert story.level("throughput") is CRITICAL


def test_without_work_nobody_is_slow() -> None:
    story = Story()
    story.depth = 60_000
    story.run(600, acked=100)
    story.depth = 0
    story.run(600)
    assert story.level("throughput") is OK


def test_the_trend_says_whether_it_grows_or_shrinks() -> None:
    story = Story()
    story.run(60, published=150, acked=100)
    report = story.meter.report(60 * SECOND_US)
    assert report.trend_per_s == pytest.approx(50, rel=0.01)
    assert report.catch_up_s is None
    story.run(60, published=50, acked=100)
    assert story.meter.report(120 * SECOND_US).trend_per_s == pytest.approx(-50, rel=0.01)


def test_the_time_to_catch_up_is_what_it_takes() -> None:
    story = Story()
    story.depth = 100_000
    story.run(200, published=50, acked=150)
    report = story.meter.report(200 * SECOND_US)
    assert report.catch_up_s == pytest.approx(800, rel=0.05)
    assert report.depth == 80_000


def test_with_nothing_left_it_has_caught_up() -> None:
    assert LagMeter(LagLimits(), 0).report(0).catch_up_s == 0


def test_limits_can_be_changed_at_run_time() -> None:
    story = Story()
    story.depth = 500
    story.run(20)
    assert story.level("depth") is OK
    story.meter.change(LagLimits(depth_warn=100))
    story.run(20)
    assert story.level("depth") is WARN
    story.meter.change(LagLimits(depth_warn=100, hold_s=1))
    assert story.meter.limits.hold_s == 1
    story.run(3)
    assert story.level("depth") is WARN


def test_a_report_is_json() -> None:
    report = json.loads(msgspec.json.encode(Story().run(3, published=1, acked=1).report(SECOND_US)))
    assert report["level"] == "ok"
    assert set(report["levels"]) == {"end_to_end", "assignment", "processing", "depth", "throughput"}
