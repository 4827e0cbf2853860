"""Settlements on their way from a client: acks are gathered for a moment and travel as ranges.

One that is not waited for is confirmed by ``flush``; if the broker refused it, the next ``flush`` or ``pull``
that hears of it raises. What a broken connection swallowed is sent again: the broker takes an ack of an ended
lease while nobody else has the message, and otherwise the message was, or will be, delivered again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from sparrow.client.connection import Answer, Connection
from sparrow.kernel.lease import ack_ids, parse_ack_ids, parse_head
from sparrow.model.consumer import sort_target
from sparrow.model.errors import ConnectionLost, InvalidAckId, SparrowError, StaleAckId, from_dict
from sparrow.wire import heads

_GATHER_S = 0.0015
_UNANSWERED_MAX = 8
"""Frames of settlements on their way above which a pull waits for them."""

Held = dict[str, list[int]]
"""Offsets by lease."""
Place = tuple[Connection, int]
"""A connection and the number of the consumer there."""


class Names(NamedTuple):
    """What a program wants to settle: offsets by lease, and ids that are none."""

    held: Held
    bad: list[tuple[str, InvalidAckId]]


def parse_names(messages: Any) -> Names:
    """Messages in hand by their lease, texts as ack ids."""
    held, texts = sort_target(messages)
    parsed = parse_ack_ids(texts)
    for group in parsed.groups:
        held.setdefault(group.ids[0].partition(".")[0], []).extend(group.offsets)
    return Names(held, parsed.bad)


def to_ranges(held: Mapping[str, list[int]]) -> list[tuple[str, list[int]]]:
    """Each lease with its offsets as start, end, start, end …"""
    return [(lease, _ranges(offsets)) for lease, offsets in held.items()]


def _ranges(offsets: list[int]) -> list[int]:
    ordered = sorted(set(offsets))
    first, last = ordered[0], ordered[-1]
    if last - first + 1 == len(ordered):
        return [first, last + 1]
    found = [first]
    before = first
    for offset in ordered[1:]:
        if offset != before + 1:
            found += (before + 1, offset)
        before = offset
    found.append(last + 1)
    return found


class Settling:
    """The settlements of one consumer."""

    def __init__(self, place: Callable[[], Place | None], opened: Callable[[], Awaitable[Place]]) -> None:
        self._place = place
        self._opened = opened
        self._loop = asyncio.get_running_loop()
        self._acks: Held = {}
        self._timer: asyncio.TimerHandle | None = None
        self._unanswered: dict[asyncio.Future[Answer], heads.Settle] = {}
        self._again: list[heads.Settle] = []
        self._losses: list[SparrowError] = []

    # Without waiting.

    def ack(self, held: Held, bad: Sequence[tuple[str, InvalidAckId]] = ()) -> None:
        """Gathers acks; ids that are none are told of later."""
        acks = self._acks
        if bad and not self._losses:
            self._losses.append(bad[0][1])
        for lease, offsets in held.items():
            if lease in acks:
                acks[lease] += offsets
            else:
                acks[lease] = offsets
        if self._timer is None:
            self._timer = self._loop.call_later(_GATHER_S, self.send)

    def send(self) -> None:
        """Sends what was gathered, and what has to be sent again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        place = self._place()
        if place is None:
            return  # Sent when the consumer is there again.
        again, self._again = self._again, []
        for head in again:
            self._submit(place, head, is_again=True)
        if self._acks:
            acks, self._acks = self._acks, {}
            self._submit(place, heads.Settle(place[1], heads.ACK, to_ranges(acks)))

    def _submit(self, place: Place, head: heads.Settle, *, is_again: bool = False) -> None:
        connection, number = place
        if head.consumer != number:
            head = heads.Settle(
                number, head.kind, head.leases, head.delay_s, head.reason, head.retry, head.wait
            )
        future = connection.submit(head)
        self._unanswered[future] = head
        future.add_done_callback(partial(self._answered, is_again))

    def settle(self, head: heads.Settle) -> None:
        """Sends a settlement that nobody waits for."""
        self._again.append(head)
        self.send()

    def _answered(self, is_again: bool, future: asyncio.Future[Answer]) -> None:
        head = self._unanswered.pop(future)
        if future.cancelled():
            return
        error = future.exception()
        if isinstance(error, ConnectionLost):
            if head.kind != heads.RETURN:
                self._again.append(head)
            return
        if error is None:
            error = refusal(future.result()[0].value)
        if error is None or head.kind == heads.RETURN or (is_again and isinstance(error, StaleAckId)):
            return
        if not self._losses and isinstance(error, SparrowError):
            self._losses.append(error)

    # Waiting.

    async def settle_now(self, head: heads.Settle | heads.Extend) -> None:
        """Sends a settlement and returns when it was taken; raises when something of it was refused."""
        while True:
            connection, number = await self._opened()
            self.send()
            fields = {name: getattr(head, name) for name in head.__struct_fields__}
            try:
                answer, _ = await connection.submit(type(head)(**{**fields, "consumer": number}))
            except ConnectionLost:
                continue  # Opening again fails when there is no connection in time.
            error = refusal(answer.value)
            if error is not None:
                raise error
            return

    async def flush(self) -> None:
        """Returns when all settlements so far are durable."""
        self.send()
        while self._unanswered or self._again or self._acks:
            if self._unanswered:
                await asyncio.wait(list(self._unanswered))
                await asyncio.sleep(0)
            if self._again or self._acks:
                await self._opened()
                self.send()
        await self.settle_now(heads.Settle(0, heads.ACK, [], wait=True))

    async def keep_pace(self) -> None:
        """Waits while too much is unanswered, then says what was lost."""
        while len(self._unanswered) > _UNANSWERED_MAX:
            await asyncio.wait(list(self._unanswered), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)
        self.tell_loss()

    def tell_loss(self) -> None:
        """Raises when a settlement was refused that nobody waited for."""
        if self._losses:
            raise self._losses.pop()

    @property
    def is_used(self) -> bool:
        """Whether something was settled that is not known to be done."""
        return bool(self._acks or self._again or self._unanswered)

    def forget(self) -> None:
        """The program lets go: what was gathered is lost."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._acks, self._again = {}, []


def refusal(refused: Any) -> SparrowError | None:
    """The first refusal as the error that it is; it names all refused ids."""
    if not refused:
        return None
    _, _, code, message = refused[0]
    error = from_dict({"code": code, "message": message})
    error.details["refused"] = [_ack_id(lease, offset) for lease, offset, *_ in refused]
    return error


def complain(bad: list[tuple[str, InvalidAckId]]) -> None:
    """All that could be settled was; the first id that is none is raised and names the others."""
    if bad:
        error = bad[0][1]
        error.details["refused"] = [ack_id for ack_id, _ in bad]
        raise error


def _ack_id(lease: str, offset: int) -> str:
    try:
        return ack_ids(lease, parse_head(lease).first_offset, [offset])[0]
    except InvalidAckId:
        return lease
