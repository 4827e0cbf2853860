"""What the broker does by itself: sealing, and dropping what its topics no longer keep."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path

import pytest

from sparrow.broker.broker import Broker
from sparrow.broker.clock import Clock
from sparrow.model.health import Status
from sparrow.model.segment import SegmentInfo
from sparrow.model.settings import JournalSettings, MaintenanceSettings, Settings
from sparrow.store.catalog_tables import CursorCheckpoint, Document, ProducerState
from sparrow.store.local import LocalStore

KIB = 1024
PATIENCE_S = 20


class HandClock(Clock):
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.seconds = 1_700_000_000.0

    def now_us(self) -> int:
        return int(self.seconds * 1_000_000)

    def monotonic_s(self) -> float:
        return self.seconds


class WatchedStore(LocalStore):
    """Tells when something was sealed or dropped, and fails when a test says so."""

    def watch(self) -> None:
        self.sealed: asyncio.Queue[int] = asyncio.Queue()
        self.dropped: asyncio.Queue[int] = asyncio.Queue()
        self.seal_error: Exception | None = None
        self.tried = asyncio.Event()

    async def seal(
        self,
        cursors: Iterable[CursorCheckpoint],
        producers: Iterable[ProducerState],
        documents: Iterable[Document] = (),
    ) -> int:
        self.tried.set()
        if self.seal_error is not None:
            raise self.seal_error
        count = await super().seal(cursors, producers, documents)
        self.sealed.put_nowait(count)
        return count

    async def drop(self, segments: Sequence[SegmentInfo]) -> None:
        await super().drop(segments)
        self.dropped.put_nowait(len(segments))


class House:
    def __init__(self, broker: Broker, store: WatchedStore, clock: HandClock) -> None:
        self.broker = broker
        self.store = store
        self.clock = clock

    async def fill(
        self, topic: str, segments: int, messages: int = 10, partition_key: str | None = None
    ) -> None:
        """Segments of ten messages each, ten seconds apart."""
        for _ in range(segments):
            await self.broker.publish_batch(
                topic,
                [b"x" * 100] * messages,
                keys=None if partition_key is None else [partition_key] * messages,
            )
            await self.broker.seal()
            self.clock.seconds += 10


async def open_house(
    path: Path,
    *,
    file_bytes: int = 1024 * KIB,
    rotate_after_s: float = 3600.0,
    retention_interval_s: float = 3600.0,
) -> House:
    clock = HandClock()
    settings = Settings(
        data=str(path / "data"),
        journal=JournalSettings(file_bytes=file_bytes, rotate_after_s=rotate_after_s),
        maintenance=MaintenanceSettings(retention_interval_s=retention_interval_s),
    )
    store = await WatchedStore.open(
        path / "data", journal=settings.journal, lake=settings.lake, now_us=clock.now_us
    )
    assert isinstance(store, WatchedStore)
    store.watch()
    return House(await Broker.open(settings, store=store, clock=clock), store, clock)


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    house = await open_house(tmp_path)
    yield house
    await house.broker.close()


async def next_of(queue: asyncio.Queue[int]) -> int:
    return await asyncio.wait_for(queue.get(), PATIENCE_S)


# Sealing.


async def test_full_journal_files_are_sealed_without_being_asked(tmp_path: Path) -> None:
    house = await open_house(tmp_path, file_bytes=64 * KIB)
    for _ in range(4):
        await house.broker.publish_batch("orders", [b"x" * KIB] * 40)
    total = 0
    while total < 80:
        total += await next_of(house.store.sealed)
    assert house.broker.state().segments >= 1
    assert len(await house.broker.read("orders")) == 160
    await house.broker.close()


async def test_an_old_journal_file_is_sealed_however_small(tmp_path: Path) -> None:
    house = await open_house(tmp_path, rotate_after_s=0.01)
    await house.broker.publish("orders", b"small")
    assert await next_of(house.store.sealed) == 1
    assert [message.data for message in await house.broker.read("orders")] == [b"small"]
    await house.broker.close()


async def test_an_idle_broker_seals_nothing_and_makes_no_files(tmp_path: Path) -> None:
    house = await open_house(tmp_path, rotate_after_s=0.001)
    await house.broker.publish("orders", b"x")
    await next_of(house.store.sealed)
    before = sorted(path.name for path in (tmp_path / "data" / "journal").iterdir())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(house.store.sealed.get(), 0.2)
    assert sorted(path.name for path in (tmp_path / "data" / "journal").iterdir()) == before
    await house.broker.close()


async def test_sealing_by_hand_moves_everything_and_says_how_much(house: House) -> None:
    await house.broker.publish_batch("a", [b"x"] * 7)
    await house.broker.publish_batch("b", [b"x"] * 5)
    assert await house.broker.seal() == 12
    assert await house.broker.seal() == 0
    assert house.broker.state().segments == 2


async def test_sealing_by_hand_from_many_tasks_seals_once(house: House) -> None:
    await house.broker.publish_batch("a", [b"x"] * 7)
    assert sum(await asyncio.gather(*(house.broker.seal() for _ in range(4)))) == 7


async def test_a_failing_seal_shows_in_the_health_and_harms_no_publisher(tmp_path: Path) -> None:
    house = await open_house(tmp_path, file_bytes=64 * KIB)
    assert house.broker.health().status is Status.HEALTHY
    house.store.seal_error = OSError(28, "No space left on device")
    for _ in range(2):
        await house.broker.publish_batch("orders", [b"x" * KIB] * 40)
    await asyncio.wait_for(house.store.tried.wait(), PATIENCE_S)
    for _ in range(50):  # The error has to travel through a few tasks.
        await asyncio.sleep(0)
    health = house.broker.health()
    assert (health.status, health.is_ready) == (Status.DEGRADED, True)
    assert any("No space left" in check.message for check in health.checks if check.name == "maintenance")
    await house.broker.publish("orders", b"still taken")
    house.store.seal_error = None
    assert await house.broker.seal() == 81
    await house.broker.close()


async def test_a_failed_seal_does_not_forget_the_producers_state(tmp_path: Path) -> None:
    house = await open_house(tmp_path)
    producer = await house.broker.producer("shop")
    first = await producer.publish("orders", b"x", sequence=5)
    house.store.seal_error = OSError(5, "Input/output error")
    with pytest.raises(OSError, match="Input/output"):
        await house.broker.seal()
    house.store.seal_error = None
    assert await house.broker.seal() == 1
    await house.broker.close()
    house = await open_house(tmp_path)
    producer = await house.broker.producer("shop")
    again = await producer.publish("orders", b"x", sequence=5)
    assert (again.is_duplicate, again.message_id) == (True, first.message_id)
    await house.broker.close()


async def test_a_broker_that_is_closed_while_it_seals_finishes_the_seal(tmp_path: Path) -> None:
    house = await open_house(tmp_path, file_bytes=64 * KIB)
    for _ in range(6):
        await house.broker.publish_batch("orders", [b"x" * KIB] * 40)
    await house.broker.close()
    house = await open_house(tmp_path)
    assert len(await house.broker.read("orders")) == 240
    assert house.broker.recovery.damages == ()
    await house.broker.close()


# Retention.


async def test_segments_go_when_their_messages_are_too_old(house: House) -> None:
    await house.broker.create_topic("orders", retention_s=25)
    await house.fill("orders", 4)
    assert await house.broker.apply_retention() == 2
    assert await house.broker.bounds("orders") == (20, 40)
    house.clock.seconds += 100
    assert await house.broker.apply_retention() == 2
    assert await house.broker.bounds("orders") == (40, 40)


async def test_segments_go_when_the_topic_is_too_large(house: House) -> None:
    await house.broker.create_topic("orders", retention_s=None)
    await house.fill("orders", 4)
    size = house.broker.state().lake_bytes // 4
    await house.broker.update_topic("orders", retention_bytes=int(size * 2.5))
    assert await house.broker.apply_retention() == 2
    assert await house.broker.bounds("orders") == (20, 40)
    assert house.broker.state().lake_bytes <= size * 2.5


async def test_segments_go_when_the_topic_has_too_many_messages(house: House) -> None:
    await house.broker.create_topic("orders", retention_s=None, retention_messages=25)
    await house.fill("orders", 4)
    assert await house.broker.apply_retention() == 2
    assert await house.broker.bounds("orders") == (20, 40)


async def test_only_the_topics_that_ask_for_it_lose_segments(house: House) -> None:
    await house.broker.create_topic("short", retention_s=5)
    await house.broker.create_topic("long", retention_s=None)
    await house.fill("short", 2)
    await house.fill("long", 2)
    assert await house.broker.apply_retention() == 2
    assert await house.broker.bounds("short") == (20, 20)
    assert await house.broker.bounds("long") == (0, 20)


async def test_what_is_not_sealed_stays(house: House) -> None:
    await house.broker.create_topic("orders", retention_s=5, retention_messages=1)
    await house.fill("orders", 1)
    await house.broker.publish_batch("orders", [b"hot"] * 5)
    house.clock.seconds += 1000
    assert await house.broker.apply_retention() == 1
    assert [message.data for message in await house.broker.read("orders", offset=10)] == [b"hot"] * 5


async def test_what_was_dropped_stays_dropped_after_a_restart(tmp_path: Path) -> None:
    house = await open_house(tmp_path)
    await house.broker.create_topic("orders", retention_messages=15, retention_s=None)
    await house.fill("orders", 3)
    await house.broker.apply_retention()
    await house.broker.close()
    house = await open_house(tmp_path)
    assert await house.broker.bounds("orders") == (20, 30)
    assert len(await house.broker.read("orders", offset=20)) == 10
    assert house.broker.recovery.damages == ()
    await house.broker.close()


async def test_retention_runs_by_itself(tmp_path: Path) -> None:
    house = await open_house(tmp_path, retention_interval_s=0.01)
    await house.broker.create_topic("orders", retention_messages=10, retention_s=None)
    await house.fill("orders", 3)
    dropped = 0
    while dropped < 2:
        dropped += await next_of(house.store.dropped)
    assert await house.broker.bounds("orders") == (20, 30)
    await house.broker.close()


async def test_retention_asked_for_twice_at_once_drops_no_more_than_it_should(house: House) -> None:
    await house.broker.create_topic("orders", retention_messages=25, retention_s=None)
    await house.fill("orders", 4)
    await asyncio.gather(*(house.broker.apply_retention() for _ in range(4)))
    assert await house.broker.bounds("orders") == (20, 40)


async def test_a_topic_deleted_while_retention_runs_is_no_trouble(house: House) -> None:
    for name in ("a", "b", "c"):
        await house.broker.create_topic(name, retention_s=1)
        await house.fill(name, 2)
    await asyncio.gather(house.broker.apply_retention(), house.broker.delete_topic("b"))
    assert [topic.name for topic in await house.broker.topics()] == ["a", "c"]
    assert await house.broker.bounds("c") == (20, 20)


async def test_what_a_subscription_has_not_acked_is_kept_when_the_topic_says_so(house: House) -> None:
    await house.broker.create_topic("orders", retention_s=5, retain_until_acked=True)
    billing = await house.broker.subscribe("billing", "orders", start="earliest")
    await house.fill("orders", 3)
    assert await house.broker.apply_retention() == 0
    await billing.ack(await billing.pull(max_messages=10), wait=True)
    assert await house.broker.apply_retention() == 1
    assert await house.broker.bounds("orders") == (10, 30)


async def test_without_that_promise_what_is_not_acked_goes_too(house: House) -> None:
    await house.broker.create_topic("orders", retention_s=5)
    await house.broker.subscribe("billing", "orders", start="earliest")
    await house.fill("orders", 3)
    assert await house.broker.apply_retention() == 3
