"""Values as people write them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from sparrow.cli import values
from sparrow.model.errors import InvalidArgument

NOW = datetime(2026, 7, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("1.5", 1.5),
        ("30s", 30),
        ("500ms", 0.5),
        ("1h30m", 5400),
        ("1h 30min", 5400),
        ("7d", 604_800),
    ],
)
def test_stretches_of_time(text: str, seconds: float) -> None:
    assert values.parse_span(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("now", NOW),
        ("2h ago", NOW - timedelta(hours=2)),
        ("1d12h ago", NOW - timedelta(hours=36)),
        ("in 5m", NOW + timedelta(minutes=5)),
        ("2026-07-01", datetime(2026, 7, 1, tzinfo=UTC)),
        ("2026-07-01 10:00", datetime(2026, 7, 1, 10, tzinfo=UTC)),
        ("2026-07-01T10:00:00+02:00", datetime(2026, 7, 1, 8, tzinfo=UTC)),
        ("20260701", datetime(2026, 7, 1, tzinfo=UTC)),
        ("1782864000", datetime(2026, 7, 1, tzinfo=UTC)),
    ],
)
def test_times(text: str, moment: datetime) -> None:
    assert values.parse_time(text, now=NOW) == moment


@pytest.mark.parametrize("text", ["", "soon", "ago", "h ago", "5", "5 apples ago", "2026-13-01"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        values.parse_time(text, now=NOW)


@pytest.mark.parametrize(
    ("text", "size"),
    [("500", 500), ("10MB", 10_000_000), ("2GiB", 2 * 1024**3), ("1.5k", 1500), ("unlimited", None)],
)
def test_sizes(text: str, size: int | None) -> None:
    assert values.parse_limit_size(text) == size


def test_set_options_are_json_where_they_can_be_and_dots_lead_into_groups() -> None:
    given = [
        "retry.jitter=0.2",
        "retry.max_attempts=null",
        "poison_rules=true",
        "filter=a = b",
        'lag={"hold_s":1}',
    ]
    assert values.parse_set(given) == {
        "retry": {"jitter": 0.2, "max_attempts": None},
        "poison_rules": True,
        "filter": "a = b",
        "lag": {"hold_s": 1},
    }


def test_named_options_and_set_are_joined_and_never_contradict() -> None:
    joined = values.merged({"retry": {"a": 1}, "x": None}, {"retry": {"b": 2}, "y": 3})
    assert joined == {"retry": {"a": 1, "b": 2}, "y": 3}
    with pytest.raises(InvalidArgument, match="given twice"):
        values.merged({"retry": {"a": 1}}, {"retry": {"a": 2}})
