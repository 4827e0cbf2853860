"""Facts: what happened to a subscription, in the past tense, in the form that the journal keeps.

A decision of the kernel returns facts; ``apply(fact)`` alone changes durable state, live and in
replay. ``docs/facts.md`` is the normative table of tags and fields; a test holds the bytes.

Rules of the format. A fact is a MessagePack array that begins with its integer tag. Tags are never
used again. Fields are only ever added at the end, with a default, so that an older reader skips what
it does not know and a newer one fills in what is missing. An unknown tag stops the reader with a
typed error: a fact that cannot be understood must not be skipped.

Facts say what became true ("attempt 3 failed", "the floor is 40"), never "one more", so applying a
stretch of the journal again on top of a later checkpoint ends in the same state.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec
from pyroaring import BitMap64

from sparrow.kernel.offsets import pack, unpack
from sparrow.model.errors import DataDamaged, DataDirectoryNewer
from sparrow.model.message import StreamId

REASON_LENGTH_MAX = 512
"""Characters kept of a nack's reason or an error text."""


class FailureKind(enum.IntEnum):
    """How an attempt failed."""

    NACKED = 1
    TIMED_OUT = 2
    CONSUMER_GONE = 3


class Fact(msgspec.Struct, frozen=True, array_like=True):
    """What became true of one subscription."""

    subscription_id: int


class StreamFact(Fact, frozen=True, array_like=True):
    """What became true of one stream of a subscription."""

    topic_id: int
    partition: int

    @property
    def stream(self) -> StreamId:
        return StreamId(self.topic_id, self.partition)


class OffsetsFact(StreamFact, frozen=True, array_like=True):
    """What became true of some messages: few runs in ``ranges``, otherwise roaring bytes."""

    ranges: tuple[int, ...]
    dense: bytes

    @property
    def offsets(self) -> BitMap64:
        """The messages, as a set that the caller owns."""
        return unpack(self.ranges, self.dense)


class MessagesAcked(OffsetsFact, frozen=True, array_like=True, tag=1):
    """They are done. Includes what the filter passed over between and below them."""


class AttemptsFailed(OffsetsFact, frozen=True, array_like=True, tag=2):
    """Their hand-over number ``attempt`` failed; they are due again, or dead by ``verdict``."""

    attempt: int
    kind: FailureKind
    at_us: int
    due_at_us: int
    consumer: str
    reason: str
    verdict: str
    """Empty: to be tried again. Otherwise why they are to be dead-lettered."""


class MessagesExpired(OffsetsFact, frozen=True, array_like=True, tag=3):
    """Their time to live passed before they were acked; they were dropped."""

    at_us: int


class DeadLettered(StreamFact, frozen=True, array_like=True, tag=4):
    """A copy lies in the dead-letter topic, and the message is done here."""

    offset: int
    reason: str
    at_us: int
    copy_topic_id: int
    copy_partition: int
    copy_offset: int


class CursorSeeked(OffsetsFact, frozen=True, array_like=True, tag=5):
    """All below ``floor`` and the named offsets are done, nothing else is; attempts are forgotten."""

    floor: int


class AcksTakenBack(OffsetsFact, frozen=True, array_like=True, tag=6):
    """They are to be delivered again, from attempt 1."""

    round: int
    """How many times they have been replayed from the dead letters; 0 for a plain take-back."""
    replay_id: str
    at_us: int


class ReplayStarted(Fact, frozen=True, array_like=True, tag=7):
    """A replay of dead letters was accepted; it covers what the dead-letter topic holds by now."""

    replay_id: str
    selection: bytes
    """The JSON form of ``deadletter.ReplaySelection``."""
    spans: tuple[tuple[int, int, int, int], ...]
    """(topic id, partition, start offset, end offset) of the dead-letter streams to go through."""
    total: int
    rate_per_s: float
    at_us: int
    destination: str = ""
    """The subscription that gets the letters; empty: the one whose letters they are."""


class ReplayAdvanced(Fact, frozen=True, array_like=True, tag=8):
    """The replay went through one dead-letter stream up to ``position``; counts are totals."""

    replay_id: str
    topic_id: int
    partition: int
    position: int
    replayed: int
    skipped: int
    failed: int
    at_us: int


class ReplayMoved(Fact, frozen=True, array_like=True, tag=9):
    """The replay's status changed."""

    replay_id: str
    status: str
    error: str
    at_us: int


class StreamAttached(StreamFact, frozen=True, array_like=True, tag=10):
    """The subscription reads the stream from ``start_offset`` on; nothing if it did already."""

    start_offset: int


class StreamDetached(StreamFact, frozen=True, array_like=True, tag=11):
    """The subscription no longer reads the stream, and its cursor is forgotten."""


class MessagesPassed(OffsetsFact, frozen=True, array_like=True, tag=12):
    """Filtered out or missing from the log; done without having been delivered."""


class GroupAdvanced(Fact, frozen=True, array_like=True, tag=13):
    """The group began a rebalance and is in this generation; lower ones are stale."""

    generation: int
    at_us: int
    reason: str
    members: tuple[str, ...]
    """Who takes part, sorted. Told for people: after a restart a group has no members."""


class OffsetCommitted(StreamFact, frozen=True, array_like=True, tag=14):
    """A member noted that it is done with everything below ``offset``."""

    offset: int
    metadata: str
    member: str
    generation: int
    at_us: int


class OffsetsForgotten(Fact, frozen=True, array_like=True, tag=15):
    """The group had no member for long; what was committed up to ``at_us`` is forgotten."""

    at_us: int


class ApplicationFact(Fact, frozen=True, array_like=True):
    """What became true of an application that commits staged batches; it is of no subscription, so of 0."""

    application: str
    batch: int


class BatchCommitted(ApplicationFact, frozen=True, array_like=True, tag=16):
    """Its entries are published from here on, whatever happens."""

    stages: tuple[int, ...]
    """Numbers of the stage files, in order; none when the entries are in the same chain."""
    entries: int
    messages: int
    at_us: int
    forget_at_us: int
    """When its application need not be known any more, if nothing newer is committed."""


class BatchPublished(ApplicationFact, frozen=True, array_like=True, tag=17):
    """The first ``entries`` of a committed batch are in the log, up to the chain of this fact."""

    entries: int


AnyFact = (
    MessagesAcked
    | AttemptsFailed
    | MessagesExpired
    | DeadLettered
    | CursorSeeked
    | AcksTakenBack
    | ReplayStarted
    | ReplayAdvanced
    | ReplayMoved
    | StreamAttached
    | StreamDetached
    | MessagesPassed
    | GroupAdvanced
    | OffsetCommitted
    | OffsetsForgotten
    | BatchCommitted
    | BatchPublished
)


TAG_NEWEST = 17
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[AnyFact])


def encode(facts: Iterable[Fact]) -> bytes:
    """The journal form of some facts, in order."""
    return _encoder.encode(list(facts))


def decode(raw: bytes | memoryview) -> list[Fact]:
    """The facts that ``encode`` wrote; refuses unknown tags and damage with typed errors."""
    try:
        return list(_decoder.decode(raw))
    except msgspec.ValidationError as error:
        raise _complaint(raw, error) from error
    except msgspec.DecodeError as error:
        raise DataDamaged(f"facts do not decode: {error}") from error


def _complaint(raw: bytes | memoryview, cause: msgspec.ValidationError) -> Exception:
    loose = msgspec.msgpack.decode(raw)
    for fields in loose if isinstance(loose, list) else []:
        tag = fields[0] if isinstance(fields, list) and fields else None
        if isinstance(tag, int) and tag > TAG_NEWEST:
            return DataDirectoryNewer(f"the journal holds a fact of the unknown kind {tag}")
    return DataDamaged(f"facts do not decode: {cause}")


def acked(subscription_id: int, stream: StreamId, offsets: BitMap64) -> MessagesAcked:
    """The fact that these messages are done."""
    return MessagesAcked(subscription_id, *stream, *pack(offsets))
