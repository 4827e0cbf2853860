"""Declarations of pipelines: what is taken, what is refused and by which key."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import sparrow
from sparrow.model.errors import InvalidPipeline
from sparrow.model.pipeline import parse_pipeline, parse_span
from sparrow.spark.pipelines import declarations

GOOD: dict[str, Any] = {
    "name": "large",
    "source": "orders.#",
    "sql": "SELECT * FROM source",
    "sinks": [{"topic": "large"}],
}
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "pipelines"


def test_a_short_declaration_has_defaults() -> None:
    found = parse_pipeline(GOOD)
    assert found.sources["source"].start == "latest"
    assert (found.dead_letter_topic, found.mode, found.trigger_s) == ("large.dead", "append", 1.0)
    assert list(found.subscriptions()) == ["large"]


def test_a_declaration_survives_its_own_form() -> None:
    found = parse_pipeline({**GOOD, "trigger": "500ms", "expect": {"is there": "data IS NOT NULL"}})
    assert parse_pipeline(found) == found
    assert found.trigger_s == 0.5


def test_each_of_several_sources_is_a_subscription() -> None:
    sources = {"orders": {"topic": "orders.#"}, "refunds": {"topic": "refunds"}}
    found = parse_pipeline({"name": "p", "sources": sources, "sql": "SELECT 1", "sinks": [{"table": "t"}]})
    assert list(found.subscriptions()) == ["p.orders", "p.refunds"]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"sinkz": []}, "sinkz"),
        ({"name": "a*"}, "name"),
        ({"source": {"topic": "orders.#", "stat": "latest"}}, "sources.source.stat"),
        ({"source": {"topic": "orders.#", "start": "yesterday"}}, "sources.source.start"),
        ({"source": {"topic": "o", "watermark": {"column": "a"}}}, "sources.source.watermark"),
        ({"source": {"topic": "o", "max_offsets_per_trigger": 0}}, "sources.source.max_offsets_per_trigger"),
        ({"source": {"topic": "o", "view": "a-b"}}, "sources.a-b"),
        ({"source": 7}, "source"),
        ({"sources": {}}, "source"),
        ({"sinks": []}, "sinks"),
        ({"sinks": [{"topic": "a", "table": "b"}]}, "sinks[0].topic"),
        ({"sinks": [{"topic": "a"}, {"topic": "a b"}]}, "sinks[1].topic"),
        ({"sinks": [{"topic": "a", "partition_by": ["x"]}]}, "sinks[0].partition_by"),
        ({"sinks": [{"table": "a", "key": "x"}]}, "sinks[0].key"),
        ({"function": "m:f"}, "sql"),
        ({"sql": None, "function": "no colon"}, "function"),
        ({"options": {"a": 1}}, "options"),
        ({"mode": "complete"}, "mode"),
        ({"trigger": "soon"}, "trigger"),
        ({"expect": {"": "x"}}, "expect."),
        ({"dead_letter_topic": "a b"}, "dead_letter_topic"),
        ({"resources": {"shuffle_partitions": 0}}, "resources.shuffle_partitions"),
    ],
)
def test_what_is_wrong_is_refused_by_its_key(changes: dict[str, Any], key: str) -> None:
    given = {name: value for name, value in {**GOOD, **changes}.items() if value is not None}
    with pytest.raises(InvalidPipeline) as refused:
        parse_pipeline(given)
    assert refused.value.details["key"] == key
    assert key.split(".")[-1] in refused.value.message or key in refused.value.message


def test_a_misspelt_key_is_answered_with_the_right_one() -> None:
    with pytest.raises(InvalidPipeline) as refused:
        parse_pipeline({**GOOD, "sinks": [{"topik": "a"}]})
    assert refused.value.hint == "Did you mean topic?"


def test_spans_are_read_with_their_units() -> None:
    assert [parse_span(text) for text in ("500ms", "2s", "1m", "1h", 3, "0.5")] == [0.5, 2, 60, 3600, 3, 0.5]


def test_a_checkpoint_serves_other_sinks_but_no_other_query() -> None:
    found = parse_pipeline(GOOD)
    assert found.is_same_query(parse_pipeline({**GOOD, "sinks": [{"topic": "b"}], "trigger": "5s"}))
    assert not found.is_same_query(parse_pipeline({**GOOD, "sql": "SELECT key FROM source"}))
    assert not found.is_same_query(
        parse_pipeline({**GOOD, "source": {"topic": "orders.#", "schema": "a INT"}})
    )


def test_functions_are_declared_in_place() -> None:
    @sparrow.pipeline("p", source="orders", sinks=[{"topic": "a"}])
    def rule(source: Any) -> Any:
        return source

    assert rule.__pipeline__.name == "p"  # type: ignore[attr-defined]
    assert rule(3) == 3


def test_the_samples_are_read_from_their_files() -> None:
    found = {each.name: each for each in declarations.read(EXAMPLES)}
    assert sorted(found) == ["archive", "fraud", "revenue"]
    assert found["fraud"].function == f"{EXAMPLES / 'fraud.py'}:fraud"


def test_files_are_refused_with_their_name_and_the_key(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("source: orders\nsql: SELECT 1\nsinks: [{topic: b}]\nmode: all\n")
    with pytest.raises(InvalidPipeline, match=r"a\.yaml: mode is append or update") as refused:
        declarations.read(tmp_path)
    assert refused.value.details["key"] == "mode"
    for text in ("a: [", "", "- 1"):
        (tmp_path / "a.yaml").write_text(text)
        with pytest.raises(InvalidPipeline, match=r"a\.yaml"):
            declarations.read(tmp_path)
    with pytest.raises(InvalidPipeline, match="there is no file"):
        declarations.read(tmp_path / "b.yaml")


def test_a_file_names_its_pipeline_and_times_are_kept(tmp_path: Path) -> None:
    text = "source: {topic: orders, start: 2026-07-01T12:00:00Z}\nsql: SELECT 1\nsinks: [{topic: b}]\n"
    (tmp_path / "mine.yaml").write_text(text)
    (found,) = declarations.read(tmp_path / "mine.yaml")
    assert found.name == "mine"
    start = found.sources["source"].start
    assert isinstance(start, str)
    assert datetime.fromisoformat(start) == datetime(2026, 7, 1, 12, tzinfo=UTC)


JOB: dict[str, Any] = {"name": "tidy", "source": "state.#", "builtin": "compact", "every": "1h"}


def test_a_job_has_topics_and_a_time_from_turn_to_turn() -> None:
    found = parse_pipeline(JOB)
    assert (found.is_job, found.every_s, found.sinks, found.dead_letter_topic) == (True, 3600.0, [], "")
    assert found.subscriptions() == {}
    assert found.segment_bytes == 128 * 1024 * 1024
    assert parse_pipeline(found) == found
    assert parse_pipeline({**JOB, "every": "7d", "options": {"segment_mib": 2}}).segment_bytes == 2 << 20


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"every": "100ms"}, "every"),
        ({"every": "60d"}, "every"),
        ({"every": 0}, "every"),
        ({"sinks": [{"topic": "x"}]}, "sinks"),
        ({"trigger": "5s"}, "trigger"),
        ({"expect": {"is there": "true"}}, "expect"),
        ({"dead_letter_topic": "x"}, "dead_letter_topic"),
        ({"source": {"topic": "state", "filter": "key = 'a'"}}, "sources.source.filter"),
        ({"source": None, "sources": {"a": {"topic": "a"}, "b": {"topic": "b"}}}, "sources"),
        ({"options": {"segment_mb": 1}}, "options.segment_mb"),
        ({"options": {"segment_mib": 0}}, "options.segment_mib"),
        ({"options": {"segment_mib": True}}, "options.segment_mib"),
    ],
)
def test_what_means_nothing_to_a_job_is_refused(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(InvalidPipeline) as refused:
        parse_pipeline({**JOB, **changes})
    assert refused.value.details["key"] == key


def test_a_stream_is_not_scheduled() -> None:
    with pytest.raises(InvalidPipeline, match="every is for compact and merge"):
        parse_pipeline({**GOOD, "every": "1h"})
