"""The state of a delivery, and what facts do to it.

``apply`` is the only place where durable state changes, live and in replay. Live, it also moves the
messages on: acked ones leave the pool, failed ones become due, dead ones are parked. In replay there
is no pool yet and the same code changes the ledger alone. What decides is in ``delivery``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pyroaring import BitMap64

from sparrow.kernel import facts
from sparrow.kernel.commits import GroupLedger
from sparrow.kernel.cursor import Attempt, Cursor
from sparrow.kernel.deadletter import Parked
from sparrow.kernel.facts import Fact
from sparrow.kernel.judgement import Judge
from sparrow.kernel.ledger import Ledger
from sparrow.kernel.offsets import OFFSET_MAX, to_list
from sparrow.kernel.pool import Pool
from sparrow.kernel.replay import Replays
from sparrow.kernel.track import Track
from sparrow.model.message import StreamId
from sparrow.model.subscription import SubscriptionPolicy


class DeliveryState:
    """Durable and volatile state of one subscription; members beyond the ledger are made on use."""

    __slots__ = (
        "_fence",
        "_horizon",
        "_judge",
        "_ledger",
        "_parked",
        "_pool",
        "_session",
        "is_paused",
        "policy",
        "subscription_id",
    )

    def __init__(self, subscription_id: int, policy: SubscriptionPolicy, *, session: int = 0) -> None:
        """``session`` is a number that differs between two runs of a broker."""
        self.subscription_id = subscription_id
        self.policy = policy
        self.is_paused = False
        self._session = session
        self._ledger = Ledger(subscription_id)
        self._fence = 0
        self._horizon: Mapping[StreamId, int] | None = None
        self._pool: Pool | None = None
        self._judge: Judge | None = None
        self._parked: Parked | None = None

    @property
    def streams(self) -> list[StreamId]:
        """The streams that are read."""
        return list(self._ledger.tracks)

    def cursor(self, stream: StreamId) -> Cursor:
        """The durable position in a stream; not to be changed."""
        return self._ledger.track(stream).cursor

    @property
    def replays(self) -> Replays:
        """The replay jobs."""
        return self._ledger.replays

    @property
    def group(self) -> GroupLedger:
        """What is durable of the group of consumers."""
        return self._ledger.group

    # Facts.

    def apply(self, fact: Fact) -> None:
        """What happened: durable state changes here and nowhere else, live and in replay."""
        if isinstance(fact, facts.StreamAttached):
            if fact.stream not in self._ledger.tracks:
                self._ledger.add(fact.stream, Cursor(fact.start_offset))
        elif isinstance(fact, facts.GroupAdvanced | facts.OffsetCommitted | facts.OffsetsForgotten):
            self._ledger.group.apply(fact)
        elif isinstance(fact, facts.StreamFact):
            if isinstance(fact, facts.StreamDetached):
                self._ledger.group.apply(fact)
            track = self._ledger.tracks.get(fact.stream)
            if track is not None:
                _EFFECTS[type(fact)](self, track, fact)
        elif isinstance(fact, facts.ReplayStarted | facts.ReplayAdvanced | facts.ReplayMoved):
            self._ledger.replays.apply(fact)

    def abandon(self, decided: Iterable[Fact]) -> None:
        """The journal did not take these: the messages go back to where they were."""
        for fact in decided:
            if not isinstance(fact, facts.OffsetsFact) or fact.stream not in self._ledger.tracks:
                continue
            track = self._ledger.tracks[fact.stream]
            ended = track.unskip(track.end_settling(fact.offsets))
            if self._parked is not None:
                ended = ended - self._parked.offsets(fact.stream)
            pool = self._open_pool()
            if isinstance(fact, facts.MessagesExpired):
                pool.expired.setdefault(fact.stream, BitMap64()).update(ended)
            else:
                pool.reinstate(track, ended)

    def _on_done(self, track: Track, fact: facts.OffsetsFact) -> None:
        self._finish(track, fact.offsets)

    def _on_dead_lettered(self, track: Track, fact: facts.DeadLettered) -> None:
        self._finish(track, BitMap64((fact.offset,)))

    def _finish(self, track: Track, offsets: BitMap64) -> None:
        """Messages are done, mostly settling ones; any other that was read is taken out first."""
        pool = self._pool
        live = track.end_settling(offsets)
        if pool is not None and len(live) != len(offsets):
            loose = track.known_unacked(OFFSET_MAX) & offsets
            if loose:
                pool.leases.revoke(track.stream, loose)
                pool.withdraw(track, loose)
                live |= loose
        if pool is not None and live:
            pool.finish(track, live)
        self._ledger.change(track, lambda: track.ack(offsets))
        if self._parked is not None:
            self._parked.discard(track.stream, offsets)
        if pool is not None:
            pool.resolve(track.stream, offsets)

    def _on_failed(self, track: Track, fact: facts.AttemptsFailed) -> None:
        offsets = fact.offsets
        entry = Attempt(fact.kind, fact.at_us, fact.consumer, fact.reason)
        self._ledger.change(
            track,
            lambda: track.cursor.fail(offsets, fact.attempt, entry, fact.due_at_us, fact.verdict),
        )
        if fact.verdict:
            dead = track.cursor.failed & offsets
            self._open_parked().add(track.stream, to_list(dead), fact.verdict)
        ended = track.end_settling(offsets)
        if self._pool is None or not ended or fact.verdict:
            return
        if fact.due_at_us <= fact.at_us:
            self._pool.release(track, ended)
        else:
            self._pool.waits.put(track.stream, to_list(ended), fact.due_at_us)

    def _on_seeked(self, track: Track, fact: facts.CursorSeeked) -> None:
        self._ledger.change(track, lambda: track.cursor.seek(fact.floor, fact.offsets))
        self._forget(track)
        track.forget_volatile()

    def _on_taken_back(self, track: Track, fact: facts.AcksTakenBack) -> None:
        offsets = fact.offsets
        self._ledger.change(track, lambda: track.take_back(offsets, fact.round))
        self._raise_fence()

    def _on_detached(self, track: Track, fact: facts.StreamDetached) -> None:
        self._forget(track)
        self._ledger.remove(track)

    def _forget(self, track: Track) -> None:
        if self._pool is not None:
            self._pool.clear(track)
        if self._parked is not None:
            self._parked.clear(track.stream)
        self._raise_fence()

    def _raise_fence(self) -> None:
        """Ack ids of leases that have ended by now are not honoured any more."""
        if self._pool is not None:
            self._fence = self._pool.leases.next_number

    # Resting.

    def checkpoint(self) -> bytes:
        """All durable state."""
        return self._ledger.checkpoint()

    def restore(self, raw: bytes) -> None:
        """Take over a checkpoint; only for a delivery that is empty."""
        self._ledger.restore(raw)
        for stream, track in self._ledger.tracks.items():
            for verdict, offsets in self._ledger.dead(track).items():
                self._open_parked().add(stream, to_list(offsets), verdict)

    def _open_pool(self) -> Pool:
        if self._pool is None:
            self._pool = Pool(self.policy, self._ledger.tracks)
        return self._pool

    def _open_judge(self) -> Judge:
        if self._judge is None:
            self._judge = Judge(self.subscription_id, self.policy)
        return self._judge

    def _open_parked(self) -> Parked:
        if self._parked is None:
            self._parked = Parked()
        return self._parked


_EFFECTS: dict[type[Fact], Callable[[DeliveryState, Track, Any], None]] = {
    facts.MessagesAcked: DeliveryState._on_done,
    facts.MessagesPassed: DeliveryState._on_done,
    facts.MessagesExpired: DeliveryState._on_done,
    facts.DeadLettered: DeliveryState._on_dead_lettered,
    facts.AttemptsFailed: DeliveryState._on_failed,
    facts.CursorSeeked: DeliveryState._on_seeked,
    facts.AcksTakenBack: DeliveryState._on_taken_back,
    facts.StreamDetached: DeliveryState._on_detached,
}
