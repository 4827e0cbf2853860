"""Shares of what is ready: fair to those who pull, and nobody waits for those who do not."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.kernel.schedule import NEVER_US
from sparrow.kernel.sharing import BUSY_US, IDLE_US, Sharing
from sparrow.model.errors import MemberNotFound
from sparrow.model.group import GroupStrategy

SHARED = [GroupStrategy.ROUND_ROBIN, GroupStrategy.LEAST_LOADED]
BIG = 100_000


class Crowd:
    """Members, what they hold, and a pool of ready messages: a delivery in eight lines."""

    def __init__(
        self,
        names: Iterable[str] = "abc",
        strategy: GroupStrategy = GroupStrategy.ROUND_ROBIN,
        ready: int = 0,
        max_in_flight: int = 10**9,
    ) -> None:
        self.held: dict[str, int] = {}
        self.ready = ready
        self.sharing = Sharing(strategy, lambda name: self.held.get(name, 0))
        for name in names:
            self.sharing.add(name, max_in_flight, 0)

    def pull(self, name: str, now_us: int = 0, wanted: int = BIG) -> int:
        count = self.sharing.allowance(name, wanted, self.ready, now_us)
        assert 0 <= count <= min(wanted, self.ready)
        if count:
            self.sharing.served(name, count, now_us)
            self.held[name] = self.held.get(name, 0) + count
            self.ready -= count
        return count

    def settle(self, name: str, now_us: int = 0) -> None:
        self.held[name] = 0
        self.sharing.settled(name, now_us)


@pytest.mark.parametrize("strategy", SHARED)
@pytest.mark.parametrize("order", list(itertools.permutations("abc")))
@pytest.mark.parametrize("gap_us", [0, 1_000, BUSY_US, 300_000])
def test_three_members_get_three_of_nine_each(
    strategy: GroupStrategy, order: tuple[str, ...], gap_us: int
) -> None:
    crowd = Crowd(strategy=strategy, ready=9)
    for turn, name in enumerate(order):
        assert crowd.pull(name, turn * gap_us) == 3


@pytest.mark.parametrize("strategy", SHARED)
def test_a_greedy_member_that_pulls_again_does_not_get_the_others_share(strategy: GroupStrategy) -> None:
    crowd = Crowd(strategy=strategy, ready=9)
    assert [crowd.pull(name) for name in "aaabbcac"] == [3, 0, 0, 3, 0, 3, 0, 0]


@pytest.mark.parametrize("strategy", SHARED)
@given(
    ready=st.integers(0, 50),
    names=st.sets(st.sampled_from("abcdefgh"), min_size=1),
    pulls=st.lists(st.sampled_from("abcdefgh"), max_size=40),
)
def test_whoever_pulls_how_often_all_get_the_same_up_to_one_and_nothing_is_left(
    strategy: GroupStrategy, ready: int, names: set[str], pulls: list[str]
) -> None:
    crowd = Crowd(names, strategy, ready)
    for name in [*(pull for pull in pulls if pull in names), *sorted(names)]:
        crowd.pull(name)
    shares = [crowd.held.get(name, 0) for name in names]
    assert crowd.ready == 0
    assert max(shares) - min(shares) <= 1


def test_thousands_are_shared_in_one_pull_each() -> None:
    crowd = Crowd(ready=30_000)
    assert [crowd.pull(name) for name in "abc"] == [10_000] * 3


def test_the_share_that_a_small_pull_cannot_use_is_the_others() -> None:
    crowd = Crowd(ready=1000)
    assert crowd.pull("a", wanted=10) == 10
    crowd.sharing.pull_began("a", 10, 0)
    crowd.sharing.pull_began("b", 10, 0)
    assert crowd.pull("c", wanted=BIG) == 970


def test_a_full_member_holds_nobody_back() -> None:
    crowd = Crowd(ready=90, max_in_flight=30)
    assert [crowd.pull(name) for name in "abc"] == [30] * 3
    crowd.settle("b")
    crowd.ready = 20
    assert crowd.pull("a") == 0
    assert crowd.pull("b") == 20


def test_a_member_that_never_comes_is_waited_for_no_longer_than_a_second() -> None:
    crowd = Crowd(ready=9)
    crowd.sharing.pull_began("a", BIG, 0)
    assert crowd.pull("a") == 3
    assert crowd.sharing.next_wakeup_us(0) == IDLE_US
    assert crowd.pull("a", IDLE_US - 1) == 0
    assert crowd.pull("a", IDLE_US) == 6


def test_a_busy_member_is_waited_for_a_moment_only() -> None:
    crowd = Crowd("ab", ready=2)
    assert [crowd.pull(name) for name in "ab"] == [1, 1]
    crowd.settle("a")
    crowd.ready = 9
    assert crowd.pull("a", BUSY_US) == 9


def test_a_member_that_has_just_settled_all_is_counted_on_again() -> None:
    crowd = Crowd("ab", ready=2)
    assert [crowd.pull(name) for name in "ab"] == [1, 1]
    later = 5 * IDLE_US
    crowd.settle("b", later)
    crowd.ready = 10
    assert crowd.pull("a", later) == 5


def test_pulls_under_way_are_counted_on_however_long_they_wait() -> None:
    crowd = Crowd()
    for name in "abc":
        crowd.sharing.pull_began(name, BIG, 0)
    crowd.ready, later = 9, 60 * IDLE_US
    assert crowd.sharing.next_wakeup_us(later) == NEVER_US
    assert [crowd.pull(name, later) for name in crowd.sharing.turns()] == [3, 3, 3]


def test_a_pull_that_broke_off_is_not_waited_for() -> None:
    crowd = Crowd("ab", ready=8)
    crowd.sharing.pull_began("b", BIG, 0)
    crowd.sharing.pull_ended("b", IDLE_US)
    assert crowd.pull("a", 2 * IDLE_US) == 8


def test_single_messages_go_by_turns() -> None:
    crowd = Crowd("ab")
    for name in "ab":
        crowd.sharing.pull_began(name, BIG, 0)
    got = []
    for _ in range(6):
        crowd.ready = 1
        got.append(next(name for name in crowd.sharing.turns() if crowd.pull(name)))
    assert got == ["a", "b"] * 3


def test_least_loaded_goes_to_whom_has_the_fewest_in_flight() -> None:
    crowd = Crowd("ab", GroupStrategy.LEAST_LOADED)
    for name in "ab":
        crowd.sharing.pull_began(name, BIG, 0)
    crowd.held = {"a": 5, "b": 1}
    crowd.ready = 4
    assert crowd.pull("a") == 0
    assert crowd.pull("b") == 4


def test_a_fast_member_is_not_held_to_the_pace_of_a_slow_one() -> None:
    crowd = Crowd("ab", max_in_flight=1000)
    total, now_us = 0, 0
    crowd.pull("b", wanted=10)
    for _ in range(200):
        now_us += 10_000
        crowd.ready = 1000
        crowd.settle("a", now_us)
        total += crowd.pull("a", now_us, wanted=1000)
        if now_us % 900_000 == 0:
            crowd.settle("b", now_us)
            crowd.pull("b", now_us, wanted=10)
    assert total >= 0.98 * 200 * 1000


def test_an_old_lead_is_forgotten() -> None:
    crowd = Crowd("a", ready=50_000)
    assert crowd.pull("a") == 50_000
    crowd.settle("a")
    crowd.sharing.add("b", 10**9, 0)
    crowd.ready = 10
    assert crowd.pull("a") == 5
    assert crowd.pull("b") == 5


def test_who_comes_back_starts_level_with_the_others() -> None:
    crowd = Crowd("ab", ready=0)
    for second in range(10):
        crowd.ready = 100
        crowd.settle("a", second * IDLE_US)
        crowd.pull("a", second * IDLE_US)
    now_us = 20 * IDLE_US
    crowd.sharing.pull_began("a", BIG, now_us)
    crowd.sharing.pull_began("b", BIG, now_us)
    crowd.ready = 10
    assert crowd.pull("b", now_us) == 5
    assert crowd.pull("a", now_us) == 5


def test_a_member_is_owed_one_pull_of_its_own_size_at_most() -> None:
    crowd = Crowd("ab", ready=10_000)
    crowd.sharing.pull_began("b", 4, 0)
    assert crowd.pull("a") == 9_996
    crowd.ready = 10
    assert crowd.pull("b", wanted=4) == 4
    assert crowd.pull("a") > 0


def test_a_slow_member_with_a_small_weight_gets_less() -> None:
    crowd = Crowd("ab", ready=100)
    crowd.sharing.set_weight("b", 0.25)
    assert crowd.pull("b") == 20
    assert crowd.pull("a") == 80


def test_a_suspended_member_gets_nothing_and_holds_nobody_back() -> None:
    crowd = Crowd("ab", ready=8)
    crowd.sharing.pull_began("b", BIG, 0)
    crowd.sharing.suspend("b", 5_000)
    assert crowd.pull("b") == 0
    assert crowd.sharing.next_wakeup_us(0) == 5_000
    assert crowd.pull("a") == 8
    crowd.ready = 2
    assert crowd.pull("b", 5_000) > 0


def test_who_could_take_nothing_of_its_share_does_not_block_the_others() -> None:
    crowd = Crowd("ab", ready=4)
    for name in "ab":
        crowd.sharing.pull_began(name, BIG, 0)
    assert crowd.sharing.allowance("b", BIG, 4, 0) == 2
    crowd.sharing.served("b", 0, 0)
    assert crowd.pull("a") == 4


def test_members_that_are_gone_are_not_counted_on() -> None:
    crowd = Crowd("ab", ready=4)
    crowd.sharing.remove("b")
    assert crowd.pull("a") == 4
    with pytest.raises(MemberNotFound):
        crowd.pull("b")
    crowd.sharing.pull_ended("b", 0)
    crowd.sharing.settled("b", 0)


@pytest.mark.parametrize("strategy", SHARED)
@given(
    names=st.sets(st.sampled_from("abcdefgh"), min_size=1),
    weights=st.lists(st.sampled_from([0.01, 0.3, 1.0, 7.0]), min_size=8, max_size=8),
    loads=st.lists(st.integers(0, 20), min_size=8, max_size=8),
    ready=st.integers(1, 200),
    wanted=st.integers(1, 300),
)
def test_those_who_wait_get_everything_between_them(
    strategy: GroupStrategy,
    names: set[str],
    weights: list[float],
    loads: list[int],
    ready: int,
    wanted: int,
) -> None:
    crowd = Crowd(names, strategy, ready, max_in_flight=1000)
    for name, weight, load in zip(sorted(names), weights, loads, strict=False):
        crowd.held[name] = load
        crowd.sharing.set_weight(name, weight)
        crowd.sharing.pull_began(name, wanted, 0)
    while any(crowd.pull(name, 0, wanted) for name in crowd.sharing.turns()):
        pass
    assert crowd.ready == 0
