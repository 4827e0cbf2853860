"""Delivery: every decision about one subscription.

The shell reads the log and offers what it read; consumers lease; what they settle, or fail to settle
in time, becomes facts. A decision returns facts and changes only volatile state: the messages it is
about are *settling*, neither redelivered nor expired. ``apply(fact)`` changes durable state, the same
way live and in replay, and lets the messages go on; ``abandon(facts)`` puts them back when the
journal failed. A crash forgets everything volatile: leases are gone, what was not acked is read
again from the cursor's floor, and no attempt is counted.

Costs. A plain subscription is served by ranges: offering, leasing and acking cost per batch, not per
message. What the filter passes over has no fact of its own: it joins the next ack's fact, where it
closes the gaps between the acked offsets, and is found again by reading after a crash
(``flush_passed`` makes it durable when nothing is acked for long). Holes in the log are treated alike.

Refuses to know: payloads, filters, sockets, clocks, files, group membership. ``consumer`` is a name;
``streams`` narrows a lease to what a group member owns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from pyroaring import BitMap64

from sparrow.kernel import deadletter, facts
from sparrow.kernel.cursor import Cursor
from sparrow.kernel.exchange import (
    DeadLetterDue,
    HandOver,
    Held,
    Lag,
    Outcome,
    Refusal,
    Run,
    Settled,
)
from sparrow.kernel.facts import Fact, FailureKind
from sparrow.kernel.intake import Intake
from sparrow.kernel.judgement import Mishap
from sparrow.kernel.lease import AckNames, head_of
from sparrow.kernel.offsets import OFFSET_MAX, first_missing, pack, to_list
from sparrow.kernel.pool import Pool
from sparrow.kernel.ready import Taken
from sparrow.kernel.schedule import NEVER_US
from sparrow.kernel.settlement import Claim, Clerk, parse_names
from sparrow.kernel.trace import Trace, locate
from sparrow.kernel.track import Track
from sparrow.model.errors import (
    InvalidArgument,
    OffsetOutOfRange,
    PreconditionFailed,
    StaleAckId,
)
from sparrow.model.message import MessageId, StreamId
from sparrow.model.subscription import Expired, Guarantee

DEADLINE_S_MAX = 600
DELAY_S_MAX = 7 * 86_400
"""The longest wait that a nack may ask for."""


class Delivery(Intake):
    """The decisions of one subscription; see the module's text."""

    __slots__ = ()

    @property
    def in_flight(self) -> int:
        """Messages leased."""
        return self._pool.leases.count if self._pool is not None else 0

    @property
    def deliverable(self) -> int:
        """About how many messages a consumer could be handed now."""
        return self._pool.deliverable if self._pool is not None else 0

    @property
    def waiting(self) -> int:
        """Messages read and not yet handed over, those with a date apart."""
        return self._pool.waiting if self._pool is not None else 0

    def deliverable_in(self, streams: Collection[StreamId]) -> int:
        """The same of some streams."""
        return self._pool.deliverable_in(streams) if self._pool is not None else 0

    def reserved(self, consumer: str) -> int:
        """How many messages this consumer alone could be handed, because their keys stick to it."""
        lanes = self._pool.lanes if self._pool is not None else None
        return lanes.reserved(consumer) if lanes is not None else 0

    def in_flight_of(self, consumer: str) -> int:
        """Messages leased to one consumer."""
        return self._pool.leases.by_consumer.get(consumer, 0) if self._pool is not None else 0

    # Handing over.

    def lease(
        self,
        consumer: str,
        max_messages: int,
        now_us: int,
        *,
        deadline_s: float | None = None,
        streams: Collection[StreamId] | None = None,
    ) -> HandOver:
        """Hand messages to a consumer; at most once, ``facts`` go into the journal first."""
        pool = self._pool
        if pool is None or self.is_paused:
            return HandOver([], [])
        pool.advance(now_us)
        count = min(max_messages, self.policy.max_in_flight - pool.leases.count)
        if self._judge is not None:
            count = self._judge.allowance(consumer, count, now_us)
        if count <= 0 or not pool.waiting:
            return HandOver([], [])
        taken = self._take(pool, count, consumer, streams)
        if taken and self._judge is not None:
            self._judge.handed_over(consumer, now_us)
        if self.policy.guarantee is Guarantee.AT_MOST_ONCE:
            return self._hand_over_for_good(taken, now_us)
        seconds = self.policy.ack_deadline_s if deadline_s is None else deadline_s
        deadline_us = now_us + round(seconds * 1_000_000)
        runs = []
        for stream, offsets in taken:
            lease = pool.leases.add(stream, consumer, offsets, now_us, deadline_us)
            runs.append(self._run(self._ledger.tracks[stream], offsets, lease.number, deadline_us))
        return HandOver(runs, [])

    def _take(self, pool: Pool, count: int, consumer: str, streams: Collection[StreamId] | None) -> Taken:
        """Of too many that failed already, retries only: what is remembered of them is bounded."""
        if pool.lanes is not None or self._ledger.failing < self.policy.max_retrying:
            return pool.take(count, consumer, streams, self.gate_us())
        taken: Taken = []
        for stream, track in self._ledger.tracks.items():
            if count > 0 and (streams is None or stream in streams):
                offsets = pool.ready.take_only(stream, track.cursor.failed, count)
                count -= len(offsets)
                taken += [(stream, offsets)] if offsets else []
        return taken

    def _hand_over_for_good(self, taken: Taken, now_us: int) -> HandOver:
        over = HandOver([], [])
        for stream, offsets in taken:
            track = self._ledger.tracks[stream]
            over.runs.append(self._run(track, offsets, 0, now_us))
            over.facts.append(self._settle_acked(track, offsets))
        return over

    def _run(self, track: Track, offsets: BitMap64, number: int, deadline_us: int) -> Run:
        start, end, size = offsets.min(), offsets.max() + 1, len(offsets)
        attempts: dict[int, int] = {}
        cursor = track.cursor
        if cursor.failures is not None:
            attempts = {o: cursor.attempt(o) for o in to_list(cursor.failed & offsets)}
        return Run(
            track.stream,
            start,
            end,
            size,
            None if size == end - start else offsets.copy(),
            attempts,
            deadline_us,
            head_of(self.subscription_id, track.stream, start, number, self._session),
            number,
        )

    # Settling.

    def ack(self, ids: Sequence[str] | AckNames, consumer: str | None = None) -> Settled:
        """These are done. Ids that cannot be honoured are refused one by one."""
        if self.policy.guarantee is Guarantee.AT_MOST_ONCE:
            groups, bad = parse_names(ids)
            accepted = sum(len(group.offsets) for group in groups)
            return Settled([], [Refusal(*each) for each in bad], accepted)
        claims, refused = self._clerk(honours_late=True).claim(ids, consumer)
        return self._ack_claims(claims, refused)

    def ack_offsets(self, stream: StreamId, offsets: BitMap64) -> Settled:
        """These are done, whichever lease holds them; what none holds is refused."""
        claims, refused = self._claim_offsets(stream, offsets)
        return self._ack_claims(claims, refused)

    def commit(self, stream: StreamId, end_offset: int, log_end_offset: int | None = None) -> Settled:
        """Everything below ``end_offset`` is done (a cumulative ack), at most up to the log's end.

        Without the log's end, at most what was read. What was not read may be committed; its lanes
        are not known, so later messages of them do not wait for the commit to be durable.
        """
        track = self._ledger.track(stream)
        bound = track.read_offset if log_end_offset is None else log_end_offset
        if not 0 <= end_offset <= bound:
            raise OffsetOutOfRange(f"cannot commit {end_offset}: the log ends at {bound}")
        floor = track.cursor.floor
        if end_offset <= floor:
            return Settled()
        known = track.known_unacked(end_offset)
        if self._pool is not None and known:
            self._pool.leases.revoke(stream, known)
            self._pool.withdraw(track, known)
        track.begin_settling(known)
        track.skip_to(end_offset)
        name = self.subscription_id, *stream
        return Settled([facts.MessagesAcked(*name, (floor, end_offset), b"")], [], len(known))

    def nack(
        self,
        ids: Sequence[str] | AckNames,
        now_us: int,
        *,
        jitter: float = 0.0,
        delay_s: float | None = None,
        reason: str = "",
        retry: bool = True,
        consumer: str | None = None,
    ) -> Settled:
        """These failed: to be tried again after a wait, or, without ``retry``, dead letters."""
        delay_us = self._check_nack(delay_s, retry)
        claims, refused = self._clerk().claim(ids, consumer)
        mishap = Mishap(FailureKind.NACKED, "", now_us, jitter, reason, delay_us, not retry)
        return self._fail_claims(claims, refused, mishap)

    def nack_offsets(
        self,
        stream: StreamId,
        offsets: BitMap64,
        now_us: int,
        *,
        jitter: float = 0.0,
        delay_s: float | None = None,
        reason: str = "",
        retry: bool = True,
    ) -> Settled:
        """As ``nack``, for messages named by their offsets."""
        delay_us = self._check_nack(delay_s, retry)
        claims, refused = self._claim_offsets(stream, offsets)
        mishap = Mishap(FailureKind.NACKED, "", now_us, jitter, reason, delay_us, not retry)
        return self._fail_claims(claims, refused, mishap)

    def extend(
        self, ids: Sequence[str] | AckNames, seconds: float, now_us: int, consumer: str | None = None
    ) -> Settled:
        """Give leases a new deadline, counted from now; 0 makes them due at the next tick."""
        if not isinstance(seconds, int | float) or not 0 <= seconds <= DEADLINE_S_MAX:
            raise InvalidArgument(f"seconds must be from 0 to {DEADLINE_S_MAX}, not {seconds!r}")
        groups, bad = parse_names(ids)
        settled = Settled([], [Refusal(*each) for each in bad])
        deadline_us = now_us + round(seconds * 1_000_000)
        clerk = self._clerk()
        for group in groups:
            lease, error = clerk.find(group, consumer)
            held = BitMap64()
            if lease is not None:
                held = clerk.leases.extend(lease, BitMap64(group.offsets), deadline_us)
            settled.accepted += len(held)
            error = error or StaleAckId("the lease of the message has ended")
            rest = zip(group.offsets, group.ids, strict=True)
            settled.refused += [Refusal(ack_id, error) for o, ack_id in rest if o not in held]
        return settled

    def give_back(self, run: Run, offsets: BitMap64) -> None:
        """These of a run were never sent: ready again if its lease still holds them, and no attempt is
        counted."""
        pool, track = self._pool, self._ledger.tracks.get(run.stream)
        lease = None if pool is None else pool.leases.by_number.get(run.number)
        if pool is not None and track is not None and lease is not None:
            pool.release(track, pool.leases.take_out(lease, offsets))

    def return_unseen(self, ids: Sequence[str] | AckNames, consumer: str | None = None) -> None:
        """A consumer never looked at these: ready again, and no attempt is counted. What is not held under
        these names any more is passed over."""
        if self._pool is None:
            return
        clerk = self._clerk()
        for group in parse_names(ids).groups:
            lease, _ = clerk.find(group, consumer)
            if lease is not None:
                held = clerk.leases.take_out(lease, BitMap64(group.offsets))
                self._pool.release(self._ledger.track(lease.stream), held)

    def holds(self, consumer: str, stream: StreamId) -> bool:
        """Whether a consumer has messages of a stream."""
        return self._pool is not None and bool(self._pool.leases.of(consumer, stream))

    def release(
        self,
        consumer: str,
        now_us: int,
        jitter: float = 0.0,
        *,
        is_graceful: bool = False,
        stream: StreamId | None = None,
    ) -> Settled:
        """A consumer left, or one stream is taken from it: what it held goes to others at once, as failed
        unless it said goodbye."""
        pool = self._pool
        if pool is None:
            return Settled()
        mishap = Mishap(FailureKind.CONSUMER_GONE, consumer, now_us, jitter, "consumer gone", 0)
        settled = Settled()
        for lease, offsets in list(pool.leases.release(consumer, stream)):
            track = self._ledger.tracks[lease.stream]
            if is_graceful:
                pool.release(track, offsets)
            else:
                settled.facts += self._settle_failed(track, offsets, mishap)
            settled.accepted += len(offsets)
        if stream is not None:
            return settled
        if pool.lanes is not None:
            pool.lanes.drop_consumer(consumer)
        if self._judge is not None:
            self._judge.forget(consumer)
        return settled

    def expire(self, now_us: int, jitter: float = 0.0) -> list[Fact]:
        """End what is due: leases past their deadline, messages past their time to live."""
        pool = self._pool
        if pool is None:
            return []
        pool.advance(now_us)
        found: list[Fact] = []
        for lease, offsets in list(pool.leases.expire(now_us)):
            mishap = Mishap(FailureKind.TIMED_OUT, lease.consumer, now_us, jitter, "timed out")
            found += self._settle_failed(self._ledger.tracks[lease.stream], offsets, mishap)
        for stream, offsets in list(pool.expired.items()):
            del pool.expired[stream]
            if self.policy.expired is Expired.DEAD_LETTER:
                self._open_parked().add(stream, to_list(offsets), deadletter.EXPIRED)
                continue
            self._ledger.tracks[stream].begin_settling(offsets)
            name = self.subscription_id, *stream
            found.append(facts.MessagesExpired(*name, *pack(offsets), now_us))
        return found

    def next_wakeup_us(self) -> int:
        """When ``expire``, ``lease`` or ``dead_letters_due`` will next find something new."""
        times = [NEVER_US]
        if self._pool is not None:
            times.append(self._pool.next_wakeup_us())
        if self._judge is not None:
            times.append(self._judge.next_wakeup_us())
        if self._parked is not None:
            times.append(self._parked.next_due_us())
        return min(times)

    # What settling has in common.

    def _clerk(self, *, honours_late: bool = False) -> Clerk:
        is_lenient = self.policy.guarantee is Guarantee.AT_LEAST_ONCE
        return Clerk(
            self.subscription_id,
            self._session,
            self._fence,
            self._open_pool().leases,
            self._ledger.tracks,
            honours_late and is_lenient,
        )

    def _claim_offsets(self, stream: StreamId, offsets: BitMap64) -> tuple[list[Claim], list[Refusal]]:
        self._ledger.track(stream)
        leases = self._open_pool().leases
        claims = []
        for lease in [x for x in leases.by_number.values() if x.stream == stream]:
            held = leases.take_out(lease, offsets)
            if held:
                claims.append(Claim(stream, lease.consumer, held, taken_at_us=lease.taken_at_us))
        rest = offsets.difference(*(claim.offsets for claim in claims))
        error = StaleAckId("nobody holds the message")
        return claims, [Refusal(str(MessageId(*stream, o)), error) for o in to_list(rest)]

    def _ack_claims(self, claims: list[Claim], refused: list[Refusal]) -> Settled:
        done: dict[StreamId, BitMap64] = {}
        settled = Settled([], refused)
        for stream, consumer, offsets, is_late, taken_at_us in claims:
            if consumer:
                settled.outcomes.append(Outcome(stream, consumer, len(offsets), taken_at_us, True))
            if self.policy.poison_rules:
                self._open_judge().succeeded(consumer, len(offsets))
            if is_late:
                self._open_pool().withdraw(self._ledger.tracks[stream], offsets)
            done[stream] = done[stream] | offsets if stream in done else offsets
        for stream, offsets in done.items():
            track = self._ledger.tracks[stream]
            settled.facts.append(self._settle_acked(track, offsets))
            settled.accepted += len(offsets)
        return settled

    def _settle_acked(self, track: Track, offsets: BitMap64) -> Fact:
        """Claimed messages are being acked; what was passed over around them goes along."""
        track.begin_settling(offsets)
        return facts.acked(self.subscription_id, track.stream, track.with_passed(offsets))

    def _fail_claims(self, claims: list[Claim], refused: list[Refusal], mishap: Mishap) -> Settled:
        settled = Settled([], refused)
        for stream, consumer, offsets, _, taken_at_us in claims:
            settled.outcomes.append(Outcome(stream, consumer, len(offsets), taken_at_us, False))
            track = self._ledger.tracks[stream]
            mishap = mishap._replace(consumer=consumer)
            settled.facts += self._settle_failed(track, offsets, mishap)
            settled.accepted += len(offsets)
        return settled

    def _settle_failed(self, track: Track, offsets: BitMap64, mishap: Mishap) -> list[Fact]:
        track.begin_settling(offsets)
        self._open_pool().fail(track, offsets)
        return self._open_judge().failed(track, offsets, mishap)

    def _check_nack(self, delay_s: float | None, retry: bool) -> int | None:
        if not retry and self.policy.dead_letter_topic is None:
            raise PreconditionFailed(
                "the subscription has no dead-letter topic to give the message to",
                hint="Set dead_letter_topic, or nack with a retry.",
            )
        if delay_s is None:
            return None
        if not isinstance(delay_s, int | float) or not 0 <= delay_s <= DELAY_S_MAX:
            raise InvalidArgument(f"delay_s must be from 0 to {DELAY_S_MAX:,}, not {delay_s!r}")
        return round(delay_s * 1_000_000)

    # Dead letters.

    def dead_letters_due(self, now_us: int, limit: int = 100) -> list[DeadLetterDue]:
        """Messages to move to the dead-letter topic; in the shell's hands until then."""
        if self._parked is None:
            return []
        return [
            DeadLetterDue(stream, offset, reason, self.cursor(stream).failure(offset))
            for stream, offset, reason in self._parked.take_due(now_us, limit)
        ]

    def defer_dead_letters(self, dues: Iterable[DeadLetterDue], retry_at_us: int) -> None:
        """The dead-letter topic is missing or full: they stay parked and are due later."""
        for due in dues:
            self._open_parked().defer(due.stream, due.offset, retry_at_us)

    # Moving the cursor.

    def seek(self, positions: Mapping[StreamId, int | Cursor]) -> list[Fact]:
        """Put cursors elsewhere: to offsets, or to what a snapshot saved."""
        found: list[Fact] = []
        for stream, position in positions.items():
            self._ledger.track(stream)
            cursor = Cursor(position) if isinstance(position, int) else position
            if not 0 <= cursor.floor <= OFFSET_MAX:
                raise OffsetOutOfRange(f"cannot seek to {cursor.floor}")
            name = self.subscription_id, *stream
            found.append(facts.CursorSeeked(*name, *pack(cursor.above), cursor.floor))
        return found

    def take_back(
        self,
        stream: StreamId,
        offsets: BitMap64,
        now_us: int,
        *,
        round: int = 0,
        replay_id: str = "",
    ) -> list[Fact]:
        """Deliver acked messages again under their ids; what is not acked is left alone."""
        cursor = self.cursor(stream)
        acked = BitMap64(offset for offset in to_list(offsets) if cursor.is_acked(offset))
        if not acked:
            return []
        name = self.subscription_id, *stream
        return [facts.AcksTakenBack(*name, *pack(acked), round, replay_id, now_us)]

    def flush_passed(self) -> list[Fact]:
        """Make durable what was passed over without an ack; worthwhile every now and then."""
        return [
            facts.MessagesPassed(self.subscription_id, *stream, *pack(track.passed))
            for stream, track in self._ledger.tracks.items()
            if track.passed
        ]

    # Looking.

    def lag(self, log_ends: Mapping[StreamId, int]) -> list[Lag]:
        """How far each stream is behind its end."""
        return [
            _lag(track, log_ends[stream])
            for stream, track in self._ledger.tracks.items()
            if stream in log_ends
        ]

    def held(self) -> list[Held]:
        """What consumers hold; to be read, not to be changed."""
        leases = [] if self._pool is None else self._pool.leases.by_number.values()
        return [
            Held(lease.stream, lease.consumer, part.offsets, lease.taken_at_us, part.deadline_us)
            for lease in leases
            for part in lease.parts
        ]

    def trace(self, message_id: MessageId, log_end_offset: int, *, is_selected: bool = True) -> Trace:
        """Where a message is; ``is_selected`` is what the filter says of it."""
        track = self._ledger.tracks.get(message_id.stream)
        where = locate(message_id, track, self._pool, self._parked, log_end_offset, is_selected)
        return where._replace(subscription_id=self.subscription_id)


def _lag(track: Track, log_end_offset: int) -> Lag:
    passed = track.passed if track.passed is not None else BitMap64()
    unacked = track.cursor.unacked_count(log_end_offset) - len(passed)
    oldest = track.cursor.floor
    if passed:
        oldest = first_missing(passed | track.cursor.above, oldest)
    return Lag(track.stream, unacked, oldest if oldest < log_end_offset else None)
