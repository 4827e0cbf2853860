"""Assignments are complete, balanced, the same everywhere, and sticky ones move little."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.kernel.assignment import Assignment, assign, count_moved
from sparrow.model.group import GroupStrategy
from sparrow.model.message import StreamId

PARTITIONED = [GroupStrategy.RANGE, GroupStrategy.ROUND_ROBIN, GroupStrategy.STICKY]
names = st.sets(st.sampled_from([f"m{number}" for number in range(12)]), min_size=1)
parts = st.sets(st.builds(StreamId, st.integers(1, 3), st.integers(0, 15)))


def streams(count: int, topic_id: int = 1) -> list[StreamId]:
    return [StreamId(topic_id, partition) for partition in range(count)]


def sizes(got: Assignment) -> list[int]:
    return sorted(len(mine) for mine in got.values())


def fair_share(count: int, members: int) -> int:
    return -(-count // members)


@pytest.mark.parametrize("strategy", PARTITIONED)
@given(members=names, wanted=parts)
def test_every_stream_has_one_owner_and_every_member_an_entry(
    strategy: GroupStrategy, members: set[str], wanted: set[StreamId]
) -> None:
    got = assign(strategy, members, wanted, {})
    assert set(got) == members
    assert sorted(stream for mine in got.values() for stream in mine) == sorted(wanted)


@pytest.mark.parametrize("strategy", PARTITIONED)
def test_nobody_gets_nothing(strategy: GroupStrategy) -> None:
    assert assign(strategy, [], streams(3), {}) == {}


@pytest.mark.parametrize("strategy", PARTITIONED)
def test_the_order_of_the_input_does_not_matter(strategy: GroupStrategy) -> None:
    members, wanted = [f"m{number}" for number in range(7)], streams(23)
    expected = assign(strategy, members, wanted, {})
    shuffle = random.Random(1).shuffle
    shuffle(members)
    shuffle(wanted)
    assert assign(strategy, members, wanted, {}) == expected


@pytest.mark.parametrize("strategy", [GroupStrategy.ROUND_ROBIN, GroupStrategy.STICKY])
@given(members=names, wanted=parts)
def test_two_members_differ_by_one_at_most(
    strategy: GroupStrategy, members: set[str], wanted: set[StreamId]
) -> None:
    got = sizes(assign(strategy, members, wanted, {}))
    assert got[-1] - got[0] <= 1


def test_range_gives_neighbours_of_each_topic_and_the_first_one_more() -> None:
    got = assign(GroupStrategy.RANGE, ["a", "b"], streams(3, 1) + streams(3, 2), {})
    assert got["a"] == {StreamId(1, 0), StreamId(1, 1), StreamId(2, 0), StreamId(2, 1)}
    assert got["b"] == {StreamId(1, 2), StreamId(2, 2)}


def test_round_robin_deals_out_over_topics() -> None:
    got = assign(GroupStrategy.ROUND_ROBIN, ["a", "b"], streams(3, 1) + streams(3, 2), {})
    assert sizes(got) == [3, 3]
    assert got["a"] == {StreamId(1, 0), StreamId(1, 2), StreamId(2, 1)}


@given(members=names, wanted=parts)
def test_a_sticky_assignment_stays_when_nothing_changed(members: set[str], wanted: set[StreamId]) -> None:
    got = assign(GroupStrategy.STICKY, members, wanted, {})
    assert assign(GroupStrategy.STICKY, members, wanted, got) == got


@given(members=names, wanted=parts, choose=st.randoms(use_true_random=False))
def test_sticky_moves_a_fair_share_at_most_when_one_joins_or_leaves(
    members: set[str], wanted: set[StreamId], choose: random.Random
) -> None:
    before = assign(GroupStrategy.STICKY, members, wanted, {})
    joined = assign(GroupStrategy.STICKY, members | {"new"}, wanted, before)
    assert count_moved(before, joined) <= fair_share(len(wanted), len(members) + 1)
    left = assign(GroupStrategy.STICKY, members, wanted, joined)
    assert count_moved(joined, left) <= fair_share(len(wanted), len(members) + 1)
    gone = choose.choice(sorted(members))
    if len(members) > 1:
        after = assign(GroupStrategy.STICKY, members - {gone}, wanted, before)
        assert count_moved(before, after) == len(before[gone])


@given(
    members=names,
    wanted=parts,
    held=st.dictionaries(
        st.sampled_from([f"m{n}" for n in range(12)]), st.frozensets(st.sampled_from(streams(9)))
    ),
)
def test_sticky_balances_from_whatever_it_finds(
    members: set[str], wanted: set[StreamId], held: dict[str, frozenset[StreamId]]
) -> None:
    got = assign(GroupStrategy.STICKY, members, wanted, held)
    assert sorted(stream for mine in got.values() for stream in mine) == sorted(wanted)
    assert sizes(got)[-1] - sizes(got)[0] <= 1


def test_new_streams_move_none_of_the_old() -> None:
    before = assign(GroupStrategy.STICKY, ["a", "b", "c"], streams(9), {})
    after = assign(GroupStrategy.STICKY, ["a", "b", "c"], streams(13), before)
    assert count_moved(before, after) == 0
    assert sizes(after) == [4, 4, 5]
