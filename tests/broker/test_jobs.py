"""Scheduled jobs in the broker: when they are due, what becomes of a turn, and what is seen of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sparrow.broker.broker import Broker
from sparrow.broker.clock import Clock
from sparrow.model.errors import PipelineHeld, PreconditionFailed
from sparrow.model.pipeline import PipelineProgress, PipelineReport, PipelineSettings
from sparrow.model.settings import Settings

RUNNER = "sparrow up 1-1"
HOUR_S = 3600.0


class Hands(Clock):
    """A clock whose hands are moved."""

    ahead_s = 0.0

    def now_us(self) -> int:
        return super().now_us() + round(self.ahead_s * 1_000_000)

    def monotonic_s(self) -> float:
        return super().monotonic_s() + self.ahead_s


@pytest.fixture
async def clock() -> Hands:
    return Hands()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    pipelines = PipelineSettings(backoff_min_s=10.0, backoff_max_s=60.0)
    return Settings(data=str(tmp_path / "data"), pipelines=pipelines)


@pytest.fixture
async def broker(settings: Settings, clock: Hands) -> AsyncIterator[Broker]:
    async with await Broker.open(settings, clock=clock) as opened:
        await opened.create_topic("state", compaction="key")
        yield opened


def declared(**changes: Any) -> dict[str, Any]:
    return {"name": "tidy", "source": "state", "builtin": "compact", "every": "1h", **changes}


async def fill(broker: Broker) -> None:
    for _ in range(3):
        await broker.publish("state", b"x", key="k")
        await broker.seal()


def told(state: str, turn: int = 1, **changes: Any) -> PipelineProgress:
    return PipelineProgress(name="tidy", run=0, state=state, turn=turn, **changes)


async def turn(broker: Broker, state: str, number: int = 1, **changes: Any) -> PipelineReport:
    """What a runner does: holds it, begins, tells how it went, lets go."""
    await broker.hold_pipeline("tidy", RUNNER)
    await broker.begin_pipeline("tidy", RUNNER, 0)
    await broker.tell_pipelines(RUNNER, [told("running", number)], [])
    assert (await broker.pipeline("tidy")).state == "running"
    for _ in range(2):  # A runner may say it twice.
        await broker.tell_pipelines(RUNNER, [told(state, number, **changes)], [])
    await broker.release_pipeline("tidy", RUNNER)
    return await broker.pipeline("tidy")


async def test_a_new_job_is_due_at_once_and_is_no_subscription(broker: Broker) -> None:
    await fill(broker)
    report = await broker.apply_pipeline(declared())
    assert (report.state, report.is_due, report.lag) == ("waiting", True, 0)
    assert await broker.subscriptions() == []
    await broker.pipeline_desk.pass_over()
    assert broker.pipeline_desk.is_wanted, "there is something to do, so a runner is wanted"


async def test_a_turn_that_is_done_is_followed_by_another_after_the_time_that_is_set(
    broker: Broker, clock: Hands
) -> None:
    await fill(broker)
    await broker.apply_pipeline(declared())
    report = await turn(broker, "done", outcome="state: 3 became 1")
    assert report.turns is not None
    assert (report.state, report.is_due) == ("scheduled", False)
    assert (report.turns.count, report.turns.outcome, report.turns.detail) == (1, "done", "state: 3 became 1")
    assert report.turns.next_at_us - (report.turns.began_at_us or 0) == HOUR_S * 1e6
    assert not broker.pipeline_desk.is_wanted
    clock.ahead_s += HOUR_S + 1
    assert (await broker.pipeline("tidy")).state == "waiting"
    assert broker.pipeline_desk.is_wanted


async def test_a_turn_with_nothing_to_do_needs_no_runner(broker: Broker, clock: Hands) -> None:
    await broker.apply_pipeline(declared())
    await broker.apply_pipeline(declared(name="join", source="#", builtin="merge"))
    for count in (1, 2):
        await broker.pipeline_desk.pass_over()
        assert not broker.pipeline_desk.is_wanted
        for name in ("tidy", "join"):
            report = await broker.pipeline(name)
            assert report.turns is not None
            assert (report.state, report.turns.count, report.turns.outcome) == ("scheduled", count, "idle")
        clock.ahead_s += HOUR_S + 1
    await fill(broker)
    await broker.pipeline_desk.pass_over()
    assert [(await broker.pipeline(name)).state for name in ("tidy", "join")] == ["waiting"] * 2


async def test_a_turn_that_failed_is_tried_again_after_a_wait_that_doubles(
    broker: Broker, clock: Hands
) -> None:
    await fill(broker)
    await broker.apply_pipeline(declared())
    for number, wait_s in ((1, 10), (2, 20), (3, 40), (4, 60), (5, 60)):
        report = await turn(broker, "failed", number, error="no space")
        assert report.turns is not None
        assert (report.state, report.error, report.turns.failures) == ("failing", "no space", number)
        assert report.turns.next_at_us - (report.turns.ended_at_us or 0) == wait_s * 1e6
        assert not report.is_due
        clock.ahead_s += wait_s + 1
        assert (await broker.pipeline("tidy")).is_due
    report = await turn(broker, "done", 6)
    assert report.turns is not None
    assert (report.state, report.error, report.turns.failures) == ("scheduled", "", 0)


async def test_what_cannot_be_done_is_told_without_a_runner(broker: Broker, clock: Hands) -> None:
    await broker.create_topic("plain")
    await broker.apply_pipeline(declared(source="plain"))
    await broker.pipeline_desk.pass_over()
    report = await broker.pipeline("tidy")
    assert (report.state, report.is_due) == ("failing", False)
    assert "not compacted [FAILED_PRECONDITION]" in report.error
    assert [line.level for line in await broker.pipeline_log("tidy")] == ["error"]
    await broker.update_topic("plain", compaction="key")
    clock.ahead_s += 11
    await broker.pipeline_desk.pass_over()
    assert (await broker.pipeline("tidy")).state == "scheduled"


async def test_a_runner_that_dies_in_a_turn_counts_as_a_failure_of_it(broker: Broker) -> None:
    await fill(broker)
    await broker.apply_pipeline(declared())
    await broker.pipeline_desk.fail_all("it cannot be started")
    report = await broker.pipeline("tidy")
    assert (report.error, report.is_due) == ("it cannot be started", True), "it is not its fault"
    await broker.hold_pipeline("tidy", RUNNER)
    await broker.begin_pipeline("tidy", RUNNER, 0)
    broker.pipeline_desk.release_all(RUNNER)
    await broker.pipeline_desk.fail_all("it was killed")
    report = await broker.pipeline("tidy")
    assert report.turns is not None
    assert (report.error, report.is_due, report.turns.failures) == ("it was killed", False, 1)


async def test_two_runners_do_not_do_a_turn_at_once(broker: Broker) -> None:
    await fill(broker)
    await broker.apply_pipeline(declared())
    await broker.hold_pipeline("tidy", RUNNER)
    with pytest.raises(PipelineHeld):
        await broker.hold_pipeline("tidy", "hand 7")
    await broker.pipeline_desk.pass_over()
    assert (await broker.pipeline("tidy")).state == "starting"


async def test_a_job_is_stopped_started_and_never_sought(
    settings: Settings, clock: Hands, broker: Broker
) -> None:
    await fill(broker)
    await broker.apply_pipeline(declared(), is_stopped=True)
    assert (await broker.pipeline("tidy")).state == "stopped"
    assert not broker.pipeline_desk.is_wanted
    assert (await broker.start_pipeline("tidy")).state == "waiting"
    await turn(broker, "failed", error="no space")
    assert (await broker.stop_pipeline("tidy")).state == "stopped"
    started = await broker.start_pipeline("tidy")
    assert (started.state, started.error, started.is_due) == ("waiting", "", True), "an operator wants it now"
    with pytest.raises(PreconditionFailed, match="no position"):
        await broker.seek_pipeline("tidy", "earliest")
    await turn(broker, "done", 2)
    await broker.stop_pipeline("tidy")
    await broker.close()
    async with await Broker.open(settings, clock=clock) as again:
        report = await again.pipeline("tidy")
        assert report.turns is not None
        assert (report.state, report.turns.count, report.turns.outcome) == ("stopped", 2, "done")
        assert (await again.start_pipeline("tidy")).state == "scheduled"
        await again.delete_pipeline("tidy")
        assert await again.pipelines() == []


async def test_another_declaration_is_due_at_once(broker: Broker) -> None:
    await fill(broker)
    await broker.apply_pipeline(declared())
    await turn(broker, "done")
    assert (await broker.apply_pipeline(declared())).state == "scheduled", "it is the same"
    changed = await broker.apply_pipeline(declared(every="2h"))
    assert (changed.state, changed.run) == ("waiting", 0)
    streaming = declared(builtin="copy", sinks=[{"topic": "out"}])
    del streaming["every"]
    assert (await broker.apply_pipeline(streaming)).turns is None
    assert [each.name for each in await broker.subscriptions()] == ["tidy"]
    assert (await broker.apply_pipeline(declared())).turns is not None
    assert await broker.subscriptions() == []
