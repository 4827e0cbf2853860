"""What the simulator has found, each as the few steps that show it. They run on virtual time."""

from __future__ import annotations

import asyncio
import errno
import gc
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from sparrow.broker.broker import Broker
from sparrow.model.errors import JournalFrozen
from sparrow.testing.simclock import seeded_chance
from sparrow.testing.simmachine import Machine

Story = Callable[[Broker], Coroutine[Any, Any, Any]]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with seeded_chance(Random(1)):
        machine = Machine(tmp_path, Random(1), rotate_after_s=900.0, file_bytes=64 * 1024)
        yield machine
        machine.end()


def _live(machine: Machine, story: Story) -> Any:
    async def life() -> Any:
        return await story(await machine.open())

    return machine.run(life())


def _after_a_kill(machine: Machine, story: Story) -> Any:
    machine.kill()
    return _live(machine, story)


def test_flush_tells_of_an_ack_that_was_lost_before_it_was_called(machine: Machine) -> None:
    async def story(broker: Broker) -> None:
        await broker.create_topic("t")
        subscription = await broker.subscribe("s", "t")
        await broker.publish("t", b"m")
        (message,) = await subscription.pull()
        machine.disk.fail("sync", error=errno.EIO)
        await subscription.ack([message])
        await asyncio.sleep(1.0)
        with pytest.raises(JournalFrozen):
            await subscription.flush()
        assert [again.data for again in await subscription.pull()] == [b"m"]

    _live(machine, story)


def test_a_seal_that_finds_nothing_to_seal_leaves_checkpoints_to_the_next_one(machine: Machine) -> None:
    async def story(broker: Broker) -> None:
        await broker.create_topic("t")
        subscription = await broker.subscribe("s", "t")
        await broker.publish("t", b"m")
        await subscription.ack(await subscription.pull(), wait=True)
        await broker._maintenance._seal_once()  # As when another seal was faster.
        await broker.seal()

    async def after(broker: Broker) -> int:
        return await (await broker.subscription("s")).lag()

    _live(machine, story)
    assert _after_a_kill(machine, after) == 0


def test_a_seal_that_its_caller_gave_up_does_not_stop_sealing(machine: Machine) -> None:
    async def story(broker: Broker) -> None:
        await broker.create_topic("t")
        for step in range(50):
            await broker.publish("t", b"m")
            task = asyncio.ensure_future(broker.seal())
            await asyncio.sleep(step * 0.003)
            task.cancel()
            await asyncio.wait([task])
        await broker.seal()
        assert len(await broker.read("t")) == 50

    _live(machine, story)


def test_a_small_read_ahead_does_not_keep_a_message_from_what_it_depends_on(machine: Machine) -> None:
    async def story(broker: Broker) -> list[bytes | None]:
        for topic in ("t.a", "t.b"):
            await broker.create_topic(topic)
        subscription = await broker.subscribe("s", "t.*", start="earliest", read_ahead=1)
        for number in range(5):
            first = await broker.publish("t.b", b"b%d" % number)
        for number in range(5):
            await broker.publish("t.a", b"a%d" % number, depends_on=[first.message_id])
        found: list[bytes | None] = []
        while len(found) < 10:
            messages = await subscription.pull(10, timeout_s=60.0)
            assert messages, f"nothing comes after {found}"
            found += [message.data for message in messages]
            await subscription.ack(messages, wait=True)
        return found

    assert _live(machine, story)[:5] == [b"b0", b"b1", b"b2", b"b3", b"b4"]


@pytest.mark.parametrize("ordering", ["none", "total"])
def test_a_message_waits_for_its_time_and_for_what_it_depends_on(machine: Machine, ordering: str) -> None:
    async def story(broker: Broker) -> None:
        await broker.create_topic("t")
        subscription = await broker.subscribe("s", "t", ordering=ordering)
        first = await broker.publish("t", b"first")
        due_s = machine.clock.now_us() / 1_000_000 + 30.0
        await broker.publish("t", b"late", deliver_at=due_s, depends_on=[first.message_id])
        (message,) = await subscription.pull(1)
        await subscription.pull(1)  # The second one has been read, and waits.
        await message.ack()
        assert await subscription.pull(1, timeout_s=20.0) == []
        (late,) = await subscription.pull(1, timeout_s=20.0)
        assert late.data == b"late"
        assert machine.clock.now_us() >= due_s * 1_000_000

    _live(machine, story)


def test_a_time_to_live_that_passes_while_a_consumer_holds_the_message_counts(machine: Machine) -> None:
    async def story(broker: Broker) -> None:
        await broker.create_topic("t")
        subscription = await broker.subscribe("s", "t", ack_deadline_s=60.0)
        await broker.publish("t", b"m", ttl_s=5.0)
        assert len(await subscription.pull()) == 1
        await asyncio.sleep(10.0)
        await subscription.close()  # Given back without a failure.
        other = await broker.subscription("s")
        assert await other.pull(timeout_s=1.0) == []
        assert await other.lag() == 0

    _live(machine, story)


def test_a_frozen_journal_leaves_the_broker_idle(machine: Machine) -> None:
    async def story(broker: Broker) -> int:
        await broker.create_topic("t")
        subscription = await broker.subscribe("s", "t")
        await broker.publish("t", b"m", ttl_s=5.0)
        await subscription.pull(timeout_s=1.0)
        asyncio.ensure_future(subscription.pull(timeout_s=60.0))  # noqa: RUF006 - it ends with the life
        machine.disk.fail("sync", error=errno.EIO, times=None)
        await asyncio.sleep(20.0)  # The expiry cannot be journaled, and is tried again.
        before = machine.loop.steps
        await asyncio.sleep(1.0)
        return machine.loop.steps - before

    assert _live(machine, story) < 2000


def test_a_sync_that_is_wanted_after_the_file_was_finished_does_not_freeze_the_journal(
    machine: Machine,
) -> None:
    async def story(broker: Broker) -> bool:
        await broker.create_topic("t", durability="written")
        await broker.publish("t", b"m")
        await broker._store.rotate()
        await asyncio.sleep(5.0)  # The sync that was put off falls due.
        await broker.publish("t", b"m")
        return broker.state().is_writable

    assert _live(machine, story)


def test_a_member_that_is_out_of_step_does_not_freeze_the_journal(machine: Machine) -> None:
    async def story(broker: Broker) -> None:
        await broker.create_topic("t")
        subscription = await broker.subscribe("s", "t")
        liar = await subscription.join("liar")
        await asyncio.sleep(1.0)
        liar.generation = 99
        await subscription.join("other")
        await asyncio.sleep(1.0)
        await broker.publish("t", b"m")
        assert (await subscription.group()).state == "stable"

    _live(machine, story)


def test_a_member_that_the_program_drops_gives_no_more_signs_of_life(machine: Machine) -> None:
    async def story(broker: Broker) -> None:
        await broker.create_topic("t")
        subscription = await broker.subscribe("s", "t", group={"heartbeat_s": 1.0, "session_timeout_s": 2.0})
        member = await subscription.join("m")
        await asyncio.sleep(5.0)
        assert (await subscription.group()).members == 1
        del member
        await asyncio.sleep(5.0)
        assert (await subscription.group()).members == 0

    gc.disable()
    try:
        _live(machine, story)
    finally:
        gc.enable()
