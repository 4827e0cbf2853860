"""Files of dropped segments: kept as long as somebody holds them, and not longer."""

from __future__ import annotations

from pathlib import Path

from sparrow.model.message import StreamId
from sparrow.store.holds import Holds
from sparrow.testing.store import append, create_topic, draft, open_store


class Time:
    def __init__(self) -> None:
        self.now_us = 0

    def __call__(self) -> int:
        return self.now_us


def test_a_file_waits_for_the_longest_hold_of_its_topic() -> None:
    time = Time()
    holds = Holds(time)
    mine, other = Path("1/a.parquet"), Path("2/a.parquet")
    holds.hold(1, 10)
    holds.hold(1, 5)
    assert [holds.keep(1, mine), holds.keep(2, other)] == [True, False]
    time.now_us = 9_999_999
    assert holds.due() == []
    time.now_us = 10_000_000
    assert holds.due() == [mine]
    assert holds.due() == []
    assert not holds.keep(1, mine)


def test_a_topic_that_is_deleted_leaves_no_path_behind_that_another_may_take() -> None:
    time = Time()
    holds = Holds(time)
    holds.hold(1, 10)
    assert holds.keep(1, Path("1/a.parquet"))
    holds.forget_topic(1)
    time.now_us = 60_000_000
    assert holds.due() == []


async def test_a_store_keeps_held_files_and_removes_them_when_they_are_released(tmp_path: Path) -> None:
    time = Time()
    store = await open_store(tmp_path, now_us=time)
    topic = await create_topic(store, "orders")
    stream = StreamId(topic.id, 0)
    await append(store, draft(stream, [b"a", b"b"]))
    await store.rotate()
    await store.seal([], [])
    layout = store.layout(topic, 30.0)
    (held,) = [tmp_path / each.file for each in layout.partitions[0].segments]
    await store.drop(store.segments(topic))
    await store.release()
    assert held.exists()
    assert store.bounds(stream) == (2, 2)
    assert store.layout(topic, 30.0).partitions[0].segments == []
    time.now_us = 31_000_000
    await store.release()
    assert not held.exists()
    await store.close()


async def test_a_start_removes_what_was_only_held(tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    topic = await create_topic(store, "orders")
    await append(store, draft(StreamId(topic.id, 0), [b"a"]))
    await store.rotate()
    await store.seal([], [])
    (held,) = [tmp_path / each.file for each in store.layout(topic, 3600.0).partitions[0].segments]
    await store.drop(store.segments(topic))
    await store.close()
    assert held.exists()
    store = await open_store(tmp_path)
    assert not held.exists()
    await store.close()
