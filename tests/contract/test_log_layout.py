"""What programs that read the log by themselves are told: extents, segments, sizes, places."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparrow.model.errors import InvalidArgument, InvalidPattern, TopicNotFound
from sparrow.model.message import StreamId
from sparrow.store.journalstretch import read_places
from sparrow.store.segmentfile import scan_segment


async def fill(broker: Any, *batches: int) -> None:
    await broker.create_topic("orders", partitions=1)
    for place, count in enumerate(batches):
        await broker.publish_batch("orders", [b"x" * 1000] * count)
        if place < len(batches) - 1:
            await broker.seal()


async def test_extents_tell_what_can_be_read_of_matching_topics(broker: Any) -> None:
    for name, count in (("orders.us", 3), ("orders.de", 0), ("people", 1)):
        await broker.create_topic(name, partitions=2)
        for _ in range(count):
            await broker.publish(name, b"x", key="k")
    found = await broker.extents(["orders.*", "nothing"])
    assert [(extent.topic, sorted(map(tuple, extent.bounds))) for extent in found] == [
        ("orders.de", [(0, 0), (0, 0)]), ("orders.us", [(0, 0), (0, 3)])]  # fmt: skip
    assert found[1].topic_id == (await broker.topic("orders.us")).id
    with pytest.raises(InvalidPattern):
        await broker.extents(["a.#.b"])
    with pytest.raises(InvalidArgument):
        await broker.extents("orders")


async def test_segments_are_files_that_hold_what_they_say(broker: Any) -> None:
    await fill(broker, 5, 7, 3)
    found = await broker.segments("orders")
    (held,) = found.partitions
    assert (held.start_offset, held.sealed_end_offset, held.end_offset) == (0, 12, 15)
    assert [(each.first_offset, each.end_offset, each.rows) for each in held.segments] == [
        (0, 5, 5),
        (5, 12, 7),
    ]
    stream = StreamId(found.topic_id, 0)
    path = Path(found.directory) / held.segments[1].file
    (rows,) = scan_segment(path, stream, 6, 11, ["data"])
    assert rows.schema.names == ["offset", "data"]
    assert rows.column("offset").to_pylist() == [6, 7, 8, 9, 10]
    with pytest.raises(TopicNotFound):
        await broker.segments("people")
    with pytest.raises(InvalidArgument):
        await broker.segments("orders", hold_s=-1)


async def test_dropped_segments_are_out_of_force_and_their_files_stay_while_they_are_held(
    broker: Any,
) -> None:
    await fill(broker, 5, 5, 5, 0 + 1)
    await broker.update_topic("orders", retention_messages=6)
    found = await broker.segments("orders", hold_s=3600)
    files = [Path(found.directory) / each.file for each in found.partitions[0].segments]
    assert await broker.apply_retention() == 2
    assert [each.first_offset for each in (await broker.segments("orders")).partitions[0].segments] == [10]
    assert all(file.exists() for file in files)
    assert (await broker.bounds("orders")).start_offset == 10
    await broker.delete_topic("orders")
    assert not any(file.exists() for file in files)


async def test_dropped_segments_that_nobody_holds_go_at_once(broker: Any) -> None:
    await fill(broker, 5, 5, 1)
    await broker.update_topic("orders", retention_messages=1)
    found = await broker.segments("orders")
    files = [Path(found.directory) / each.file for each in found.partitions[0].segments]
    assert await broker.apply_retention() == 2
    assert not any(file.exists() for file in files)


async def test_measure_tells_how_far_bytes_reach_over_lake_and_journal(broker: Any) -> None:
    await fill(broker, 20, 20)
    ((end, whole),) = map(tuple, await broker.measure("orders", [(0, 0, 40)]))
    assert end == 40
    ((end, hot),) = map(tuple, await broker.measure("orders", [(0, 20, 40)]))
    assert (end, 20_000 <= hot <= 22_000) == (40, True)
    assert whole > hot
    ((end, size),) = map(tuple, await broker.measure("orders", [(0, 20, 40)], max_bytes=10_500))
    assert 28 <= end <= 30
    assert size <= 10_500
    ((end, _),) = map(tuple, await broker.measure("orders", [(0, 25, 40)], max_bytes=1))
    assert end == 26, "one message always passes"
    ((end, size),) = map(tuple, await broker.measure("orders", [(0, 40, 40)]))
    assert (end, size) == (40, 0)
    with pytest.raises(InvalidArgument, match="stretch"):
        await broker.measure("orders", [(0, 1)])
    with pytest.raises(InvalidArgument, match="partitions 0 to 0"):
        await broker.measure("orders", [(3, 0, 1)])


async def test_places_lead_to_the_batches_in_the_journal(broker: Any) -> None:
    await fill(broker, 4, 6)
    await broker.publish_batch("orders", [b"y"] * 2)
    ((first, second),) = await broker.places("orders", [(0, 0, 12)])
    assert (first.base_offset, second.base_offset) == (4, 10)
    assert await broker.places("orders", [(0, 11, 12)]) == [[second]]
    found = await broker.segments("orders")
    stream = StreamId(found.topic_id, 0)
    batches = list(read_places(Path(found.directory), [first, second], stream))
    assert [batch.batch.column("offset").to_pylist() for batch in batches] == [[4, 5, 6, 7, 8, 9], [10, 11]]
    assert batches[1].batch.column("data").to_pylist() == [b"y", b"y"]
