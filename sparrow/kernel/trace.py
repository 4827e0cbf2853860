"""Where is this message? The state of one message in one subscription (features C14).

The states are those of queue.md §1.6, told apart more finely. Whether a message that is done was
acked or merely filtered out is not recorded anywhere, because filtered stretches cost nothing; the
shell evaluates the filter again and says so.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from sparrow.kernel.cursor import Attempt
from sparrow.kernel.deadletter import Parked
from sparrow.kernel.pool import Pool
from sparrow.kernel.track import Track
from sparrow.model.message import MessageId


class MessageState(enum.StrEnum):
    """Where a message is in a subscription."""

    NOT_SUBSCRIBED = "not_subscribed"
    """The subscription does not read this stream."""
    BEYOND_END = "beyond_end"
    """No such message has been stored yet."""
    NOT_REACHED = "not_reached"
    """Stored; the subscription has not read that far, or must read it again."""
    FILTERED = "filtered"
    READY = "ready"
    BLOCKED = "blocked"
    """Waits in its lane for a message before it."""
    SCHEDULED = "scheduled"
    """Waits for its ``deliver_at`` or its next try."""
    DEPENDENT = "dependent"
    """Waits for messages that it depends on."""
    LEASED = "leased"
    SETTLING = "settling"
    """Being journaled: acked, failed or expired in a moment."""
    DEAD_LETTER_DUE = "dead_letter_due"
    EXPIRED = "expired"
    """Its time to live has passed; to be dropped at the next tick."""
    ACKED = "acked"
    """Done: acked, expired or dead-lettered."""


class Trace(NamedTuple):
    """What is known of one message in one subscription."""

    message_id: MessageId
    state: MessageState
    subscription_id: int = 0
    subscription: str = ""
    """Its name, as the shell knows it."""
    attempts: int = 0
    """Failed hand-overs."""
    consumer: str | None = None
    deadline_us: int | None = None
    due_at_us: int | None = None
    waits_for: tuple[MessageId, ...] = ()
    reason: str = ""
    round: int = 0
    history: tuple[Attempt, ...] = ()


def locate(
    message_id: MessageId,
    track: Track | None,
    pool: Pool | None,
    parked: Parked | None,
    log_end_offset: int,
    is_selected: bool,
) -> Trace:
    """Where a message is, from what a subscription knows."""
    if track is None:
        return Trace(message_id, MessageState.NOT_SUBSCRIBED)
    failure = track.cursor.failure(message_id.offset)
    here = Trace(
        message_id,
        MessageState.NOT_REACHED,
        attempts=failure.attempts,
        round=failure.round,
        history=failure.history,
    )
    offset = message_id.offset
    if track.cursor.is_acked(offset):
        state = MessageState.ACKED if is_selected else MessageState.FILTERED
        return here._replace(state=state)
    if offset >= log_end_offset:
        return here._replace(state=MessageState.BEYOND_END)
    if track.passed is not None and offset in track.passed:
        return here._replace(state=MessageState.FILTERED)
    reason = parked.reason(track.stream, offset) if parked is not None else None
    if reason is not None:
        return here._replace(state=MessageState.DEAD_LETTER_DUE, reason=reason)
    is_read = offset < track.read_offset and (track.reread is None or offset not in track.reread)
    if pool is None or not is_read:
        due = failure.due_at_us if failure.attempts else None
        return here._replace(due_at_us=due)
    return _locate_read(here, track, pool, offset)


def _locate_read(here: Trace, track: Track, pool: Pool, offset: int) -> Trace:
    """Where a message is that has been read."""
    if track.is_settling(offset):
        return here._replace(state=MessageState.SETTLING)
    if offset in pool.expired.get(track.stream, ()):
        return here._replace(state=MessageState.EXPIRED)
    due_at_us = pool.waits.due_at_us(track.stream, offset)
    if due_at_us is not None:
        return here._replace(state=MessageState.SCHEDULED, due_at_us=due_at_us)
    needs = pool.dependencies.missing((track.stream, offset))
    if needs:
        ids = tuple(MessageId(*stream, number) for stream, number in needs)
        return here._replace(state=MessageState.DEPENDENT, waits_for=ids)
    lease = pool.leases.find(track.stream, offset)
    if lease is not None:
        deadline = next(p.deadline_us for p in lease.parts if offset in p.offsets)
        return here._replace(state=MessageState.LEASED, consumer=lease.consumer, deadline_us=deadline)
    if pool.lanes is not None and not pool.lanes.is_first(track.entry(offset)):
        return here._replace(state=MessageState.BLOCKED)
    return here._replace(state=MessageState.READY)
