"""The steward: refuses publishes for the broker, and remembers a maintenance."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparrow.broker.broker import Broker
from sparrow.broker.clock import Clock
from sparrow.kernel.degradation import ServiceLevel, Strain
from sparrow.model.errors import InMaintenance, InvalidArgument, LoadShed, PreconditionFailed, StorageFull
from sparrow.model.health import Status
from sparrow.model.settings import Settings

DISK = 10**12
CALM = Strain(0.1, DISK // 2, DISK)


class HandClock(Clock):
    """The machine's wall clock, and a steady clock that a test moves."""

    def __init__(self) -> None:
        self.offset_s = 0.0

    def monotonic_s(self) -> float:
        return super().monotonic_s() + self.offset_s


async def strained(broker: Broker, clock: HandClock, strain: Strain, seconds: int = 5) -> None:
    for _ in range(seconds):
        clock.offset_s += 1.0
        broker.steward.look(strain)


async def test_in_maintenance_publishes_are_refused_and_deliveries_go_on(tmp_path: Path) -> None:
    async with await Broker.open(Settings(data=str(tmp_path))) as broker:
        billing = await broker.subscribe("billing", "orders")
        await broker.publish("orders", b"1")
        await broker.steward.begin_maintenance("new disks", 60)
        with pytest.raises(InMaintenance, match="new disks") as refused:
            await broker.publish("orders", b"2")
        assert refused.value.details == {"retry_after_s": 60}
        with pytest.raises(InMaintenance):
            await broker.publish_batch("orders", [b"2"])
        (message,) = await billing.pull(timeout_s=5)
        await billing.ack([message], wait=True)
        assert await billing.lag() == 0
        assert broker.health().status is Status.DEGRADED
        await broker.steward.end_maintenance()
        await broker.publish("orders", b"3")
        assert broker.health().status is Status.HEALTHY


async def test_a_maintenance_lasts_over_a_restart_until_it_is_ended(tmp_path: Path) -> None:
    settings = Settings(data=str(tmp_path))
    async with await Broker.open(settings) as broker:
        await broker.steward.begin_maintenance("upgrade")
    async with await Broker.open(settings) as broker:
        assert broker.steward.level is ServiceLevel.MAINTENANCE
        with pytest.raises(InMaintenance, match="upgrade"):
            await broker.publish("orders", b"1")
        await broker.steward.end_maintenance()
    async with await Broker.open(settings) as broker:
        await broker.publish("orders", b"1")


async def test_dead_letters_are_moved_also_in_maintenance(tmp_path: Path) -> None:
    async with await Broker.open(Settings(data=str(tmp_path))) as broker:
        billing = await broker.subscribe("billing", "orders", dead_letter_topic="dead")
        await broker.publish("orders", b"1")
        await broker.steward.begin_maintenance()
        await billing.nack(await billing.pull(timeout_s=5), retry=False, wait=True)
        await billing.flush()
        assert len(await billing.dead_letters.list()) == 1


async def test_when_memory_runs_short_bulk_publishers_are_refused_first(tmp_path: Path) -> None:
    clock = HandClock()
    async with await Broker.open(Settings(data=str(tmp_path)), clock=clock) as broker:
        await strained(broker, clock, CALM._replace(memory_share=0.85))
        with pytest.raises(LoadShed):
            await broker.publish("orders", b"1", priority_class="bulk")
        await broker.publish("orders", b"1")
        await broker.publish("orders", b"1", priority_class="critical")
        assert broker.steward.takes_connections
        await strained(broker, clock, CALM._replace(memory_share=0.97))
        with pytest.raises(LoadShed):
            await broker.publish("orders", b"1", priority_class="critical")
        assert not broker.steward.takes_connections
        assert broker.health().status is Status.CRITICAL
        await strained(broker, clock, CALM, seconds=30)
        assert broker.steward.level is ServiceLevel.NORMAL
        await broker.publish("orders", b"1", priority_class="bulk")


async def test_with_hardly_any_disk_left_publishes_are_refused_as_on_a_full_one(tmp_path: Path) -> None:
    clock = HandClock()
    async with await Broker.open(Settings(data=str(tmp_path)), clock=clock) as broker:
        billing = await broker.subscribe("billing", "orders")
        await broker.publish("orders", b"1")
        await strained(broker, clock, CALM._replace(disk_free_bytes=1000))
        with pytest.raises(StorageFull):
            await broker.publish("orders", b"2")
        assert len(await billing.pull(timeout_s=5)) == 1
        await strained(broker, clock, CALM, seconds=30)
        await broker.publish("orders", b"3")


async def test_the_watch_sees_the_memory_and_the_disk_of_this_machine(tmp_path: Path) -> None:
    async with await Broker.open(Settings(data=str(tmp_path))) as broker:
        assert broker.steward.space.total_bytes == 0
        broker.steward.space = await broker._store.space()
        broker.steward.look(broker.steward._strain())
        assert broker.steward.usage.memory_bytes > 10_000_000
        assert broker.steward.usage.open_files > 3
        assert 0 < broker.steward.space.free_bytes <= broker.steward.space.total_bytes


@pytest.mark.parametrize("options", [{"retry_after_s": 0}, {"retry_after_s": -1}, {"reason": "x" * 2000}])
async def test_a_maintenance_with_nonsense_is_refused(tmp_path: Path, options: dict[str, object]) -> None:
    async with await Broker.open(Settings(data=str(tmp_path))) as broker:
        with pytest.raises(InvalidArgument):
            await broker.steward.begin_maintenance(**options)  # type: ignore[arg-type]
        assert broker.steward.level is ServiceLevel.NORMAL


async def test_an_embedded_broker_is_stopped_by_its_program_alone(tmp_path: Path) -> None:
    async with await Broker.open(Settings(data=str(tmp_path))) as broker:
        with pytest.raises(PreconditionFailed):
            broker.steward.shut_down()
