"""Members of groups over the binary protocol."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from sparrow.model import errors
from sparrow.wire import heads
from sparrow.wire.frame import FrameType

from .wireclient import Client, connected, publish_batch, serving

QUICK = {"mode": "partitioned", "stabilisation_s": 0.0, "backoff_min_s": 0.0, "backoff_max_s": 0.0}


async def join(client: Client, member: str, **fields: Any) -> dict[str, Any]:
    head = heads.JoinGroup("s", member, credit_messages=1000, credit_bytes=1 << 20, **fields)
    found: dict[str, Any] = (await client.ask(head)).value
    return found


async def share_of(client: Client, size: int) -> heads.Rebalance:
    """The rebalance that gives a member so many partitions."""
    while True:
        found: heads.Rebalance = await client.next_head(FrameType.REBALANCE)
        if len(found.assignment) == size:
            return found


async def test_members_share_the_partitions_and_are_told_when_that_changes(tmp_path: Path) -> None:
    async with serving(tmp_path) as (broker, server), connected(server) as first, connected(server) as second:
        await broker.create_topic("t", partitions=4)
        await broker.subscribe("s", "t", group=QUICK)
        joined = await join(first, "a")
        assert joined["consumer"] == 1
        assert joined["incarnation"] >= 1
        whole = joined["assignment"] or (await share_of(first, 4)).assignment
        assert len(whole) == 4
        await join(second, "b")
        mine, theirs = await share_of(first, 2), await share_of(second, 2)
        assert sorted([*mine.assignment, *theirs.assignment]) == [("t", n) for n in range(4)]
        for partition in range(4):
            head, body = publish_batch("t", [b"%d" % partition], partition)
            await first.ask(head, body)
        for client, share in ((first, mine), (second, theirs)):
            got = set()
            while len(got) < 2:
                deliver, _ = await client.deliver()
                got.add((deliver.topic, deliver.partition))
                settle = heads.Settle(
                    deliver.consumer,
                    heads.ACK,
                    [(deliver.lease, [deliver.first_offset, deliver.first_offset + 1])],
                    wait=True,
                )
                assert (await client.ask(settle)).value == []
            assert got == set(share.assignment)
        assert await (await broker.subscription("s")).lag() == 0


async def test_the_share_of_a_member_whose_connection_breaks_goes_to_the_others(tmp_path: Path) -> None:
    async with serving(tmp_path) as (broker, server), connected(server) as first:
        await broker.create_topic("t", partitions=2)
        await broker.subscribe("s", "t", group=QUICK)
        await join(first, "a")
        second = await Client.connect(server.address)
        await second.hello()
        await join(second, "b")
        await share_of(second, 1)
        second.abort()
        await share_of(first, 2)
        members = await (await broker.subscription("s")).members()
        assert [member.name for member in members] == ["a"]


async def test_a_static_member_keeps_its_seat_when_its_connection_breaks(tmp_path: Path) -> None:
    async with serving(tmp_path) as (broker, server):
        await broker.create_topic("t")
        await broker.subscribe("s", "t", group=QUICK)
        client = await Client.connect(server.address)
        await client.hello()
        await join(client, "a", is_static=True)
        client.abort()
        await asyncio.sleep(0.2)
        handle = await broker.subscription("s")
        assert [member.name for member in await handle.members()] == ["a"]
        async with connected(server) as again:
            joined = await join(again, "a", is_static=True)
            assert joined["assignment"] == [["t", 0]]


async def test_a_member_whose_name_is_taken_is_told_to_join_again(tmp_path: Path) -> None:
    async with serving(tmp_path) as (broker, server), connected(server) as first, connected(server) as second:
        await broker.create_topic("t")
        await broker.subscribe("s", "t", group=QUICK)
        consumer = (await join(first, "a"))["consumer"]
        await join(second, "a")
        while not (await first.next_head(FrameType.REBALANCE)).must_rejoin:
            pass
        with pytest.raises(errors.StaleGeneration):
            await first.ask(heads.Commit(consumer, "t", 0, 0))
        first.abort()
        await asyncio.sleep(0.1)
        members = await (await broker.subscription("s")).members()
        assert [member.name for member in members] == ["a"]


async def test_a_member_that_is_silent_is_removed_and_one_that_beats_is_not(tmp_path: Path) -> None:
    group = {**QUICK, "heartbeat_s": 0.5, "session_timeout_s": 1.5}
    async with (
        serving(tmp_path, heartbeat_s=5.0) as (broker, server),
        connected(server) as silent,
        connected(server) as lively,
    ):
        await broker.create_topic("t", partitions=2)
        await broker.subscribe("s", "t", group=group)
        await join(silent, "silent")
        await join(lively, "lively")
        handle = await broker.subscription("s")
        for _ in range(30):
            lively.send(heads.Beat("well"))
            await asyncio.sleep(0.1)
        assert [(m.name, m.status) for m in await handle.members()] == [("lively", "well")]
        while not (await silent.next_head(FrameType.REBALANCE)).must_rejoin:
            pass


async def test_a_member_commits_with_metadata_and_leaves(tmp_path: Path) -> None:
    async with serving(tmp_path) as (broker, server), connected(server) as client:
        await broker.create_topic("t")
        await broker.subscribe("s", "t", group=QUICK)
        joined = await join(client, "a")
        head, body = publish_batch("t", [b"a", b"b"])
        await client.ask(head, body)
        if not joined["assignment"]:
            await share_of(client, 1)
        await client.deliver()
        await client.ask(heads.Commit(joined["consumer"], "t", 0, 2, "noted"))
        (found,) = await client.call("subscription.committed", subscription="s")
        assert (found["offset"], found["metadata"], found["member"]) == (2, "noted", "a")
        await client.ask(heads.Leave(joined["consumer"]))
        assert await client.call("subscription.members", subscription="s") == []


async def test_members_of_a_shared_group_get_each_message_once(tmp_path: Path) -> None:
    async with serving(tmp_path) as (broker, server), connected(server) as first, connected(server) as second:
        await broker.subscribe("s", "t")
        await join(first, "a")
        await join(second, "b")
        for number in range(20):
            await broker.publish("t", b"%d" % number)
        got: list[bytes] = []

        async def take(client: Client) -> None:
            while True:
                _, rows = await client.deliver()
                got.extend(rows.column("data").to_pylist())

        takers = [asyncio.ensure_future(take(client)) for client in (first, second)]
        for _ in range(200):
            if len(got) >= 20:
                break
            await asyncio.sleep(0.01)
        for taker in takers:
            taker.cancel()
        assert sorted(got) == sorted(b"%d" % number for number in range(20))
