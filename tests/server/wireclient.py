"""A client as small as can be, for tests of the server: it knows frames and nothing of what they mean."""

from __future__ import annotations

import asyncio
import itertools
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from sparrow.broker.broker import Broker
from sparrow.model.settings import Address, JournalSettings, ServerSettings, Settings
from sparrow.server.http import bind
from sparrow.server.tcp import TcpServer
from sparrow.store import batch as batches
from sparrow.wire import heads
from sparrow.wire.frame import Frame, FrameReader, FrameType, pack

TIMEOUT_S = 10.0


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.frames = FrameReader()
        self.arrived: list[Frame] = []
        self.numbers = itertools.count(1)

    @classmethod
    async def connect(cls, address: Address, context: ssl.SSLContext | None = None) -> Client:
        return cls(*await asyncio.open_connection(address.host, address.port, ssl=context))

    def write(self, pieces: list[Any]) -> None:
        for piece in pieces:
            self.writer.write(bytes(piece))

    def send(self, head: heads.Head, request_id: int | None = None, *body: Any) -> None:
        self.write(heads.encode(head, request_id, *body))

    def send_core(self, kind: int, payload: bytes, request_id: int | None = None) -> None:
        self.write(pack(kind, [payload], request_id))

    async def _more(self) -> bool:
        data = await asyncio.wait_for(self.reader.read(1 << 20), TIMEOUT_S)
        self.arrived += self.frames.feed(data)
        return bool(data)

    async def until(self, want: Any) -> Frame:
        """The first frame that passes a test; the others stay."""
        while True:
            for place, frame in enumerate(self.arrived):
                if want(frame):
                    return self.arrived.pop(place)
            if not await self._more():
                raise ConnectionError("the broker closed the connection")

    async def next(self, kind: int) -> Frame:
        return await self.until(lambda frame: frame.type == kind)

    async def next_head(self, kind: int) -> Any:
        return heads.decode(await self.next(kind))[0]

    async def ask(self, head: heads.Head, *body: Any) -> Any:
        """Sends a command and returns the head of its answer; an error is raised."""
        number = next(self.numbers)
        self.send(head, number, *body)
        return self.opened(await self.until(lambda frame: frame.request_id == number))

    @staticmethod
    def opened(frame: Frame) -> Any:
        head, _ = heads.decode(frame)
        if isinstance(head, heads.WireError):
            raise head.to_exception()
        return head

    async def hello(self, **fields: Any) -> heads.Welcome:
        found: heads.Welcome = await self.ask(heads.Hello(**fields))
        return found

    async def call(self, verb: str, **arguments: Any) -> Any:
        return (await self.ask(heads.Call(verb, arguments))).value

    async def deliver(self) -> tuple[heads.Deliver, pa.RecordBatch]:
        head, body = heads.decode(await self.next(FrameType.DELIVER))
        with pa.ipc.open_stream(pa.py_buffer(body)) as stream:
            (batch,) = stream
        return head, batch

    async def ended(self) -> bool:
        """Whether the broker closed the connection."""
        try:
            while await self._more():
                pass
        except ConnectionError:
            pass
        return True

    async def close(self) -> None:
        self.writer.close()
        with suppress(ConnectionError, ssl.SSLError):
            await self.writer.wait_closed()

    def abort(self) -> None:
        self.writer.transport.abort()


def publish_batch(topic: str, data: list[Any], partition: int = -1, **fields: Any) -> tuple[Any, Any]:
    """The head and the body of a PUBLISH_BATCH."""
    columns = {name: fields.pop(name) for name in ("key", "attributes") if name in fields}
    body = batches.encode(batches.build(data, **columns))
    head = heads.PublishBatch(
        topic, partition, body.record_count, body.columns, body.codec, body.crc, **fields
    )
    return head, body.buffer


@asynccontextmanager
async def serving(path: Path, **server: Any) -> AsyncIterator[tuple[Broker, TcpServer]]:
    settings = Settings(
        data=str(path / "data"),
        journal=JournalSettings(file_bytes=4 * 1024 * 1024),
        server=ServerSettings(**server),
    )
    async with await Broker.open(settings) as broker:
        running = await TcpServer.start(broker, bind(Address("127.0.0.1", 0)), settings.server)
        try:
            yield broker, running
        finally:
            await running.close()


@asynccontextmanager
async def connected(server: TcpServer, **hello: Any) -> AsyncIterator[Client]:
    client = await Client.connect(server.address)
    try:
        await client.hello(**hello)
        yield client
    finally:
        await client.close()
