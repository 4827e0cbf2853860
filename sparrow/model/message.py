"""A message as it is handed over, its id, and the receipt that its publisher got.

A message id is ``<topic id>-<partition>-<offset>``. Topic ids are never used again, so an id stays
unique when a topic is deleted and created anew, and it needs no counter of its own. Ids hold no dot,
because webhook signatures join id, time and body with dots.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from sparrow.model.errors import MessageNotFound

_ID = re.compile(r"(\d{1,10})-(\d{1,4})-(\d{1,19})\Z")


class StreamId(NamedTuple):
    """One partition of one topic: the unit that has offsets."""

    topic_id: int
    partition: int


class MessageId(NamedTuple):
    """Where a message lies."""

    topic_id: int
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic_id}-{self.partition}-{self.offset}"

    @property
    def stream(self) -> StreamId:
        return StreamId(self.topic_id, self.partition)


def parse_message_id(text: object) -> MessageId:
    """The position that an id names."""
    match = _ID.match(text) if isinstance(text, str) else None
    if match is None:
        raise MessageNotFound(f"{text!r} is not a message id")
    return MessageId(*(int(group) for group in match.groups()))


class Receipt(NamedTuple):
    """What a publisher holds once its message is stored as its topic's durability promises."""

    topic: str
    partition: int
    offset: int
    message_id: str
    publish_time_us: int
    is_duplicate: bool = False
    """True when an earlier publish with the same sequence or idempotency key was returned instead."""
