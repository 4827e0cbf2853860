"""Replays: dead letters given back to their subscription or to another, as jobs that survive a crash.

A replay goes through the dead-letter streams from the spans it was accepted with; what arrives there
later is not part of it. For each stretch the shell reads, the job says which letters it takes; their
acks are taken back, so that the messages are delivered again under their own ids and in the order of
their log, and the job's position moves, in one journal group. So a crash repeats or loses nothing.
A job with a *destination* takes no acks back: its letters are stored again for that subscription alone,
in the same group.

Selection is by ids, by time of dead-lettering, by reason, and by a filter that the shell evaluates.
A dry run uses the same selection and makes no facts. The rate is held by a token bucket that keeps
its fractions. Statuses and their moves are one table.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping

import msgspec

from sparrow.kernel.deadletter import PREFIX, is_loop
from sparrow.kernel.facts import Fact, ReplayAdvanced, ReplayMoved, ReplayStarted
from sparrow.model.errors import InvalidArgument, PreconditionFailed, ReplayNotFound
from sparrow.model.message import MessageId, StreamId, parse_message_id

REPLAYS_MAX = 100
"""Jobs remembered for one subscription; the oldest finished ones go first."""
IDS_MAX = 10_000
RATE_DEFAULT_PER_S = 100.0
"""The floor of queue.md §8.3, so that a replay does not overwhelm consumers unasked."""


class ReplayStatus(enum.StrEnum):
    """Where a job is."""

    PENDING = "pending"
    RUNNING = "running"
    PAUSED = "paused"
    COMPLETED = "completed"
    FAILED = "failed"
    ABORTED = "aborted"


TRANSITIONS: dict[ReplayStatus, frozenset[ReplayStatus]] = {
    ReplayStatus.PENDING: frozenset({ReplayStatus.RUNNING, ReplayStatus.ABORTED}),
    ReplayStatus.RUNNING: frozenset(
        {
            ReplayStatus.PAUSED,
            ReplayStatus.COMPLETED,
            ReplayStatus.FAILED,
            ReplayStatus.ABORTED,
        }
    ),
    ReplayStatus.PAUSED: frozenset({ReplayStatus.RUNNING, ReplayStatus.ABORTED}),
    ReplayStatus.FAILED: frozenset({ReplayStatus.RUNNING, ReplayStatus.ABORTED}),
    ReplayStatus.COMPLETED: frozenset(),
    ReplayStatus.ABORTED: frozenset(),
}
"""Every legal move. A failed job may be resumed: its position is kept."""
FINISHED = frozenset({ReplayStatus.COMPLETED, ReplayStatus.ABORTED})


class ReplaySelection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which dead letters to replay; everything that is given must hold."""

    ids: tuple[str, ...] = ()
    """Ids of the original messages; none means any."""
    start_at_us: int | None = None
    end_at_us: int | None = None
    """When they were dead-lettered: from the first (inclusive) to the second (exclusive)."""
    reason: str = ""
    filter: str = ""
    """An attribute filter, evaluated by the shell on the dead letters."""

    def takes(self, attributes: Mapping[str, str], dead_at_us: int) -> bool:
        """Whether a dead letter is selected, its filter aside."""
        if self.ids:
            if attributes.get(PREFIX + "message_id") not in self.ids:
                return False
        elif is_loop(attributes):
            return False
        if self.start_at_us is not None and dead_at_us < self.start_at_us:
            return False
        if self.end_at_us is not None and dead_at_us >= self.end_at_us:
            return False
        return not self.reason or attributes.get(PREFIX + "reason") == self.reason


def parse_selection(options: Mapping[str, object]) -> ReplaySelection:
    """The selection that ``options`` describe; refuses unknown names and bad values."""
    known = ", ".join(ReplaySelection.__struct_fields__)
    try:
        selection = msgspec.convert(dict(options), ReplaySelection)
    except msgspec.ValidationError as error:
        hint = f"A selection has: {known}."
        raise InvalidArgument(f"bad replay selection: {error}", hint=hint) from error
    if len(selection.ids) > IDS_MAX:
        raise InvalidArgument(f"{len(selection.ids)} ids are too many; {IDS_MAX} are allowed")
    for text in selection.ids:
        parse_message_id(text)
    start, end = selection.start_at_us, selection.end_at_us
    if start is not None and end is not None and start >= end:
        raise InvalidArgument(f"start_at_us {start} is not before end_at_us {end}")
    return selection


def original_of(attributes: Mapping[str, str]) -> tuple[MessageId, int] | None:
    """The message that a dead letter is a copy of and its round; ``None`` when it does not say."""
    text = attributes.get(PREFIX + "message_id")
    rounds = attributes.get(PREFIX + "round", "0")
    if text is None or not (rounds.isascii() and rounds.isdigit()):
        return None
    return parse_message_id(text), int(rounds)


class ReplayJob(msgspec.Struct):
    """A replay as it stands; changed by facts alone."""

    replay_id: str
    selection: ReplaySelection
    spans: dict[str, tuple[int, int]]
    """Position and end of each dead-letter stream, by ``topic-partition``."""
    total: int
    rate_per_s: float
    started_at_us: int
    status: ReplayStatus = ReplayStatus.PENDING
    replayed: int = 0
    skipped: int = 0
    failed: int = 0
    error: str = ""
    updated_at_us: int = 0
    destination: str = ""
    """The subscription that gets the letters; empty: the one whose letters they are."""

    def next_span(self) -> tuple[StreamId, int, int] | None:
        """The stretch to go on with: stream, position, end; ``None`` when all is gone through."""
        for name, (position, end) in self.spans.items():
            if position < end:
                topic_id, _, partition = name.partition("-")
                return StreamId(int(topic_id), int(partition)), position, end
        return None

    def is_ahead(self, stream: StreamId, offset: int) -> bool:
        """Whether the job is not over and still has to come to a place of a dead-letter stream."""
        position, end = self.spans.get(f"{stream.topic_id}-{stream.partition}", (0, 0))
        return self.status not in FINISHED and position <= offset < end

    def progress(self) -> float:
        """The share of the work that is done, 0 to 1."""
        if self.status is ReplayStatus.COMPLETED or self.total <= 0:
            return 1.0
        return min(1.0, (self.replayed + self.skipped + self.failed) / self.total)


class Replays:
    """The jobs of one subscription."""

    __slots__ = ("_subscription_id", "jobs")

    def __init__(self, subscription_id: int) -> None:
        self._subscription_id = subscription_id
        self.jobs: dict[str, ReplayJob] = {}

    def get(self, replay_id: str) -> ReplayJob:
        job = self.jobs.get(replay_id)
        if job is None:
            raise ReplayNotFound(f"no replay has the id {replay_id!r}")
        return job

    # Decisions.

    def start(
        self,
        replay_id: str,
        selection: ReplaySelection,
        spans: Iterable[tuple[StreamId, int, int]],
        total: int,
        now_us: int,
        rate_per_s: float = RATE_DEFAULT_PER_S,
        destination: str = "",
    ) -> list[Fact]:
        """Accept a replay of what the dead-letter streams hold by now, for another subscription if named."""
        if replay_id in self.jobs:
            raise PreconditionFailed(f"a replay has the id {replay_id!r} already")
        if not 0 < rate_per_s <= 1_000_000:
            raise InvalidArgument(f"rate_per_s must be above 0 to 1,000,000, not {rate_per_s!r}")
        if sum(job.status not in FINISHED for job in self.jobs.values()) >= REPLAYS_MAX:
            raise PreconditionFailed(f"{REPLAYS_MAX} replays are unfinished; abort some first")
        places = tuple((*stream, start, end) for stream, start, end in spans)
        raw = msgspec.json.encode(selection)
        name = self._subscription_id
        return [ReplayStarted(name, replay_id, raw, places, total, float(rate_per_s), now_us, destination)]

    def advance(
        self,
        replay_id: str,
        stream: StreamId,
        position: int,
        now_us: int,
        *,
        replayed: int = 0,
        skipped: int = 0,
        failed: int = 0,
    ) -> list[Fact]:
        """A running job went through a stream up to ``position``; goes with the acks that are taken back or
        the messages that are stored again."""
        job = self.get(replay_id)
        if job.status is not ReplayStatus.RUNNING:
            raise PreconditionFailed(f"replay {replay_id!r} is {job.status}, not running")
        return [
            ReplayAdvanced(
                self._subscription_id,
                replay_id,
                *stream,
                position,
                job.replayed + replayed,
                job.skipped + skipped,
                job.failed + failed,
                now_us,
            )
        ]

    def move(self, replay_id: str, status: ReplayStatus, now_us: int, error: str = "") -> list[Fact]:
        """Change the status; an illegal move changes nothing and says from, to and why."""
        job = self.get(replay_id)
        if status not in TRANSITIONS[job.status]:
            raise PreconditionFailed(f"replay {replay_id!r} is {job.status}; it cannot be {status}")
        return [ReplayMoved(self._subscription_id, replay_id, status.value, error, now_us)]

    # Facts.

    def apply(self, fact: ReplayStarted | ReplayAdvanced | ReplayMoved) -> None:
        """What happened to a job; facts about one that is forgotten are passed over."""
        if isinstance(fact, ReplayStarted):
            self._started(fact)
            return
        job = self.jobs.get(fact.replay_id)
        if job is None:
            return
        job.updated_at_us = fact.at_us
        if isinstance(fact, ReplayMoved):
            job.status, job.error = ReplayStatus(fact.status), fact.error
            return
        name = f"{fact.topic_id}-{fact.partition}"
        job.spans[name] = (fact.position, job.spans[name][1])
        job.replayed, job.skipped, job.failed = fact.replayed, fact.skipped, fact.failed

    def _started(self, fact: ReplayStarted) -> None:
        selection = msgspec.json.decode(fact.selection, type=ReplaySelection)
        spans = {f"{t}-{p}": (start, end) for t, p, start, end in fact.spans}
        self.jobs[fact.replay_id] = ReplayJob(
            fact.replay_id,
            selection,
            spans,
            fact.total,
            fact.rate_per_s,
            fact.at_us,
            destination=fact.destination,
        )
        finished = [job for job in self.jobs.values() if job.status in FINISHED]
        for job in finished[: max(0, len(self.jobs) - REPLAYS_MAX)]:
            del self.jobs[job.replay_id]

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(list(self.jobs.values()))

    def restore(self, raw: bytes) -> None:
        jobs = msgspec.msgpack.decode(raw, type=list[ReplayJob]) if raw else []
        self.jobs = {job.replay_id: job for job in jobs}


class TokenBucket:
    """A rate limit that loses no fractions: what was earned in a part of a second is kept."""

    __slots__ = ("_burst", "_filled_at_us", "_rate_per_s", "_tokens")

    def __init__(self, rate_per_s: float, now_us: int, burst: float | None = None) -> None:
        self._rate_per_s = rate_per_s
        self._burst = max(1.0, rate_per_s if burst is None else burst)
        self._tokens = 0.0
        self._filled_at_us = now_us

    def take(self, wanted: int, now_us: int) -> int:
        """How many of the wanted may go now."""
        self._fill(now_us)
        granted = min(wanted, int(self._tokens))
        self._tokens -= granted
        return granted

    def next_at_us(self, now_us: int) -> int:
        """When at least one may go."""
        self._fill(now_us)
        missing = max(0.0, 1.0 - self._tokens)
        return now_us + int(-(-missing * 1_000_000 // self._rate_per_s))

    def _fill(self, now_us: int) -> None:
        elapsed_us = max(0, now_us - self._filled_at_us)
        self._tokens = min(self._burst, self._tokens + elapsed_us * self._rate_per_s / 1_000_000)
        self._filled_at_us = max(self._filled_at_us, now_us)


class ReplayPlan(msgspec.Struct):
    """What a replay would do: the outcome of a dry run."""

    total: int = 0
    loops: int = 0
    unreadable: int = 0
    by_reason: dict[str, int] = {}
    estimated_s: float = 0.0
    warnings: list[str] = []

    def add(self, selection: ReplaySelection, attributes: Mapping[str, str], at_us: int) -> bool:
        """Count one dead letter; returns whether the replay would take it."""
        if original_of(attributes) is None:
            self.unreadable += 1
            return False
        self.loops += is_loop(attributes)
        if not selection.takes(attributes, at_us):
            return False
        self.total += 1
        reason = attributes.get(PREFIX + "reason", "unknown")
        self.by_reason[reason] = self.by_reason.get(reason, 0) + 1
        return True

    def finish(self, rate_per_s: float) -> ReplayPlan:
        """Fill in what follows from the counts."""
        self.estimated_s = self.total / rate_per_s
        if self.loops:
            self.warnings.append(f"{self.loops} have failed after every replay; name their ids")
        if self.unreadable:
            self.warnings.append(f"{self.unreadable} do not say which message they are copies of")
        return self
