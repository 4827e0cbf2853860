"""What keeps the server whole: limits, back-pressure, bad frames, silence, draining, TLS, cleaning up."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import ssl
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sparrow.model import errors
from sparrow.server import connection as connections
from sparrow.server.connection import Connection
from sparrow.wire import core, heads
from sparrow.wire.frame import FrameType, pack

from .wireclient import Client, connected, publish_batch, serving

MIB = 1024 * 1024


async def eventually(check: Any, seconds: float = 5.0) -> None:
    for _ in range(int(seconds / 0.02)):
        if check():
            return
        await asyncio.sleep(0.02)
    assert check()


def _connections_in_memory() -> list[Connection]:
    gc.collect()
    return [found for found in gc.get_objects() if isinstance(found, Connection)]


# Bad frames.


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\n",
        struct.pack(">IBBBBI", 0x4D515545, 9, 34, 0, 0, 0),
        struct.pack(">IBBBBI", 0x4D515545, 1, 34, 2, 0, 0),
        struct.pack(">IBBBBI", 0x4D515545, 1, 34, 0, 0, 17 * MIB),
        struct.pack(">IBBBBI", 0x4D515545, 1, 34, 1, 0, 2) + b"xx",
    ],
)
async def test_broken_framing_is_told_logged_and_closes_the_connection(
    tmp_path: Path, raw: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path) as (_, server):
        client = await Client.connect(server.address)
        client.writer.write(raw)
        error = await client.next_head(FrameType.ERROR)
        assert error.is_fatal
        assert error.code in ("PROTOCOL_ERROR", "VERSION_UNSUPPORTED")
        assert await client.ended()
        await client.close()
        assert any("framing-broken" in str(vars(record)) for record in caplog.records)


async def test_sixteen_frames_in_a_row_that_do_not_parse_close_the_connection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path) as (_, server), connected(server) as client:
        for number in range(15):
            client.write(pack(FrameType.CALL, [b"\xff"], 200 + number))
        await client.call("topics")  # One that parses: counting starts anew.
        for number in range(16):
            client.write(pack(FrameType.CALL, [b"\xff\xff"], 100 + number))
        last = heads.decode(await client.until(lambda frame: frame.request_id == 115))[0]
        assert (last.code, last.is_fatal) == ("INVALID_ARGUMENT", True)
        assert await client.ended()
        assert any("frames-malformed" in str(vars(record)) for record in caplog.records)


@pytest.mark.parametrize("kind", [6, 10, 11, 33, 35, 39, 48, 52, 98, 255])
async def test_frames_that_no_client_sends_are_refused_and_the_connection_goes_on(
    tmp_path: Path, kind: int
) -> None:
    async with serving(tmp_path) as (_, server), connected(server) as client:
        client.write(pack(kind, [struct.pack(">I", 1) + b"\x90"], 5))
        error = heads.decode(await client.until(lambda frame: frame.request_id == 5))[0]
        assert error.code == "INVALID_ARGUMENT"
        assert await client.call("topics") == []


@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        ("close", {}),
        ("_check_open", {}),
        ("subscription._courier", {"subscription": "s"}),
        ("subscription.pull", {"subscription": "s"}),
        ("dead_letters.__init__", {"subscription": "s"}),
        ("topics", {"colour": "red"}),
        ("topic", {}),
        ("subscription.lag", {}),
        ("subscription.lag", {"subscription": 7}),
        ("subscription.lag", {"subscription": "s", "more": 1}),
        ("subscription.in_flight", {"subscription": "s", "more": 1}),
        ("create_topic", {"name": "t", "colour": "red"}),
        ("offset_at", {"topic": "s", "moment": 2**62}),
        ("subscription.seek", {"subscription": "s", "target": [[1, 2]]}),
    ],
)
async def test_an_unknown_verb_or_argument_is_an_invalid_argument(
    tmp_path: Path, verb: str, arguments: dict[str, Any]
) -> None:
    async with serving(tmp_path) as (broker, server), connected(server) as client:
        await broker.subscribe("s", "t")
        with pytest.raises(errors.InvalidArgument):
            await client.call(verb, **arguments)


async def test_every_verb_of_the_page_answers(tmp_path: Path) -> None:
    async with serving(tmp_path) as (broker, server), connected(server) as client:
        await client.call("create_topic", name="t", partitions=2)
        await client.call("subscribe", name="s", pattern="t", dead_letter_topic="dead", start="earliest")
        await broker.publish("t", b"x", key="k", attributes={"a": "b"})
        assert (await client.call("topic", name="t"))["partitions"] == 2
        assert [topic["name"] for topic in await client.call("topics")] == ["t"]
        assert (await client.call("update_topic", name="t", partitions=3))["partitions"] == 3
        assert (await client.call("subscription", name="s"))["policy"]["dead_letter_topic"] == "dead"
        assert len(await client.call("subscriptions")) == 1
        handle = await broker.subscription("s")
        (message,) = await handle.pull(timeout_s=1.0)
        await handle.nack([message], retry=False, wait=True)
        await handle.flush()
        one = {"subscription": "s"}
        await client.call("subscription.snapshot", **one, name="saved")
        looks = ("lag", "lag_report", "consumer_lag", "sample_share", "in_flight", "members", "group")
        for verb in (*looks, "committed"):
            await client.call(f"subscription.{verb}", **one)
        (letter,) = await client.call("dead_letters.list", **one)
        assert letter[0]["data"] == b"x"
        assert letter[0]["key"] == "k"
        assert (await client.call("dead_letters.statistics", **one))["messages"] == 1
        assert (await client.call("dead_letters.get", **one, message_id=letter[1]))[1] == letter[1]
        job = await client.call("dead_letters.replay", **one)
        await client.call("dead_letters.wait", **one, replay_id=job["replay_id"])
        await client.call("dead_letters.replays", **one)
        await client.call("dead_letters.purge", **one)
        await client.call("subscription.seek", **one, target="saved")
        await client.call("subscription.seek", **one, target=message.publish_time_us)
        place = [["t", message.partition, 0]]
        await client.call("subscription.seek", **one, target=place)
        await client.call("subscription.commit", **one, topic="t", partition=message.partition, offset=1)
        await client.call("subscription.pause", **one)
        await client.call("subscription.resume", **one)
        await client.call("subscription.update", **one, ack_deadline_s=20.0)
        assert await client.call("snapshots")
        await client.call("delete_snapshot", name="saved")
        assert (await client.call("trace", message_id=message.id))[0][3] == "s"
        await client.call("bounds", topic="t", partition=1)
        found = await client.call(
            "offset_at", topic="t", moment=message.publish_time_us, partition=message.partition
        )
        assert found == 0
        for verb in ("seal", "apply_retention", "health", "state", "recovery", "lag"):
            await client.call(verb)
        await client.call("set_publisher_limits", publisher="p", messages_per_s=1e6)
        await client.call("set_token_limits", token="k", messages_per_s=1e6)
        await client.call("flow", topic="t")
        await client.call("topic_lag", topic="t")
        await client.call("subscription.unsubscribe", **one)
        await client.call("delete_topic", name="t", force=True)


# Limits.


async def test_one_connection_too_many_is_told_so(tmp_path: Path) -> None:
    async with serving(tmp_path, connections_max=1) as (_, server), connected(server):
        client = await Client.connect(server.address)
        error = await client.next_head(FrameType.ERROR)
        assert (error.code, error.is_fatal) == ("TOO_MANY_CONNECTIONS", True)
        assert await client.ended()
        await client.close()
        assert server.connections == 1


async def test_a_connection_with_too_much_under_way_is_not_read_from_until_it_is_answered(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, connection_bytes_max=MIB) as (broker, server), connected(server) as client:
        await broker.create_topic("t", flow={"bytes_per_s": 4 * MIB, "burst_s": 0.1, "overflow": "block"})
        most = 0
        for number in range(16):
            head, body = publish_batch("t", [bytes(300_000)])
            client.send(head, 1000 + number, body)
        for number in range(16):
            await client.until(lambda frame, n=number: frame.request_id == 1000 + n)
            most = max(most, server.held_bytes)
        assert most < 3 * MIB
        await eventually(lambda: server.held_bytes == 0)


async def test_a_client_that_does_not_read_is_closed_and_slows_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "UNREAD_BYTES_MAX", 8 * MIB)
    async with serving(tmp_path) as (broker, server), connected(server) as other:
        await broker.create_topic("t")
        for _ in range(8):
            await broker.publish_batch("t", [bytes(500_000)] * 10)
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect((server.address.host, server.address.port))
        raw.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(raw, b"".join(map(bytes, heads.encode(heads.Hello(), 1))))
        await eventually(lambda: server.connections == 2)
        # Each answer is small, and nobody reads them.
        verbs = b"".join(map(bytes, heads.encode(heads.Call("topics"), 5)))
        with pytest.raises(OSError):  # noqa: PT012 - the broker cuts the connection at some point
            while True:
                await asyncio.wait_for(loop.sock_sendall(raw, verbs * 1000), 5)
                await asyncio.sleep(0)
        raw.close()
        await eventually(lambda: server.connections == 1)
        assert await other.call("topics")
        await eventually(lambda: server.held_bytes == 0)


async def test_frames_that_are_begun_and_not_finished_do_not_fill_the_memory(tmp_path: Path) -> None:
    limits = {"total_bytes_max": 16 * MIB, "connection_bytes_max": 8 * MIB}
    async with serving(tmp_path, **limits) as (_, server), connected(server) as other:
        begun = struct.pack(">IBBBBI", 0x4D515545, 1, FrameType.PUBLISH_BATCH, 0, 0, 16 * MIB) + bytes(
            6 * MIB
        )
        clients = [await Client.connect(server.address) for _ in range(6)]
        for client in clients:
            client.writer.write(begun)
        await eventually(lambda: server.connections < 7)
        await asyncio.sleep(0.2)
        assert server.held_bytes <= 24 * MIB
        assert await other.call("topics") == []
        for client in clients:
            client.abort()
        await eventually(lambda: server.held_bytes == 0)


async def test_deliveries_wait_for_a_slow_reader_and_others_get_theirs(tmp_path: Path) -> None:
    async with serving(tmp_path) as (broker, server), connected(server) as quick:
        slow = await Client.connect(server.address)
        await slow.hello()
        for name in ("slow", "quick"):
            await broker.subscribe(name, "t", ack_deadline_s=60.0)
        await slow.ask(heads.Consume("slow", 10**9, 10**12))
        await quick.ask(heads.Consume("quick", 10**9, 10**12))
        slow.reader._limit = 1  # type: ignore[attr-defined]
        count = 0
        for _ in range(40):
            await broker.publish_batch("t", [bytes(100_000)] * 10)
        while count < 400:
            count += (await quick.deliver())[1].num_rows
        held = (await broker.subscription("slow")).in_flight
        assert 0 < held < 400
        assert server.held_bytes < 16 * MIB
        slow.reader._limit = MIB  # type: ignore[attr-defined]
        count = 0
        while count < 400:
            count += (await slow.deliver())[1].num_rows
        await slow.close()


async def test_a_silent_client_is_closed_and_one_that_beats_is_not(tmp_path: Path) -> None:
    async with serving(tmp_path, heartbeat_s=0.2) as (_, server), connected(server) as lively:
        silent = await Client.connect(server.address)
        await silent.hello()

        async def beat() -> None:
            while True:
                lively.send(heads.Beat("well"))
                await asyncio.sleep(0.2)

        beating = asyncio.ensure_future(beat())
        assert await silent.ended()
        beating.cancel()
        assert await lively.call("topics") == []
        await silent.close()


# The end.


async def test_before_a_stop_what_is_under_way_is_answered_and_everybody_told(tmp_path: Path) -> None:
    async with serving(tmp_path) as (broker, server), connected(server) as client:
        await client.call("subscribe", name="s", pattern="t")
        await client.ask(heads.Consume("s", 10, MIB))
        head, body = publish_batch("t", [b"x"])
        client.send(head, 500, body)
        await eventually(lambda: server.held_bytes > 0 or len(broker._topics) > 0)
        closing = asyncio.ensure_future(server.close())
        await client.until(lambda frame: frame.request_id == 500)
        assert (await client.next_head(FrameType.FLOW)).kind == "draining"
        assert await client.ended()
        await closing
        with pytest.raises(OSError):
            await Client.connect(server.address)


async def test_a_stop_does_not_wait_for_a_client_for_ever(tmp_path: Path) -> None:
    async with serving(tmp_path, drain_s=0.1) as (broker, server), connected(server) as client:
        await broker.create_topic("t")
        client.send(heads.Fetch("t", 0, 0, MIB, 50.0), 9)
        await asyncio.sleep(0.05)
        await asyncio.wait_for(server.close(), 5.0)
        assert server.connections == 0


async def test_nothing_is_left_of_a_thousand_connections(tmp_path: Path) -> None:
    async with serving(tmp_path) as (broker, server):
        await broker.subscribe("s", "t")
        await broker.publish_batch("t", [b"x"] * 10)
        for number in range(1000):
            client = await Client.connect(server.address)
            await client.hello()
            match number % 4:
                case 0:
                    await client.ask(heads.Consume("s", 10, MIB))
                case 1:
                    await client.ask(heads.JoinGroup("s", f"member-{number}", None, False, "", 10, MIB))
                case 2 if number % 20 == 2:
                    client.send_core(FrameType.SUBSCRIBE, core.subscribe(core.Subscribe("t")))
                case _:
                    client.send(heads.Call("topics"), 3)
            if number % 3:
                client.abort()
            else:
                client.send(heads.Close(), 8)
                await client.ended()
                await client.close()
        await eventually(lambda: server.connections == 0, 10.0)
        await eventually(lambda: server.held_bytes == 0)
        await eventually(lambda: not server._house.leftover)
        handle = await broker.subscription("s")
        assert await handle.members() == []
        assert handle.in_flight == 0
        assert [each.name for each in await broker.subscriptions()] == ["s"]
        await eventually(lambda: not _connections_in_memory(), 10.0)
        names = {task.get_name() for task in asyncio.all_tasks()}
        assert not [name for name in names if name.startswith("push")]


# TLS.


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    command = [
        "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
        "-keyout", str(key), "-out", str(chain),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    return chain, key


async def test_with_a_certificate_connections_use_tls(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    chain, key = certificate
    async with serving(tmp_path, tls_certificate=str(chain), tls_key=str(key)) as (_, server):
        context = ssl.create_default_context(cafile=str(chain))
        context.check_hostname = False
        client = await Client.connect(server.address, context)
        await client.hello()
        head, body = publish_batch("t", [bytes(200_000)] * 20)
        assert (await client.ask(head, body)).runs[0].length == 20
        await client.call("subscribe", name="s", pattern="t", start="earliest")
        await client.ask(heads.Consume("s", 100, 100 * MIB))
        total = 0
        while total < 20:
            total += (await client.deliver())[1].num_rows
        await client.close()


async def test_a_certificate_that_is_not_there_is_a_wrong_setting(tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidSettings, match="tls_certificate"):
        async with serving(tmp_path, tls_certificate=str(tmp_path / "none.pem")):
            pass


@pytest.fixture(autouse=True)
def _log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)


# What nobody asked for.


async def test_a_publisher_is_told_of_the_topic_that_is_congested(tmp_path: Path) -> None:
    async with serving(tmp_path) as (broker, server), connected(server) as publisher:
        await broker.create_topic("tight", flow={"backlog_high": 5, "backlog_max": 20, "overflow": "reject"})
        slow = await broker.subscribe("slow", "tight")
        await publisher.ask(*publish_batch("tight", [b"x"] * 15))
        told = await publisher.until(lambda frame: frame.type == FrameType.FLOW)
        head, _ = heads.decode(told)
        assert (head.kind, head.topic, head.cause) == ("throttle", "tight", "backlog")
        await slow.ack(await slow.pull(100), wait=True)
        while True:
            head, _ = heads.decode(await publisher.until(lambda frame: frame.type == FrameType.FLOW))
            if head.kind == "resume":
                break


async def test_a_publisher_is_told_to_hold_while_a_topic_is_full(tmp_path: Path) -> None:
    async with serving(tmp_path) as (broker, server), connected(server) as publisher:
        await broker.create_topic("tight", flow={"backlog_high": 5, "backlog_max": 10, "overflow": "block"})
        slow = await broker.subscribe("slow", "tight")
        await publisher.ask(*publish_batch("tight", [b"x"] * 12))
        kinds = []
        while "pause" not in kinds:
            head, _ = heads.decode(await publisher.until(lambda frame: frame.type == FrameType.FLOW))
            kinds.append(head.kind)
        assert (head.topic, head.level) == ("tight", "full")
        await slow.ack(await slow.pull(100), wait=True)
        head, _ = heads.decode(await publisher.until(lambda frame: frame.type == FrameType.FLOW))
        assert head.kind in ("throttle", "resume")
