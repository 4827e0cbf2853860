"""Reading a partition as messages and as record batches, from any offset and any time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from sparrow.broker.broker import Broker
from sparrow.broker.clock import Clock
from sparrow.model.errors import InvalidArgument, OffsetOutOfRange
from sparrow.model.settings import LakeSettings, Settings
from sparrow.store.batch import TABLE_SCHEMA

START = datetime(2024, 1, 1, tzinfo=UTC)


class HandClock(Clock):
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.moment = START

    def now_us(self) -> int:
        return int(self.moment.timestamp() * 1_000_000)

    def monotonic_s(self) -> float:
        return self.moment.timestamp()


SIZES = (7, 1, 20, 3, 64, 5)
"""Messages of each batch; the first four are sealed as two segments, the last two are hot."""
TOTAL = sum(SIZES)


class Library:
    def __init__(self, broker: Broker, clock: HandClock) -> None:
        self.broker = broker
        self.clock = clock


@pytest.fixture
async def library(tmp_path: Path) -> AsyncIterator[Library]:
    """A topic on both sides of the border; batch n was published n minutes after the start."""
    clock = HandClock()
    settings = Settings(data=str(tmp_path / "data"), lake=LakeSettings(row_group_bytes=2000))
    async with await Broker.open(settings, clock=clock) as broker:
        await broker.create_topic("orders")
        number = 0
        for place, size in enumerate(SIZES):
            clock.moment = START + timedelta(minutes=place)
            values = range(number, number + size)
            await broker.publish_batch(
                "orders",
                [b"%04d" % value * 50 for value in values],
                keys=[f"k{value}" for value in values],
                attributes=[{"n": str(value)} for value in values],
            )
            number += size
            if place in (1, 3):
                await broker.seal()
        yield Library(broker, clock)


async def test_messages_can_be_read_from_any_offset_across_the_border(library: Library) -> None:
    for offset in range(TOTAL + 1):
        found = await library.broker.read("orders", offset=offset)
        assert [message.offset for message in found] == list(range(offset, TOTAL))
        assert [message.data for message in found] == [b"%04d" % n * 50 for n in range(offset, TOTAL)]


@pytest.mark.parametrize("limit", [1, 2, 7, 8, 9, 29, 1000])
async def test_no_more_messages_come_than_asked_for(library: Library, limit: int) -> None:
    for offset in (0, 5, 27, 30, 95):
        found = await library.broker.read("orders", offset=offset, max_messages=limit)
        assert [message.offset for message in found] == list(range(offset, min(offset + limit, TOTAL)))


async def test_a_loop_over_small_reads_sees_every_message_once(library: Library) -> None:
    offset, seen = 0, []
    while found := await library.broker.read("orders", offset=offset, max_messages=3):
        seen += [message.offset for message in found]
        offset = found[-1].offset + 1
    assert seen == list(range(TOTAL))


async def test_values_are_the_same_from_journal_and_lake(library: Library) -> None:
    for message in await library.broker.read("orders"):
        assert message.key == f"k{message.offset}"
        assert message.attributes == {"n": str(message.offset)}
        assert message.topic == "orders"
        assert message.id.endswith(f"-0-{message.offset}")


async def test_record_batches_can_be_read_from_any_offset_across_the_border(library: Library) -> None:
    for offset in range(TOTAL):
        at = offset
        while at < TOTAL:
            for batch in await library.broker.read_batches("orders", offset=at, max_bytes=3000):
                assert batch.schema.equals(TABLE_SCHEMA)
                assert batch.column("offset").to_pylist() == list(range(at, at + batch.num_rows))
                at += batch.num_rows
        assert at == TOTAL


async def test_the_record_batches_hold_what_the_messages_hold(library: Library) -> None:
    offset, tables = 0, []
    while batches := await library.broker.read_batches("orders", offset=offset):
        tables += batches
        offset += sum(batch.num_rows for batch in batches)
    table = pa.Table.from_batches(tables)
    messages = await library.broker.read("orders")
    assert table["data"].to_pylist() == [message.data for message in messages]
    assert table["publish_time"].to_pylist() == [message.publish_time for message in messages]


async def test_at_the_end_of_the_log_there_is_nothing_yet(library: Library) -> None:
    assert await library.broker.read("orders", offset=TOTAL) == []
    assert await library.broker.read_batches("orders", offset=TOTAL) == []


async def test_an_empty_topic_reads_as_nothing(library: Library) -> None:
    await library.broker.create_topic("empty", partitions=2)
    assert await library.broker.read("empty", partition=1) == []
    assert await library.broker.bounds("empty", 1) == (0, 0)
    assert await library.broker.offset_at("empty", START) == 0


@pytest.mark.parametrize("offset", [-1, TOTAL + 1, 10**12])
async def test_an_offset_outside_the_log_is_refused_with_the_bounds(library: Library, offset: int) -> None:
    for call in (
        library.broker.read("orders", offset=offset),
        library.broker.read_batches("orders", offset=offset),
    ):
        with pytest.raises(OffsetOutOfRange) as caught:
            await call
        assert caught.value.details == {"start_offset": 0, "end_offset": TOTAL}


@pytest.mark.parametrize("limit", [0, -1, 1.5, "10"])
async def test_a_limit_is_a_whole_number_from_one(library: Library, limit: Any) -> None:
    with pytest.raises(InvalidArgument, match="max_messages"):
        await library.broker.read("orders", max_messages=limit)


async def test_bounds_are_the_first_offset_and_the_one_after_the_last(library: Library) -> None:
    bounds = await library.broker.bounds("orders")
    assert (bounds.start_offset, bounds.end_offset) == (0, TOTAL)


async def test_reading_goes_on_after_retention_took_the_front(library: Library) -> None:
    await library.broker.update_topic("orders", retention_messages=25)
    assert await library.broker.apply_retention() == 1
    assert await library.broker.bounds("orders") == (8, TOTAL)
    with pytest.raises(OffsetOutOfRange):
        await library.broker.read("orders", offset=7)
    assert [m.offset for m in await library.broker.read("orders", offset=8)] == list(range(8, TOTAL))
    assert await library.broker.offset_at("orders", START) == 8


# By time.


@pytest.mark.parametrize("place", range(len(SIZES)))
@pytest.mark.parametrize(("shift_us", "is_later"), [(-1, False), (0, False), (1, True)])
async def test_the_offset_at_a_time_is_the_first_published_then_or_later(
    library: Library, place: int, shift_us: int, is_later: bool
) -> None:
    moment = START + timedelta(minutes=place, microseconds=shift_us)
    found = await library.broker.offset_at("orders", moment)
    assert found == sum(SIZES[: place + is_later])


async def test_a_time_may_be_seconds_since_1970(library: Library) -> None:
    assert await library.broker.offset_at("orders", 0) == 0
    assert await library.broker.offset_at("orders", (START + timedelta(minutes=1)).timestamp()) == SIZES[0]


async def test_a_time_after_everything_is_the_end_of_the_log(library: Library) -> None:
    assert await library.broker.offset_at("orders", START + timedelta(days=1)) == TOTAL


async def test_a_time_is_found_also_when_all_is_sealed(library: Library) -> None:
    await library.broker.seal()
    for place in range(len(SIZES)):
        found = await library.broker.offset_at("orders", START + timedelta(minutes=place))
        assert found == sum(SIZES[:place])
    assert await library.broker.offset_at("orders", START + timedelta(days=1)) == TOTAL


async def test_a_message_goes_on_after_its_segment_is_gone(library: Library) -> None:
    """What was handed over stays whole, whatever retention does afterwards."""
    first = (await library.broker.read("orders", max_messages=1))[0]
    await library.broker.update_topic("orders", retention_messages=1)
    await library.broker.apply_retention()
    assert first.attributes == {"n": "0"}
