"""Delivery against a naive model, by ordering and guarantee, with crashes and lost journals.

The model is one record a message and every rule spelled out in a line or two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from pyroaring import BitMap64

from sparrow.kernel import deadletter, facts
from sparrow.kernel.delivery import Delivery
from sparrow.kernel.exchange import Arrival, Settled
from sparrow.model.errors import StaleAckId
from sparrow.model.message import MessageId, StreamId
from sparrow.model.subscription import Guarantee, Ordering, RetryPolicy, SubscriptionPolicy

STREAM = StreamId(3, 0)
SECOND_US = 1_000_000
consumers = st.sampled_from(["ann", "bob"])
picks = st.just([*range(30)]) | st.lists(st.integers(0, 30), min_size=1, max_size=6)


LADDER_S = (0, 1, 4, 16, 64, 256, 300)


@dataclass
class Message:
    lane: object
    is_wanted: bool
    due_us: int = 0
    state: str = "open"  # open, leased, acking, held (being decided, not out), failing, dead, done
    fails: int = 0
    holder: str = ""
    deadline_us: int = 0


@dataclass
class Model:
    policy: SubscriptionPolicy
    now_us: int = 0
    log: dict[int, Message] = field(default_factory=dict)

    def outstanding(self, lane: object) -> list[int]:
        return [o for o, m in self.log.items() if m.lane == lane and m.state in ("leased", "acking")]

    def is_eligible(self, offset: int, consumer: str) -> bool:
        message = self.log[offset]
        if not message.is_wanted or message.state != "open" or message.due_us > self.now_us:
            return False
        if self.policy.ordering is Ordering.NONE or message.lane is None:
            return True
        out = self.outstanding(message.lane)
        if any(self.log[o].holder != consumer for o in out) or len(out) >= self.policy.key_window:
            return False
        before = [o for o, m in self.log.items() if o < offset and m.lane == message.lane]
        return all(o in out or not self.is_open(o) for o in before)

    def is_open(self, offset: int) -> bool:
        return self.log[offset].is_wanted and self.log[offset].state != "done"

    def lease(self, offsets: list[int], consumer: str, deadline_us: int) -> None:
        for offset in offsets:
            assert self.is_eligible(offset, consumer), f"{offset} must not be delivered now"
            message = self.log[offset]
            message.state, message.holder, message.deadline_us = "leased", consumer, deadline_us

    def fail(self, offsets: list[int]) -> None:
        """They failed; later ones of their lanes that are still leased come back uncounted."""
        for offset in offsets:
            self.log[offset].state = "failing"
        if self.policy.ordering is Ordering.NONE:
            return
        for offset in offsets:
            lane = self.log[offset].lane
            for later, message in self.log.items():
                is_later = lane is not None and message.lane == lane and later > offset
                if is_later and message.state == "leased":
                    message.state = "open"

    def failed(self, offset: int, attempt: int, at_us: int, delay_us: int | None) -> None:
        message = self.log[offset]
        if message.state == "done" or attempt <= message.fails:
            return
        message.state, message.fails = "open", attempt
        if self.is_exhausted(attempt):
            message.state = "dead"
        wait_us = LADDER_S[min(attempt, len(LADDER_S)) - 1] * 1_000_000 if delay_us is None else delay_us
        message.due_us = at_us + wait_us

    def is_exhausted(self, fails: int) -> bool:
        return self.policy.attempts_max is not None and fails >= self.policy.attempts_max

    def seek(self, floor: int) -> None:
        for offset, message in self.log.items():
            message.state = "done" if offset < floor else "open"
            message.fails = message.due_us = 0

    def reopen(self, offsets: list[int]) -> None:
        for offset in offsets:
            message = self.log[offset]
            message.state, message.fails, message.due_us = "open", 0, 0

    def crash(self) -> None:
        """Leases are gone and nothing is counted."""
        for message in self.log.values():
            if message.state in ("leased", "acking", "held", "failing"):
                message.state = "dead" if self.is_exhausted(message.fails) else "open"

    @property
    def keeps_leases(self) -> bool:
        return self.policy.guarantee is not Guarantee.AT_MOST_ONCE


class DeliveryMachine(RuleBasedStateMachine):
    policy = SubscriptionPolicy()
    kind = Delivery

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(self.policy)
        self.session = 1
        self.subject = self.kind(1, self.policy, session=self.session)
        self.journal: list[bytes] = []
        self.kept = self.subject.checkpoint(), 0
        self.pending: list[tuple[facts.Fact, Callable[[], None], Callable[[], None]]] = []
        self.held: dict[str, int] = {}
        self.ended: dict[str, int] = {}

    @initialize()
    def attach(self) -> None:
        self.decide(self.subject.attach(STREAM, 0)[0], lambda: None, lambda: None)
        self.sync()

    # The journal.

    def decide(self, fact: facts.Fact, then: Callable[[], None], otherwise: Callable[[], None]) -> None:
        self.pending.append((fact, then, otherwise))

    @rule()
    def sync(self) -> None:
        for fact, then, _ in self.pending:
            self.journal.append(facts.encode([fact]))
            self.subject.apply(fact)
            then()
        self.pending.clear()

    @rule()
    def lose_the_journal(self) -> None:
        self.subject.abandon([fact for fact, _, _ in self.pending])
        for _, _, otherwise in self.pending:
            otherwise()
        self.pending.clear()

    @rule()
    def checkpoint(self) -> None:
        self.kept = self.subject.checkpoint(), len(self.journal)

    @rule(written=st.integers(0, 5), overlap=st.integers(0, 10))
    def crash(self, written: int, overlap: int) -> None:
        for fact, then, _ in self.pending[:written]:
            self.journal.append(facts.encode([fact]))
            self.subject.apply(fact)
            then()
        self.pending.clear()
        before = self.subject.checkpoint()
        self.session += 1
        self.subject = self.kind(1, self.policy, session=self.session)
        self.subject.restore(self.kept[0])
        for raw in self.journal[max(0, self.kept[1] - overlap) :]:
            for fact in facts.decode(raw):
                self.subject.apply(fact)
        assert self.subject.checkpoint() == before
        self.model.crash()
        self.ended |= self.held
        self.held = {}

    # Messages come in.

    @rule(keys=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 4)), min_size=1, max_size=8))
    def publish(self, keys: list[tuple[str, int]]) -> None:
        for key, luck in keys:
            lane: object = {"total": "*", "none": None}.get(self.policy.ordering.value, key)
            self.model.log[len(self.model.log)] = Message(lane, is_wanted=luck > 0)

    def read(self) -> None:
        end = len(self.model.log)
        while True:
            wish = self.subject.wanted(10_000)[0]
            stop = min(end, wish.start_offset + wish.max_messages)
            if wish.start_offset >= end:
                return
            stretch = range(wish.start_offset, stop)
            lanes = [self.model.log[o].lane for o in stretch]
            self.subject.offer(
                Arrival(
                    stream=STREAM,
                    first_offset=wish.start_offset,
                    end_offset=stop,
                    selected=BitMap64([o for o in stretch if self.model.log[o].is_wanted]),
                    keys=lanes,
                    publishers=lanes,
                ),
                self.model.now_us,
            )

    # Messages go out.

    @rule(consumer=consumers, count=st.integers(1, 6))
    def lease(self, consumer: str, count: int) -> None:
        self.read()
        over = self.subject.lease(consumer, count, self.model.now_us)
        got = [offset for run in over.runs for offset in run.to_offsets()]
        assert len(got) == len(set(got)) == over.size <= count
        for run in over.runs:
            for offset in run.to_offsets():
                assert run.attempts.get(offset, 1) == self.model.log[offset].fails + 1
        deadline_us = self.model.now_us + 10 * SECOND_US
        open_before = [o for o in self.model.log if self.model.is_eligible(o, consumer)]
        self.model.lease(sorted(got), consumer, deadline_us)
        if len(got) < count:
            left = [o for o in self.model.log if self.model.is_eligible(o, consumer)]
            assert not left, f"{left} could have been delivered"
        if self.policy.ordering is Ordering.NONE:
            assert sorted(got) == open_before[: len(got)]
        if self.model.keeps_leases:
            for run in over.runs:
                self.held |= dict(zip(run.ack_ids(), run.to_offsets(), strict=True))
        else:
            self.settle(got, "acking", over.facts, self.done(got))

    def settle(
        self, offsets: list[int], state: str, found: list[facts.Fact], then: Callable[[], None]
    ) -> None:
        """Note what a decision was about: the last of its facts brings its effect."""
        for offset in offsets:
            self.model.log[offset].state = state
        for fact in found[:-1]:
            self.decide(fact, lambda: None, lambda: None)
        if found:
            self.decide(found[-1], then, self.reopened(offsets))

    def done(self, offsets: list[int]) -> Callable[[], None]:
        def effect() -> None:
            for offset in offsets:
                self.model.log[offset].state = "done"

        return effect

    def reopened(self, offsets: list[int]) -> Callable[[], None]:
        def effect() -> None:
            for offset in offsets:
                if self.model.log[offset].state in ("acking", "held", "failing"):
                    self.model.log[offset].state = "open"

        return effect

    def pick(self, numbers: list[int]) -> dict[str, int]:
        names = sorted(self.held)
        return {names[n % len(names)]: self.held[names[n % len(names)]] for n in numbers if names}

    def drop(self, offsets: list[int]) -> None:
        """Ids whose lease has ended."""
        for ack_id, offset in list(self.held.items()):
            if offset in offsets:
                self.ended[ack_id] = self.held.pop(ack_id)

    @precondition(lambda self: self.model.keeps_leases)
    @rule(numbers=picks)
    def ack(self, numbers: list[int]) -> None:
        chosen = self.pick(numbers)
        settled = self.subject.ack(list(chosen))
        assert not settled.refused
        assert settled.accepted == len(chosen)
        offsets = list(chosen.values())
        self.drop(offsets)
        self.settle(offsets, "acking", settled.facts, self.done(offsets))

    @precondition(lambda self: self.model.keeps_leases and self.ended)
    @rule(data=st.data())
    def ack_too_late(self, data: st.DataObject) -> None:
        ack_id = data.draw(st.sampled_from(sorted(self.ended)))
        offset = self.ended[ack_id]
        message = self.model.log[offset]
        settled = self.subject.ack([ack_id])
        if settled.accepted:
            assert self.policy.guarantee is Guarantee.AT_LEAST_ONCE
            assert message.state == "open"
            self.settle([offset], "held", settled.facts, self.done([offset]))
        else:
            assert isinstance(settled.refused[0].error, StaleAckId)
            assert not settled.facts

    @precondition(lambda self: self.model.keeps_leases)
    @rule(numbers=picks, delay_s=st.none() | st.integers(0, 20))
    def nack(self, numbers: list[int], delay_s: int | None) -> None:
        chosen = self.pick(numbers)
        settled = self.subject.nack(list(chosen), self.model.now_us, delay_s=delay_s)
        assert not settled.refused
        self.fail(list(chosen.values()), settled, delay_s)

    @precondition(lambda self: self.model.keeps_leases)
    @rule(consumer=consumers, times=st.integers(1, 4))
    def fail_all(self, consumer: str, times: int) -> None:
        """The way to the dead letters, which single steps rarely go to the end."""
        for _ in range(times):
            self.lease(consumer, 6)
            self.nack(list(range(len(self.held))), None)
            self.sync()
            self.pass_time(20 * SECOND_US)
            self.sync()

    @rule(step_us=st.integers(0, 12 * SECOND_US))
    def pass_time(self, step_us: int) -> None:
        self.model.now_us += step_us
        found = self.subject.expire(self.model.now_us)
        late = [
            offset
            for offset, message in self.model.log.items()
            if message.state == "leased" and message.deadline_us <= self.model.now_us
        ]
        self.fail(late, Settled(found), None)

    def fail(self, offsets: list[int], settled: Settled, delay_s: int | None) -> None:
        before = {o for o, m in self.model.log.items() if m.state == "leased"}
        self.model.fail(offsets)
        after = {o for o, m in self.model.log.items() if m.state == "leased"}
        self.drop(sorted(before - after))
        told = {o for f in settled.facts if isinstance(f, facts.AttemptsFailed) for o in f.offsets}
        assert told == set(offsets)
        delay_us = None if delay_s is None else delay_s * SECOND_US
        for fact in settled.facts:
            assert isinstance(fact, facts.AttemptsFailed)
            self.decide(fact, self.failed(fact, delay_us), self.reopened(list(fact.offsets)))

    def failed(self, fact: facts.AttemptsFailed, delay_us: int | None) -> Callable[[], None]:
        def effect() -> None:
            for offset in fact.offsets:
                self.model.failed(offset, fact.attempt, fact.at_us, delay_us)

        return effect

    @precondition(lambda self: self.model.keeps_leases)
    @rule(numbers=picks, seconds=st.integers(0, 30))
    def extend(self, numbers: list[int], seconds: int) -> None:
        chosen = self.pick(numbers)
        settled = self.subject.extend(list(chosen), seconds, self.model.now_us)
        assert settled.accepted == len(chosen)
        assert not settled.facts
        for offset in chosen.values():
            self.model.log[offset].deadline_us = self.model.now_us + seconds * SECOND_US

    @rule(numbers=picks)
    def give_back(self, numbers: list[int]) -> None:
        chosen = self.pick(numbers)
        offsets = list(chosen.values())
        self.subject.return_unseen(list(chosen))
        self.drop(offsets)
        for offset in offsets:
            self.model.log[offset].state = "open"

    # The cursor moves.

    @rule(end=st.integers(0, 40))
    def commit(self, end: int) -> None:
        end = min(end, len(self.model.log))
        if self.policy.ordering is not Ordering.NONE:
            self.read()  # the lanes of what was not read are not known and cannot be held up
        settled = self.subject.commit(STREAM, end, len(self.model.log))
        self.drop([o for o in self.held.values() if o < end])
        about = [
            o
            for o, m in self.model.log.items()
            if o < end and m.is_wanted and m.state in ("open", "leased", "dead")
        ]
        if not settled.facts:
            assert not [o for o in about if self.model.log[o].is_wanted]
            return
        for offset in about:
            is_out = self.model.log[offset].state == "leased"
            self.model.log[offset].state = "acking" if is_out else "held"

        def otherwise() -> None:
            for offset in about:
                message = self.model.log[offset]
                if message.state in ("acking", "held"):
                    message.state = "dead" if self.model.is_exhausted(message.fails) else "open"

        self.decide(settled.facts[0], self.done(list(range(end))), otherwise)

    @precondition(lambda self: not self.pending)
    @rule(floor=st.integers(0, 40))
    def seek(self, floor: int) -> None:
        floor = min(floor, len(self.model.log))
        self.decide(self.subject.seek({STREAM: floor})[0], lambda: self.model.seek(floor), lambda: None)
        self.sync()
        self.drop(list(self.held.values()))

    @precondition(lambda self: not self.pending)
    @rule(numbers=st.lists(st.integers(0, 30), max_size=6))
    def take_back(self, numbers: list[int]) -> None:
        offsets = [n for n in numbers if n in self.model.log and self.model.log[n].state == "done"]
        for fact in self.subject.take_back(STREAM, BitMap64(offsets), self.model.now_us):
            self.decide(fact, lambda: self.model.reopen(offsets), lambda: None)
        self.sync()

    @rule(later=st.booleans())
    def bury(self, later: bool) -> None:
        dues = self.subject.dead_letters_due(self.model.now_us)
        for due in dues:
            assert self.model.log[due.offset].state in ("dead", "held")
            assert due.failure.attempts == self.policy.attempts_max
        if later:
            self.subject.defer_dead_letters(dues, self.model.now_us)
            return
        self.sync()
        for due in dues:
            copy = MessageId(9, 0, 0)
            fact = deadletter.dead_lettered(1, due, self.model.now_us, copy)
            self.decide(fact, self.done([due.offset]), lambda: None)
        self.sync()

    # What always holds.

    @invariant()
    def done_is_what_the_model_says(self) -> None:
        if STREAM not in self.subject.streams:
            return
        cursor = self.subject.cursor(STREAM)
        for offset, message in self.model.log.items():
            if message.is_wanted:
                assert cursor.is_acked(offset) == (message.state == "done"), offset

    @invariant()
    def in_flight_is_what_the_model_says(self) -> None:
        leased = sum(message.state == "leased" for message in self.model.log.values())
        assert self.subject.in_flight == leased == len(self.held)


def machine(policy: SubscriptionPolicy, kind: type[Delivery] = Delivery) -> type[DeliveryMachine]:
    return type("Machine", (DeliveryMachine,), {"policy": policy, "kind": kind})


def check(machine_type: type[DeliveryMachine], examples: int, phases: Iterable[Phase] = tuple(Phase)) -> None:
    run_state_machine_as_test(
        machine_type,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            phases=phases,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


RETRY = RetryPolicy(jitter=0.0, max_attempts=3)


@pytest.mark.parametrize("guarantee", list(Guarantee))
@pytest.mark.parametrize("ordering", list(Ordering))
def test_delivery_does_what_the_naive_model_does(ordering: Ordering, guarantee: Guarantee) -> None:
    policy = SubscriptionPolicy(ordering=ordering, guarantee=guarantee, retry=RETRY, dead_letter_topic="dead")
    check(machine(policy), examples=50)


@pytest.mark.parametrize("ordering", [Ordering.KEY, Ordering.TOTAL])
def test_a_window_per_key_does_what_the_naive_model_does(ordering: Ordering) -> None:
    policy = SubscriptionPolicy(ordering=ordering, key_window=3, retry=RETRY, dead_letter_topic="dead")
    check(machine(policy), examples=60)


class ForgetfulDelivery(Delivery):
    """Acks the right messages towards the consumer and one less towards the journal."""

    def _settle_acked(self, track, offsets):  # type: ignore[no-untyped-def]
        return super()._settle_acked(track, offsets - BitMap64([offsets.max()]) or offsets)


class GreedyDelivery(Delivery):
    """Acks a neighbour along with what it was asked to."""

    def _settle_acked(self, track, offsets):  # type: ignore[no-untyped-def]
        return super()._settle_acked(track, offsets | BitMap64([offsets.max() + 1]))


class MiscountingDelivery(Delivery):
    """Takes every failed attempt for the first."""

    def apply(self, fact: facts.Fact) -> None:
        if isinstance(fact, facts.AttemptsFailed):
            fact = msgspec.structs.replace(fact, attempt=1)
        super().apply(fact)


@pytest.mark.parametrize("broken", [ForgetfulDelivery, GreedyDelivery, MiscountingDelivery])
def test_a_broken_settling_path_is_caught(broken: type[Delivery]) -> None:
    with pytest.raises((AssertionError, KeyError, ExceptionGroup)):
        check(machine(SubscriptionPolicy(retry=RetryPolicy(jitter=0.0)), broken), 1000, [Phase.generate])
