"""Groups: the table walked pair by pair, and stories of members that come, go, stall and return."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest

from sparrow.kernel import facts
from sparrow.kernel.commits import GroupLedger
from sparrow.kernel.facts import Fact
from sparrow.kernel.member import Joined, Tick
from sparrow.kernel.membership import ABANDONED_WAIT_US, MEMBERS_MAX, Group
from sparrow.kernel.rebalance import TRANSITIONS, Event, IllegalMove, State, wait_us
from sparrow.kernel.schedule import NEVER_US
from sparrow.model.errors import (
    InvalidArgument,
    InvalidName,
    MemberNotFound,
    PreconditionFailed,
    ResourceExhausted,
    StaleGeneration,
)
from sparrow.model.group import GroupPolicy, parse_group_policy
from sparrow.model.message import StreamId

SECOND_US = 1_000_000
STREAMS = [StreamId(1, partition) for partition in range(6)]


def policy_of(**options: Any) -> GroupPolicy:
    return parse_group_policy(
        {"mode": "partitioned", "stabilisation_s": 0, "backoff_max_s": 0, "backoff_min_s": 0, **options}
    )


class Story:
    """A group with a clock, a journal, and members that remember what they were told."""

    def __init__(
        self, *names: str, ledger: GroupLedger | None = None, session: int = 0, **options: Any
    ) -> None:
        self.now_us = 0
        self.journal: list[Fact] = []
        self.seats: dict[str, Joined] = {}
        self.group = Group(7, policy_of(**options), 0, ledger=ledger, session=session)
        self.group.set_streams(STREAMS, 0)
        for name in names:
            self.join(name)
        if names:
            self.settle_down()

    def join(self, name: str, **options: Any) -> Joined:
        self.seats[name] = self.group.join(name, self.now_us, **options)
        return self.seats[name]

    def tick(self, seconds: float = 0) -> Tick:
        self.now_us += round(seconds * SECOND_US)
        tick = self.group.tick(self.now_us)
        for fact in tick.facts:
            self.journal.append(fact)
            self.group.apply(fact)
        return tick

    def beat(self, names: Iterable[str] | None = None) -> None:
        for name in self.seats if names is None else names:
            seat = self.seats[name]
            self.group.heartbeat(name, seat.incarnation, self.group.generation, self.now_us)

    def accept(self, *names: str) -> None:
        for name in names:
            self.group.accept(name, self.seats[name].incarnation, self.group.generation, self.now_us)

    def let_go(self) -> None:
        for stream, name in self.group.drains.items():
            self.group.released(name, stream, self.now_us)

    def settle_down(self) -> None:
        """Everybody who is here answers at once, until nothing is left to do."""
        self.tick()
        while self.group.state is not State.STABLE:
            self.accept(*(member.member_id for member in self.group.members))
            self.let_go()
            self.tick()

    def check(self, name: str, stream: StreamId | None = None, generation: int | None = None) -> None:
        spoken = self.group.generation if generation is None else generation
        self.group.check(name, self.seats[name].incarnation, spoken, stream)

    def owned(self) -> dict[str, set[StreamId]]:
        return {m.member_id: set(self.group.owned(m.member_id)) for m in self.group.members}

    def owner(self, stream: StreamId) -> str | None:
        return next((name for name, mine in self.owned().items() if stream in mine), None)


def at(state: State) -> Group:
    """A group brought to a state by the shortest way."""
    story = Story()
    if state is not State.EMPTY:
        story.join("a")
    if state in (State.REBALANCING, State.STABLE):
        story.tick()
    if state is State.STABLE:
        story.accept("a")
    assert story.group.state is state
    return story.group


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_every_pair_moves_by_the_table_or_is_refused(state: State, event: Event) -> None:
    group = at(state)
    target = TRANSITIONS.get((state, event))
    if target is None:
        with pytest.raises(IllegalMove):
            group.move(event)
        assert group.state is state
    else:
        group.move(event)
        assert group.state is target


# Joining.


def test_a_new_group_shares_out_all_streams() -> None:
    story = Story("a", "b", "c")
    assert sorted(len(mine) for mine in story.owned().values()) == [2, 2, 2]
    assert set().union(*story.owned().values()) == set(STREAMS)


def test_the_generation_grows_by_one_at_the_start_of_a_rebalance_and_not_at_its_end() -> None:
    story = Story("a")
    before = story.group.generation
    story.join("b")
    assert story.group.generation == before
    story.tick()
    assert story.group.generation == before + 1
    story.settle_down()
    assert story.group.generation == before + 1


def test_the_fact_names_generation_reason_and_members() -> None:
    story = Story("a")
    story.now_us = 9
    story.join("b")
    story.tick()
    assert story.journal[-1] == facts.GroupAdvanced(7, 2, 9, "consumer-joined", ("a", "b"))


def test_nothing_starts_before_the_generation_is_durable() -> None:
    story = Story("a")
    story.join("b")
    tick = story.group.tick(0)
    assert [type(fact) for fact in tick.facts] == [facts.GroupAdvanced]
    assert story.group.tick(0).facts == []
    assert (story.group.state, story.group.generation) == (State.PREPARING, 1)
    assert story.owner(STREAMS[0]) == "a"


def test_a_generation_that_the_journal_did_not_take_is_decided_again_after_a_moment() -> None:
    story = Story("a")
    story.join("b")
    story.group.abandon(story.group.tick(0).facts)
    assert story.group.next_wakeup_us() == ABANDONED_WAIT_US
    assert story.group.tick(0).facts == []
    assert story.group.tick(ABANDONED_WAIT_US).facts != []


def test_a_generation_whose_fact_was_written_slowly_gives_everybody_the_full_time() -> None:
    story = Story("a")
    story.join("b")
    decided = story.group.tick(0).facts
    story.now_us = 25 * SECOND_US
    story.beat()
    story.group.apply(decided[0])
    story.now_us += 29 * SECOND_US
    story.beat()
    assert story.tick().removed == []
    assert story.group.state is State.REBALANCING


def test_changes_within_the_stabilisation_are_one_rebalance() -> None:
    story = Story(stabilisation_s=0.2)
    for name in "abc":
        story.join(name)
        assert story.tick(0.05).facts == []
    assert story.group.next_wakeup_us() == 200_000
    story.tick(0.05)
    story.settle_down()
    assert (story.group.generation, story.group.total_rebalances) == (1, 1)


def test_who_joins_while_a_generation_is_under_way_has_its_turn_in_the_next() -> None:
    story = Story("a")
    story.join("b")
    story.tick()
    joined = story.join("c")
    assert joined.assignment == frozenset()
    assert story.group.generation == 2
    story.accept("a", "b")
    story.let_go()
    assert story.group.state is State.PREPARING
    assert story.group.total_rebalances == 2
    story.settle_down()
    assert story.group.generation == 3
    assert len(story.group.owned("c")) == 2


def test_who_joins_while_the_fact_is_written_has_its_turn_in_the_next() -> None:
    story = Story("a")
    story.join("b")
    decided = story.group.tick(0).facts
    story.join("c")
    story.group.apply(decided[0])
    assert story.group.assignment("c") == frozenset()
    story.settle_down()
    assert story.group.generation == 3
    assert len(story.group.owned("c")) == 2


def test_who_leaves_while_the_fact_is_written_is_not_planned_for() -> None:
    story = Story("a", "b")
    story.join("c")
    decided = story.group.tick(0).facts
    story.group.leave("b", story.seats["b"].incarnation, 0)
    story.group.apply(decided[0])
    assert set(story.group.assignment("a") | story.group.assignment("c")) == set(STREAMS)


def test_all_may_leave_while_the_fact_is_written() -> None:
    story = Story("a")
    story.join("b")
    decided = story.group.tick(0).facts
    for name in "ab":
        story.group.leave(name, story.seats[name].incarnation, 0)
    story.join("d")
    story.group.apply(decided[0])
    assert story.group.state is State.PREPARING
    story.settle_down()
    assert story.group.owned("d") == set(STREAMS)


@pytest.mark.parametrize("name", ["", "x" * 256, 7, None])
def test_a_member_needs_a_name(name: Any) -> None:
    with pytest.raises(InvalidName):
        Story().group.join(name, 0)


@pytest.mark.parametrize("count", [0, -1, True, 1.5])
def test_a_member_needs_room(count: Any) -> None:
    with pytest.raises(InvalidArgument):
        Story().group.join("a", 0, max_in_flight=count)


def test_a_member_has_the_room_of_the_policy_unless_it_asks_for_another() -> None:
    story = Story(member_max_in_flight=5)
    story.join("a")
    story.join("b", max_in_flight=9)
    assert [member.max_in_flight for member in story.group.members] == [5, 9]


def test_members_are_limited() -> None:
    story = Story()
    for number in range(MEMBERS_MAX):
        story.join(f"m{number}")
    with pytest.raises(ResourceExhausted):
        story.join("one more")
    assert story.join("m0").is_returning


# Returning and fencing.


def test_a_member_that_returns_keeps_its_streams_without_a_rebalance() -> None:
    story = Story("a", "b")
    before = story.group.owned("a")
    joined = story.join("a")
    assert joined.is_returning
    assert joined.assignment == before == story.group.owned("a")
    assert (story.group.state, story.group.generation) == (State.STABLE, 1)


def test_the_older_process_of_a_name_is_fenced() -> None:
    story = Story("a")
    older = story.seats["a"]
    newer = story.join("a")
    assert newer.incarnation > older.incarnation
    with pytest.raises(StaleGeneration, match="another process"):
        story.group.check("a", older.incarnation, 1, STREAMS[0])
    with pytest.raises(StaleGeneration):
        story.group.leave("a", older.incarnation, 0)
    reply = story.group.heartbeat("a", older.incarnation, 1, 0)
    assert reply.must_rejoin
    assert reply.is_fenced
    story.check("a", STREAMS[0])


def test_a_member_that_returns_while_it_was_waited_for_has_accepted() -> None:
    story = Story("a")
    story.join("b")
    story.tick()
    story.join("b")
    assert story.group.assignment("b")
    story.accept("a")
    story.let_go()
    assert story.group.state is State.STABLE


def test_what_drains_from_a_process_is_free_when_another_takes_its_name() -> None:
    story = Story("a")
    story.join("b")
    story.tick()
    story.accept("a", "b")
    assert story.group.drains
    story.join("a")
    assert not story.group.drains
    assert story.group.state is State.STABLE


def test_a_lost_connection_ends_a_member_unless_it_is_static() -> None:
    story = Story("a", "b")
    story.join("c", is_static=True)
    story.settle_down()
    assert not story.group.lost("c", story.seats["c"].incarnation, 0)
    assert story.group.lost("b", story.seats["b"].incarnation, 0)
    assert not story.group.lost("b", story.seats["b"].incarnation, 0)
    assert [member.member_id for member in story.group.members] == ["a", "c"]


def test_a_connection_that_was_replaced_may_break_without_effect() -> None:
    story = Story("a")
    older = story.seats["a"]
    story.join("a")
    assert not story.group.lost("a", older.incarnation, 0)
    assert story.group.state is State.STABLE


# Going.


def test_who_leaves_loses_its_streams_at_once_and_others_get_them() -> None:
    story = Story("a", "b")
    mine = story.group.owned("a")
    story.group.leave("a", story.seats["a"].incarnation, 0)
    assert all(story.owner(stream) is None for stream in mine)
    story.settle_down()
    assert story.group.owned("b") == set(STREAMS)


def test_who_is_silent_for_a_session_is_dead() -> None:
    story = Story("a", "b")
    story.now_us = 29 * SECOND_US
    story.beat("a")
    assert story.group.next_wakeup_us() == 30 * SECOND_US
    assert story.tick(1).removed == ["b"]
    story.settle_down()
    assert story.group.owned("a") == set(STREAMS)
    assert story.journal[-1].reason == "heartbeat-timeout"  # type: ignore[attr-defined]


def test_a_removed_member_is_told_to_join_again() -> None:
    story = Story("a", "b")
    story.now_us = 29 * SECOND_US
    story.beat("a")
    story.tick(1)
    reply = story.group.heartbeat("b", story.seats["b"].incarnation, 1, story.now_us)
    assert reply.must_rejoin
    assert not reply.is_fenced
    with pytest.raises(MemberNotFound, match="Join the group again"):
        story.check("b", STREAMS[0])
    assert not story.join("b").is_returning


def test_the_last_to_leave_makes_the_group_empty() -> None:
    story = Story("a")
    story.group.leave("a", story.seats["a"].incarnation, 0)
    assert story.group.state is State.EMPTY
    assert story.group.next_wakeup_us() == NEVER_US


@pytest.mark.parametrize("rebalance", ["cooperative", "eager"])
def test_all_may_leave_in_the_middle_of_a_rebalance(rebalance: str) -> None:
    story = Story("a", rebalance=rebalance)
    story.join("b")
    story.tick()
    for name in "ab":
        story.group.leave(name, story.seats[name].incarnation, 0)
    assert story.group.state is State.EMPTY
    story.join("c")
    story.settle_down()
    assert story.group.owned("c") == set(STREAMS)


# A rebalance.


def test_cooperative_members_go_on_with_what_they_keep() -> None:
    story = Story("a", "b")
    before = story.owned()
    story.join("c")
    story.tick()
    moving = set(story.group.drains)
    assert len(moving) == 2
    assert story.owned() == {name: mine - moving for name, mine in before.items()} | {"c": set()}


def test_eager_members_pause_until_all_is_done() -> None:
    story = Story("a", "b", rebalance="eager")
    story.join("c")
    story.tick()
    assert not any(story.owned().values())
    story.accept("a", "b", "c")
    assert not any(story.owned().values())
    story.let_go()
    assert set().union(*story.owned().values()) == set(STREAMS)


def test_a_stream_that_moves_is_leasable_when_it_is_drained_and_accepted() -> None:
    story = Story("a")
    story.join("b")
    story.tick()
    stream = min(story.group.drains)
    story.accept("b")
    assert story.owner(stream) is None
    story.group.released("b", stream, 0)
    assert story.owner(stream) is None
    story.group.released("a", stream, 0)
    assert story.owner(stream) == "b"


def test_a_drained_stream_waits_for_its_new_owner_to_accept() -> None:
    story = Story("a")
    story.join("b")
    story.tick()
    stream = min(story.group.drains)
    story.let_go()
    assert story.owner(stream) is None
    story.accept("b")
    assert story.owner(stream) == "b"


def test_leases_of_a_live_owner_may_be_settled_while_they_drain() -> None:
    story = Story("a")
    story.join("b")
    story.tick()
    stream = min(story.group.drains)
    story.check("a", stream, generation=1)
    story.check("a", stream, generation=2)
    with pytest.raises(StaleGeneration):
        story.check("b", stream)
    story.accept("a", "b")
    story.group.released("a", stream, 0)
    story.check("b", stream)
    with pytest.raises(StaleGeneration):
        story.check("a", stream, generation=1)


def test_a_live_owner_that_does_not_let_go_loses_the_stream_at_the_drain_timeout() -> None:
    story = Story("a", drain_timeout_s=10)
    story.join("b")
    story.tick()
    story.accept("a", "b")
    moving = sorted(story.group.drains)
    assert story.group.next_wakeup_us() == 10 * SECOND_US
    assert story.tick(9.9).expelled == []
    assert story.tick(0.1).expelled == [("a", stream) for stream in moving]
    assert story.group.state is State.STABLE
    with pytest.raises(StaleGeneration):
        story.check("a", moving[0])


def test_a_dead_owner_is_not_waited_for() -> None:
    story = Story("a")
    story.join("b")
    story.tick()
    story.accept("b")
    story.group.leave("a", story.seats["a"].incarnation, 0)
    assert not story.group.drains
    assert len(story.group.owned("b")) == 3
    story.settle_down()
    assert story.group.owned("b") == set(STREAMS)


def test_a_member_that_does_not_accept_in_time_is_dropped_though_it_beats() -> None:
    story = Story("a", "b", rebalance_timeout_s=20)
    story.join("c")
    story.tick()
    story.accept("a", "c")
    story.let_go()
    story.now_us = 19 * SECOND_US
    story.beat()
    assert story.group.next_wakeup_us() == 20 * SECOND_US
    assert story.tick(1).removed == ["b"]
    story.settle_down()
    assert sorted(len(mine) for mine in story.owned().values()) == [3, 3]
    assert story.journal[-1].reason == "member-silent"  # type: ignore[attr-defined]


def test_a_rebalance_ends_when_all_are_silent() -> None:
    story = Story(rebalance_timeout_s=20)
    story.join("a")
    story.join("b")
    story.tick()
    assert story.tick(20).removed == ["a", "b"]
    assert story.group.state is State.EMPTY


def test_counters_are_set_when_a_rebalance_is_complete() -> None:
    story = Story("a")
    story.join("b")
    story.tick()
    assert story.group.total_rebalances == 1
    story.now_us = 3 * SECOND_US
    story.accept("a", "b")
    story.let_go()
    assert story.group.total_rebalances == 2
    assert story.group.last_rebalance_at_us == 3 * SECOND_US
    assert story.group.last_rebalance_us == 3 * SECOND_US


def test_a_heartbeat_tells_what_to_take_up_until_it_is_accepted() -> None:
    story = Story("a")
    story.join("b")
    story.tick()
    seat = story.seats["b"]
    reply = story.group.heartbeat("b", seat.incarnation, seat.generation, 0, "fine")
    assert reply.must_accept
    assert (reply.generation, reply.assignment) == (2, story.group.assignment("b"))
    assert not story.group.accept("b", seat.incarnation, 2, 0).must_accept
    assert story.group.member("b").status == "fine"


def test_accepting_an_older_generation_changes_nothing_and_tells_the_present_one() -> None:
    story = Story("a")
    story.join("b")
    story.tick()
    reply = story.group.accept("a", story.seats["a"].incarnation, 1, 0)
    assert (reply.must_accept, reply.generation) == (True, 2)
    assert story.group.state is State.REBALANCING


@pytest.mark.parametrize("generation", [-1, 0, 2, 99])
def test_a_generation_that_the_member_was_not_in_is_stale(generation: int) -> None:
    story = Story("a", ledger=_ledger_at(0))
    story.group.leave("a", story.seats["a"].incarnation, 0)
    story.join("a")
    with pytest.raises(StaleGeneration) as caught:
        story.check("a", generation=generation)
    assert caught.value.details == {"generation": 1}
    assert story.group.heartbeat("a", story.seats["a"].incarnation, generation, 0).must_rejoin


def test_a_commit_from_before_a_break_in_ownership_is_stale() -> None:
    story = Story("a")
    story.join("b")
    story.settle_down()
    stream = min(story.group.owned("b"))
    story.group.leave("b", story.seats["b"].incarnation, 0)
    story.settle_down()
    assert story.owner(stream) == "a"
    story.check("a", stream, generation=3)
    with pytest.raises(StaleGeneration):
        story.check("a", stream, generation=1)
    kept = min(set(STREAMS) - {stream} - story.group.assignment("b"))
    story.check("a", kept)


# Streams, strategy, operators, lag.


def test_a_stream_that_is_gone_is_nobodys_at_once() -> None:
    story = Story("a")
    story.group.set_streams(STREAMS[1:], 0)
    assert story.owner(STREAMS[0]) is None
    with pytest.raises(StaleGeneration):
        story.check("a", STREAMS[0])
    assert story.group.state is State.PREPARING


def test_a_new_stream_is_shared_out_by_a_rebalance() -> None:
    story = Story("a", "b")
    new = StreamId(2, 0)
    story.group.set_streams([*STREAMS, new], 0)
    assert story.owner(new) is None
    story.settle_down()
    assert story.owner(new) is not None


def test_the_same_streams_again_change_nothing() -> None:
    story = Story("a")
    story.group.set_streams(list(reversed(STREAMS)), 0)
    assert story.group.state is State.STABLE


def test_a_rebalance_does_not_wait_for_a_stream_that_is_gone() -> None:
    story = Story("a")
    story.join("b")
    story.tick()
    story.accept("a", "b")
    story.group.set_streams(set(STREAMS) - set(story.group.drains), 0)
    assert story.group.total_rebalances == 2
    story.settle_down()


def test_another_strategy_makes_another_plan() -> None:
    story = Story("a", "b")
    story.group.set_policy(policy_of(strategy="range"), 0)
    story.settle_down()
    assert story.group.owned("a") == set(STREAMS[:3])


def test_the_mode_changes_only_without_members() -> None:
    story = Story("a")
    with pytest.raises(PreconditionFailed):
        story.group.set_policy(GroupPolicy(), 0)
    story.group.leave("a", story.seats["a"].incarnation, 0)
    story.group.set_policy(GroupPolicy(), 0)
    assert story.group.state is State.EMPTY


def test_an_operator_may_ask_for_a_rebalance() -> None:
    story = Story("a")
    story.group.rebalance(0)
    story.settle_down()
    assert story.group.generation == 2
    assert story.journal[-1].reason == "admin"  # type: ignore[attr-defined]


def test_critical_lag_rebalances_once_in_its_time() -> None:
    story = Story("a", lag_rebalance_s=60)
    assert story.group.lag_critical(0)
    assert not story.group.lag_critical(0)
    story.settle_down()
    assert not story.group.lag_critical(59 * SECOND_US)
    assert story.group.lag_critical(60 * SECOND_US)


def test_rebalances_that_follow_one_another_wait_longer_and_longer() -> None:
    story = Story("a", backoff_min_s=0.5, backoff_max_s=3, calm_s=10)
    waits = []
    for _ in range(5):
        story.group.rebalance(story.now_us)
        waits.append((story.group.next_wakeup_us() - story.now_us) / SECOND_US)
        story.tick(waits[-1])
        story.settle_down()
        story.beat()
    assert waits == [0.5, 1, 2, 3, 3]
    story.now_us += 10 * SECOND_US
    story.beat()
    story.group.rebalance(story.now_us)
    assert story.group.next_wakeup_us() == story.now_us


def test_the_wait_is_never_below_the_stabilisation() -> None:
    assert wait_us(GroupPolicy(stabilisation_s=2), 1) == 2 * SECOND_US
    assert wait_us(GroupPolicy(), 10**6) == 10 * SECOND_US


# Shared mode.


def test_members_of_a_shared_group_may_lease_everything_from_their_join_on() -> None:
    story = Story("a", mode="shared")
    story.join("b")
    assert story.group.owned("b") == set(STREAMS)
    story.tick()
    assert story.group.owned("a") == set(STREAMS)
    assert (story.group.state, story.group.generation) == (State.STABLE, 2)
    story.check("b", STREAMS[0], generation=1)
    with pytest.raises(StaleGeneration):
        story.check("b", STREAMS[0], generation=0)
    assert story.group.owned("nobody") == frozenset()


# What lasts.


def _ledger_at(generation: int) -> GroupLedger:
    ledger = GroupLedger()
    if generation:
        ledger.apply(facts.GroupAdvanced(7, generation, 0, "admin", ()))
    return ledger


def test_after_a_restart_the_group_is_empty_and_its_generation_goes_on() -> None:
    story = Story("a", "b")
    ledger = GroupLedger()
    for fact in story.journal:
        ledger.apply(fact)
    again = Story(ledger=ledger, session=1)
    assert (again.group.state, again.group.generation) == (State.EMPTY, 1)
    with pytest.raises(MemberNotFound):
        again.group.check("a", story.seats["a"].incarnation, 1)
    again.join("a")
    with pytest.raises(StaleGeneration):
        again.group.check("a", story.seats["a"].incarnation, 1)
    again.settle_down()
    assert again.group.generation == 2


def test_replay_through_the_group_starts_no_rebalance() -> None:
    story = Story("a", "b")
    again = Group(7, policy_of(), 0)
    for fact in story.journal:
        again.apply(fact)
    assert (again.state, again.generation) == (State.EMPTY, 1)
    assert again.ledger.checkpoint() == story.group.ledger.checkpoint()


def test_a_commit_of_an_owner_becomes_a_fact_and_is_read_back() -> None:
    story = Story("a")
    seat = story.seats["a"]
    (fact,) = story.group.commit("a", seat.incarnation, 1, STREAMS[0], 40, 5, "note")
    assert story.group.ledger.commit_of(STREAMS[0]) is None
    story.group.apply(fact)
    commit = story.group.ledger.commit_of(STREAMS[0])
    assert commit is not None
    assert (commit.offset, commit.metadata, commit.generation) == (40, "note", 1)


def test_a_commit_of_another_than_the_owner_is_refused() -> None:
    story = Story("a", "b")
    theirs = min(story.group.owned("b"))
    with pytest.raises(StaleGeneration):
        story.group.commit("a", story.seats["a"].incarnation, 1, theirs, 40, 5)


def committed_and_left(**options: Any) -> Story:
    story = Story("a", **options)
    for fact in story.group.commit("a", story.seats["a"].incarnation, 1, STREAMS[0], 40, 0):
        story.group.apply(fact)
    story.group.leave("a", story.seats["a"].incarnation, 5 * SECOND_US)
    return story


def test_commits_are_forgotten_when_the_group_was_empty_for_long() -> None:
    story = committed_and_left(offset_expiry_s=60)
    assert story.group.next_wakeup_us() == 65 * SECOND_US
    story.tick(64)
    assert story.group.ledger.has_commits
    story.tick(1)
    assert not story.group.ledger.has_commits
    assert story.group.next_wakeup_us() == NEVER_US


def test_commits_stay_while_somebody_is_there_or_when_told_so() -> None:
    story = committed_and_left(offset_expiry_s=60)
    story.join("b")
    story.tick(20)
    assert story.group.ledger.has_commits
    assert committed_and_left(offset_expiry_s=None).group.next_wakeup_us() == NEVER_US


def test_forgetting_that_the_journal_did_not_take_is_decided_again() -> None:
    story = committed_and_left(offset_expiry_s=60)
    decided = story.group.tick(65 * SECOND_US).facts
    assert story.group.tick(65 * SECOND_US).facts == []
    story.group.abandon(decided)
    assert story.group.next_wakeup_us() == 66 * SECOND_US
    assert [type(fact) for fact in story.group.tick(66 * SECOND_US).facts] == [facts.OffsetsForgotten]
