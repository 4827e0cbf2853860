"""Compaction and merge by schedule, under a supervisor with a real runner."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import sparrow
from sparrow.broker.broker import Broker
from sparrow.model.pipeline import PipelineReport, PipelineSettings
from sparrow.model.settings import Settings, parse_address
from sparrow.server.http import bind
from sparrow.server.supervision import Supervisor
from sparrow.server.tcp import TcpServer

pytestmark = pytest.mark.soak
"""A JVM a test: `make test-spark` runs them."""

WAIT_S = 600.0


@asynccontextmanager
async def supervised(directory: Path, **changes: Any) -> AsyncIterator[tuple[Broker, Supervisor]]:
    """A broker with a supervisor, as `sparrow up` has them."""
    data = directory / "data"
    pipelines = PipelineSettings(
        master="local[2]",
        driver_memory="700m",
        home=str(directory / "home"),
        **{"backoff_min_s": 0.2, "backoff_max_s": 1.0, **changes},
    )
    async with sparrow.aopen(data, settings=Settings(pipelines=pipelines)) as broker:
        with bind(parse_address("127.0.0.1:0")) as bound:
            server = await TcpServer.start(broker, bound)
            supervisor = Supervisor(broker, pipelines, f"sparrow://{server.address}", str(data))
            supervisor.start()
            try:
                yield broker, supervisor
            finally:
                await supervisor.stop()
                await server.close()


async def until(broker: Broker, name: str, condition: Callable[[PipelineReport], object]) -> PipelineReport:
    report = await broker.pipeline(name)
    try:
        async with asyncio.timeout(WAIT_S):
            while not condition(report):
                await asyncio.sleep(0.1)
                report = await broker.pipeline(name)
    except TimeoutError:
        raise AssertionError(f"it did not come to that: {report}") from None
    return report


async def change(broker: Broker, topic: str, rounds: int = 3) -> None:
    for number in range(rounds):
        await broker.publish_batch(topic, [b"%d" % number] * 20, keys=[f"k{row % 4}" for row in range(20)])
        await broker.seal()


async def rows(broker: Broker, topic: str) -> int:
    layout = await broker.segments(topic)
    return sum(file.rows for each in layout.partitions for file in each.segments)


def turns_of(report: PipelineReport) -> Any:
    assert report.turns is not None
    return report.turns


async def test_jobs_are_done_when_they_are_due_and_the_runner_goes_meanwhile(tmp_path: Path) -> None:
    async with supervised(tmp_path, idle_s=0.0) as (broker, supervisor):
        await broker.create_topic("state.a", compaction="key")
        await broker.create_topic("plain")
        await change(broker, "state.a")
        await change(broker, "plain")
        tidy = {"name": "tidy", "source": "#", "builtin": "compact", "every": "2s"}
        join = {"name": "join", "source": "plain", "builtin": "merge", "every": "1h"}
        await broker.apply_pipeline(join)
        await broker.apply_pipeline(tidy)
        joined = await until(broker, "join", lambda report: turns_of(report).count)
        assert (turns_of(joined).outcome, joined.error) == ("done", "")
        assert turns_of(joined).detail == "plain: 60 messages in 3 segments became 60 in 1"
        first = await until(broker, "tidy", lambda report: turns_of(report).outcome)
        assert (turns_of(first).detail, await rows(broker, "state.a")) == (
            "state.a: 60 messages in 3 segments became 4 in 1",
            4,
        )
        idle = await until(broker, "tidy", lambda report: turns_of(report).outcome == "idle")
        assert (idle.error, supervisor.starts) == ("", 1), "nothing to do starts nothing"
        await until(broker, "tidy", lambda report: turns_of(report).count > turns_of(idle).count)
        assert not broker.pipeline_desk.is_wanted
        await broker.stop_pipeline("tidy")
        stopped = await until(broker, "tidy", lambda report: report.state == "stopped")
        await change(broker, "state.a")
        await asyncio.sleep(3.0)  # Longer than it would have waited.
        assert (await broker.pipeline("tidy")).turns == stopped.turns
        await broker.start_pipeline("tidy")
        await until(broker, "tidy", lambda report: turns_of(report).outcome == "done")
        assert (await rows(broker, "state.a"), supervisor.starts) == (4, 2)
        assert (await broker.pipeline("join")).turns == joined.turns, "it waits for its hour"
        lines = [line.text for line in await broker.pipeline_log("tidy")]
        assert lines[0] == turns_of(first).detail


async def test_a_failure_is_told_and_tried_again(tmp_path: Path) -> None:
    """A segment that rotted is found by its reader; when it is whole again, so is the job."""
    async with supervised(tmp_path) as (broker, _):
        await broker.create_topic("state", compaction="key")
        await change(broker, "state")
        layout = await broker.segments("state")
        file = Path(layout.directory) / layout.partitions[0].segments[1].file
        whole = file.read_bytes()
        file.write_bytes(whole[:-100])
        await broker.apply_pipeline({"name": "tidy", "source": "state", "builtin": "compact", "every": "1h"})
        failing = await until(broker, "tidy", lambda report: turns_of(report).failures >= 2)
        assert failing.error
        assert await rows(broker, "state") == 60
        file.write_bytes(whole)
        done = await until(broker, "tidy", lambda report: turns_of(report).outcome == "done")
        assert (turns_of(done).failures, done.error, done.state) == (0, "", "scheduled")
        assert await rows(broker, "state") == 4
