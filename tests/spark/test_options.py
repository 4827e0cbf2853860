"""Options of the source, without Spark: what is wrong is said before anything runs, by its name."""

from __future__ import annotations

import pytest

from sparrow.model.errors import InvalidOption
from sparrow.spark.options import EARLIEST, LATEST, Moment, parse_options

GOOD = {"servers": "127.0.0.1:9092", "subscribe": "orders"}


def test_names_are_known_in_any_case_as_spark_hands_them_over() -> None:
    found = parse_options({**GOOD, "startingoffsets": "earliest", "MAXOFFSETSPERTRIGGER": "10"})
    assert (found.start, found.trigger_rows_max) == (EARLIEST, 10)


def test_defaults_read_all_columns_and_fail_on_loss() -> None:
    found = parse_options(GOOD)
    assert (found.start, found.end, found.columns, found.is_loss_fatal) == (None, LATEST, (), True)


@pytest.mark.parametrize(
    ("text", "bytes_max"), [("1024", 1024), ("64m", 64 << 20), ("1 GB", 1 << 30), ("10k", 10240)]
)
def test_sizes_are_bytes_or_have_a_unit(text: str, bytes_max: int) -> None:
    assert parse_options({**GOOD, "maxBytesPerTrigger": text}).trigger_bytes_max == bytes_max


@pytest.mark.parametrize(("text", "seconds"), [("15m", 900), ("250ms", 0.25), ("2h", 7200), ("1500", 1.5)])
def test_durations_have_a_unit_or_are_milliseconds(text: str, seconds: float) -> None:
    assert parse_options({**GOOD, "maxTriggerDelay": text}).trigger_delay_s == seconds


@pytest.mark.parametrize(
    ("text", "time_us"),
    [
        ("1700000000000", 1_700_000_000_000_000),
        ("2023-11-14T22:13:20Z", 1_700_000_000_000_000),
        ("2023-11-14T22:13:20", 1_700_000_000_000_000),
        ("2023-11-14 23:13:20+01:00", 1_700_000_000_000_000),
    ],
)
def test_times_are_milliseconds_or_iso_and_utc_without_a_zone(text: str, time_us: int) -> None:
    assert parse_options({**GOOD, "startingTimestamp": text}).start == Moment(time_us)


def test_offsets_are_written_as_for_kafka() -> None:
    found = parse_options({**GOOD, "startingOffsets": '{"orders": {"0": 23, "1": -2}, "a.b": {"3": -1}}'})
    assert found.start == {("orders", 0): 23, ("orders", 1): EARLIEST, ("a.b", 3): LATEST}


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"servers": None}, "servers"),
        ({"path": "/tmp/x"}, "servers"),
        ({"servers": "a:1,b:2"}, "servers"),
        ({"servers": "nowhere:99999999"}, "servers"),
        ({"servers": " "}, "servers"),
        ({"servers": None, "path": "s3://bucket/x"}, "path"),
        ({"subscribe": None}, "subscribe"),
        ({"subscribePattern": "orders.#"}, "subscribe"),
        ({"subscribe": "bad name!"}, "subscribe"),
        ({"subscribe": None, "subscribePattern": "a.#.b"}, "subscribePattern"),
        ({"startingOffsets": "sometimes"}, "startingOffsets"),
        ({"startingOffsets": "[1]"}, "startingOffsets"),
        ({"startingOffsets": "{}"}, "startingOffsets"),
        ({"startingOffsets": '{"orders": 3}'}, "startingOffsets"),
        ({"startingOffsets": '{"orders": {"zero": 3}}'}, "startingOffsets"),
        ({"startingOffsets": '{"orders": {"0": -3}}'}, "startingOffsets"),
        ({"startingOffsets": '{"orders": {"0": true}}'}, "startingOffsets"),
        ({"startingOffsets": "earliest", "startingTimestamp": "1"}, "startingOffsets"),
        ({"startingTimestamp": "yesterday"}, "startingTimestamp"),
        ({"endingTimestamp": "2023-99-01"}, "endingTimestamp"),
        ({"maxOffsetsPerTrigger": "0"}, "maxOffsetsPerTrigger"),
        ({"maxOffsetsPerTrigger": "-5"}, "maxOffsetsPerTrigger"),
        ({"maxOffsetsPerTrigger": "1.5"}, "maxOffsetsPerTrigger"),
        ({"minOffsetsPerTrigger": "20", "maxOffsetsPerTrigger": "10"}, "minOffsetsPerTrigger"),
        ({"maxBytesPerTrigger": "64 parrots"}, "maxBytesPerTrigger"),
        ({"maxTriggerDelay": "soon"}, "maxTriggerDelay"),
        ({"failOnDataLoss": "perhaps"}, "failOnDataLoss"),
        ({"includeHeaders": "1"}, "includeHeaders"),
        ({"minPartitions": "many"}, "minPartitions"),
        ({"columns": "offset,,data"}, "columns"),
        ({"columns": "offset,offset"}, "columns"),
        ({"filter": "attributes.env ="}, "filter"),
        ({"filter": ""}, "filter"),
        ({"subscription": "not a name!"}, "subscription"),
        ({"servers": None, "path": "/tmp/x", "subscription": "billing"}, "subscription"),
        ({"retryTimeout": "-1s"}, "retryTimeout"),
        ({"epochs": "7"}, "epochs"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, str | None], option: str) -> None:
    given = {name: value for name, value in {**GOOD, **changes}.items() if value is not None}
    with pytest.raises(InvalidOption) as refused:
        parse_options(given)
    assert refused.value.details["option"] == option
    assert option in refused.value.message


def test_an_unknown_option_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(InvalidOption, match="Did you mean startingOffsets") as refused:
        parse_options({**GOOD, "startingOffset": "earliest"})
    assert refused.value.details["option"] == "startingoffset"


@pytest.mark.parametrize("name", ["endingOffsets", "endingTimestamp"])
def test_a_stream_has_no_end(name: str) -> None:
    with pytest.raises(InvalidOption, match=f"{name} is for a batch alone"):
        parse_options({**GOOD, name: "1"}, is_stream=True)


@pytest.mark.parametrize("name", ["maxOffsetsPerTrigger", "maxBytesPerTrigger", "subscription"])
def test_a_batch_has_no_triggers(name: str) -> None:
    with pytest.raises(InvalidOption, match=f"{name} is for a stream alone"):
        parse_options({**GOOD, name: "1"}, is_stream=False)
