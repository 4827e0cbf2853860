"""Dead letters: messages that left their subscription because they cannot be delivered.

A dead-letter queue is an ordinary topic. The move is one journal group of a copy and the fact
``DeadLettered``, so it happened or it did not. Until then the message is *parked*: not delivered,
not forgotten, and, with an ordering, still holding up its lane. A topic that is missing or full
leaves it parked; it is tried again later and nothing is lost. What is parked is volatile, because
it follows from the verdicts in the cursor and the times to live in the log.

The copy keeps data, key and attributes, and adds what is known of the failure as attributes of the
prefix ``dlq_``, on top of the number that a publisher may give.

Loop guard. A subscription never dead-letters into a topic that it reads itself. Every replay of a
message adds to its *round*; from ``ROUNDS_MAX`` on its copy is marked ``dlq_loop`` and replays by time
or filter pass it over, so that it cannot circle. A replay that names its id still takes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from pyroaring import BitMap64

from sparrow.kernel.cursor import Failure
from sparrow.kernel.exchange import DeadLetterDue
from sparrow.kernel.facts import DeadLettered
from sparrow.kernel.schedule import NEVER_US
from sparrow.model.limits import ATTRIBUTE_VALUE_BYTES_MAX, ATTRIBUTES_ADDED_MAX
from sparrow.model.message import MessageId, StreamId

EXHAUSTED = "attempts_exhausted"
REJECTED = "rejected"
EXPIRED = "expired"
ROUNDS_MAX = 3
"""Replays after which a message that still fails is taken for one that loops."""
PREFIX = "dlq_"
IN_HAND_US = NEVER_US


class Parked:
    """Messages on their way to the dead letters."""

    __slots__ = ("_places",)

    def __init__(self) -> None:
        self._places: dict[StreamId, dict[int, tuple[int, str]]] = {}
        """When to try next, and why it is dead."""

    @property
    def count(self) -> int:
        return sum(map(len, self._places.values()))

    def add(self, stream: StreamId, offsets: Iterable[int], reason: str) -> None:
        """Park messages; those that are parked stay as they are."""
        places = self._places.setdefault(stream, {})
        for offset in offsets:
            places.setdefault(offset, (0, reason))

    def take_due(self, now_us: int, limit: int) -> list[tuple[StreamId, int, str]]:
        """Up to ``limit`` messages to try now; they are in hand until removed or deferred."""
        due = [
            (stream, offset, reason)
            for stream, places in self._places.items()
            for offset, (at_us, reason) in sorted(places.items())
            if at_us <= now_us
        ][:limit]
        for stream, offset, reason in due:
            self._places[stream][offset] = (IN_HAND_US, reason)
        return due

    def defer(self, stream: StreamId, offset: int, retry_at_us: int) -> None:
        """It could not be moved; try again later."""
        places = self._places.get(stream, {})
        if offset in places:
            places[offset] = (retry_at_us, places[offset][1])

    def discard(self, stream: StreamId, offsets: BitMap64) -> None:
        """These are done or alive again."""
        places = self._places.get(stream)
        if places is None:
            return
        for offset in [o for o in places if o in offsets]:
            del places[offset]
        if not places:
            del self._places[stream]

    def clear(self, stream: StreamId) -> None:
        self._places.pop(stream, None)

    def offsets(self, stream: StreamId) -> BitMap64:
        """The parked messages of a stream."""
        return BitMap64(self._places.get(stream, ()))

    def reason(self, stream: StreamId, offset: int) -> str | None:
        """Why a message is parked, if it is."""
        place = self._places.get(stream, {}).get(offset)
        return None if place is None else place[1]

    def next_due_us(self) -> int:
        times = [at_us for places in self._places.values() for at_us, _ in places.values()]
        return min(times, default=NEVER_US)


def dead_lettered(subscription_id: int, due: DeadLetterDue, now_us: int, copy: MessageId) -> DeadLettered:
    """The fact that goes into the journal together with the copy."""
    return DeadLettered(subscription_id, *due.stream, due.offset, due.reason, now_us, *copy)


def attributes(
    due: DeadLetterDue,
    original: Mapping[str, str],
    *,
    source_topic: str,
    subscription: str,
    publish_time_us: int,
    now_us: int,
) -> dict[str, str]:
    """The attributes of the copy: the original's, and what is known of the failure."""
    failure = due.failure
    last = failure.history[-1] if failure.history else None
    ours = {
        "message_id": str(MessageId(*due.stream, due.offset)),
        "topic": source_topic,
        "subscription": subscription,
        "reason": due.reason,
        "attempts": str(failure.attempts),
        "round": str(failure.round),
        "at_us": str(now_us),
        "publish_time_us": str(publish_time_us),
        "last_error": last.reason if last else "",
        "last_consumer": last.consumer if last else "",
        "first_failed_at_us": str(failure.history[0].at_us) if failure.history else "",
        "last_failed_at_us": str(last.at_us) if last else "",
        "consumers": ",".join(sorted({a.consumer for a in failure.history if a.consumer})),
        "history": _history(failure),
    }
    if failure.round >= ROUNDS_MAX:
        ours = {"loop": "true", **ours}
    kept = {k: v for k, v in original.items() if not k.startswith(PREFIX)}
    added = {PREFIX + name: _cut(value) for name, value in ours.items() if value}
    assert len(added) <= ATTRIBUTES_ADDED_MAX, "what is added to a copy has a bound of its own"
    return {**kept, **added}


def is_loop(copy_attributes: Mapping[str, str]) -> bool:
    """Whether a dead letter has been replayed too often without success."""
    return copy_attributes.get(PREFIX + "loop") == "true"


def loops(dead_letter_topic: str | None, source_topic: str) -> bool:
    """Whether dead-lettering a message of this topic would feed the subscription itself."""
    return dead_letter_topic is not None and dead_letter_topic == source_topic


def _history(failure: Failure) -> str:
    """The failed attempts as JSON, the oldest left out until it fits."""
    entries = [
        {"kind": a.kind.name.lower(), "at_us": a.at_us, "consumer": a.consumer, "reason": a.reason}
        for a in failure.history
    ]
    while entries:
        text = msgspec.json.encode(entries)
        if len(text) <= ATTRIBUTE_VALUE_BYTES_MAX:
            return text.decode()
        del entries[0]
    return ""


def _cut(text: str) -> str:
    """As much of a text as an attribute holds."""
    raw = text.encode()
    if len(raw) <= ATTRIBUTE_VALUE_BYTES_MAX:
        return text
    return raw[:ATTRIBUTE_VALUE_BYTES_MAX].decode(errors="ignore")


class Statistics(msgspec.Struct):
    """What lies in a dead-letter topic, counted from the attributes of its messages."""

    messages: int = 0
    bytes: int = 0
    loops: int = 0
    oldest_at_us: int | None = None
    newest_at_us: int | None = None
    by_topic: dict[str, int] = {}
    by_subscription: dict[str, int] = {}
    by_reason: dict[str, int] = {}

    def add(self, copy_attributes: Mapping[str, str], size_bytes: int) -> None:
        """Count one dead letter."""
        self.messages += 1
        self.bytes += size_bytes
        self.loops += is_loop(copy_attributes)
        for counts, name in (
            (self.by_topic, "topic"),
            (self.by_subscription, "subscription"),
            (self.by_reason, "reason"),
        ):
            value = copy_attributes.get(PREFIX + name, "unknown")
            counts[value] = counts.get(value, 0) + 1
        at_us = _number(copy_attributes.get(PREFIX + "at_us"))
        if at_us is not None:
            self.oldest_at_us = min(at_us, self.oldest_at_us or at_us)
            self.newest_at_us = max(at_us, self.newest_at_us or at_us)

    def dominant_reason(self) -> tuple[str, float] | None:
        """The most frequent reason and its share; one that dominates deserves a look."""
        if not self.messages:
            return None
        reason = max(sorted(self.by_reason), key=lambda name: self.by_reason[name])
        return reason, self.by_reason[reason] / self.messages


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None
