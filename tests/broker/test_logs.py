"""The log: one shape of line, secrets masked, silent until a program configures it."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from sparrow.broker import logs


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """Each test leaves the process's logging as it found it."""
    root, ours = logging.getLogger(), logging.getLogger(logs.ROOT)
    before = (root.handlers[:], root.level, ours.level)
    yield
    root.handlers[:], root.level, ours.level = before
    root.setLevel(before[1])
    ours.setLevel(before[2])


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_has_exactly_the_promised_keys(stream: io.StringIO) -> None:
    logs.configure("info", "json", stream)
    with logs.correlated("r-1"):
        logs.get("journal").info("journal-rotated", "started a new file", number=12)
    (line,) = lines(stream)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("timestamp"))
    assert line == {
        "level": "info",
        "component": "journal",
        "event_type": "journal-rotated",
        "correlation_id": "r-1",
        "message": "started a new file",
        "details": {"number": 12},
    }


def test_an_event_without_a_message_is_told_by_its_type(stream: io.StringIO) -> None:
    logs.configure("info", "json", stream)
    logs.get("up").info("broker-started")
    assert lines(stream)[0]["message"] == "broker started"


def test_lines_below_the_level_are_not_written(stream: io.StringIO) -> None:
    logs.configure("warning", "json", stream)
    log = logs.get("journal")
    log.debug("a")
    log.info("b")
    log.warning("c")
    log.error("d")
    assert [line["event_type"] for line in lines(stream)] == ["c", "d"]


def test_a_line_that_is_off_does_not_touch_its_details(stream: io.StringIO) -> None:
    class Untouchable(dict[str, object]):
        def items(self) -> Any:
            raise AssertionError("the details were looked at")

        def __repr__(self) -> str:
            raise AssertionError("the details were rendered")

    logs.configure("info", "json", stream)
    logs.get("journal").debug("a", details=Untouchable(x=1))
    assert lines(stream) == []


def test_bound_details_are_on_every_line(stream: io.StringIO) -> None:
    logs.configure("info", "json", stream)
    log = logs.get("topic").bind(topic="orders")
    log.info("topic-created", partitions=4)
    log.info("topic-deleted")
    assert [line["details"] for line in lines(stream)] == [
        {"topic": "orders", "partitions": 4},
        {"topic": "orders"},
    ]


@pytest.mark.parametrize(
    "key", ["token", "secret", "password", "authorization", "Authorization", "api_token"]
)
def test_secrets_are_masked_at_any_depth(stream: io.StringIO, key: str) -> None:
    logs.configure("info", "json", stream)
    details: dict[str, Any] = {key: "hush", "headers": {key: "hush"}, "all": [{key: ["hush"]}]}
    logs.get("http").info("request-received", **details)
    assert "hush" not in stream.getvalue()
    assert lines(stream)[0]["details"]["headers"] == {key: logs.MASK}


@pytest.mark.parametrize("key", ["tokens_used", "secretary", "passwords_checked"])
def test_keys_that_only_resemble_secrets_are_kept(stream: io.StringIO, key: str) -> None:
    logs.configure("info", "json", stream)
    logs.get("http").info("request-received", **{key: 7})
    assert lines(stream)[0]["details"] == {key: 7}


@pytest.mark.parametrize("value", [object(), {1, 2}, b"\xff", "\ud800", {("a", "b"): 1}, float("nan")])
def test_a_detail_that_json_cannot_hold_does_not_lose_the_line(stream: io.StringIO, value: object) -> None:
    logs.configure("info", "json", stream)
    logs.get("journal").info("odd-detail", "still told", value=value)
    assert lines(stream)[0]["message"] == "still told"


def test_a_line_stays_one_line(stream: io.StringIO) -> None:
    logs.configure("info", "json", stream)
    logs.get("journal").info("a", "two\nlines", text="x\r\ny")
    assert stream.getvalue().count("\n") == 1


def test_an_exception_is_a_detail(stream: io.StringIO) -> None:
    logs.configure("info", "json", stream)
    try:
        raise OSError("disk gone")
    except OSError:
        logs.get("journal").error("sync-failed", exc_info=True)
    assert "OSError: disk gone" in lines(stream)[0]["details"]["exception"]


def test_warnings_of_other_libraries_are_lines_of_the_same_shape(stream: io.StringIO) -> None:
    logs.configure("debug", "json", stream)
    logging.getLogger("asyncio").error("task %s failed", "x")
    logging.getLogger("uvicorn.error").info("chatter")
    (line,) = lines(stream)
    assert line["component"] == "asyncio"
    assert line["message"] == "task x failed"
    assert set(line) >= {"timestamp", "level", "event_type", "correlation_id", "details"}


def test_configuring_again_replaces_the_stream(stream: io.StringIO) -> None:
    second = io.StringIO()
    logs.configure("info", "json", stream)
    logs.configure("info", "json", second)
    logs.get("up").info("broker-started")
    assert stream.getvalue() == ""
    assert len(lines(second)) == 1


def test_people_get_plain_lines_without_colour_where_there_is_no_terminal(stream: io.StringIO) -> None:
    logs.configure("info", "console", stream)
    logs.get("journal").info("journal-rotated", "started a new file", number=12, password="hush")
    text = stream.getvalue()
    assert "started a new file" in text
    assert "number=12" in text
    assert "hush" not in text
    assert "\x1b" not in text


async def test_a_correlation_id_follows_its_own_tasks_only(stream: io.StringIO) -> None:
    logs.configure("info", "json", stream)
    log = logs.get("http")

    async def work(name: str) -> None:
        with logs.correlated(name):
            await asyncio.create_task(inner(name))

    async def inner(name: str) -> None:
        log.info("worked", name=name)

    await asyncio.gather(work("r-1"), work("r-2"))
    assert logs.correlation_id() == ""
    assert all(line["correlation_id"] == line["details"]["name"] for line in lines(stream))


def test_an_embedding_application_gets_the_records_in_its_own_handlers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        logs.get("journal").info("journal-rotated", "started a new file", number=12)
    (record,) = caplog.records
    assert record.name == "sparrow.journal"
    assert record.getMessage() == "started a new file"
    assert record.funcName == "test_an_embedding_application_gets_the_records_in_its_own_handlers"


def test_without_configuration_nothing_below_a_warning_is_printed_and_nothing_global_is_set() -> None:
    program = (
        "import logging, structlog\n"
        "import sparrow\n"
        "from sparrow.broker import logs\n"
        "log = logs.get('journal')\n"
        "log.debug('a'); log.info('b')\n"
        "assert not logging.getLogger().handlers\n"
        "assert not logging.getLogger('sparrow').handlers\n"
        "assert logging.getLogger('sparrow').level == logging.NOTSET\n"
        "assert not structlog.is_configured()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_configuring_leaves_structlog_of_the_application_alone(stream: io.StringIO) -> None:
    logs.configure("info", "json", stream)
    assert not structlog.is_configured()
