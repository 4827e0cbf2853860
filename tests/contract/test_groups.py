"""Groups and their members, on every surface."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from sparrow import errors

FAST = {
    "mode": "partitioned",
    "stabilisation_s": 0.0,
    "heartbeat_s": 0.2,
    "session_timeout_s": 2.0,
    "drain_timeout_s": 0.2,
    "backoff_min_s": 0.0,
    "backoff_max_s": 0.0,
}


async def share(*members: Any) -> list[list[int]]:
    """The partitions of each member, once all have some and every one is given out."""
    for _ in range(500):
        found = [sorted(each.partition for each in member.assignment) for member in members]
        if all(found) and sorted(itertools.chain.from_iterable(found)) == [0, 1, 2, 3]:
            return found
        await asyncio.sleep(0.02)
    raise AssertionError(f"the partitions are shared out as {found}")


async def test_partitions_are_shared_out_and_taken_over(broker: Any) -> None:
    await broker.create_topic("t", partitions=4)
    subscription = await broker.subscribe("s", "t", group=FAST)
    one = await subscription.join("one")
    two = await subscription.join("two")
    assert [len(mine) for mine in await share(one, two)] == [2, 2]
    assert [member.name for member in await subscription.members()] == ["one", "two"]
    assert (await subscription.group()).members == 2
    await two.leave()
    assert await share(one) == [[0, 1, 2, 3]]
    assert one.generation == (await subscription.group()).generation
    with pytest.raises(errors.StaleGeneration):
        await two.pull()


async def test_members_get_the_messages_of_their_partitions(broker: Any) -> None:
    await broker.create_topic("t", partitions=4)
    subscription = await broker.subscribe("s", "t", group=FAST)
    members = [await subscription.join(name) for name in ("one", "two")]
    shares = await share(*members)
    keys = [f"k{n}" for n in range(100)]
    await broker.publish_batch("t", [b"x"] * 100, keys=keys)
    count = 0
    for member, mine in zip(members, shares, strict=True):
        while some := await member.pull(100, timeout_s=0.5):
            assert {message.partition for message in some} <= set(mine)
            await member.ack(some)
            count += len(some)
        await member.flush()
    assert count == 100
    assert await subscription.lag() == 0


async def test_only_members_of_a_partitioned_group_may_pull(broker: Any) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("s", "t", group=FAST)
    with pytest.raises(errors.PreconditionFailed):
        await subscription.pull()


async def test_commit_keeps_its_note_for_who_comes_next(broker: Any) -> None:
    await broker.create_topic("t", partitions=4)
    subscription = await broker.subscribe("s", "t", group=FAST)
    member = await subscription.join("one")
    await share(member)
    receipts = await broker.publish_batch("t", [b"a", b"b"], keys=["k", "k"])
    partition = receipts[0].partition
    await member.commit("t", partition, 1, metadata="half way")
    [committed] = await member.committed()
    assert (committed.partition, committed.offset, committed.metadata) == (partition, 1, "half way")
    assert (await member.info()).name == "one"
    assert await subscription.lag() == 1


async def test_name_that_is_taken_over_fences_the_first(broker: Any) -> None:
    await broker.create_topic("t", partitions=4)
    subscription = await broker.subscribe("s", "t", group=FAST)
    first = await subscription.join("one")
    await share(first)
    second = await subscription.join("one")
    await share(second)

    async def pull_until_told() -> None:
        for _ in range(100):
            await first.pull()
            await asyncio.sleep(0.02)

    with pytest.raises(errors.StaleGeneration):
        await pull_until_told()


async def test_shared_group_gives_everybody_something(broker: Any) -> None:
    await broker.create_topic("t")
    subscription = await broker.subscribe("s", "t", group={"mode": "shared", "stabilisation_s": 0.0})
    members = [await subscription.join(f"m{n}", max_in_flight=50) for n in range(3)]
    await broker.publish_batch("t", [b"%d" % n for n in range(120)])
    found: list[bytes | None] = []
    for _ in range(100):
        for member in members:
            some = await member.pull(20, timeout_s=0.1)
            await member.ack(some)
            found += [message.data for message in some]
        if len(found) >= 120:
            break
    assert sorted(map(int, found)) == list(range(120))  # type: ignore[arg-type]
    for member in members:
        await member.flush()
        await member.close()
    assert await subscription.lag() == 0
