"""Values that pass between the delivery kernel and its shell.

The shell reads the log and evaluates filters; what it read comes in as an ``Arrival``. It wants
messages for a consumer and gets a ``HandOver`` of ``Run`` s. It settles and gets a ``Settled``: facts
to put into the journal, and for each refused id its error. None of these hold payload bytes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pyroaring import BitMap64

from sparrow.kernel.cursor import Failure
from sparrow.kernel.facts import Fact
from sparrow.kernel.lease import ack_ids
from sparrow.kernel.offsets import to_list
from sparrow.model.errors import SparrowError
from sparrow.model.message import MessageId, StreamId


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A stretch of a stream as the shell read it.

    ``selected`` are the offsets that passed the filter; ``None`` is all. Aligned columns have one
    value an offset, from ``first_offset`` on; sparse ones name only the messages that have a value.
    A column that ``Delivery.needs`` does not list, or that is empty in this stretch, is ``None``.
    """

    stream: StreamId
    first_offset: int
    end_offset: int
    selected: BitMap64 | None = None
    keys: Sequence[Hashable] | None = None
    publishers: Sequence[Hashable] | None = None
    published_at_us: Sequence[int] | None = None
    priority: Mapping[int, int] | None = None
    expires_at_us: Mapping[int, int] | None = None
    deliver_at_us: Mapping[int, int] | None = None
    depends_on: Mapping[int, Sequence[MessageId]] | None = None
    large: BitMap64 | None = None
    """Messages above ``poison.LARGE_BYTES``."""

    @property
    def is_plain(self) -> bool:
        """Whether no message of it asks for anything by itself."""
        return not (self.priority or self.expires_at_us or self.deliver_at_us or self.depends_on)


class Wish(NamedTuple):
    """What the shell should read next for a subscription: from where, at most how many."""

    stream: StreamId
    start_offset: int
    max_messages: int


class Run(NamedTuple):
    """Messages of one stream handed to one consumer in one lease."""

    stream: StreamId
    start_offset: int
    end_offset: int
    size: int
    """How many messages."""
    offsets: BitMap64 | None
    """``None`` when every offset from start to end belongs to it."""
    attempts: dict[int, int]
    """The attempt number of those that were tried before; all others are at attempt 1."""
    deadline_us: int
    head: str
    """The part that its ack ids share."""
    number: int = 0
    """Of its lease; 0 is none."""

    def to_offsets(self) -> Sequence[int]:
        """The offsets in order."""
        if self.offsets is None:
            return range(self.start_offset, self.end_offset)
        return to_list(self.offsets)

    def ack_ids(self) -> list[str]:
        """One id a message, in the order of ``to_offsets``."""
        return ack_ids(self.head, self.start_offset, self.to_offsets())


class HandOver(NamedTuple):
    """What a consumer gets; at most once, its facts must be in the journal before it does."""

    runs: list[Run]
    facts: list[Fact]

    @property
    def size(self) -> int:
        """How many messages, over all runs."""
        return sum(run.size for run in self.runs)


class Refusal(NamedTuple):
    """An ack id that was not settled, and why."""

    ack_id: str
    error: SparrowError


@dataclass(slots=True)
class Settled:
    """The outcome of a decision: facts for the journal, ids that were refused, messages accepted.

    Accepted messages are *settling*: neither redelivered nor expired until the facts were applied
    or abandoned. Confirm an ack to its consumer after the facts were applied.
    """

    facts: list[Fact] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    accepted: int = 0
    outcomes: list[Outcome] = field(default_factory=list)
    """What consumers made of what they held, for whoever measures them."""


class Outcome(NamedTuple):
    """So many messages of one lease were settled."""

    stream: StreamId
    consumer: str
    size: int
    """How many messages."""
    taken_at_us: int
    is_success: bool


class DeadLetterDue(NamedTuple):
    """A message that is to be moved to the dead-letter topic."""

    stream: StreamId
    offset: int
    reason: str
    failure: Failure


class Held(NamedTuple):
    """Messages of one stream that a consumer holds until the same deadline."""

    stream: StreamId
    consumer: str
    offsets: BitMap64
    taken_at_us: int
    deadline_us: int


class Lag(NamedTuple):
    """How far a subscription is behind in one stream."""

    stream: StreamId
    messages: int
    oldest_offset: int | None
    """The oldest message that is not done; ``None`` when all are."""


def total(lags: Iterator[Lag] | Sequence[Lag]) -> int:
    """Messages not done, over all streams."""
    return sum(lag.messages for lag in lags)
