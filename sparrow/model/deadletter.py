"""A dead letter: a message that a subscription could not deliver, as people look at it."""

from __future__ import annotations

from typing import NamedTuple

from sparrow.model.message import Message


class DeadLetter(NamedTuple):
    """One dead letter: the copy of the message, and what is known of its failure."""

    message: Message
    message_id: str
    topic: str
    reason: str
    attempts: int
    last_error: str
    dead_at_us: int
    is_loop: bool
