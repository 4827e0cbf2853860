"""Replays of dead letters: jobs that run in the background and survive a crash.

The jobs and their rules are the kernel's (kernel/replay.py). Each step takes acks back, closes the letters
and moves the job's position in one entry of the journal, so a crash repeats and loses nothing. With another
subscription as the destination the messages are stored again for it, in the same entry (broker/forwarding).
The jobs of one subscription take turns, so that no letter is taken by two of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from weakref import WeakValueDictionary

from pyroaring import BitMap64

from sparrow.broker import logs
from sparrow.broker.clock import Clock
from sparrow.broker.courier import Courier
from sparrow.broker.deadletters import HIDDEN, DeadLetters
from sparrow.broker.forwarding import Again, forwarded, stored_again
from sparrow.broker.settling import Settling
from sparrow.broker.subscriptions import Subscriptions
from sparrow.broker.topics import Topics
from sparrow.kernel import facts
from sparrow.kernel.facts import Fact
from sparrow.kernel.filter import parse_filter
from sparrow.kernel.replay import (
    ReplayJob,
    ReplayPlan,
    ReplaySelection,
    ReplayStatus,
    original_of,
    parse_selection,
)
from sparrow.model.deadletter import DeadLetter
from sparrow.model.errors import InvalidArgument, PreconditionFailed, SparrowError, SubscriptionNotFound
from sparrow.model.message import StreamId
from sparrow.model.subscription import Delivery
from sparrow.store.ports import BatchDraft, Store

_STEP = 100
_TICK_S = 0.1
"""A slow replay gives letters back evenly, in small portions, not a hundred at once."""

_Outcome = tuple[list[Fact], list[BatchDraft]]
"""What gives one letter back: acks that are taken back, or a message that is stored again."""


class ReplayJobs:
    """Runs the replay jobs of all subscriptions."""

    def __init__(
        self,
        store: Store,
        topics: Topics,
        subscriptions: Subscriptions,
        letters: DeadLetters,
        settling: Settling,
        clock: Clock,
        new_id: Callable[[], str],
    ) -> None:
        self._store = store
        self._topics = topics
        self._subscriptions = subscriptions
        self._letters = letters
        self._settling = settling
        self._clock = clock
        self._new_id = new_id
        self._log = logs.get("replays")
        self._running: dict[tuple[int, str], asyncio.Task[None]] = {}
        self._aborted: dict[tuple[int, str], asyncio.Event] = {}
        self._turns: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()

    async def start(
        self,
        courier: Courier,
        selection: dict[str, object],
        rate_per_s: float,
        dry_run: bool,
        destination: str | None = None,
    ) -> ReplayJob | ReplayPlan:
        """Starts a replay of what is open now; a dry run only tells what it would do."""
        chosen = parse_selection(selection)
        parse_filter(chosen.filter)
        if not isinstance(rate_per_s, int | float):
            raise InvalidArgument(f"rate_per_s must be a number, not {rate_per_s!r}")
        hidden = self._letters.hidden(courier)
        if destination == courier.subscription.name:
            destination = None
        if destination is not None:
            await self._check_reach(courier, self._target(destination), chosen)
        plan = ReplayPlan()
        async for _, _, letter in self._letters.selected(courier, chosen):
            plan.add(chosen, letter.message.attributes, letter.dead_at_us)
        replay_id, now_us = self._new_id(), self._clock.now_us()
        spans = [
            (stream, hidden.delivery.cursor(stream).floor, self._store.bounds(stream).end_offset)
            for stream in hidden.delivery.streams
        ]
        replays = courier.delivery.replays
        decided = replays.start(replay_id, chosen, spans, plan.total, now_us, rate_per_s, destination or "")
        if dry_run:
            return plan.finish(rate_per_s)
        await courier.journal(decided)
        await courier.journal(replays.move(replay_id, ReplayStatus.RUNNING, now_us))
        self._run_job(courier, replay_id)
        return replays.get(replay_id)

    def _target(self, destination: object) -> Courier:
        found = self._subscriptions.get(destination)
        if found.subscription.name.endswith(HIDDEN):
            raise SubscriptionNotFound(f"there is no subscription {destination!r}")
        return found

    async def _check_reach(self, courier: Courier, target: Courier, chosen: ReplaySelection) -> None:
        """Refuses letters that the destination would not get, before anything is begun."""
        portion: list[DeadLetter] = []

        def check() -> None:
            for one in forwarded(portion, courier.subscription.name, target, self._topics):
                if isinstance(one, PreconditionFailed):
                    raise one
            portion.clear()

        async for _, _, letter in self._letters.selected(courier, chosen):
            if original_of(letter.message.attributes) is not None:
                portion.append(letter)
            if len(portion) == _STEP:
                check()
        check()

    def resume(self) -> None:
        """Goes on with what a crash interrupted."""
        for courier in self._subscriptions:
            self._letters.move(courier)
            for job in courier.delivery.replays.jobs.values():
                if job.status is ReplayStatus.RUNNING:
                    self._run_job(courier, job.replay_id)

    def jobs(self, courier: Courier) -> list[ReplayJob]:
        return list(courier.delivery.replays.jobs.values())

    async def wait(self, courier: Courier, replay_id: str) -> ReplayJob:
        courier.delivery.replays.get(replay_id)
        task = self._running.get((courier.subscription.id, replay_id))
        if task is not None:
            await asyncio.wait([task])
        return courier.delivery.replays.get(replay_id)

    async def abort(self, courier: Courier, replay_id: str) -> ReplayJob:
        replays = courier.delivery.replays
        await courier.journal(replays.move(replay_id, ReplayStatus.ABORTED, self._clock.now_us()))
        aborted = self._aborted.get((courier.subscription.id, replay_id))
        if aborted is not None:
            aborted.set()
        await self.wait(courier, replay_id)
        return replays.get(replay_id)

    def _run_job(self, courier: Courier, replay_id: str) -> None:
        key = (courier.subscription.id, replay_id)
        task = asyncio.get_running_loop().create_task(self._run(courier.subscription.name, replay_id))
        self._running[key], self._aborted[key] = task, asyncio.Event()
        task.add_done_callback(lambda _: (self._running.pop(key, None), self._aborted.pop(key, None)))

    async def _run(self, name: str, replay_id: str) -> None:
        try:
            while await self._step(name, replay_id):
                pass
        except SparrowError as error:
            self._log.error("replay-failed", str(error), subscription=name, replay_id=replay_id)
            courier = self._subscriptions.get(name)
            if courier.delivery.replays.get(replay_id).status is not ReplayStatus.RUNNING:
                return  # It was aborted while a step was under way.
            decided = courier.delivery.replays.move(
                replay_id, ReplayStatus.FAILED, self._clock.now_us(), str(error)
            )
            with suppress(SparrowError):  # Without a journal it stays RUNNING and goes on at the next start.
                await courier.journal(decided)

    async def _step(self, name: str, replay_id: str) -> bool:
        """One stretch of a replay, and the pause after it; False when it has ended."""
        key = self._subscriptions.get(name).subscription.id, replay_id
        async with self._turns.setdefault(key[0], asyncio.Lock()):
            courier = self._subscriptions.get(name)
            job = courier.delivery.replays.get(replay_id)
            given = await self._take(courier, job)
        if given:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._aborted[key].wait(), given / job.rate_per_s)
        return given is not None

    async def _take(self, courier: Courier, job: ReplayJob) -> int | None:
        """Goes through the next stretch of a replay; how many letters it met, None when it has ended."""
        if job.status is not ReplayStatus.RUNNING:
            return None
        span = job.next_span()
        if span is None:
            replays = courier.delivery.replays
            await courier.journal(replays.move(job.replay_id, ReplayStatus.COMPLETED, self._clock.now_us()))
            return None
        stream, position, end = span
        step = max(1, min(_STEP, int(job.rate_per_s * _TICK_S)))
        letters = [
            (offset, letter)
            async for _, offset, letter in self._letters.selected(
                courier, job.selection, stream, position, end, limit=step
            )
        ]
        reached = letters[-1][0] + 1 if len(letters) == step else end
        await self._give_back(courier, job, stream, reached, letters)
        return len(letters)

    async def _give_back(
        self,
        courier: Courier,
        job: ReplayJob,
        stream: StreamId,
        reached: int,
        letters: list[tuple[int, DeadLetter]],
    ) -> None:
        """Acks taken back, letters closed and the job's position, in one entry; where the original is
        gone the message is stored again under its id, in the same chain."""
        hidden, now_us = self._letters.hidden(courier), self._clock.now_us()
        decided: list[Fact] = []
        drafts: list[BatchDraft] = []
        closed = BitMap64()
        failed = 0
        outcomes = (
            self._forward(courier, self._target(job.destination), [letter for _, letter in letters])
            if job.destination
            else [await self._revive(courier, job.replay_id, letter, now_us) for _, letter in letters]
        )
        for (offset, _), outcome in zip(letters, outcomes, strict=True):
            if outcome is None:
                failed += 1
                continue
            decided += outcome[0]
            drafts += outcome[1]
            closed.add(offset)
        if closed:
            decided.append(facts.acked(hidden.subscription.id, stream, closed))
        decided += courier.delivery.replays.advance(
            job.replay_id, stream, reached, now_us, replayed=len(closed), failed=failed
        )

        def apply(found: Sequence[Fact], lsn: int) -> None:
            for one in (courier, hidden):
                own = [fact for fact in found if fact.subscription_id == one.subscription.id]
                one.apply(own, lsn)

        await self._settling.append_with(drafts, decided, apply)
        for draft in drafts:
            for reader in self._subscriptions.readers(draft.stream):
                reader.wake()

    def _forward(self, courier: Courier, target: Courier, letters: list[DeadLetter]) -> list[_Outcome | None]:
        """The messages for another subscription; what it cannot get any more stays a dead letter."""
        found = forwarded(letters, courier.subscription.name, target, self._topics)
        return [
            ([], [self._letters.draft(one.stream, one.topic, [one.row])]) if isinstance(one, Again) else None
            for one in found
        ]

    async def _revive(
        self, courier: Courier, replay_id: str, letter: DeadLetter, now_us: int
    ) -> _Outcome | None:
        origin = original_of(letter.message.attributes)
        if origin is None:
            return None
        place, rounds = origin
        is_read_by_spark = courier.subscription.policy.delivery is Delivery.PIPELINE
        if (
            # A query reads onwards only: what it is to read again is stored again.
            not is_read_by_spark
            and place.stream in courier.streams
            and await self._letters.read_one(place.stream, place.offset) is not None
        ):
            offsets = BitMap64([place.offset])
            taken = courier.delivery.take_back(
                place.stream, offsets, now_us, round=rounds + 1, replay_id=replay_id
            )
            return taken, []
        topic = self._topics.find(place.topic_id)
        if topic is None or place.stream not in courier.streams:
            return None
        row = stored_again(letter, rounds + 1, courier.subscription.name)
        return [], [self._letters.draft(place.stream, topic, [row])]

    async def stop(self) -> None:
        """Stops where the jobs are; they go on when the broker is opened again."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)
