"""Pipelines in the broker: a document beside subscriptions, and runners that hold them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import sparrow
from sparrow.broker.broker import Broker
from sparrow.broker.clock import Clock
from sparrow.broker.pipelines import HOLD_S
from sparrow.model.errors import InvalidPipeline, PipelineHeld, PipelineNotFound, PreconditionFailed
from sparrow.model.pipeline import PipelineProgress
from sparrow.model.settings import Settings


def declared(**changes: Any) -> dict[str, Any]:
    return {
        "name": "large",
        "source": {"topic": "orders.#", "start": "earliest"},
        "sql": "SELECT * FROM source",
        "sinks": [{"topic": "large"}],
        **changes,
    }


class Hands(Clock):
    """A clock whose hands are moved."""

    ahead_s = 0.0

    def monotonic_s(self) -> float:
        return super().monotonic_s() + self.ahead_s


@pytest.fixture
async def clock() -> Hands:
    return Hands()


@pytest.fixture
async def broker(tmp_path: Path, clock: Hands) -> AsyncIterator[Broker]:
    async with await Broker.open(Settings(data=str(tmp_path / "data")), clock=clock) as opened:
        await opened.create_topic("orders.us")
        for number in range(3):
            await opened.publish("orders.us", b"%d" % number)
        yield opened


def told(state: str = "running", **changes: Any) -> PipelineProgress:
    return PipelineProgress(name="large", run=changes.pop("run", 0), state=state, **changes)


async def test_a_pipeline_is_a_subscription(broker: Broker) -> None:
    report = await broker.apply_pipeline(declared())
    assert (report.state, report.is_wanted, report.lag, report.run) == ("waiting", True, 3, 0)
    (subscription,) = await broker.subscriptions()
    assert (subscription.name, subscription.pattern) == ("large", "orders.#")
    assert subscription.policy.delivery == "pipeline"
    assert subscription.policy.dead_letter_topic == "large.dead"
    with pytest.raises(PreconditionFailed, match="read by a Spark pipeline"):
        await (await broker.subscription("large")).pull()
    with pytest.raises(PreconditionFailed, match="is the pipeline 'large'"):
        await (await broker.subscription("large")).unsubscribe()


async def test_stopping_is_pausing_and_starting_is_resuming(broker: Broker) -> None:
    await broker.apply_pipeline(declared(), is_stopped=True)
    handle = await broker.subscription("large")
    assert handle.subscription.is_paused
    assert (await broker.start_pipeline("large")).is_wanted
    assert not handle.subscription.is_paused
    await handle.pause()
    assert (await broker.pipeline("large")).state == "stopped"
    assert not broker.pipeline_desk.is_wanted


async def test_one_runner_at_a_time_holds_a_pipeline(broker: Broker, clock: Hands) -> None:
    await broker.apply_pipeline(declared())
    await broker.hold_pipeline("large", "one")
    with pytest.raises(PipelineHeld, match="run by 'one'"):
        await broker.hold_pipeline("large", "other")
    assert await broker.tell_pipelines("one", [told()]) == []
    assert (await broker.pipeline("large")).state == "running"
    clock.ahead_s += HOLD_S + 1
    assert (await broker.pipeline("large")).state == "waiting"
    await broker.hold_pipeline("large", "other")
    assert await broker.tell_pipelines("one", [told()]) == ["large"]
    await broker.release_pipeline("large", "other")
    assert (await broker.pipeline("large")).runner == ""


async def test_a_seek_begins_a_run_and_outlasts_the_commit_of_the_batch_under_way(broker: Broker) -> None:
    await broker.apply_pipeline(declared())
    assert await broker.begin_pipeline("large", "r", 0) == {"large": [("orders.us", 0, 0)]}
    handle = await broker.subscription("large")
    await handle.commit("orders.us", 0, 2)
    await handle.seek({("orders.us", 0): 1})
    await handle.commit("orders.us", 0, 3)  # Of a batch that was under way.
    assert (await broker.pipeline("large")).run == 1
    with pytest.raises(PreconditionFailed, match="at run 1"):
        await broker.begin_pipeline("large", "r", 0)
    assert await broker.begin_pipeline("large", "r", 1) == {"large": [("orders.us", 0, 1)]}
    assert (await broker.pipeline("large")).lag == 2
    assert (await broker.seek_pipeline("large", "latest")).run == 2
    assert await broker.begin_pipeline("large", "r", 2) == {"large": [("orders.us", 0, 3)]}


async def test_another_query_goes_on_in_a_new_run_and_other_sinks_in_the_same(broker: Broker) -> None:
    await broker.apply_pipeline(declared())
    await (await broker.subscription("large")).commit("orders.us", 0, 2)
    same = await broker.apply_pipeline(declared(sinks=[{"topic": "elsewhere"}]))
    assert (same.run, same.lag) == (0, 1)
    other = await broker.apply_pipeline(declared(sql="SELECT key FROM source"))
    assert (other.run, other.lag) == (1, 1)
    assert await broker.begin_pipeline("large", "r", 1) == {"large": [("orders.us", 0, 2)]}
    moved = await broker.apply_pipeline(declared(source={"topic": "refunds", "start": "earliest"}))
    assert (moved.run, moved.lag) == (2, 0)
    assert [each.pattern for each in await broker.subscriptions()] == ["refunds"]


async def test_a_pipeline_must_not_feed_itself(broker: Broker) -> None:
    for changes in ({"sinks": [{"topic": "orders.large"}]}, {"dead_letter_topic": "orders.dead"}):
        with pytest.raises(InvalidPipeline, match="feed itself"):
            await broker.apply_pipeline(declared(**changes))
    assert await broker.subscriptions() == []
    with pytest.raises(InvalidPipeline, match=r"sources\.source\.topic"):
        await broker.apply_pipeline(declared(source="orders.#.x"))
    internal = {"dead_letter_topic": "~sparrow.dead", "sinks": [{"topic": "~sparrow.out"}]}
    await broker.apply_pipeline(declared(source="#", **internal))


async def test_errors_and_figures_are_seen_and_errors_go_with_the_next_batch(broker: Broker) -> None:
    await broker.apply_pipeline(declared())
    await broker.hold_pipeline("large", "r")
    lines = [("large", "error", "it broke")]
    await broker.tell_pipelines("r", [told("failing", error="it broke", restarts=1)], lines)
    report = await broker.pipeline("large")
    assert (report.state, report.error) == ("failing", "it broke")
    assert report.error_at_us is not None
    (line,) = await broker.pipeline_log("large")
    assert (line.number, line.level, line.text) == (1, "error", "it broke")
    assert await broker.pipeline_log("large", after=1) == []
    await broker.tell_pipelines("r", [told(rows=3, batch_s=0.5, rows_per_s=6.0, done_rows=3)])
    report = await broker.pipeline("large")
    assert (report.error, report.error_at_us) == ("", None)
    figures = {extra.name: extra.samples for extra in broker.pipeline_desk.figures()}
    assert figures["sparrow_pipeline_batch_seconds"] == [({"pipeline": "large"}, 0.5)]
    assert figures["sparrow_pipeline_running"] == [({"pipeline": "large"}, 1.0)]


async def test_pipelines_outlast_the_broker(tmp_path: Path) -> None:
    async with sparrow.aopen(tmp_path) as broker:
        await broker.create_topic("orders.us")
        await broker.publish("orders.us", b"1")
        before = await broker.apply_pipeline(declared(), is_stopped=True)
        await broker.seek_pipeline("large", "latest")
        await broker.hold_pipeline("large", "r")
        await broker.tell_pipelines("r", [told("failing", run=1, error="it broke")])
    async with sparrow.aopen(tmp_path) as broker:
        (report,) = await broker.pipelines()
        assert report.pipeline == before.pipeline
        assert (report.state, report.run, report.error, report.runner) == ("stopped", 1, "it broke", "")
        await broker.delete_pipeline("large")
        assert await broker.subscriptions() == []
        with pytest.raises(PipelineNotFound):
            await broker.pipeline("large")
    async with sparrow.aopen(tmp_path) as broker:
        assert await broker.pipelines() == []


async def test_a_dead_letter_of_a_pipeline_is_replayed_as_a_new_message_for_it_alone(broker: Broker) -> None:
    await broker.apply_pipeline(declared())
    await (await broker.subscription("large")).commit("orders.us", 0, 3)
    topic = await broker.topic("orders.us")
    letter = {
        "dlq_message_id": f"{topic.id}-0-1",
        "dlq_topic": "orders.us",
        "dlq_subscription": "large",
        "dlq_reason": "malformed",
        "dlq_at_us": "1",
    }
    await broker.publish("large.dead", b"1", attributes=letter)
    letters = await broker.dead_letters("large")
    (found,) = await letters.list()
    assert (found.message_id, found.reason) == (f"{topic.id}-0-1", "malformed")
    job = await letters.replay()
    await letters.wait(job.replay_id)
    assert await letters.list() == []
    (again,) = await broker.read("orders.us", offset=3)
    assert (again.data, again.id, again.attributes["replay_for"]) == (b"1", f"{topic.id}-0-1", "large")
    assert (await broker.pipeline("large")).lag == 1


async def test_what_cannot_run_says_why(broker: Broker) -> None:
    await broker.apply_pipeline(declared())
    await broker.pipeline_desk.fail_all("Spark is not installed")
    report = await broker.pipeline("large")
    assert (report.state, report.error) == ("failing", "Spark is not installed")
    assert msgspec.to_builtins(report)["pipeline"]["name"] == "large"
    assert (await broker.start_pipeline("large")).error == ""
