"""Bad input: each is refused with a typed error that says what to do, and nothing has changed."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import pytest_asyncio

from sparrow.broker.broker import Broker
from sparrow.model.errors import (
    BrokerClosed,
    DataDirectoryLocked,
    DataDirectoryNewer,
    DataDirectoryUnusable,
    InvalidArgument,
    InvalidName,
    MessageTooLarge,
    OffsetOutOfRange,
    SequenceGap,
    SparrowError,
    StorageError,
    TopicExists,
    TopicNotFound,
)
from sparrow.model.limits import (
    ATTRIBUTE_KEY_BYTES_MAX,
    ATTRIBUTE_VALUE_BYTES_MAX,
    ATTRIBUTES_MAX,
    KEY_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    PARTITIONS_MAX,
)
from sparrow.model.settings import Settings, TopicSettings
from sparrow.testing.checker import read_logs

Verb = Callable[[Broker], Awaitable[Any]]


def shown(value: object) -> str:
    """A test's id, the same in every process: without the addresses of objects."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def broker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Broker]:
    """A broker that holds one message and makes no topics by itself. All tests share it, because each
    proves that it has left it as it was."""
    data = tmp_path_factory.mktemp("bad-input") / "data"
    settings = Settings(data=str(data), topics=TopicSettings(auto_create=False))
    async with await Broker.open(settings) as broker:
        await broker.create_topic("orders", partitions=2)
        await broker.publish("orders", b"kept", key="k")
        yield broker


async def everything(broker: Broker) -> Any:
    """The broker's state as far as anybody can see it."""
    state = broker.state()
    return (await broker.topics(), await read_logs(broker), state.journal_bytes, state.pending_bytes)


async def refused(broker: Broker, verb: Verb, kind: type[SparrowError]) -> SparrowError:
    """The refusal, when it is of this kind, explains itself, and nothing has changed."""
    before = await everything(broker)
    with pytest.raises(kind) as caught:
        await verb(broker)
    error = caught.value
    assert type(error) is kind
    assert error.code == kind.code != SparrowError.code
    assert error.message
    assert error.hint
    assert await everything(broker) == before
    await broker.publish("orders", b"after", key="k")  # and it still works
    return error


BAD_NAMES: list[Any] = [
    "", ".", "..", "a..b", ".a", "a.", "a b", "a/b", "../etc", "a\0b", "a*", "orders.#", "é", "a\n",
    "x" * 256, None, 7, b"orders", ["orders"], object(),
]  # fmt: skip


@pytest.mark.parametrize(
    "verb",
    [
        lambda broker, name: broker.create_topic(name),
        lambda broker, name: broker.publish(name, b"x"),
        lambda broker, name: broker.publish_batch(name, [b"x"]),
        lambda broker, name: broker.publish_table(name, pa.table({"data": [b"x"]})),
        lambda broker, name: broker.producer(name),
        lambda broker, name: broker.topic(name),
        lambda broker, name: broker.delete_topic(name),
        lambda broker, name: broker.update_topic(name, retention_s=5),
        lambda broker, name: broker.read(name),
        lambda broker, name: broker.bounds(name),
    ],
    ids=["create", "publish", "batch", "table", "producer", "topic", "delete", "update", "read", "bounds"],
)
async def test_a_bad_name_is_refused_by_every_verb(
    broker: Broker, verb: Callable[[Broker, Any], Awaitable[Any]]
) -> None:
    before = await everything(broker)
    for name in BAD_NAMES:
        with pytest.raises(InvalidName) as caught:
            await verb(broker, name)
        assert caught.value.code == "INVALID_NAME", repr(name)
        assert caught.value.hint
    assert await everything(broker) == before


@pytest.mark.parametrize(
    "verb",
    [
        lambda broker: broker.publish("nowhere", b"x"),
        lambda broker: broker.publish_batch("nowhere", [b"x"]),
        lambda broker: broker.publish_table("nowhere", pa.table({"data": [b"x"]})),
        lambda broker: broker.read("nowhere"),
        lambda broker: broker.read_batches("nowhere"),
        lambda broker: broker.bounds("nowhere"),
        lambda broker: broker.offset_at("nowhere", 0),
        lambda broker: broker.topic("nowhere"),
        lambda broker: broker.update_topic("nowhere", retention_s=5),
        lambda broker: broker.delete_topic("nowhere"),
    ],
)
async def test_an_unknown_topic_is_refused_when_topics_are_not_made_on_first_use(
    broker: Broker, verb: Verb
) -> None:
    await refused(broker, verb, TopicNotFound)


async def test_a_producer_cannot_publish_to_an_unknown_topic(broker: Broker) -> None:
    producer = await broker.producer("shop")
    await refused(broker, lambda _: producer.publish("nowhere", b"x"), TopicNotFound)


TOO_LARGE = b"x" * (MESSAGE_BYTES_MAX + 1)


@pytest.mark.parametrize(
    "verb",
    [
        lambda broker: broker.publish("orders", TOO_LARGE),
        lambda broker: broker.publish("orders", bytearray(TOO_LARGE)),
        lambda broker: broker.publish_batch("orders", [b"small", TOO_LARGE]),
        lambda broker: broker.publish_table("orders", pa.table({"data": [b"small", TOO_LARGE]})),
        lambda broker: broker.publish_batch("orders", [b"x" * 1024 * 1024] * 11),
    ],
    ids=["one", "bytearray", "in a batch", "in a table", "a batch of small ones"],
)
async def test_what_is_too_large_is_refused(broker: Broker, verb: Verb) -> None:
    await refused(broker, verb, MessageTooLarge)


async def test_a_message_of_exactly_the_limit_is_taken(tmp_path: Path) -> None:
    async with await Broker.open(Settings(data=str(tmp_path / "data"))) as broker:
        await broker.publish("orders", TOO_LARGE[1:])
        (found,) = await broker.read("orders")
        assert found.data == TOO_LARGE[1:]


BAD_VALUES: list[dict[str, Any]] = [
    {"data": "text"},
    {"data": 5},
    {"data": ["x"]},
    {"data": {"a": 1}},
    {"key": b"bytes"},
    {"key": 5},
    {"key": ""},
    {"key": "x" * (KEY_BYTES_MAX + 1)},
    {"key": "\ud800"},
    {"attributes": "text"},
    {"attributes": [("a", "b")]},
    {"attributes": {"a": 1}},
    {"attributes": {"a": None}},
    {"attributes": {1: "a"}},
    {"attributes": {"": "a"}},
    {"attributes": {"a": "\ud800"}},
    {"attributes": {"x" * (ATTRIBUTE_KEY_BYTES_MAX + 1): "a"}},
    {"attributes": {"a": "x" * (ATTRIBUTE_VALUE_BYTES_MAX + 1)}},
    {"attributes": {f"a{number}": "x" for number in range(ATTRIBUTES_MAX + 1)}},
    {"event_time": "yesterday"},
    {"event_time": datetime(2024, 1, 1)},
    {"event_time": True},
    {"event_time": float("nan")},
    {"event_time": float("inf")},
    {"event_time": 1e300},
    {"priority": 128},
    {"priority": -129},
    {"priority": "high"},
    {"priority": 1.5},
    {"ttl_s": 0},
    {"ttl_s": -1},
    {"ttl_s": "1"},
    {"ttl_s": True},
    {"ttl_s": float("nan")},
    {"ttl_s": float("inf")},
    {"ttl_s": 1e300},
    {"deliver_at": "tomorrow"},
    {"deliver_at": datetime(2024, 1, 1)},
    {"deliver_at": float("nan")},
    {"idempotency_key": ""},
    {"idempotency_key": 7},
    {"idempotency_key": "x" * (KEY_BYTES_MAX + 1)},
]


@pytest.mark.parametrize("values", BAD_VALUES, ids=lambda values: repr(values)[:40])
async def test_a_wrong_value_of_a_message_is_refused(broker: Broker, values: dict[str, Any]) -> None:
    data, options = values.get("data", b"x"), {name: v for name, v in values.items() if name != "data"}
    await refused(broker, lambda broker: broker.publish("orders", data, **options), InvalidArgument)


BAD_BATCHES: list[dict[str, Any]] = [
    {"data": []},
    {"data": b"bytes"},
    {"data": "text"},
    {"data": None},
    {"data": 5},
    {"data": dict.fromkeys([b"x"])},
    {"data": {b"x"}},
    {"data": [b"x", "text"]},
    {"data": [b"x", 5]},
    {"data": [[b"x"]]},
    {"keys": "k"},
    {"keys": ["a", "b"]},
    {"keys": [b"bytes"]},
    {"keys": [5]},
    {"keys": [""]},
    {"keys": ["x" * (KEY_BYTES_MAX + 1)]},
    {"keys": ["\ud800"]},
    {"keys": 5},
    {"attributes": [{}, {}]},
    {"attributes": ["text"]},
    {"attributes": [5]},
    {"attributes": {"a": "b"}},
    {"attributes": [{"a": 1}]},
    {"attributes": [{"a": None}]},
    {"attributes": [{"": "b"}]},
    {"attributes": [{"x" * (ATTRIBUTE_KEY_BYTES_MAX + 1): "a"}]},
    {"attributes": [{"a": "x" * (ATTRIBUTE_VALUE_BYTES_MAX + 1)}]},
    {"attributes": [{f"a{number}": "x" for number in range(ATTRIBUTES_MAX + 1)}]},
    {"event_times": ["yesterday"]},
    {"event_times": [{}]},
    {"event_times": 5},
    {"priorities": [1000]},
    {"priorities": ["high"]},
    {"priorities": [1.5]},
    {"idempotency_keys": [""]},
    {"idempotency_keys": [5]},
    {"idempotency_keys": ["a", "b"]},
]


@pytest.mark.parametrize("values", BAD_BATCHES, ids=lambda values: repr(values)[:40])
async def test_a_wrong_value_in_a_batch_refuses_all_of_it(broker: Broker, values: dict[str, Any]) -> None:
    given = {"data": [b"x"], **values}
    await refused(broker, lambda broker: broker.publish_batch("orders", **given), InvalidArgument)


@pytest.mark.parametrize(
    "table",
    [
        None,
        [b"x"],
        {"data": [b"x"]},
        pa.table({"key": ["k"]}),
        pa.table({"data": [b"x"], "colour": ["red"]}),
        pa.table({"data": [1, 2]}),
        pa.table({"data": pa.array([], pa.binary())}),
        pa.table({"data": [b"x"], "priority": [1000]}),
        pa.table({"data": [b"x"], "priority": ["high"]}),
        pa.table({"data": [b"x"], "key": [""]}),
        pa.table({"data": [b"x"], "ttl_ms": [-1]}),
        pa.table([[b"x"], [b"y"]], names=["data", "data"]),
    ],
    ids=lambda table: str(table)[:30].replace("\n", " "),
)
async def test_a_table_that_is_no_batch_of_messages_is_refused(broker: Broker, table: Any) -> None:
    await refused(broker, lambda broker: broker.publish_table("orders", table), InvalidArgument)


@pytest.mark.parametrize("sequence", [-1, "1", 1.5, True])
async def test_a_wrong_sequence_is_refused(broker: Broker, sequence: Any) -> None:
    producer = await broker.producer("careless")
    await refused(broker, lambda _: producer.publish("orders", b"x", sequence=sequence), InvalidArgument)


async def test_a_sequence_that_jumps_ahead_is_refused_and_names_the_expected_one(broker: Broker) -> None:
    producer = await broker.producer("hasty")
    await producer.publish("orders", b"x", sequence=4)
    error = await refused(broker, lambda _: producer.publish("orders", b"x", sequence=9), SequenceGap)
    assert error.details["expected"] == 5


@pytest.mark.parametrize(
    "options",
    [
        {"partitions": 0},
        {"partitions": PARTITIONS_MAX + 1},
        {"partitions": "2"},
        {"partitions": True},
        {"partitions": 1.5},
        {"retention_s": -1},
        {"retention_s": "week"},
        {"retention_bytes": 0},
        {"retention_messages": 1.5},
        {"durability": "maybe"},
        {"codec": "zip"},
        {"dedupe_window_s": -1},
        {"colour": "red"},
    ],
    ids=shown,
)
async def test_wrong_options_of_a_topic_are_refused(broker: Broker, options: dict[str, Any]) -> None:
    await refused(broker, lambda broker: broker.create_topic("new", **options), InvalidArgument)
    await refused(broker, lambda broker: broker.update_topic("orders", **options), InvalidArgument)


async def test_a_taken_name_and_a_shrinking_topic_are_refused(broker: Broker) -> None:
    await refused(broker, lambda broker: broker.create_topic("orders", partitions=9), TopicExists)
    await refused(broker, lambda broker: broker.update_topic("orders", partitions=1), InvalidArgument)


@pytest.mark.parametrize(
    "options",
    [
        {"partition": 2},
        {"partition": -1},
        {"partition": "0"},
        {"max_messages": 0},
        {"max_messages": "all"},
        {"offset": "0"},
        {"offset": None},
    ],
    ids=shown,
)
async def test_a_read_with_a_wrong_argument_is_refused(broker: Broker, options: dict[str, Any]) -> None:
    await refused(broker, lambda broker: broker.read("orders", **options), InvalidArgument)


@pytest.mark.parametrize("offset", [-1, 1 << 40])
async def test_a_read_beyond_the_log_is_refused(broker: Broker, offset: int) -> None:
    await refused(broker, lambda broker: broker.read("orders", offset=offset), OffsetOutOfRange)


async def test_a_moment_that_is_none_is_refused(broker: Broker) -> None:
    await refused(broker, lambda broker: broker.offset_at("orders", "noon"), InvalidArgument)  # type: ignore[arg-type]


async def test_a_closed_broker_refuses_work(tmp_path: Path) -> None:
    broker = await Broker.open(Settings(data=str(tmp_path / "data")))
    await broker.close()
    for verb in (broker.publish("orders", b"x"), broker.create_topic("orders"), broker.seal()):
        with pytest.raises(BrokerClosed):
            await verb


# Data directories.


def listing(root: Path) -> dict[str, tuple[int, bytes]]:
    """Every file with its time and content."""
    return {
        str(path.relative_to(root)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in root.rglob("*")
        if path.is_file()
    }


async def refuses_to_open(data: Path, kind: type[StorageError]) -> StorageError:
    with pytest.raises(kind) as caught:
        await Broker.open(Settings(data=str(data)))
    assert type(caught.value) is kind
    assert caught.value.hint
    return caught.value


async def filled(data: Path) -> Path:
    async with await Broker.open(Settings(data=str(data))) as broker:
        await broker.publish_batch("orders", [b"a", b"b"])
    return data


async def test_a_directory_of_a_newer_format_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    data = await filled(tmp_path / "data")
    (data / "sparrow.json").write_text('{"format": 2, "created_at_us": 0, "later": "field"}')
    before = listing(data)
    await refuses_to_open(data, DataDirectoryNewer)
    assert listing(data) == before


async def test_a_directory_that_another_process_holds_is_refused_and_named(tmp_path: Path) -> None:
    program = """
import asyncio, sys
from sparrow.broker.broker import Broker
from sparrow.model.settings import Settings

async def main():
    async with await Broker.open(Settings(data=sys.argv[1])) as broker:
        await broker.publish("orders", b"first")
        print("open", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        print((await broker.publish("orders", b"second")).offset, flush=True)

asyncio.run(main())
"""
    data = tmp_path / "data"
    command = [sys.executable, "-c", program, str(data)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(  # noqa: ASYNC220 - nothing else runs on this loop meanwhile
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        before: object = None
        while before != (before := listing(data)):  # noqa: ASYNC110 - the holder notes its file in its own time
            await asyncio.sleep(0.3)
        error = await refuses_to_open(data, DataDirectoryLocked)
        assert str(holder.pid) in error.message
        assert listing(data) == before
        holder.stdin.write("\n")
        holder.stdin.flush()
        assert holder.stdout.readline() == "1\n", "the holder goes on undisturbed"
        assert holder.wait(10) == 0
    async with await Broker.open(Settings(data=str(data))) as broker:
        assert [message.data for message in await broker.read("orders")] == [b"first", b"second"]


async def test_a_directory_that_this_process_holds_is_refused_too(tmp_path: Path) -> None:
    async with await Broker.open(Settings(data=str(tmp_path / "data"))) as broker:
        await refuses_to_open(tmp_path / "data", DataDirectoryLocked)
        await broker.publish("orders", b"x")


async def test_a_path_that_is_a_file_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"mine")
    await refuses_to_open(tmp_path / "data", DataDirectoryUnusable)
    await refuses_to_open(tmp_path / "data" / "below", DataDirectoryUnusable)
    assert (tmp_path / "data").read_bytes() == b"mine"


async def test_a_place_where_nobody_may_write_is_refused() -> None:
    """Not even root may make a directory in /proc."""
    await refuses_to_open(Path("/proc/sparrow"), DataDirectoryUnusable)
    await refuses_to_open(Path("/proc/self/fdinfo"), DataDirectoryUnusable)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
async def test_a_directory_without_write_permission_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    data = await filled(tmp_path / "data")
    data.chmod(0o555)
    (data / "lock").chmod(0o444)
    before = listing(data)
    try:
        await refuses_to_open(data, DataDirectoryUnusable)
        assert listing(data) == before
    finally:
        data.chmod(0o755)


async def test_a_part_of_the_directory_that_is_in_the_way_is_refused(tmp_path: Path) -> None:
    for name in ("journal", "topics"):
        data = await filled(tmp_path / name)
        shutil.rmtree(data / name)
        (data / name).write_bytes(b"in the way")
        await refuses_to_open(data, DataDirectoryUnusable)
    data = await filled(tmp_path / "catalog")
    (data / "catalog.db").unlink()
    (data / "catalog.clean").unlink()
    (data / "catalog.db").mkdir()
    await refuses_to_open(data, DataDirectoryUnusable)


async def test_a_directory_that_holds_something_else_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    before = listing(tmp_path)
    error = await refuses_to_open(tmp_path, DataDirectoryUnusable)
    assert "thesis.tex" in error.message
    assert listing(tmp_path) == before


async def test_strangers_inside_a_data_directory_are_left_alone(tmp_path: Path) -> None:
    data = await filled(tmp_path / "data")
    strangers = {
        "notes.txt": b"mine",
        "journal/backup.wal": b"mine",
        "journal/1.wal": b"mine",
        "journal/README": b"mine",
        "topics/orders/notes.txt": b"mine",
        "topics/orders/0/notes.txt": b"mine",
        "topics/notes.txt": b"mine",
    }
    for name, content in strangers.items():
        (data / name).parent.mkdir(exist_ok=True, parents=True)
        (data / name).write_bytes(content)
    async with await Broker.open(Settings(data=str(data))) as broker:
        assert [message.data for message in await broker.read("orders")] == [b"a", b"b"]
        assert broker.recovery.damages == ()
        await broker.publish("orders", b"c")
        await broker.seal()
    assert {name: (data / name).read_bytes() for name in strangers} == strangers
