"""Ids, receipts and times of messages."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.model.errors import InvalidArgument, MessageNotFound
from sparrow.model.message import (
    Message,
    MessageId,
    Receipt,
    Receipts,
    Run,
    StreamId,
    from_us,
    parse_message_id,
    to_us,
)

# Ids.


@given(st.integers(0, 2**32 - 1), st.integers(0, 9999), st.integers(0, 2**63 - 1))
def test_an_id_parses_back_to_what_it_was_made_of(topic_id: int, partition: int, offset: int) -> None:
    made = MessageId(topic_id, partition, offset)
    assert parse_message_id(str(made)) == made


def test_an_id_is_topic_id_partition_and_offset_joined_without_a_dot() -> None:
    assert str(MessageId(12, 3, 4711)) == "12-3-4711"
    assert "." not in str(MessageId(12, 3, 4711))


def test_an_id_knows_its_stream() -> None:
    assert MessageId(12, 3, 4711).stream == StreamId(12, 3)


@pytest.mark.parametrize(
    "text",
    ["", "1-2", "1-2-3-4", "a-0-1", "1-0--1", "1.0.1", " 1-0-1", "1-0-1\n", "-1-0-1", None, 7, b"1-0-1"],
)
def test_what_is_not_an_id_is_not_found(text: object) -> None:
    with pytest.raises(MessageNotFound, match="is not a message id"):
        parse_message_id(text)


# Receipts.


def receipts_of_one_run() -> Receipts:
    return Receipts("orders", 7, [Run(2, 100, 5, 1_000)])


def test_receipts_of_one_run_count_up_from_its_base() -> None:
    receipts = receipts_of_one_run()
    assert len(receipts) == 5
    assert [receipt.offset for receipt in receipts] == [100, 101, 102, 103, 104]
    assert receipts[0] == Receipt("orders", 2, 100, "7-2-100", 1_000, False)


def test_receipts_follow_rows_over_several_runs() -> None:
    runs = [Run(0, 10, 2, 5), Run(3, 70, 1, 6)]
    receipts = Receipts("orders", 7, runs, [(0, 0), (1, 0), (0, 1)])
    assert [(r.partition, r.offset, r.publish_time_us) for r in receipts] == [
        (0, 10, 5),
        (3, 70, 6),
        (0, 11, 5),
    ]
    assert [r.message_id for r in receipts] == ["7-0-10", "7-3-70", "7-0-11"]


def test_a_negative_index_counts_from_the_end() -> None:
    receipts = receipts_of_one_run()
    assert receipts[-1] == receipts[4]
    assert receipts[-5] == receipts[0]


@pytest.mark.parametrize("index", [5, -6, 100])
def test_an_index_beyond_the_receipts_is_refused(index: int) -> None:
    with pytest.raises(IndexError):
        receipts_of_one_run()[index]


@given(st.slices(8))
def test_a_slice_gives_what_a_list_would_give(part: slice) -> None:
    receipts = Receipts("t", 1, [Run(0, 0, 8, 1)])
    assert receipts[part] == list(receipts)[part]


def test_receipts_are_a_sequence_in_all_its_verbs() -> None:
    receipts = receipts_of_one_run()
    third = receipts[2]
    assert third in receipts
    assert receipts.index(third) == 2
    assert receipts.count(third) == 1
    assert next(reversed(receipts)) == receipts[4]


def test_a_duplicate_shows_the_first_place_and_says_so() -> None:
    duplicates = {1: Run(3, 40, 1, 77)}
    receipts = Receipts("orders", 7, [Run(0, 10, 2, 99)], [(0, 0), (0, 0), (0, 1)], duplicates)
    assert [r.is_duplicate for r in receipts] == [False, True, False]
    assert receipts[1] == Receipt("orders", 3, 40, "7-3-40", 77, True)
    assert [r.offset for r in receipts] == [10, 40, 11]


def test_a_run_of_repeats_marks_all_its_receipts() -> None:
    receipts = Receipts("orders", 7, [Run(0, 10, 3, 99, True)])
    assert all(receipt.is_duplicate for receipt in receipts)


def test_no_run_gives_no_receipts() -> None:
    receipts = Receipts("orders", 7, [])
    assert len(receipts) == 0
    assert list(receipts) == []
    assert receipts[:] == []


def test_receipts_say_how_many_they_are_and_of_what() -> None:
    assert repr(receipts_of_one_run()) == "<5 receipts of 'orders'>"


# Messages.


class Values:
    """The columns of one message."""

    topic, topic_id, partition = "orders", 7, 1

    def __init__(self, **values: Any) -> None:
        self._values = values

    def value(self, column: str, row: int) -> Any:
        assert row == 0
        return self._values.get(column)


def message(data: bytes | None = b"abc", key: str | None = None, **values: Any) -> Message:
    return Message(Values(**values), 0, 42, data, key)


def test_a_message_is_known_by_its_place() -> None:
    assert message().id == "7-1-42"


def test_a_message_stored_again_keeps_its_first_id() -> None:
    assert message(original_id="3-0-5").id == "3-0-5"


def test_values_that_nobody_gave_have_plain_defaults() -> None:
    plain = message()
    assert plain.attributes == {}
    assert plain.priority == 0
    assert (plain.event_time, plain.deliver_at, plain.ttl_s) == (None, None, None)
    assert (plain.idempotency_key, plain.producer_id, plain.sequence) == (None, None, None)
    assert not plain.is_tombstone


def test_values_that_were_given_come_in_python_terms() -> None:
    full = message(
        attributes=[("env", "prod")],
        publish_time=1_000_001,
        event_time=-1,
        deliver_at=2_000_000,
        priority=-3,
        ttl_ms=1_500,
        idempotency_key="i",
        producer_id=4,
        sequence=9,
    )
    assert full.attributes == {"env": "prod"}
    assert full.publish_time_us == 1_000_001
    assert full.publish_time == datetime(1970, 1, 1, 0, 0, 1, 1, UTC)
    assert full.event_time == datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC)
    assert full.deliver_at == datetime(1970, 1, 1, 0, 0, 2, tzinfo=UTC)
    assert (full.priority, full.ttl_s, full.idempotency_key) == (-3, 1.5, "i")
    assert (full.producer_id, full.sequence) == (4, 9)


def test_a_message_without_data_is_a_tombstone_but_an_empty_one_is_not() -> None:
    assert message(None).is_tombstone
    assert not message(b"").is_tombstone


def test_a_message_prints_its_id_topic_key_and_size() -> None:
    assert repr(message(b"abc", "k")) == "<Message 7-1-42 orders key='k' 3 bytes>"
    assert repr(message(None)) == "<Message 7-1-42 orders tombstone>"


# Times.


@given(st.datetimes(timezones=st.just(UTC)))
def test_a_time_survives_the_way_to_microseconds_and_back(moment: datetime) -> None:
    assert from_us(to_us(moment)) == moment


@given(st.integers(-(10**16), 10**17))
def test_microseconds_survive_the_way_to_a_datetime_and_back_exactly(time_us: int) -> None:
    assert to_us(from_us(time_us)) == time_us


def test_another_time_zone_names_the_same_moment() -> None:
    east = timezone(timedelta(hours=5, minutes=30))
    assert to_us(datetime(2024, 1, 1, 5, 30, tzinfo=east)) == to_us(datetime(2024, 1, 1, tzinfo=UTC))


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0, 0), (1, 1_000_000), (1.5, 1_500_000), (-2, -2_000_000)]
)
def test_a_number_is_seconds_since_1970(seconds: float, expected: int) -> None:
    assert to_us(seconds) == expected


def test_a_datetime_without_time_zone_is_refused_with_advice() -> None:
    with pytest.raises(InvalidArgument, match="no time zone") as caught:
        to_us(datetime(2024, 1, 1))
    assert "UTC" in caught.value.hint


@pytest.mark.parametrize("moment", [None, "2024-01-01", True, b"1", [1]])
def test_what_is_no_time_is_refused(moment: object) -> None:
    with pytest.raises(InvalidArgument, match="a time is a datetime or seconds"):
        to_us(moment)
