"""Where is this message? The state of one message in one subscription (features C14).

The states are those of queue.md §1.6, told apart more finely. Whether a message that is done was
acked or merely filtered out is not recorded anywhere, because filtered stretches cost nothing; the
shell evaluates the filter again and says so.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from sparrow.kernel.cursor import Attempt
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
    subscription_id: int
    state: MessageState
    attempts: int = 0
    """Failed hand-overs."""
    consumer: str | None = None
    deadline_us: int | None = None
    due_at_us: int | None = None
    waits_for: tuple[MessageId, ...] = ()
    reason: str = ""
    round: int = 0
    history: tuple[Attempt, ...] = ()
