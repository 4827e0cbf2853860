"""The HTTP API: batches in, single messages in, server-sent events out, as clients see them.

    python -m benchmarks.http [--quick] [--json] [--data DIR]

A broker (``sparrow up``, default settings) and one client, each a process of its own, over HTTP/1.1 with
connections that are kept. The client is a few lines of asyncio, so that it is not what is measured; it builds
its requests beforehand and looks at every answer. Messages are JSON of about 200 bytes with two attributes,
durable: 202 comes after fdatasync.

- Batches: 500 messages a request on 4 connections.
- Single messages: 64 connections, each sending its next message when the last one is answered.
- Server-sent events: one stream of a backlog; every message is acknowledged by its ack id, 1,000 a request,
  on a connection beside the stream. The figure counts what was acknowledged, durable too.
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
import sys
from collections.abc import Sequence
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from benchmarks import measure, remote
from benchmarks.measure import Options, Report

BATCHED_PER_S = 30_000.0
SINGLE_PER_S = 2_000.0
STREAMED_PER_S = 20_000.0
BATCH = 500
BATCH_CONNECTIONS = 4
SINGLE_CONNECTIONS = 64
ACKS = 1_000
_ACK_ID = re.compile(rb'"ack_id":"([^"]+)"')


def run(options: Options, report: Report) -> None:
    batched, single, streamed = (4_000, 500, 4_000) if options.quick else (200_000, 20_000, 200_000)
    report.set_out(
        durability="durable (202 after fdatasync)",
        batch=BATCH,
        batched=batched,
        single=single,
        streamed=streamed,
    )
    gc.collect()
    gc.freeze()
    with remote.broker(options.data / "broker") as process:
        measure.on_loop(bench(report, process.http, batched, single, streamed))


async def bench(report: Report, url: str, batched: int, single: int, streamed: int) -> None:
    await make(url, "batched")
    await publish_batches(url, "batched", 10 * BATCH)
    report.check(
        "publish in batches",
        await publish_batches(url, "batched", batched),
        BATCHED_PER_S,
        "/s",
        at_least=True,
    )
    await make(url, "single")
    await publish_singles(url, "single", 500)
    report.check(
        "publish one at a time",
        await publish_singles(url, "single", single),
        SINGLE_PER_S,
        "/s",
        at_least=True,
    )
    await make(url, "streamed", subscription="streamed")
    await publish_batches(url, "streamed", streamed)
    report.check(
        "stream and acknowledge", await stream(url, "streamed", streamed), STREAMED_PER_S, "/s", at_least=True
    )


# A client.


class Wire:
    """One connection that is kept."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, url: str) -> Wire:
        parts = urlsplit(url)
        return cls(*await asyncio.open_connection(parts.hostname, parts.port, limit=4 * 1024 * 1024))

    async def ask(self, request: bytes, status: int) -> bytes:
        """Sends a request and returns the body of its answer, which must have the status."""
        self.writer.write(request)
        head = await self.reader.readuntil(b"\r\n\r\n")
        size = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        body = await self.reader.readexactly(int(size[1])) if size else b""
        if int(head[9:12]) != status:
            raise AssertionError(f"{head!r} {body!r}")
        return body

    def close(self) -> None:
        self.writer.close()


def post(path: str, value: Any) -> bytes:
    body = json.dumps(value).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def message(number: int) -> dict[str, Any]:
    return {
        "data": {"order_id": f"o-{number}", "amount": number % 500, "country": "DE", "note": "x" * 120},
        "attributes": {"env": "prod", "region": "eu"},
        "ordering_key": f"customer-{number % 1000}",
    }


async def make(url: str, topic: str, *, subscription: str | None = None) -> None:
    wire = await Wire.open(url)
    await wire.ask(post("/v1/topics", {"name": topic, "partitions": 4}), 201)
    if subscription is not None:
        options = {"name": subscription, "topic_id": topic, "ack_deadline_s": 60}
        await wire.ask(post("/v1/subscriptions", options), 201)
    wire.close()


async def publish_batches(url: str, topic: str, count: int) -> float:
    requests = [
        post(
            f"/v1/topics/{topic}/messages/batch",
            {"messages": [message(n) for n in range(start, start + BATCH)]},
        )
        for start in range(0, count, BATCH)
    ]
    return count / await timed(url, requests, BATCH_CONNECTIONS)


async def publish_singles(url: str, topic: str, count: int) -> float:
    requests = [post(f"/v1/topics/{topic}/messages", message(number)) for number in range(count)]
    return count / await timed(url, requests, SINGLE_CONNECTIONS)


async def timed(url: str, requests: list[bytes], connections: int) -> float:
    """How long it takes until every request is answered, in seconds."""
    waiting = iter(requests)
    wires = [await Wire.open(url) for _ in range(connections)]

    async def work(wire: Wire) -> None:
        for request in waiting:
            await wire.ask(request, 202)

    began = perf_counter()
    await asyncio.gather(*(work(wire) for wire in wires))
    took_s = perf_counter() - began
    for wire in wires:
        wire.close()
    return took_s


async def stream(url: str, subscription: str, count: int) -> float:
    """Messages a second that are streamed and acknowledged."""
    reading, acking = await Wire.open(url), await Wire.open(url)
    path = f"/v1/subscriptions/{subscription}"
    began = perf_counter()
    query = f"max_messages=20000&limit={count}"
    reading.writer.write(f"GET {path}/messages?{query} HTTP/1.1\r\nHost: bench\r\n\r\n".encode())
    head = await reading.reader.readuntil(b"\r\n\r\n")
    assert b" 200 " in head, head
    acked, ids = 0, list[str]()
    async for chunk in chunks(reading.reader):
        ids += [found.decode() for found in _ACK_ID.findall(chunk)]
        while len(ids) >= ACKS or (ids and acked + len(ids) == count):
            some, ids = ids[:ACKS], ids[ACKS:]
            await acking.ask(post(f"{path}/acknowledge", {"ack_ids": some}), 204)
            acked += len(some)
    took_s = perf_counter() - began
    assert acked == count, f"{acked} of {count}"
    reading.close()
    acking.close()
    return count / took_s


async def chunks(reader: asyncio.StreamReader) -> Any:
    """The chunks of an answer; the broker sends whole events in each."""
    while size := int(await reader.readline(), 16):
        yield await reader.readexactly(size)
        await reader.readline()


def main(arguments: Sequence[str] | None = None) -> int:
    return measure.main("http", __doc__, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
