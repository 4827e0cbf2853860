"""What a consumer may count on: at most once, at least once, exactly once."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import sparrow
from sparrow import errors
from sparrow.broker.broker import Broker
from sparrow.model.settings import MIB, JournalSettings

SMALL = sparrow.Settings(journal=JournalSettings(file_bytes=MIB))


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with sparrow.aopen(tmp_path / "data", settings=SMALL) as broker:
        await broker.create_topic("t")
        yield broker


def crashed(data: Path) -> Path:
    """What a crash at this moment would leave: the files as they are, with the broker still open."""
    left = data.with_name(data.name + "-crashed")
    shutil.copytree(data, left)
    return left


# At most once.


async def test_at_most_once_message_is_done_when_it_is_handed_over(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t", guarantee="at_most_once")
    await broker.publish_batch("t", [b"a", b"b"])
    assert len(await subscription.pull()) == 2
    assert (await subscription.lag(), subscription.in_flight) == (0, 0)
    assert await subscription.pull(timeout_s=0.05) == []


async def test_at_most_once_message_does_not_come_again_after_a_crash(tmp_path: Path) -> None:
    async with sparrow.aopen(tmp_path / "data", settings=SMALL) as broker:
        await broker.create_topic("t")
        subscription = await broker.subscribe("s", "t", guarantee="at_most_once")
        await broker.publish("t", b"x")
        assert len(await subscription.pull()) == 1
        left = crashed(tmp_path / "data")
    async with sparrow.aopen(left, settings=SMALL) as broker:
        assert await (await broker.subscription("s")).pull() == []


async def test_at_most_once_ack_is_accepted_and_changes_nothing(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t", guarantee="at_most_once")
    await broker.publish("t", b"x")
    [message] = await subscription.pull()
    await message.ack()
    assert await subscription.lag() == 0


async def test_at_most_once_nack_does_not_bring_the_message_back(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t", guarantee="at_most_once")
    await broker.publish("t", b"x")
    [message] = await subscription.pull()
    with pytest.raises(errors.StaleAckId):
        await message.nack()
    assert await subscription.pull(timeout_s=0.05) == []


# At least once.


async def test_at_least_once_message_comes_again_until_it_is_acked(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t", ack_deadline_s=0.05, retry={"immediate_retries": 9})
    await broker.publish("t", b"x")
    attempts = []
    for _ in range(3):
        [message] = await subscription.pull(timeout_s=5)
        attempts.append(message.attempt)
    await subscription.ack([message], wait=True)
    assert attempts == [1, 2, 3]
    assert await subscription.pull(timeout_s=0.1) == []


# Exactly once.


async def test_exactly_once_ack_returns_when_it_is_durable(tmp_path: Path) -> None:
    async with sparrow.aopen(tmp_path / "data", settings=SMALL) as broker:
        await broker.create_topic("t")
        subscription = await broker.subscribe("s", "t", guarantee="exactly_once")
        await broker.publish_batch("t", [b"a", b"b"])
        [first] = await subscription.pull(1)
        await first.ack()
        left = crashed(tmp_path / "data")
    async with sparrow.aopen(left, settings=SMALL) as broker:
        assert [m.data for m in await (await broker.subscription("s")).pull()] == [b"b"]


async def test_exactly_once_message_does_not_come_again_after_a_confirmed_ack_and_a_restart(
    tmp_path: Path,
) -> None:
    async with sparrow.aopen(tmp_path, settings=SMALL) as broker:
        await broker.create_topic("t")
        subscription = await broker.subscribe("s", "t", guarantee="exactly_once")
        await broker.publish_batch("t", [b"x"] * 10)
        confirmed = await subscription.pull(5)
        await subscription.ack(confirmed)
        await broker.seal()
    async with sparrow.aopen(tmp_path, settings=SMALL) as broker:
        again = await (await broker.subscription("s")).pull(100)
        assert [m.offset for m in again] == [5, 6, 7, 8, 9]


async def test_exactly_once_ack_of_an_expired_lease_is_refused(broker: Broker) -> None:
    subscription = await broker.subscribe(
        "s", "t", guarantee="exactly_once", ack_deadline_s=0.05, retry={"immediate_retries": 9}
    )
    await broker.publish("t", b"x")
    [late] = await subscription.pull()
    [again] = await subscription.pull(timeout_s=5)
    with pytest.raises(errors.StaleAckId):
        await late.ack()
    assert again.attempt == 2
    assert await subscription.lag() == 1


async def test_exactly_once_ack_of_an_expired_lease_is_refused_though_nobody_holds_the_message(
    broker: Broker,
) -> None:
    subscription = await broker.subscribe(
        "s", "t", guarantee="exactly_once", ack_deadline_s=0.05, retry={"immediate_retries": 0}
    )
    await broker.publish("t", b"x")
    [late] = await subscription.pull()
    assert await subscription.pull(timeout_s=0.1) == []
    with pytest.raises(errors.StaleAckId):
        await late.ack()


async def test_ack_id_of_an_earlier_run_of_the_broker_is_refused(tmp_path: Path) -> None:
    async with sparrow.aopen(tmp_path, settings=SMALL) as broker:
        await broker.create_topic("t")
        subscription = await broker.subscribe("s", "t", guarantee="exactly_once")
        await broker.publish("t", b"x")
        [before] = await subscription.pull()
    async with sparrow.aopen(tmp_path, settings=SMALL) as broker:
        subscription = await broker.subscription("s")
        [after] = await subscription.pull()
        with pytest.raises(errors.StaleAckId):
            await subscription.ack([before.ack_id])
        await after.ack()
        assert await subscription.lag() == 0


async def test_of_two_acks_of_one_message_one_is_confirmed(broker: Broker) -> None:
    subscription = await broker.subscribe("s", "t", guarantee="exactly_once")
    await broker.publish("t", b"x")
    [message] = await subscription.pull()
    outcomes = await asyncio.gather(message.ack(), message.ack(), return_exceptions=True)
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["NoneType", "StaleAckId"]


async def test_exactly_once_each_message_of_a_busy_subscription_is_confirmed_once(broker: Broker) -> None:
    members = [await broker.subscribe("s", "t", guarantee="exactly_once") for _ in range(4)]
    await broker.publish_batch("t", [b"x"] * 200)
    confirmed: list[int] = []

    async def work(number: int) -> None:
        member = members[number]
        while messages := await member.pull(7, timeout_s=0.2):
            for place, message in enumerate(messages):
                if (place + number) % 5 == 0 and message.attempt == 1:
                    await message.nack(delay_s=0)
                    continue
                await message.ack()
                confirmed.append(message.offset)

    await asyncio.gather(*(work(number) for number in range(4)))
    assert sorted(confirmed) == list(range(200))
