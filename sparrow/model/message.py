"""A message as it is handed over, its id, and the receipt that its publisher got.

A message id is ``<topic id>-<partition>-<offset>``. Topic ids are never used again, so an id stays
unique when a topic is deleted and created anew, and it needs no counter of its own. Ids hold no dot,
because webhook signatures join id, time and body with dots.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, Protocol, overload

from sparrow.model.errors import InvalidArgument, MessageNotFound

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
    is_dropped: bool = False
    """True when the topic's flow control threw the message away: it has no offset (-1) and no id."""

    @classmethod
    def dropped(cls, topic: str) -> Receipt:
        """The honest answer for a message that was not stored."""
        return cls(topic, -1, -1, "", 0, is_dropped=True)


class Receipts(Sequence[Receipt]):
    """The receipts of one publish, in the order of its messages.

    A batch costs per batch: what is kept are runs of offsets, and a Receipt is made when it is asked for.
    """

    __slots__ = ("_places", "_rows", "_runs", "_size", "_topic", "_topic_id", "dropped", "duplicates")

    def __init__(
        self,
        topic: str,
        topic_id: int,
        runs: Sequence[Run],
        rows: Sequence[tuple[int, int]] | None = None,
        duplicates: Mapping[int, Run] | None = None,
    ) -> None:
        self._topic = topic
        self._topic_id = topic_id
        self._runs = runs
        self._rows = rows
        """Per message (run, place in it); None when the messages fill one run in order."""
        self.duplicates = duplicates or {}
        """Messages that were stored before, by their place in the publish."""
        self._size = len(rows) if rows is not None else sum(run.length for run in runs)
        self._places: Sequence[int] | None = None
        self.dropped = 0
        """Messages that flow control threw away."""

    @property
    def topic(self) -> str:
        return self._topic

    @property
    def topic_id(self) -> int:
        return self._topic_id

    def spread(self, places: Sequence[int]) -> Receipts:
        """The receipts of a publish of which these are what was kept: for each of its messages the place
        here, -1 for one that was dropped."""
        assert self._places is None, "receipts are spread once"
        found = Receipts(self._topic, self._topic_id, self._runs, self._rows, self.duplicates)
        found._places, found._size = places, len(places)
        found.dropped = len(places) - self._size
        return found

    def spread_over(self, kept: Iterable[Any]) -> Receipts:
        """The same, from whether each message was kept."""
        places = itertools.count()
        return self.spread([next(places) if is_kept else -1 for is_kept in kept])

    @classmethod
    def join(cls, parts: Sequence[Receipts]) -> Receipts:
        """The receipts of several publishes to one topic as those of one; there is at least one part."""
        if len(parts) == 1:
            return parts[0]
        receipts = [receipt for part in parts for receipt in part]
        stored = [receipt for receipt in receipts if not receipt.is_dropped]
        runs = [Run(r.partition, r.offset, 1, r.publish_time_us, r.is_duplicate) for r in stored]
        found = cls(parts[0]._topic, parts[0]._topic_id, runs, [(number, 0) for number in range(len(runs))])
        if len(runs) == len(receipts):
            return found
        return found.spread_over(not receipt.is_dropped for receipt in receipts)

    def __len__(self) -> int:
        return self._size

    def in_runs(self) -> tuple[list[tuple[Any, ...]], Sequence[tuple[int, int]] | None]:
        """Runs as (partition, base offset, length, publish time, is duplicate, is dropped), and for each
        message its run and its place there; None when the messages fill the runs in order."""
        if self._places is None and not self.duplicates:
            return [(*run, False) for run in self._runs], self._rows
        runs: list[list[Any]] = []
        for receipt in self:
            last = runs[-1] if runs else None
            if last is not None and _follows(last, receipt):
                last[2] += 1
            else:
                runs.append([receipt.partition, receipt.offset, 1, receipt.publish_time_us, *receipt[5:]])
        return [tuple(run) for run in runs], None

    @overload
    def __getitem__(self, index: int) -> Receipt: ...

    @overload
    def __getitem__(self, index: slice) -> list[Receipt]: ...

    def __getitem__(self, index: int | slice) -> Receipt | list[Receipt]:
        if isinstance(index, slice):
            return [self._receipt(place) for place in range(*index.indices(self._size))]
        place = index + self._size if index < 0 else index
        if not 0 <= place < self._size:
            raise IndexError(f"there are {self._size} receipts, not {index + 1}")
        return self._receipt(place)

    def _receipt(self, place: int) -> Receipt:
        if self._places is not None:
            place = self._places[place]
            if place < 0:
                return Receipt.dropped(self._topic)
        repeated = self.duplicates.get(place)
        if repeated is not None:
            run, within = repeated, 0
        elif self._rows is None:
            run, within = self._runs[0], place
        else:
            number, within = self._rows[place]
            run = self._runs[number]
        offset = run.base_offset + within
        message_id = str(MessageId(self._topic_id, run.partition, offset))
        is_duplicate = repeated is not None or run.is_duplicate
        return Receipt(self._topic, run.partition, offset, message_id, run.publish_time_us, is_duplicate)

    def __repr__(self) -> str:
        dropped = f", {self.dropped} dropped" if self.dropped else ""
        return f"<{self._size} receipts of {self._topic!r}{dropped}>"


def _follows(run: list[Any], receipt: Receipt) -> bool:
    """Whether a message lies right behind those of a run."""
    partition, base, length, time_us, *flags = run
    offset = base if receipt.is_dropped else base + length
    return (partition, offset, time_us, flags) == (
        receipt.partition,
        receipt.offset,
        receipt.publish_time_us,
        list(receipt[5:]),
    )


class Run(NamedTuple):
    """Messages that went to consecutive offsets of one partition."""

    partition: int
    base_offset: int
    length: int
    publish_time_us: int
    is_duplicate: bool = False


class Lot(Protocol):
    """What the messages of one batch share, and where their less used values are fetched from."""

    topic: str
    topic_id: int
    partition: int

    def value(self, column: str, row: int) -> Any: ...


class Message:
    """A message as it was read.

    Data and key are there at once; everything else is taken from the batch it came in when it is asked
    for, because most programs look at little of it.
    """

    __slots__ = ("_lot", "_row", "data", "key", "offset")

    def __init__(self, lot: Any, row: int, offset: int, data: bytes | None, key: str | None) -> None:
        self._lot = lot
        self._row = row
        self.offset = offset
        self.data = data
        self.key = key

    @property
    def topic(self) -> str:
        return str(self._lot.topic)

    @property
    def topic_id(self) -> int:
        return int(self._lot.topic_id)

    @property
    def partition(self) -> int:
        return int(self._lot.partition)

    @property
    def id(self) -> str:
        """The id under which the message was first stored; it survives dead-lettering and replay."""
        original: str | None = self._lot.value("original_id", self._row)
        return original or f"{self._lot.topic_id}-{self._lot.partition}-{self.offset}"

    @property
    def attributes(self) -> dict[str, str]:
        return dict(self._lot.value("attributes", self._row) or ())

    @property
    def publish_time_us(self) -> int:
        """When the broker took the message, in microseconds since 1970."""
        return int(self._lot.value("publish_time", self._row))

    @property
    def publish_time(self) -> datetime:
        """When the broker took the message, in UTC."""
        return from_us(self.publish_time_us)

    @property
    def event_time(self) -> datetime | None:
        """The publisher's own time, when it gave one."""
        return self._moment("event_time")

    @property
    def deliver_at(self) -> datetime | None:
        """The time before which the message is not delivered."""
        return self._moment("deliver_at")

    @property
    def priority(self) -> int:
        return self._lot.value("priority", self._row) or 0

    @property
    def ttl_s(self) -> float | None:
        """Seconds after its publish time for which the message is worth delivering."""
        ttl_ms: int | None = self._lot.value("ttl_ms", self._row)
        return None if ttl_ms is None else ttl_ms / 1000

    @property
    def idempotency_key(self) -> str | None:
        key: str | None = self._lot.value("idempotency_key", self._row)
        return key

    @property
    def producer_id(self) -> int | None:
        found: int | None = self._lot.value("producer_id", self._row)
        return found

    @property
    def sequence(self) -> int | None:
        """The producer's sequence of this message."""
        found: int | None = self._lot.value("sequence", self._row)
        return found

    @property
    def is_tombstone(self) -> bool:
        """Whether the message says that its key is gone."""
        return self.data is None

    def _moment(self, column: str) -> datetime | None:
        time_us: int | None = self._lot.value(column, self._row)
        return None if time_us is None else from_us(time_us)

    def __repr__(self) -> str:
        size = "tombstone" if self.data is None else f"{len(self.data)} bytes"
        key = "" if self.key is None else f" key={self.key!r}"
        return f"<Message {self.id} {self.topic}{key} {size}>"


class Delivered(Message):
    """A message in the hands of a consumer, until it is settled or its deadline passes.

    The three verbs are those of the subscription it came from: awaitable with asyncio, blocking otherwise.
    """

    __slots__ = ()

    @property
    def attempt(self) -> int:
        """Hand-overs of this message to this subscription, this one included."""
        return int(self._lot.attempt(self.offset))

    @property
    def ack_id(self) -> str:
        """Names this hand-over; good for settling from elsewhere."""
        return str(self._lot.ack_id(self.offset))

    @property
    def about_published_us(self) -> int:
        """The publish time of its page: without a look into the batch, for measuring lag."""
        found: int = self._lot.published_at_us
        return found

    @property
    def lease(self) -> str:
        """Names the lease by which this message and its neighbours were handed over."""
        return str(self._lot.lease)

    @property
    def deadline_us(self) -> int:
        """When the message counts as failed, unless it is settled or extended before."""
        return int(self._lot.deadline_us)

    def ack(self) -> Any:
        """The work is done; the message is not delivered to this subscription again."""
        return self._lot.owner.ack([self])

    def nack(self, *, delay_s: float | None = None, reason: str = "", retry: bool = True) -> Any:
        """The work failed: delivered again after the backoff or ``delay_s``; with ``retry=False`` it goes
        to the dead letters at once."""
        return self._lot.owner.nack([self], delay_s=delay_s, reason=reason, retry=retry)

    def extend(self, seconds: float) -> Any:
        """The work takes longer: the deadline is now ``seconds`` away."""
        return self._lot.owner.extend([self], seconds)


_TIME_S_MAX = 253_402_300_799  # the last second of the year 9999, where datetime ends
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def from_us(time_us: int) -> datetime:
    """Microseconds since 1970 as a datetime in UTC, exact."""
    return _EPOCH + timedelta(microseconds=time_us)


def to_us(moment: object) -> int:
    """A point in time as microseconds since 1970: an aware datetime, or seconds as a number."""
    if isinstance(moment, datetime):
        if moment.tzinfo is None:
            raise InvalidArgument(
                f"{moment} has no time zone", hint="Use datetime.now(UTC) or another aware datetime."
            )
        return (moment - _EPOCH) // timedelta(microseconds=1)
    if isinstance(moment, int | float) and not isinstance(moment, bool):
        if not -_TIME_S_MAX <= moment <= _TIME_S_MAX:
            raise InvalidArgument(f"{moment!r} is not a time in seconds since 1970")
        return int(moment * 1_000_000)
    raise InvalidArgument(f"a time is a datetime or seconds since 1970, not {type(moment).__name__}")
