"""Staged publishes, the same over every surface."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from sparrow.model.errors import InvalidArgument, StageIncomplete, StageNotFound


def table(*payloads: bytes, keys: list[str] | None = None) -> pa.Table:
    columns = {"data": pa.array(payloads, pa.binary())}
    if keys is not None:
        columns["key"] = pa.array(keys)
    return pa.table(columns)


async def payloads(broker: Any, topic: str) -> list[bytes]:
    found = []
    for partition in range((await broker.topic(topic)).partitions):
        found += [message.data for message in await broker.read(topic, partition=partition)]
    return found


async def test_staged_parts_are_published_by_one_commit_once(broker: Any) -> None:
    await broker.create_topic("out")
    first = await broker.stage("t", "a", "out", table(b"1", b"2"))
    second = await broker.stage("t", "b", "out", table(b"3"), position=0)
    assert (first.messages, second.messages, second.calls) == (2, 1, 1)
    assert await payloads(broker, "out") == []
    committed = await broker.commit_staged("etl", 3, [("t", "b", 1), ("t", "a", 2)])
    assert (committed.batch, committed.messages, committed.is_repeat) == (3, 3, False)
    assert await payloads(broker, "out") == [b"3", b"1", b"2"]
    assert (await broker.commit_staged("etl", 3, [("t", "b", 1), ("t", "a", 2)])).is_repeat
    assert await payloads(broker, "out") == [b"3", b"1", b"2"]
    assert await broker.committed_batch("etl") == 3
    assert await broker.committed_batch("nobody") is None


async def test_calls_are_numbered_and_repeats_recognised(broker: Any) -> None:
    await broker.stage("t", "a", "out", table(b"1"), position=0)
    await broker.stage("t", "a", "out", table(b"1"), position=0)
    with pytest.raises(StageIncomplete):
        await broker.stage("t", "a", "out", table(b"3"), position=2)
    await broker.commit_staged("etl", 0, [("t", "a", 1)])
    assert await payloads(broker, "out") == [b"1"]


async def test_keys_keep_their_order_in_their_partition(broker: Any) -> None:
    await broker.create_topic("out", partitions=3)
    keys = [f"k{row % 5}" for row in range(40)]
    data = [f"{key}:{row:03}".encode() for row, key in enumerate(keys)]
    staged = await broker.stage("t", "a", "out", table(*data, keys=keys), position=0)
    again = await broker.stage("t", "a", "out", table(*data, keys=keys), position=0)
    assert staged.messages == again.messages == 40
    await broker.commit_staged("etl", 0, [("t", "a", 40)])
    plain = await broker.publish_batch("out", [b"x"] * 5, keys=[f"k{n}" for n in range(5)])
    for number in range(5):
        found = await broker.read("out", partition=plain[number].partition)
        mine = [message.data for message in found if message.key == f"k{number}"]
        assert mine == [*(d for d, k in zip(data, keys, strict=True) if k == f"k{number}"), b"x"]


async def test_a_large_table_is_staged_in_several_calls(broker: Any) -> None:
    data = [bytes([row % 251]) * 100_000 for row in range(300)]
    staged = await broker.stage("t", "a", "out", table(*data), position=0)
    assert staged.calls > 1
    assert staged.messages == 300
    await broker.commit_staged("etl", 0, [("t", "a", 300)])
    found = [
        row for batch in await broker.read_batches("out", max_bytes=2**30) for row in batch.column("data")
    ]
    assert [row.as_py() for row in found] == data[: len(found)]
    assert (await broker.bounds("out")).end_offset == 300


async def test_aborted_parts_are_gone(broker: Any) -> None:
    await broker.stage("t", "a", "out", table(b"1"))
    assert [stage.part for stage in await broker.stages()] == ["a"]
    assert await broker.abort_staged("t") == 1
    assert await broker.stages() == []
    with pytest.raises(StageNotFound):
        await broker.commit_staged("etl", 0, [("t", "a", 1)])


async def test_bad_tables_are_refused(broker: Any) -> None:
    with pytest.raises(InvalidArgument, match="colour"):
        await broker.stage("t", "a", "out", pa.table({"data": [b"1"], "colour": ["red"]}))
    with pytest.raises(InvalidArgument, match="data"):
        await broker.stage("t", "a", "out", pa.table({"key": ["k"]}))
    with pytest.raises(InvalidArgument):
        await broker.stage("t", "a", "out", table())
    assert await broker.stages() == []
