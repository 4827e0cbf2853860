"""Slow and bad members of a group are found, get less, and recover; leases last as long as work does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.kernel.lag import LagLevel
from sparrow.kernel.pace import SAMPLES_MIN, WEIGHT_MIN, Deadline, GroupPace, MemberPace

SECOND_US = 1_000_000
OK, WARN, CRITICAL = LagLevel.OK, LagLevel.WARN, LagLevel.CRITICAL


class Story:
    """A group in which every member is always busy and acks so many a second."""

    def __init__(self) -> None:
        self.group = GroupPace(heartbeat_interval_s=10)
        self.second = 0

    def run(
        self,
        seconds: int,
        rates: dict[str, int],
        *,
        latency_s: dict[str, float] | None = None,
        failing: dict[str, int] | None = None,
    ) -> dict[str, LagLevel]:
        levels: dict[str, LagLevel] = {}
        for _ in range(seconds):
            self.second += 1
            now_us = self.second * SECOND_US
            for member, rate in rates.items():
                failures = (failing or {}).get(member, 0)
                self.group.handed_over(member, max(1, rate + failures), now_us - SECOND_US)
                took_us = round((latency_s or {}).get(member, 0.1) * SECOND_US)
                if rate:
                    self.group.acked(member, rate, rate * (now_us - took_us), now_us)
                if failures:
                    self.group.failed(member, failures, now_us)
                self.group.heartbeat(member, now_us)
            levels = self.group.observe(now_us)
        return levels

    def look(self, member: str) -> MemberPace:
        found = self.group.look(member, self.second * SECOND_US)
        assert found is not None
        return found


@pytest.mark.parametrize(("rate", "level"), [(60, OK), (45, WARN), (20, CRITICAL)])
def test_a_member_that_acks_less_than_the_others_is_found(rate: int, level: LagLevel) -> None:
    levels = Story().run(60, {"ann": 100, "bob": 100, "cid": rate})
    assert levels == {"ann": OK, "bob": OK, "cid": level}


def test_of_two_the_slow_one_is_found_and_not_the_fast_one() -> None:
    assert Story().run(60, {"ann": 100, "bob": 10}) == {"ann": OK, "bob": CRITICAL}


def test_one_that_is_very_fast_makes_nobody_slow() -> None:
    levels = Story().run(60, {"ann": 100, "bob": 110, "cid": 90, "dan": 5000})
    assert set(levels.values()) == {OK}


@pytest.mark.parametrize(("took_s", "level"), [(0.15, OK), (0.25, WARN), (0.6, CRITICAL)])
def test_a_member_that_takes_longer_than_the_others_is_found(took_s: float, level: LagLevel) -> None:
    latency_s = {"cid": took_s}
    levels = Story().run(60, {"ann": 100, "bob": 100, "cid": 100}, latency_s=latency_s)
    assert levels == {"ann": OK, "bob": OK, "cid": level}


def test_a_member_alone_is_not_judged() -> None:
    story = Story()
    assert story.run(60, {"ann": 1}) == {"ann": OK}
    assert story.look("ann").rate_ratio is None


def test_a_few_acks_mean_nothing() -> None:
    story = Story()
    story.run(60, {"ann": 100, "bob": 100})
    story.group.handed_over("cid", SAMPLES_MIN - 1, story.second * SECOND_US)
    assert story.run(5, {"ann": 100, "bob": 100})["cid"] is OK


def test_one_that_holds_much_and_never_acks_is_found() -> None:
    story = Story()
    story.group.handed_over("cid", 1000, 0)
    assert story.run(30, {"ann": 100, "bob": 100})["cid"] is CRITICAL
    assert story.group.weight("cid") == WEIGHT_MIN


def test_a_slow_member_gets_less_and_a_live_one_never_nothing() -> None:
    story = Story()
    story.run(60, {"ann": 100, "bob": 100, "cid": 20})
    assert story.group.weight("ann") == 1
    assert story.group.weight("cid") == pytest.approx(0.2, abs=0.02)
    story.run(600, {"ann": 100, "bob": 100, "cid": 0})
    assert story.group.weight("cid") == WEIGHT_MIN


def test_a_member_that_recovers_gets_its_full_share_again() -> None:
    story = Story()
    story.run(60, {"ann": 100, "bob": 100, "cid": 10})
    assert story.group.weight("cid") < 0.2
    story.run(300, {"ann": 100, "bob": 100, "cid": 100})
    assert story.group.weight("cid") == 1


def test_one_that_gets_little_to_do_is_not_slow() -> None:
    """It holds messages a tenth of the time and is as quick as the others while it does."""
    story = Story()
    for _ in range(60):
        story.run(1, {"ann": 100, "bob": 100})
        now_us = story.second * SECOND_US
        story.group.handed_over("cid", 10, now_us)
        story.group.acked("cid", 10, 10 * now_us, now_us + SECOND_US // 10)
    assert story.look("cid").rate_ratio == pytest.approx(1, rel=0.1)
    assert story.look("cid").level is OK


def test_one_that_fails_much_gets_less() -> None:
    story = Story()
    story.run(60, {"ann": 100, "bob": 100}, failing={"bob": 60})
    assert story.look("bob").failure_share == pytest.approx(0.375, abs=0.01)
    assert story.group.weight("bob") == pytest.approx(0.625, abs=0.01)


@pytest.mark.parametrize(("gap", "level"), [(1.5, OK), (2.5, WARN), (6, CRITICAL)])
def test_a_gap_in_the_heartbeats_is_seen(gap: float, level: LagLevel) -> None:
    group = GroupPace(heartbeat_interval_s=10)
    group.joined("ann", 0)
    group.observe(round(gap * 10 * SECOND_US))
    assert group.observe(round(gap * 10 * SECOND_US) + 1)["ann"] is level


@pytest.mark.parametrize(("growth", "level"), [(1, OK), (3, WARN), (20, CRITICAL)])
def test_holding_more_and_more_is_seen(growth: int, level: LagLevel) -> None:
    story = Story()
    for _ in range(60):
        story.group.handed_over("ann", growth, story.second * SECOND_US)
        story.run(1, {"ann": 10})
    assert story.look("ann").level is level


def test_one_that_left_is_forgotten() -> None:
    story = Story()
    story.run(10, {"ann": 100, "bob": 1})
    story.group.left("bob")
    assert len(story.group) == 1
    assert story.group.look("bob", 0) is None
    assert story.group.weight("bob") == 1


def test_what_is_taken_back_counts_as_neither_done_nor_failed() -> None:
    group = GroupPace()
    group.handed_over("ann", 100, 0)
    group.returned("ann", 100, SECOND_US)
    found = group.look("ann", SECOND_US)
    assert found is not None
    assert (found.in_flight, found.failure_share) == (0, 0)


# How long a lease should last.


def test_the_deadline_begins_where_the_policy_has_it() -> None:
    assert Deadline(30).ack_deadline_s == 30


def test_it_grows_fast_and_shrinks_slowly() -> None:
    deadline = Deadline(10)
    for _ in range(20):
        deadline.processed(60 * SECOND_US)
    assert deadline.ack_deadline_s > 100
    high = deadline.ack_deadline_s
    for _ in range(20):
        deadline.processed(SECOND_US)
    assert deadline.ack_deadline_s > 0.75 * high
    for _ in range(1000):
        deadline.processed(SECOND_US)
    assert deadline.ack_deadline_s == 5


def test_a_lease_that_ran_out_makes_the_next_one_longer() -> None:
    deadline = Deadline(10)
    deadline.timed_out()
    assert deadline.ack_deadline_s == 15


def test_it_rests_where_one_in_twenty_is_longer() -> None:
    deadline = Deadline(60)
    for number in range(20_000):
        deadline.processed((number * 7919 % 1000) * SECOND_US // 10)  # evenly from 0 to 100 s
    assert deadline.estimate_s == pytest.approx(95, rel=0.1)


@given(st.lists(st.none() | st.integers(0, 10**10), max_size=200), st.floats(0, 10_000))
def test_it_stays_within_its_bounds(events: list[int | None], initial_s: float) -> None:
    deadline = Deadline(initial_s)
    for event in events:
        if event is None:
            deadline.timed_out()
        else:
            deadline.processed(event)
        assert 5 <= deadline.ack_deadline_s <= 600
