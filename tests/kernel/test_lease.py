"""Leases end when they are due, and ack ids say exactly whose they are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap64

from sparrow.kernel.lease import NEVER_US, LeaseTable, ack_ids, head_of, parse_ack_ids, parse_head
from sparrow.model.errors import InvalidAckId
from sparrow.model.message import StreamId

STREAM = StreamId(3, 1)
HEAD = head_of(7, STREAM, 100, 5, 99)
IDS = ack_ids(HEAD, 100, range(100, 200))


def table(*deadlines_us: int) -> LeaseTable:
    leases = LeaseTable()
    for number, deadline_us in enumerate(deadlines_us):
        offsets = BitMap64(range(10 * number, 10 * number + 10))
        leases.add(STREAM, f"c{number}", offsets, 0, deadline_us)
    return leases


def test_a_lease_ends_at_its_deadline_to_the_microsecond() -> None:
    leases = table(1000)
    assert list(leases.expire(999)) == []
    ((lease, lost),) = leases.expire(1000)
    assert (lease.consumer, list(lost)) == ("c0", list(range(10)))
    assert leases.count == 0
    assert leases.next_deadline_us() == NEVER_US


def test_leases_end_in_the_order_of_their_deadlines() -> None:
    leases = table(300, 100, 200)
    assert leases.next_deadline_us() == 100
    assert [lease.consumer for lease, _ in leases.expire(300)] == ["c1", "c2", "c0"]


def test_extending_some_messages_splits_the_lease_and_keeps_its_number() -> None:
    leases = table(100)
    lease = leases.by_number[1]
    assert list(leases.extend(lease, BitMap64([2, 3, 77]), 500)) == [2, 3]
    ((_, lost),) = leases.expire(100)
    assert list(lost) == [0, 1, 4, 5, 6, 7, 8, 9]
    assert leases.next_deadline_us() == 500
    assert leases.find(STREAM, 2) is lease


def test_an_extension_may_shorten_a_lease() -> None:
    leases = table(100)
    leases.extend(leases.by_number[1], BitMap64([2]), 50)
    assert leases.next_deadline_us() == 50
    ((_, lost),) = leases.expire(50)
    assert list(lost) == [2]


def test_settled_messages_do_not_expire() -> None:
    leases = table(100)
    taken = leases.take_out(leases.by_number[1], BitMap64([1, 2, 50]))
    assert list(taken) == [1, 2]
    ((_, lost),) = leases.expire(100)
    assert 1 not in lost
    assert leases.by_consumer == {}


def test_revoking_ends_leases_of_one_stream_only() -> None:
    leases = table(100, 100)
    assert list(leases.revoke(StreamId(9, 9), BitMap64(range(20)))) == []
    assert list(leases.revoke(STREAM, BitMap64([9, 10]))) == [9, 10]
    assert leases.count == 18


def test_a_consumer_that_leaves_gives_up_all_it_holds() -> None:
    leases = table(100, 100)
    assert [len(lost) for _, lost in leases.release("c0")] == [10]
    assert leases.by_consumer == {"c1": 10}


def test_an_ack_id_says_everything() -> None:
    name = parse_head(IDS[0].partition(".")[0])
    assert name[:5] == (7, STREAM, 100, 5, 99)
    ((_, offsets, ids),), bad = parse_ack_ids(IDS)
    assert offsets == list(range(100, 200))
    assert ids == IDS
    assert not bad


def test_ids_are_sorted_by_lease() -> None:
    other = ack_ids(head_of(7, STREAM, 100, 6, 99), 100, [150])
    groups, _ = parse_ack_ids([IDS[0], *other, IDS[1]])
    assert [(g.name.number, g.offsets) for g in groups] == [(5, [100, 101]), (6, [150])]


@pytest.mark.parametrize(
    "text",
    ["", ".", "a.b", HEAD, HEAD + ".", HEAD + ".zz", "x" * 48 + ".1", None, 5, b"bytes", "é.1", "." * 99],
)
def test_garbage_is_refused(text: str) -> None:
    groups, bad = parse_ack_ids([text])
    assert not groups
    assert isinstance(bad[0][1], InvalidAckId)


@given(st.sampled_from(IDS), st.data())
def test_an_id_with_one_wrong_character_is_refused(ack_id: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(ack_id) - 1))
    wrong = data.draw(st.sampled_from("0123456789abcdefghXYZ.-_"))
    changed = ack_id[:at] + wrong + ack_id[at + 1 :]
    groups, bad = parse_ack_ids([changed])
    assert changed == ack_id or (not groups and len(bad) == 1)


@given(st.text(max_size=80))
def test_no_text_breaks_the_parser(text: str) -> None:
    groups, bad = parse_ack_ids([text])
    assert not groups
    assert len(bad) == 1


def test_a_huge_number_is_refused() -> None:
    _, bad = parse_ack_ids([f"{HEAD}.{'f' * 100_000}"])
    assert len(bad) == 1
