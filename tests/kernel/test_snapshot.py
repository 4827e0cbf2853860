"""Snapshots are saved cursors that expire."""

from __future__ import annotations

import pytest
from pyroaring import BitMap64

from sparrow.kernel.cursor import Attempt, Cursor
from sparrow.kernel.facts import FailureKind
from sparrow.kernel.snapshot import expired, find, take
from sparrow.model.errors import InvalidArgument, SnapshotNotFound
from sparrow.model.message import StreamId

STREAM = StreamId(3, 0)


def cursor() -> Cursor:
    made = Cursor(7)
    made.ack(BitMap64([9]))
    made.fail(BitMap64([8]), 1, Attempt(FailureKind.NACKED, 5, "ann", ""), 9)
    return made


def test_a_snapshot_keeps_what_was_acked_and_forgets_failures() -> None:
    snapshot = take("before", 1, {STREAM: cursor()}, 0)
    (saved,) = snapshot.positions().values()
    assert (saved.floor, list(saved.above), saved.failures) == (7, [9], None)


def test_a_snapshot_is_not_changed_by_what_comes_after() -> None:
    live = cursor()
    snapshot = take("before", 1, {STREAM: live}, 0)
    live.ack_to(100)
    assert snapshot.positions()[STREAM].floor == 7


def test_a_snapshot_expires() -> None:
    snapshot = take("before", 1, {}, 0, 10)
    assert find([snapshot], "before", 9_999_999) is snapshot
    with pytest.raises(SnapshotNotFound):
        find([snapshot], "before", 10_000_000)
    assert expired([snapshot], 10_000_000) == [snapshot]


@pytest.mark.parametrize("ttl_s", [0, -1, 7 * 86_400 + 1])
def test_a_time_to_live_out_of_range_is_refused(ttl_s: float) -> None:
    with pytest.raises(InvalidArgument):
        take("before", 1, {}, 0, ttl_s)
