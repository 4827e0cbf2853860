"""The network client: addresses, options, the same verbs, reconnecting, blocking code, TLS and tokens."""

from __future__ import annotations

import asyncio
import inspect
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import sparrow
from sparrow import errors
from sparrow.broker.broker import Broker
from sparrow.broker.member import BrokerMember
from sparrow.broker.producer import Producer
from sparrow.broker.subscription import BrokerSubscription, DeadLetterBox
from sparrow.client.options import parse_url
from sparrow.client.remote import RemoteBroker, RemoteProducer
from sparrow.client.remoteletters import RemoteDeadLetters
from sparrow.client.remotemember import RemoteMember
from sparrow.client.remotesub import RemoteSubscription
from sparrow.client.settling import to_ranges
from sparrow.kernel.partition import partition_of
from sparrow.model.settings import MIB, JournalSettings, ServerSettings, parse_address
from sparrow.server.http import bind
from sparrow.server.tcp import TcpServer

SMALL = sparrow.Settings(journal=JournalSettings(file_bytes=MIB))
PAIRS = [
    (Broker, RemoteBroker),
    (BrokerSubscription, RemoteSubscription),
    (BrokerMember, RemoteMember),
    (DeadLetterBox, RemoteDeadLetters),
    (Producer, RemoteProducer),
]
HERE_ONLY = {
    "open": "sparrow.connect does it",
    "publish_encoded": "for protocols",
    "flow_listeners": "for protocols",
    "pull_portions": "for protocols",
    "ack_names": "for protocols",
    "nack_names": "for protocols",
    "extend_names": "for protocols",
    "return_names": "for protocols",
    "abandon": "for protocols",
    "beat": "for protocols",
    "owner": "for protocols",
    "wait_for": "for protocols",
    "allow": "for protocols",
    "is_member": "for protocols",
    "stage_encoded": "for protocols",
    "pipeline_desk": "for protocols",
    "next_sequence": "of the broker: for protocols; producers have it",
}


class House:
    """A broker with a server that can be stopped and started on the same port."""

    def __init__(self, data: Path, settings: ServerSettings | None = None) -> None:
        self._data = data
        self._settings = settings
        self.port = 0
        self.broker: Any = None
        self.server: Any = None

    @property
    def url(self) -> str:
        return f"sparrow://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._opening = sparrow.aopen(self._data, settings=SMALL)
        self.broker = await self._opening.__aenter__()
        self._bound = bind(parse_address(f"127.0.0.1:{self.port}"))
        self.server = await TcpServer.start(self.broker, self._bound, self._settings)
        self.port = self.server.address.port

    async def stop(self) -> None:
        await self.server.close()
        self._bound.close()
        await self._opening.__aexit__(None, None, None)

    def cut(self) -> None:
        """Breaks every connection, as a network does."""
        for connection in list(self.server._house.connections):
            connection.give_up("a test pulled the plug")


@asynccontextmanager
async def house(data: Path, settings: ServerSettings | None = None) -> AsyncIterator[House]:
    found = House(data, settings)
    await found.start()
    try:
        yield found
    finally:
        await found.stop()


# Addresses and options.


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("sparrow://", ("127.0.0.1", 9092, False)),
        ("sparrow://db.example.com", ("db.example.com", 9092, False)),
        ("sparrows://[::1]:99", ("::1", 99, True)),
        ("sparrow://localhost:1/", ("localhost", 1, False)),
    ],
)
def test_url_is_taken_apart(url: str, found: tuple[str, int, bool]) -> None:
    assert tuple(parse_url(url)) == found


@pytest.mark.parametrize("url", ["", "http://x", "sparrow://x:0", "sparrow://x:99999", "sparrow://a b", None])
def test_what_is_no_url_is_refused(url: Any) -> None:
    with pytest.raises(errors.InvalidArgument):
        parse_url(url)


@pytest.mark.parametrize(
    "options",
    [
        {"colour": 1},
        {"linger_s": -1},
        {"compression": "zip"},
        {"priority_class": "vip"},
        {"max_in_flight": 1.5},
    ],
)
def test_bad_options_are_refused_before_anything_is_connected(options: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidArgument):
        sparrow.connect("sparrow://127.0.0.1:1", **options)


def test_offsets_become_ranges() -> None:
    assert to_ranges({"x": [3, 1, 2, 7, 9, 8, 8], "y": [5]}) == [("x", [1, 4, 7, 10]), ("y", [5, 6])]


# The same verbs.


def parts(kind: type) -> list[type]:
    """The class and those that hold verbs for it."""
    return [kind, *(base for base in kind.__mro__ if base.__name__.endswith("Verbs"))]


def _cases() -> list[Any]:
    return [
        pytest.param(kind, remote, name, id=f"{kind.__name__}.{name}")
        for kind, remote in PAIRS
        for name in (name for part in parts(kind) for name in vars(part))
        if not name.startswith("_") and (name not in HERE_ONLY or kind is Producer)
    ]


@pytest.mark.parametrize(("kind", "remote", "name"), _cases())
def test_verb_has_the_same_options_over_a_network(kind: type, remote: type, name: str) -> None:
    ours, theirs = inspect.getattr_static(kind, name), inspect.getattr_static(remote, name, None)
    assert theirs is not None
    assert isinstance(ours, property) == isinstance(theirs, property)
    if not isinstance(ours, property):
        assert _parameters(ours) == _parameters(theirs)


def _parameters(verb: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    found = inspect.signature(verb).parameters.values()
    return [(p.name, p.kind, p.default) for p in found if p.name != "self"]


# Connecting.


async def test_address_where_nobody_listens_is_told_after_the_time_for_it() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(errors.ConnectionLost):
        async with sparrow.aconnect(f"sparrow://127.0.0.1:{port}", connect_s=0.1):
            pass


async def test_wrong_token_is_refused_at_once(tmp_path: Path) -> None:
    async with house(tmp_path, ServerSettings(tokens="name:a-secret-of-some-length")) as there:
        with pytest.raises(errors.Unauthenticated):
            async with sparrow.aconnect(there.url, token="other"):
                pass


async def test_closed_client_refuses(tmp_path: Path) -> None:
    async with house(tmp_path) as there:
        async with sparrow.aconnect(there.url) as broker:
            subscription = await broker.subscribe("s", "t")
            waiting = asyncio.create_task(subscription.pull(timeout_s=30))
            await asyncio.sleep(0.05)
        with pytest.raises(errors.BrokerClosed):
            await waiting
        for verb in (broker.topics, subscription.pull, lambda: broker.publish("t", b"x")):
            with pytest.raises(errors.BrokerClosed):
                await verb()
        assert "closed" in repr(broker)


async def test_what_was_published_and_acked_before_closing_is_kept(tmp_path: Path) -> None:
    async with house(tmp_path) as there:
        async with sparrow.aconnect(there.url) as broker:
            await broker.create_topic("t")
            subscription = await broker.subscribe("s", "t")
            publishing = [asyncio.ensure_future(broker.publish("t", b"%d" % n)) for n in range(100)]
            await asyncio.sleep(0)
            await publishing[0]
            await subscription.ack(await subscription.pull(timeout_s=5))
        assert len([await one for one in publishing]) == 100
        assert (await there.broker.bounds("t")).end_offset == 100
        assert await (await there.broker.subscription("s")).lag() < 100


# Reconnecting.


async def test_publishes_go_on_after_the_connection_broke_and_nothing_is_doubled(tmp_path: Path) -> None:
    async with house(tmp_path) as there, sparrow.aconnect(there.url, backoff_min_s=0.01) as broker:
        await broker.create_topic("t", partitions=3)

        async def publish(number: int) -> list[Any]:
            return [await broker.publish("t", b"%d-%d" % (number, n), key=str(number)) for n in range(40)]

        async def batches() -> list[Any]:
            found: list[Any] = []
            for n in range(40):
                found += await broker.publish_batch("t", [b"b-%d-%d" % (n, k) for k in range(20)])
            return found

        work = asyncio.gather(batches(), *(publish(number) for number in range(20)))
        while not work.done():
            await asyncio.sleep(0.03)
            there.cut()
        receipts = [receipt for found in await work for receipt in found]
        stored = []
        for partition in range(3):
            stored += [m.data for m in await broker.read("t", partition=partition, max_messages=10_000)]
        assert len(receipts) == len({r.message_id for r in receipts}) == 40 * 20 + 40 * 20
        assert sorted(stored) == sorted(
            [b"%d-%d" % (a, b) for a in range(20) for b in range(40)]
            + [b"b-%d-%d" % (a, b) for a in range(40) for b in range(20)]
        )


async def test_consumer_is_there_again_after_the_connection_broke(tmp_path: Path) -> None:
    async with house(tmp_path) as there, sparrow.aconnect(there.url, backoff_min_s=0.01) as broker:
        await broker.create_topic("t")
        subscription = await broker.subscribe("s", "t")
        waiting = asyncio.create_task(subscription.pull(timeout_s=30))
        await asyncio.sleep(0.05)
        there.cut()
        await broker.publish("t", b"x")
        [message] = await asyncio.wait_for(waiting, 10)
        await message.ack()
        there.cut()
        await subscription.flush()
        if await subscription.lag():  # The ack met the broker while it was giving the message back.
            [again] = await subscription.pull(timeout_s=10)
            assert (again.id, again.attempt > message.attempt) == (message.id, True)
            await again.ack()
            await subscription.flush()
        assert await subscription.lag() == 0


async def test_publishes_to_a_full_topic_wait_in_the_client(tmp_path: Path) -> None:
    async with house(tmp_path) as there, sparrow.aconnect(there.url) as broker:
        await broker.create_topic("tight", flow={"backlog_high": 5, "backlog_max": 10, "overflow": "block"})
        slow = await broker.subscribe("slow", "tight")
        await broker.publish_batch("tight", [b"x"] * 12)
        async with asyncio.timeout(30):
            while not (await broker.flow("tight")).is_paused:  # noqa: ASYNC110 - a network lies between
                await asyncio.sleep(0.01)
        later = asyncio.create_task(broker.publish("tight", b"later"))
        await asyncio.sleep(0.2)
        assert not later.done()
        await slow.ack(await slow.pull(100), wait=True)
        assert (await asyncio.wait_for(later, 30)).offset == 12


async def test_broker_that_was_stopped_and_started_again_is_found(tmp_path: Path) -> None:
    there = House(tmp_path)
    await there.start()
    async with sparrow.aconnect(there.url, backoff_min_s=0.01, backoff_max_s=0.1) as broker:
        await broker.create_topic("t")
        subscription = await broker.subscribe("s", "t")
        await broker.publish("t", b"a")
        await there.stop()
        publishing = asyncio.create_task(broker.publish("t", b"b"))
        asking = asyncio.create_task(broker.topics())
        await asyncio.sleep(0.1)
        await there.start()
        assert (await asyncio.wait_for(publishing, 10)).offset == 1
        assert len(await asyncio.wait_for(asking, 10)) == 1
        found: list[bytes | None] = []
        while len(found) < 2:
            found += [m.data for m in await subscription.pull(timeout_s=5)]
        assert found == [b"a", b"b"]
    await there.stop()


async def test_member_joins_again_after_the_connection_broke(tmp_path: Path) -> None:
    async with house(tmp_path) as there, sparrow.aconnect(there.url, backoff_min_s=0.01) as broker:
        await broker.create_topic("t", partitions=2)
        group = {"mode": "partitioned", "stabilisation_s": 0.0}
        subscription = await broker.subscribe("s", "t", group=group)
        member = await subscription.join("one")
        there.cut()
        await broker.publish_batch("t", [b"a", b"b"])
        found: list[Any] = []
        while len(found) < 2:
            found += await member.pull(timeout_s=5)
        await member.ack(found, wait=True)
        assert [one.name for one in await subscription.members()] == ["one"]


async def test_broker_that_stays_away_is_told_and_numbers_begin_anew_afterwards(tmp_path: Path) -> None:
    """What was given up may be stored; what comes next must not be taken for it."""
    there = House(tmp_path)
    await there.start()
    async with sparrow.aconnect(there.url, backoff_min_s=0.01, reconnect_s=0.2) as broker:
        await broker.create_topic("t")
        subscription = await broker.subscribe("s", "t")
        await broker.publish_batch("t", [b"a", b"b"])
        await there.stop()
        waiting = asyncio.create_task(subscription.pull(timeout_s=30))
        with pytest.raises(errors.ConnectionLost):
            await broker.publish_batch("t", [b"lost", b"lost"])
        with pytest.raises(errors.ConnectionLost):
            await broker.topics()
        with pytest.raises(errors.ConnectionLost):
            await waiting
        await there.start()
        receipts = await broker.publish_batch("t", [b"c", b"d"])
        assert [(r.offset, r.is_duplicate) for r in receipts] == [(2, False), (3, False)]
    await there.stop()


async def test_keys_go_where_they_belong_after_another_client_added_partitions(tmp_path: Path) -> None:
    async with house(tmp_path) as there, sparrow.aconnect(there.url) as broker:
        await broker.create_topic("t", partitions=2)

        async def publish() -> list[Any]:
            return await asyncio.gather(*(broker.publish("t", b"x", key=f"k{n}") for n in range(200)))

        await publish()
        await there.broker.update_topic("t", partitions=5)
        for _ in range(2):
            found = [receipt.partition for receipt in await publish()]
            assert found == [partition_of(f"k{n}", 5) for n in range(200)]


# Tables.


async def test_tables_of_other_libraries_are_published(tmp_path: Path) -> None:
    class Frame:
        def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
            return pa.table({"data": [b"a", b"b"]}).__arrow_c_stream__(requested_schema)

    async with house(tmp_path) as there, sparrow.aconnect(there.url, compression="zstd") as broker:
        await broker.create_topic("t", partitions=2)
        assert len(await broker.publish_table("t", Frame())) == 2
        large = pa.table({"data": [bytes(1000)] * 30_000, "key": [f"k{n % 50}" for n in range(30_000)]})
        receipts = await broker.publish_table("t", large)
        assert len({receipt.message_id for receipt in receipts}) == 30_000
        table = await broker.fetch_table("t")
        assert table.num_rows == 30_002
        assert set(table.column("partition").to_pylist()) == {0, 1}
        part = await broker.fetch_table("t", partition=1, start_offset=5, end_offset=9)
        assert part.column("offset").to_pylist() == [5, 6, 7, 8]
        with pytest.raises(errors.InvalidArgument):
            await broker.publish_table("t", [1, 2])


# Blocking code.


async def test_blocking_client_has_the_same_verbs(tmp_path: Path) -> None:
    async with house(tmp_path) as there:
        await asyncio.to_thread(_walk, there.url)


def _walk(url: str) -> None:
    before = _loops()
    with sparrow.connect(url, client="test") as broker:
        broker.create_topic("t", partitions=2)
        subscription = broker.subscribe("s", "t", dead_letter_topic="dead")
        producer = broker.producer("p")
        assert producer.publish("t", b"x", key="k").offset == 0
        [message] = subscription.pull(timeout_s=5)
        assert subscription.in_flight == 1
        message.nack(retry=False, reason="no")
        subscription.flush()
        assert [letter.last_error for letter in broker.dead_letters("s").list()] == ["no"]
        broker.publish_batch("t", [b"a", b"b"])
        for message in subscription:
            message.ack()
            if message.data == b"b":
                break
        subscription.flush()
        assert subscription.lag() == 0
        assert broker.health().is_ready
        assert broker.state().is_writable
        assert broker.recovery.messages == 0
        assert broker.fetch_table("t").num_rows == 3
        member = broker.subscription("s").join("one")
        assert member.consumer == "one"
        member.leave()
        with pytest.raises(errors.TopicNotFound):
            broker.topic("nowhere")
    assert _loops() == before


def _loops() -> set[threading.Thread]:
    """The threads of event loops; other tests of this process may have left theirs running."""
    return {thread for thread in threading.enumerate() if thread.name == "sparrow-loop"}


async def test_threads_share_a_client(tmp_path: Path) -> None:
    async with house(tmp_path) as there:
        await asyncio.to_thread(_threads, there.url)


def _threads(url: str) -> None:
    with sparrow.connect(url) as broker:
        broker.create_topic("t", partitions=2)

        def publish(number: int) -> None:
            for n in range(50):
                broker.publish("t", b"%d-%d" % (number, n), key=str(number))

        threads = [threading.Thread(target=publish, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert broker.fetch_table("t").num_rows == 400


async def test_who_publishes_is_said_once(tmp_path: Path) -> None:
    async with house(tmp_path) as there, sparrow.aconnect(there.url, publisher="me") as broker:
        await broker.create_topic("t")
        await broker.publish("t", b"x", publisher="me")
        with pytest.raises(errors.InvalidArgument):
            await broker.publish("t", b"x", publisher="you")
        with pytest.raises(errors.InvalidArgument):
            await broker.producer("p", hold_gaps_s=1.0)


# TLS.


async def test_connection_is_encrypted_with_a_certificate_that_the_client_trusts(tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    words = (
        "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    )
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    command = ["openssl", *words.split(), "-keyout", str(key), "-out", str(certificate)]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
    settings = ServerSettings(tls_certificate=str(certificate), tls_key=str(key))
    async with house(tmp_path / "data", settings) as there:
        url = there.url.replace("sparrow:", "sparrows:")
        context = ssl.create_default_context(cafile=str(certificate))
        async with sparrow.aconnect(url, tls=context) as broker:
            await broker.create_topic("t")
            await broker.publish_batch("t", [bytes(100_000)] * 20)
            assert (await broker.fetch_table("t")).num_rows == 20
        with pytest.raises(errors.ConnectionLost):
            async with sparrow.aconnect(url, connect_s=0.05):
                pass
