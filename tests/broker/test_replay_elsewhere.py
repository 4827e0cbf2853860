"""Dead letters replayed to another subscription: it alone gets them, once, and nothing is lost on the way."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import sparrow
from sparrow import errors
from sparrow.broker.broker import Broker
from sparrow.broker.subscription import BrokerSubscription
from sparrow.kernel.replay import ReplayPlan, ReplayStatus
from sparrow.model.settings import MIB, JournalSettings

SMALL = sparrow.Settings(journal=JournalSettings(file_bytes=MIB))
FAST: dict[str, Any] = {"rate_per_s": 100_000}
LIMIT_S = 30


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with sparrow.aopen(tmp_path / "data", settings=SMALL) as broker:
        await broker.create_topic("t")
        yield broker


async def reject(subscription: BrokerSubscription, count: int) -> list[str]:
    """So many messages are refused for good; their ids."""
    messages = await pulled(subscription, count)
    await subscription.nack(messages, retry=False, reason="bad")
    await subscription.flush()
    return [message.id for message in messages]


async def buried(broker: Broker, *data: bytes, **columns: Any) -> tuple[BrokerSubscription, list[str]]:
    """The subscription "s" with these messages among its dead letters, and their ids."""
    subscription = await broker.subscribe("s", "t", dead_letter_topic="d")
    await broker.publish_batch("t", list(data), **columns)
    return subscription, await reject(subscription, len(data))


async def pulled(subscription: BrokerSubscription, count: int) -> list[Any]:
    found: list[Any] = []
    async with asyncio.timeout(LIMIT_S):
        while len(found) < count:
            found += await subscription.pull(count - len(found), timeout_s=5)
    return found


async def listed(subscription: BrokerSubscription) -> list[bytes | None]:
    return [letter.message.data for letter in await subscription.dead_letters.list()]


async def replayed(subscription: BrokerSubscription, destination: str, **selection: Any) -> Any:
    """A replay, seen to its end."""
    box = subscription.dead_letters
    job = await box.replay(destination=destination, **{**FAST, **selection})
    return await asyncio.wait_for(box.wait(job.replay_id), LIMIT_S)


async def test_the_destination_alone_gets_the_letters_as_new_deliveries(broker: Broker) -> None:
    source, ids = await buried(broker, b"a", b"b", keys=["k", "l"], attributes=[{"n": "1"}, {"n": "2"}])
    target = await broker.subscribe("target", "t")
    other = await broker.subscribe("other", "#")
    job = await replayed(source, "target")
    assert (job.status, job.total, job.replayed, job.failed) == (ReplayStatus.COMPLETED, 2, 2, 0)
    assert job.destination == "target"
    messages = await pulled(target, 2)
    assert [(m.id, m.data, m.key, m.attempt) for m in messages] == [
        (ids[0], b"a", "k", 1),
        (ids[1], b"b", "l", 1),
    ]
    assert messages[0].attributes == {
        "n": "1",
        "replay_for": "target",
        "replay_from": "s",
        "replay_round": "1",
    }
    assert await listed(source) == []
    for reader in (source, other):
        assert await reader.pull() == []
        assert await reader.lag() == 0
    await target.ack(messages, wait=True)
    assert await target.lag() == 0


async def test_the_destination_may_have_had_the_message_before(broker: Broker) -> None:
    target = await broker.subscribe("target", "t")
    source, ids = await buried(broker, b"x")
    await target.ack(await pulled(target, 1), wait=True)
    await replayed(source, "target")
    assert [m.id for m in await pulled(target, 1)] == ids


async def test_only_the_selected_letters_go(broker: Broker) -> None:
    source, ids = await buried(broker, b"a", b"b", b"c")
    target = await broker.subscribe("target", "t")
    assert (await replayed(source, "target", ids=ids[1:2])).total == 1
    assert [m.id for m in await pulled(target, 1)] == ids[1:2]
    assert await listed(source) == [b"a", b"c"]


async def test_its_own_name_is_a_plain_replay(broker: Broker) -> None:
    source, ids = await buried(broker, b"x")
    job = await replayed(source, "s")
    assert (job.replayed, job.destination) == (1, "")
    [message] = await pulled(source, 1)
    assert (message.id, message.attributes) == (ids[0], {})
    assert (await broker.bounds("t")).end_offset == 1, "nothing is stored again"


async def test_dry_run_counts_and_changes_nothing(broker: Broker) -> None:
    source, _ = await buried(broker, b"a", b"b")
    target = await broker.subscribe("target", "t")
    plan = await source.dead_letters.replay(destination="target", dry_run=True)
    assert isinstance(plan, ReplayPlan)
    assert plan.total == 2
    assert await target.pull() == []
    assert await listed(source) == [b"a", b"b"]


async def test_consumers_of_the_destination_that_wait_are_woken(broker: Broker) -> None:
    source, ids = await buried(broker, b"x")
    target = await broker.subscribe("target", "t")
    waiting = asyncio.create_task(target.pull(timeout_s=60))
    await asyncio.sleep(0.01)
    await replayed(source, "target")
    assert [m.id for m in await asyncio.wait_for(waiting, LIMIT_S)] == ids


# What cannot be.


async def refused(source: BrokerSubscription, destination: Any, error: type[errors.SparrowError]) -> Any:
    """A replay that is refused and leaves everything as it was."""
    before = await listed(source)
    for dry_run in (True, False):
        with pytest.raises(error) as raised:
            await source.dead_letters.replay(destination=destination, dry_run=dry_run, **FAST)
    assert await listed(source) == before
    assert await source.dead_letters.replays() == []
    return raised.value


async def test_a_destination_that_is_not_there_is_refused(broker: Broker) -> None:
    source, _ = await buried(broker, b"x")
    await refused(source, "nobody", errors.SubscriptionNotFound)
    await refused(source, "s~dlq", errors.SubscriptionNotFound)
    for bad in ("", 5, ["s"]):
        await refused(source, bad, errors.InvalidArgument)


async def test_a_destination_that_does_not_read_the_topic_is_refused_with_what_to_do(broker: Broker) -> None:
    source, [message_id] = await buried(broker, b"x")
    await broker.create_topic("elsewhere")
    await broker.subscribe("target", "elsewhere")
    error = await refused(source, "target", errors.PreconditionFailed)
    assert "does not read the topic 't'" in error.message
    assert message_id in error.message
    assert "dlq_topic" in error.hint


async def test_letters_of_topics_that_the_destination_reads_can_be_chosen(broker: Broker) -> None:
    for name in ("orders.de", "orders.us"):
        await broker.create_topic(name)
    source = await broker.subscribe("s", "orders.*", dead_letter_topic="d")
    target = await broker.subscribe("target", "orders.de")
    for name in ("orders.de", "orders.us"):
        await broker.publish(name, name.encode())
    await target.ack(await pulled(target, 1), wait=True)
    await reject(source, 2)
    await refused(source, "target", errors.PreconditionFailed)
    job = await replayed(source, "target", filter='attributes.dlq_topic = "orders.de"')
    assert (job.replayed, job.failed) == (1, 0)
    assert [m.data for m in await pulled(target, 1)] == [b"orders.de"]
    assert await listed(source) == [b"orders.us"]


async def test_letters_that_do_not_pass_the_filter_of_the_destination_are_refused(broker: Broker) -> None:
    target = await broker.subscribe("target", "t", filter='attributes.env = "prod"')
    source, ids = await buried(broker, b"p", b"q", attributes=[{"env": "prod"}, {"env": "test"}])
    await target.ack(await pulled(target, 1), wait=True)
    error = await refused(source, "target", errors.PreconditionFailed)
    assert ids[1] in error.message
    assert "filter" in error.message
    assert (await replayed(source, "target", ids=ids[:1])).replayed == 1
    assert [m.data for m in await pulled(target, 1)] == [b"p"]
    assert await listed(source) == [b"q"]


async def test_letters_that_the_destination_stops_taking_meanwhile_stay_dead(broker: Broker) -> None:
    source, _ = await buried(broker, *[b"%d" % n for n in range(4)])
    target = await broker.subscribe("target", "t")
    box = source.dead_letters
    job = await box.replay(destination="target", rate_per_s=2)
    first = await pulled(target, 1)
    await target.update(filter='attributes.env = "prod"')
    job = await asyncio.wait_for(box.wait(job.replay_id), LIMIT_S)
    assert job.status is ReplayStatus.COMPLETED
    assert job.replayed + job.failed == 4
    assert job.failed >= 1
    assert len(await listed(source)) == job.failed
    assert first[0].data == b"0"


async def test_a_destination_that_goes_away_fails_the_job_and_keeps_the_rest(broker: Broker) -> None:
    source, _ = await buried(broker, *[b"%d" % n for n in range(5)])
    target = await broker.subscribe("target", "t")
    box = source.dead_letters
    job = await box.replay(destination="target", rate_per_s=2)
    await pulled(target, 1)
    await target.unsubscribe()
    job = await asyncio.wait_for(box.wait(job.replay_id), LIMIT_S)
    assert job.status is ReplayStatus.FAILED
    assert "target" in job.error
    left = await listed(source)
    assert len(left) == 5 - job.replayed > 0
    await broker.subscribe("target", "t")
    assert (await replayed(source, "target")).replayed == len(left)


async def test_letters_of_a_topic_that_is_gone_are_refused(broker: Broker) -> None:
    await broker.create_topic("brief.one")
    source = await broker.subscribe("s", "brief.*", dead_letter_topic="d")
    await broker.publish("brief.one", b"x")
    await reject(source, 1)
    await broker.delete_topic("brief.one", force=True)
    await broker.subscribe("target", "brief.*")
    error = await refused(source, "target", errors.PreconditionFailed)
    assert "'brief.one'" in error.message


# What dies again.


async def test_a_letter_that_dies_again_is_the_destinations_and_can_be_sent_back(broker: Broker) -> None:
    source, ids = await buried(broker, b"x", attributes=[{"n": "1"}])
    target = await broker.subscribe("target", "t", dead_letter_topic="d2")
    await replayed(source, "target")
    assert await reject(target, 1) == ids
    [letter] = await target.dead_letters.list()
    assert (letter.message_id, letter.message.attributes["dlq_round"]) == (ids[0], "1")
    assert not [name for name in letter.message.attributes if name.startswith("replay_")]
    await replayed(target, "s")
    [message] = await pulled(source, 1)
    assert (message.id, message.data, message.attempt) == (ids[0], b"x", 1)
    assert (message.attributes["replay_from"], message.attributes["replay_round"]) == ("target", "2")
    assert await listed(target) == []


async def test_a_message_that_dies_everywhere_is_recognised_as_a_loop(broker: Broker) -> None:
    source, [message_id] = await buried(broker, b"x")
    target = await broker.subscribe("target", "t", dead_letter_topic="d2")
    here, there = source, target
    for _ in range(3):
        await replayed(here, there.name)
        assert await reject(there, 1) == [message_id]
        here, there = there, here
    assert (await here.dead_letters.get(message_id)).is_loop
    assert (await replayed(here, there.name)).total == 0
    assert (await replayed(here, there.name, ids=[message_id])).replayed == 1


async def test_two_replays_at_once_deliver_each_letter_once(broker: Broker) -> None:
    data = [b"%d" % n for n in range(300)]
    source, _ = await buried(broker, *data)
    targets = [await broker.subscribe(name, "t") for name in ("one", "two")]
    box = source.dead_letters
    jobs = [await box.replay(destination=each.name, rate_per_s=2000) for each in targets]
    ended = [await asyncio.wait_for(box.wait(job.replay_id), LIMIT_S) for job in jobs]
    assert sum(job.replayed for job in ended) == 300
    got = [
        m.data for target, job in zip(targets, ended, strict=True) for m in await pulled(target, job.replayed)
    ]
    assert sorted(got) == sorted(data)
    for target in targets:
        assert await target.pull() == []


# Crashes.


@pytest.mark.parametrize("done", [0, 1, 3])
async def test_replay_that_a_crash_interrupted_goes_on_without_loss_or_repetition(
    tmp_path: Path, done: int
) -> None:
    async with sparrow.aopen(tmp_path / "data", settings=SMALL) as broker:
        await broker.create_topic("t")
        source, ids = await buried(broker, *[b"%d" % n for n in range(8)])
        target = await broker.subscribe("target", "t")
        job = await source.dead_letters.replay(destination="target", rate_per_s=5)
        before = await pulled(target, done)
        await target.ack(before, wait=True)
        shutil.copytree(tmp_path / "data", tmp_path / "crashed")
        await source.dead_letters.abort(job.replay_id)
    async with sparrow.aopen(tmp_path / "crashed", settings=SMALL) as broker:
        source = await broker.subscription("s")
        [found] = await source.dead_letters.replays()
        assert (found.status, found.destination) == (ReplayStatus.RUNNING, "target")
        found = await asyncio.wait_for(source.dead_letters.wait(job.replay_id), LIMIT_S)
        assert (found.status, found.replayed) == (ReplayStatus.COMPLETED, 8)
        target = await broker.subscription("target")
        after = await pulled(target, 8 - done)
        assert [m.id for m in before] + [m.id for m in after] == ids
        assert await target.pull() == []
        assert await listed(source) == []
        await target.ack(after, wait=True)
    async with sparrow.aopen(tmp_path / "crashed", settings=SMALL) as broker:
        assert await (await broker.subscription("target")).lag() == 0
