"""One webhook over HTTP, to servers that break every rule: each becomes a reply, none an exception."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sparrow.broker.push.guard import Guard
from sparrow.broker.push.sender import REASON_BYTES, Reply, Sender, make_target
from sparrow.kernel.push import Answer
from sparrow.model.push import PushPolicy, PushSettings

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
GUARD = Guard(PushSettings(allow_networks="127.0.0.0/8"))


@asynccontextmanager
async def server(serve: Serve, context: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    found = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)
    try:
        yield found.sockets[0].getsockname()[1]
    finally:
        found.close()


async def request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
    return head + await reader.readexactly(length)


def answering(answer: bytes) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(answer)
        await writer.drain()

    return serve


async def send(serve: Serve, timeout_s: float = 5.0) -> Reply:
    sender = Sender(GUARD)
    try:
        async with server(serve) as port:
            target = make_target(PushPolicy(url=f"http://127.0.0.1:{port}/", timeout_s=timeout_s))
            return await sender.send(target, b"{}", {"webhook-id": "1"}, 0)
    finally:
        await sender.close()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", Answer.ACCEPTED),
        (b"HTTP/1.1 204 No Content\r\n\r\n", Answer.ACCEPTED),
        (b"HTTP/1.0 200 OK\r\n\r\nbody until the end", Answer.ACCEPTED),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", Answer.ACCEPTED),
        (b"HTTP/1.1 500 \r\nContent-Length: 0\r\n\r\n", Answer.FAILED),
        (b"HTTP/1.1 302 Found\r\nLocation: http://10.0.0.1/\r\nContent-Length: 0\r\n\r\n", Answer.REJECTED),
        (b"HTTP/1.1 401 No\r\nWWW-Authenticate: Basic\r\nContent-Length: 0\r\n\r\n", Answer.REJECTED),
        (b"", Answer.FAILED),
        (b"\x00\x01\x02\x03", Answer.FAILED),
        (b"SSH-2.0-OpenSSH_9.6\r\n", Answer.FAILED),
        (b"HTTP/1.1 999999 What\r\n\r\n", Answer.FAILED),
        (b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n", Answer.FAILED),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", Answer.FAILED),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort", Answer.FAILED),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", Answer.FAILED),
        (b"HTTP/1.1 200 OK\r\nX-Long: " + b"a" * 100_000 + b"\r\n\r\n", Answer.FAILED),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n", Answer.REJECTED),
    ],
)  # fmt: skip
async def test_every_answer_is_judged(answer: bytes, expected: Answer) -> None:
    reply = await send(answering(answer))
    assert reply.answer is expected
    assert bool(reply.reason) == (expected is not Answer.ACCEPTED)


async def test_only_the_beginning_of_a_failed_answer_is_kept() -> None:
    body = b"why: " + b"\xffx\x00" * 1_000_000
    reply = await send(answering(b"HTTP/1.1 500 Oops\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)))
    assert reply.reason.startswith("500 Oops: why: \N{REPLACEMENT CHARACTER}x")
    assert len(reply.reason) <= REASON_BYTES + 20
    assert "\x00" not in reply.reason


async def test_an_endless_good_answer_is_not_read_to_its_end() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"x" * 65_536)
            await writer.drain()

    assert (await send(serve)).answer is Answer.ACCEPTED


@pytest.mark.parametrize(
    "first", [b"", b"HTTP/1.1 200 OK\r\nContent-Le", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"]
)
async def test_an_answer_that_trickles_is_given_up_in_time(first: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(first)
        await reader.read()

    reply = await send(serve, timeout_s=0.3)
    assert (reply.answer, reply.reason) == (Answer.FAILED, "no answer within 0.3 s")


async def test_a_connection_is_used_again() -> None:
    connections: list[Any] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        while True:
            await request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    sender = Sender(GUARD)
    async with server(serve) as port:
        target = make_target(PushPolicy(url=f"http://127.0.0.1:{port}/"))
        for _ in range(10):
            assert (await sender.send(target, b"{}", {}, 0)).answer is Answer.ACCEPTED
        await sender.close()
    assert len(connections) == 1


async def test_a_closed_port_and_a_name_that_nobody_has_are_unreachable() -> None:
    sender = Sender(GUARD)
    for url in ("http://127.0.0.1:1024/", "http://nobody.invalid/"):
        reply = await sender.send(make_target(PushPolicy(url=url, timeout_s=20.0)), b"{}", {}, 0)
        assert reply.answer is Answer.UNREACHABLE, reply
    await sender.close()


@pytest.fixture
def strange_certificate(tmp_path: Path) -> ssl.SSLContext:
    """A server's context with a certificate that it signed itself."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    return context


async def test_a_certificate_that_nobody_vouches_for_is_refused(strange_certificate: ssl.SSLContext) -> None:
    sender = Sender(GUARD)
    serve = answering(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    async with server(serve, strange_certificate) as port:
        target = make_target(PushPolicy(url=f"https://127.0.0.1:{port}/"))
        reply = await sender.send(target, b"{}", {}, 0)
    await sender.close()
    assert reply.answer is Answer.UNREACHABLE
    assert "certificate" in reply.reason.lower()
