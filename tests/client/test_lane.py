"""Batches on their way: numbered, answered, refused, lost and sent again. No network: a peer by hand."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sparrow.client.lane import Batch, Lane
from sparrow.client.options import Options
from sparrow.model.errors import (
    ConnectionLost,
    PreconditionFailed,
    RateLimited,
    SequenceGap,
    SparrowError,
)
from sparrow.store import batch as batches
from sparrow.wire import heads


class Peer:
    """A connection whose answers the test gives."""

    def __init__(self) -> None:
        self.sent: list[tuple[heads.PublishBatch, asyncio.Future[Any]]] = []

    def submit(self, head: Any, *body: Any) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.sent.append((head, future))
        return future

    @property
    def open(self) -> list[tuple[int, int]]:
        """Base sequence and size of what waits for an answer."""
        return [(h.base_sequence, h.record_count) for h, f in self.sent if not f.done()]

    async def store(self, base: int) -> None:
        await self._answer(base, heads.WireReceipts("t", 1, [heads.WireRun(0, base, 1, 0)]))

    async def refuse(self, base: int, error: SparrowError) -> None:
        await self._answer(base, error)

    async def _answer(self, base: int, outcome: Any) -> None:
        future = next(f for h, f in self.sent if h.base_sequence == base and not f.done())
        if isinstance(outcome, SparrowError):
            future.set_exception(outcome)
        else:
            future.set_result((outcome, b""))
        await asyncio.sleep(0)
        await asyncio.sleep(0)


class Session:
    def __init__(self) -> None:
        self.options = Options(max_in_flight=4)
        self.present: Any = Peer()
        self.in_flight_bytes_max = 2**30

    def is_paused(self, topic: str, go_on: Any) -> bool:
        return False

    def wake(self) -> None: ...


class Owner:
    def __init__(self) -> None:
        self.session: Any = Session()
        self.in_flight_bytes = 0
        self.identity = (7, 0)

    def blocked(self, lane: Lane) -> None: ...

    def relieved(self, lane: Lane) -> None: ...

    def forget_partitions(self, topic: str) -> None: ...


class Desk:
    """A lane, its peer and what became of the batches."""

    def __init__(self) -> None:
        self.owner = Owner()
        self.lane = Lane("t", self.owner, 0, is_proven=False)
        self.outcomes: dict[str, Any] = {}

    @property
    def peer(self) -> Peer:
        found: Peer = self.owner.session.present
        return found

    def add(self, name: str, count: int = 10, **options: Any) -> None:
        body = batches.encode(batches.build([b"x"] * count))
        self.lane.add(Batch(body, lambda outcome: self.outcomes.__setitem__(name, outcome), **options))

    async def break_and_reconnect(self) -> None:
        old, self.owner.session.present = self.peer, None
        for _, future in old.sent:
            if not future.done():
                future.set_exception(ConnectionLost("gone"))
        await asyncio.sleep(0.01)
        self.owner.session.present = Peer()
        self.lane.connected()


@pytest.fixture
async def desk() -> Desk:
    return Desk()


async def test_first_batch_goes_alone_and_the_others_follow_in_order(desk: Desk) -> None:
    for name in "abc":
        desk.add(name)
    assert desk.peer.open == [(0, 10)]
    await desk.peer.store(0)
    assert desk.peer.open == [(10, 10), (20, 10)]


async def test_no_more_than_the_window_is_on_its_way(desk: Desk) -> None:
    desk.add("first")
    await desk.peer.store(0)
    for n in range(9):
        desk.add(str(n))
    assert len(desk.peer.open) == 4
    await desk.peer.store(10)
    assert len(desk.peer.open) == 4


async def test_refused_batch_leaves_no_gap(desk: Desk) -> None:
    desk.add("first")
    await desk.peer.store(0)
    for name in "abc":
        desk.add(name, 5)
    assert desk.peer.open == [(10, 5), (15, 5), (20, 5)]
    await desk.peer.refuse(10, RateLimited("slow down"))
    await desk.peer.refuse(15, SequenceGap("gap", expected=10))
    assert isinstance(desk.outcomes["a"], RateLimited)
    assert desk.peer.open == [(20, 5)], "numbers are given anew when every answer is there"
    desk.add("late", 1)
    await desk.peer.refuse(20, SequenceGap("gap", expected=10))
    assert desk.peer.open == [(10, 5), (15, 5), (20, 1)]
    for base in (10, 15, 20):
        await desk.peer.store(base)
    assert [name for name, found in desk.outcomes.items() if not isinstance(found, SparrowError)] == [
        "first", "b", "c", "late",
    ]  # fmt: skip
    assert desk.lane.is_idle


async def test_batch_that_was_overtaken_keeps_its_number(desk: Desk) -> None:
    """The first waits in flow control, so the second is refused for a gap that closes by itself."""
    desk.add("first")
    await desk.peer.store(0)
    desk.add("a")
    desk.add("b")
    await desk.peer.refuse(20, SequenceGap("gap", expected=10))
    assert desk.peer.open == [(10, 10)]
    await desk.peer.store(10)
    assert desk.peer.open == [(20, 10)]


async def test_lost_answers_are_asked_for_again_under_the_same_numbers(desk: Desk) -> None:
    desk.add("first")
    await desk.peer.store(0)
    desk.add("a")
    desk.add("b", 3)
    await desk.break_and_reconnect()
    desk.add("c")
    assert desk.peer.open == [(10, 10), (20, 3), (23, 10)]
    assert "a" not in desk.outcomes


async def test_refusal_and_a_broken_connection_together(desk: Desk) -> None:
    desk.add("first")
    await desk.peer.store(0)
    for name in "abc":
        desk.add(name)
    await desk.peer.refuse(20, RateLimited("slow down"))  # b; whether a was stored is not known yet
    await desk.break_and_reconnect()
    assert desk.peer.open == [(10, 10), (30, 10)]
    await desk.peer.store(10)
    await desk.peer.refuse(30, SequenceGap("gap", expected=20))
    assert desk.peer.open == [(20, 10)], "c takes the numbers of b"


async def test_another_number_of_partitions_leaves_the_division_to_the_broker(desk: Desk) -> None:
    desk.add("first")
    await desk.peer.store(0)
    desk.add("a", partition=3, partitions=4)
    await desk.peer.refuse(10, PreconditionFailed("8 partitions", partitions=8))
    head, _ = desk.peer.sent[-1]
    assert (head.base_sequence, head.partition, head.partitions) == (10, -1, 0)


async def test_number_that_the_program_chose_is_its_own_business(desk: Desk) -> None:
    desk.add("a", sequence=100)
    await desk.peer.refuse(100, SequenceGap("gap", expected=5))
    assert isinstance(desk.outcomes["a"], SequenceGap)


async def test_gap_that_will_not_close_is_told(desk: Desk) -> None:
    desk.add("a")
    for _ in range(4):
        [(base, _)] = desk.peer.open
        await desk.peer.refuse(base, SequenceGap("gap", expected=base + 1))
    assert isinstance(desk.outcomes["a"], SequenceGap)
    assert desk.lane.is_idle


async def test_keyed_batch_that_cannot_be_repeated_is_told_of_the_loss(desk: Desk) -> None:
    desk.add("keyed", is_sequenced=False, is_repeatable=False)
    await desk.break_and_reconnect()
    assert isinstance(desk.outcomes["keyed"], ConnectionLost)
