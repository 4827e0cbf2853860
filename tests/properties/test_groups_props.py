"""Groups against a tiny model: members crash, stall, lie about generations, return; the journal fails.

The model is the set of leases that processes hold and the list of processes that must be refused. The
shell's part is played by the book: it releases what the group tells it to, and reports empty hands.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sparrow.kernel import facts
from sparrow.kernel.commits import GroupLedger
from sparrow.kernel.membership import Group
from sparrow.kernel.rebalance import State
from sparrow.model.errors import MemberNotFound, StaleGeneration
from sparrow.model.group import GroupStrategy, RebalanceProtocol, parse_group_policy
from sparrow.model.message import StreamId

SECOND_US = 1_000_000
NAMES = ["ann", "bob", "cyd", "dan"]
STREAMS = [StreamId(topic, partition) for topic in (1, 2) for partition in range(4)]
ENDS_AFTER_US = 31 * SECOND_US
"""The longer of the two timeouts below, and a second for what comes between two ticks."""

names = st.sampled_from(NAMES)
some_streams = st.just(set(STREAMS)) | st.sets(st.sampled_from(STREAMS))


class Process(NamedTuple):
    """A consumer process that was a member at some time."""

    name: str
    incarnation: int
    joined_in: int


class Groups(RuleBasedStateMachine):
    options: dict[str, Any]

    @initialize(streams=some_streams, first=st.sets(names))
    def open(self, streams: set[StreamId], first: set[str]) -> None:
        self.now_us = 0
        self.session = 1
        self.group = self.open_group(GroupLedger())
        self.processes: dict[str, Process] = {}
        self.outdated: list[Process] = []
        self.held: dict[tuple[str, StreamId], int] = {}
        self.journal: list[facts.Fact] = []
        self.pending: list[facts.Fact] = []
        self.is_slow = False
        self.began_us = 0
        self.set_streams(streams)
        for name in sorted(first):
            self.join(name, False)
        self.everybody_behaves()

    def open_group(self, ledger: GroupLedger) -> Group:
        policy = parse_group_policy({"rebalance_timeout_s": 30, "drain_timeout_s": 10, **self.options})
        return Group(1, policy, self.now_us, ledger=ledger, session=self.session)

    @property
    def is_shared(self) -> bool:
        return self.options["mode"] == "shared"

    # What processes do.

    @rule(name=names, is_static=st.booleans())
    def join(self, name: str, is_static: bool) -> None:
        before = self.processes.get(name)
        joined = self.group.join(name, self.now_us, is_static=is_static)
        assert joined.is_returning == (before is not None)
        if before is not None:
            self.outdated.append(before)
            self.drop_leases(name)
        self.processes[name] = Process(name, joined.incarnation, joined.generation)
        self.report_empty_hands()

    @rule(name=names, says_goodbye=st.booleans())
    def go(self, name: str, says_goodbye: bool) -> None:
        process = self.processes.get(name)
        if process is None:
            return
        if says_goodbye:
            self.group.leave(name, process.incarnation, self.now_us)
            self.gone(name)
        elif self.group.lost(name, process.incarnation, self.now_us):
            self.gone(name)

    @rule(only=st.sets(names))
    def beat(self, only: set[str]) -> None:
        for name in sorted(only & self.processes.keys()):
            process = self.processes[name]
            reply = self.group.heartbeat(name, process.incarnation, process.joined_in, self.now_us)
            assert not reply.must_rejoin
            assert reply.generation == self.group.generation

    @rule(only=st.sets(names, min_size=1))
    def accept(self, only: set[str]) -> None:
        for name in sorted(only & self.processes.keys()):
            self.group.accept(name, self.processes[name].incarnation, self.group.generation, self.now_us)

    @rule(only=st.sets(names, min_size=1))
    def lease(self, only: set[str]) -> None:
        for name in sorted(only):
            for stream in self.group.owned(name):
                assert name in self.processes
                self.held.setdefault((name, stream), self.group.generation)

    @rule(name=names, count=st.integers(1, 8))
    def settle(self, name: str, count: int) -> None:
        for key in [key for key in sorted(self.held) if key[0] == name][:count]:
            del self.held[key]
        self.report_empty_hands()

    @rule(name=names, comes=st.booleans(), accepting=st.sets(names))
    def change_while_all_work(self, name: str, comes: bool, accepting: set[str]) -> None:
        """The usual course: everybody holds messages when the next generation begins."""
        self.beat(set(NAMES))
        self.lease(set(NAMES))
        if comes:
            self.join(name, False)
        else:
            self.go(name, True)
        self.pass_time(5)
        self.accept(accepting)
        self.lease(set(NAMES))

    @rule(name=names, generation=st.integers(-1, 30), stream=st.sampled_from(STREAMS))
    def lie(self, name: str, generation: int, stream: StreamId) -> None:
        """Whoever gets through speaks for a generation that was, and owns the stream."""
        process = self.processes.get(name)
        try:
            self.group.check(name, process.incarnation if process else 1, generation, stream)
        except (StaleGeneration, MemberNotFound):
            return
        assert process is not None
        assert process.joined_in <= generation <= self.group.generation
        if not self.is_shared:
            holders = [holder for holder, held in self.held if held == stream]
            assert holders in ([], [name])
            assert stream in self.group.assignment(name) or self.group.drains.get(stream) == name

    @precondition(lambda self: self.outdated)
    @rule(data=st.data(), stream=st.sampled_from([None, *STREAMS]), ahead=st.integers(-2, 1))
    def outdated_speaks(self, data: st.DataObject, stream: StreamId | None, ahead: int) -> None:
        process = data.draw(st.sampled_from(self.outdated))
        generation = self.group.generation + ahead
        with pytest.raises((StaleGeneration, MemberNotFound)):
            self.group.check(process.name, process.incarnation, generation, stream)
        with pytest.raises((StaleGeneration, MemberNotFound)):
            self.group.commit(process.name, process.incarnation, generation, STREAMS[0], 1, self.now_us)
        assert self.group.heartbeat(process.name, process.incarnation, generation, self.now_us).must_rejoin

    # What the shell does.

    @rule(seconds=st.sampled_from([0, 0, 0.1, 1, 9, 29]))
    def pass_time(self, seconds: float) -> None:
        """The shell wakes up whenever the group asks it to."""
        until_us = self.now_us + round(seconds * SECOND_US)
        self.run_tick(self.now_us)
        while (next_us := self.group.next_wakeup_us()) <= until_us:
            self.run_tick(max(self.now_us, next_us))
        self.run_tick(until_us)

    @rule()
    def write_slowly(self) -> None:
        """From now on the journal takes its time, once."""
        self.is_slow = True

    @precondition(lambda self: self.pending)
    @rule(is_taken=st.booleans())
    def finish_write(self, is_taken: bool) -> None:
        """The journal took what was decided, or failed."""
        self.is_slow = False
        decided, self.pending = self.pending, []
        if not is_taken:
            self.group.abandon(decided)
            return
        for fact in decided:
            self.journal.append(fact)
            self.apply(fact)

    @rule(streams=some_streams)
    def set_streams(self, streams: set[StreamId]) -> None:
        self.group.set_streams(streams, self.now_us)
        self.held = {key: since for key, since in self.held.items() if key[1] in streams}

    @rule(which=st.sampled_from(["admin", "lag", "range", "sticky", "round_robin"]))
    def disturb(self, which: str) -> None:
        if which == "admin":
            self.group.rebalance(self.now_us)
        elif which == "lag":
            self.group.lag_critical(self.now_us)
        elif not self.is_shared:
            options = {**self.options, "strategy": which}
            self.group.set_policy(parse_group_policy(options), self.now_us)

    @rule(chance=st.integers(0, 7))
    def restart(self, chance: int) -> None:
        if chance != 7:
            return
        ledger = GroupLedger()
        for fact in self.journal:
            ledger.apply(fact)
        assert ledger.checkpoint() == self.group.ledger.checkpoint()
        resting = GroupLedger()
        resting.restore(ledger.checkpoint())
        self.session += 1
        streams = self.group.streams
        self.group = self.open_group(resting)
        self.group.set_streams(streams, self.now_us)
        self.outdated += self.processes.values()
        self.processes.clear()
        self.held.clear()
        self.pending.clear()

    @rule()
    def everybody_behaves(self) -> None:
        """Then the group is stable at once, or as soon as its waits are over."""
        for _ in range(40):
            self.finish_write(True)
            self.beat(set(NAMES))
            self.accept(set(NAMES))
            self.held.clear()
            self.report_empty_hands()
            if self.group.state in (State.STABLE, State.EMPTY):
                return
            self.run_tick(max(self.now_us, min(self.group.next_wakeup_us(), self.now_us + 5 * SECOND_US)))
        raise AssertionError(f"the group is still {self.group.state}")

    # The shell's part.

    def run_tick(self, now_us: int) -> None:
        self.now_us = max(self.now_us, now_us)
        tick = self.group.tick(self.now_us)
        for name in tick.removed:
            self.gone(name)
        for name, stream in tick.expelled:
            self.held.pop((name, stream), None)
        self.pending += tick.facts
        if not self.is_slow:
            self.finish_write(True)

    def apply(self, fact: facts.Fact) -> None:
        before = {name: self.group.owned(name) for name in self.processes}
        generation = self.group.generation
        self.group.apply(fact)
        if isinstance(fact, facts.GroupAdvanced):
            assert self.group.generation == fact.generation == generation + 1
            self.began_us = self.now_us
        if self.group.policy.rebalance is RebalanceProtocol.COOPERATIVE:
            for name, mine in before.items():
                assert mine & self.group.assignment(name) <= self.group.owned(name)
        self.report_empty_hands()

    def gone(self, name: str) -> None:
        self.outdated.append(self.processes.pop(name))
        self.drop_leases(name)

    def drop_leases(self, name: str) -> None:
        self.held = {key: since for key, since in self.held.items() if key[0] != name}

    def report_empty_hands(self) -> None:
        for stream, name in self.group.drains.items():
            if (name, stream) not in self.held:
                self.group.released(name, stream, self.now_us)

    # What always holds.

    @invariant()
    def the_members_are_the_processes(self) -> None:
        assert {m.member_id: m.incarnation for m in self.group.members} == {
            process.name: process.incarnation for process in self.processes.values()
        }

    @invariant()
    def no_stream_is_leasable_by_two_or_while_another_holds_it(self) -> None:
        if self.is_shared:
            return
        owned = [stream for name in self.processes for stream in self.group.owned(name)]
        assert len(owned) == len(set(owned))
        holders = {stream: name for name, stream in self.held}
        assert len(holders) == len(self.held)
        for name in self.processes:
            assert all(holders.get(stream, name) == name for stream in self.group.owned(name))

    @invariant()
    def what_a_live_member_holds_it_may_settle(self) -> None:
        for (name, stream), generation in self.held.items():
            incarnation = self.processes[name].incarnation
            self.group.check(name, incarnation, generation, stream)
            self.group.check(name, incarnation, self.group.generation, stream)

    @invariant()
    def a_stable_group_has_shared_out_everything_evenly(self) -> None:
        if self.group.state is not State.STABLE or self.is_shared:
            return
        shares = [self.group.owned(name) for name in self.processes]
        assert frozenset().union(*shares) == self.group.streams
        sizes = [len(share) for share in shares]
        if self.group.policy.strategy is not GroupStrategy.RANGE:
            assert max(sizes) - min(sizes) <= 1

    @invariant()
    def it_is_empty_when_nobody_is_there(self) -> None:
        assert (self.group.state is State.EMPTY) == (not self.processes)

    @invariant()
    def a_rebalance_ends_and_is_counted_at_its_end(self) -> None:
        if self.group.state is State.REBALANCING:
            assert self.now_us - self.began_us <= ENDS_AFTER_US
        else:
            assert not self.group.drains

    @invariant()
    def generations_grow(self) -> None:
        numbers = [fact.generation for fact in self.journal if isinstance(fact, facts.GroupAdvanced)]
        assert numbers == list(range(1, len(numbers) + 1))


CASES = {
    "cooperative": {"mode": "partitioned", "rebalance": "cooperative", "stabilisation_s": 0.2},
    "at once": {"mode": "partitioned", "rebalance": "cooperative", "stabilisation_s": 0, "backoff_min_s": 0},
    "eager": {"mode": "partitioned", "rebalance": "eager", "stabilisation_s": 0.2},
    "shared": {"mode": "shared", "stabilisation_s": 0.2},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_groups_hold_their_promises_whatever_members_do(options: dict[str, Any]) -> None:
    machine = type("Case", (Groups,), {"options": options})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=200,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
