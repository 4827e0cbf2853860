"""How offsets are cut into tasks, shared out and remembered: pure arithmetic, tried at random."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.model.errors import DataLost, InvalidArgument, TopicRecreated
from sparrow.model.segment import Extent, SegmentFile
from sparrow.spark.offsets import Offsets
from sparrow.spark.planning import stream_ranges
from sparrow.spark.ranges import Range, along_segments, shares, to_tasks

ranges = st.lists(
    st.builds(
        lambda partition, start, rows, size: Range("t", 1, partition, start, start + rows, rows * size),
        st.integers(0, 5),
        st.integers(0, 1000),
        st.integers(1, 5000),
        st.integers(0, 3000),
    ),
    max_size=8,
)


def offsets_of(parts: list[Range]) -> list[tuple[int, int]]:
    return [(part.partition, offset) for part in parts for offset in range(part.start, part.end)]


@given(ranges, st.integers(1, 10**7), st.none() | st.integers(1, 4000), st.integers(0, 9))
def test_tasks_hold_every_offset_once_and_in_order(
    wanted: list[Range], bytes_max: int, rows_max: int | None, tasks_min: int
) -> None:
    tasks = to_tasks(wanted, bytes_max=bytes_max, rows_max=rows_max, tasks_min=tasks_min)
    assert offsets_of([part for task in tasks for part in task]) == offsets_of(wanted)
    assert all(task for task in tasks)
    if rows_max is not None:
        assert all(sum(map(len, task)) <= rows_max for task in tasks)
    assert len(tasks) >= min(tasks_min, sum(map(len, wanted)))


def test_a_large_partition_is_split_and_small_ones_share_a_task() -> None:
    big, small = Range("t", 1, 0, 0, 1000, 256 << 20), [Range("t", 1, n, 0, 5, 500) for n in range(1, 20)]
    tasks = to_tasks([big, *small], bytes_max=64 << 20)
    assert [len(task) for task in tasks] == [1, 1, 1, 1, 19]


@given(
    st.integers(0, 50),
    st.integers(1, 50),
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 10)), max_size=6),
)
def test_ranges_are_cut_where_segments_begin_and_end(
    start: int, rows: int, pieces: list[tuple[int, int]]
) -> None:
    segments, at = [], 0
    for gap, length in pieces:
        segments.append(SegmentFile(f"{at + gap}.parquet", at + gap, at + gap + length, length, 100, 0, 0))
        at += gap + length
    whole = Range("t", 1, 0, start, start + rows, 1000)
    parts = list(along_segments(whole, "/data", segments))
    assert offsets_of(parts) == offsets_of([whole])
    for part in parts:
        holders = [s for s in segments if s.first_offset <= part.start and part.end <= s.end_offset]
        assert part.file == (f"/data/{holders[0].file}" if holders else None)


@given(st.lists(st.integers(0, 10**6), max_size=8), st.integers(1, 10**6))
def test_a_limit_is_shared_in_proportion_and_used_up(backlogs: list[int], limit: int) -> None:
    found = shares(backlogs, limit)
    assert all(0 <= share <= backlog for share, backlog in zip(found, backlogs, strict=True))
    assert sum(found) == min(limit, sum(backlogs))


def test_offsets_survive_a_checkpoint_and_are_always_written_alike() -> None:
    one = Offsets({("b", 1): 5, ("a.c", 0): 2}, {"b": 2, "a.c": 9}, "billing")
    other = Offsets({("a.c", 0): 2, ("b", 1): 5}, {"a.c": 9, "b": 2}, "billing")
    assert json.dumps(one.to_json()) == json.dumps(other.to_json())
    assert Offsets.from_json(json.loads(json.dumps(one.to_json()))) == one


def test_offsets_of_another_source_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="checkpoint"):
        Offsets.from_json({"orders": {"0": 1}})


NOW = [Extent("t", 7, [(10, 50), (0, 5)])]


def test_a_batch_reads_what_lies_between_two_positions_and_new_partitions_from_their_start() -> None:
    start, end = Offsets({("t", 0): 20}, {"t": 7}), Offsets({("t", 0): 30, ("t", 1): 5}, {"t": 7})
    assert stream_ranges(NOW, start, end, True) == [Range("t", 7, 0, 20, 30), Range("t", 7, 1, 0, 5)]


def test_positions_that_retention_overtook_are_a_loss() -> None:
    start, end = Offsets({("t", 0): 3}, {"t": 7}), Offsets({("t", 0): 30}, {"t": 7})
    with pytest.raises(DataLost, match="7 messages are lost"):
        stream_ranges(NOW, start, end, True)
    assert stream_ranges(NOW, start, end, False) == [Range("t", 7, 0, 10, 30)]


def test_a_topic_made_anew_is_noticed() -> None:
    start, end = Offsets({("t", 0): 20}, {"t": 6}), Offsets({("t", 0): 30}, {"t": 6})
    with pytest.raises(TopicRecreated):
        stream_ranges(NOW, start, end, True)
    assert stream_ranges(NOW, start, end, False) == []


def test_a_topic_that_is_gone_is_a_loss() -> None:
    with pytest.raises(DataLost, match="deleted"):
        stream_ranges([], Offsets({("t", 0): 2}, {"t": 7}), Offsets({("t", 0): 3}, {"t": 7}), True)
