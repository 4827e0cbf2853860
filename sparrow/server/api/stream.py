"""A stream of server-sent events: messages as they come, each with its ack id.

Acks go by requests of their own. ``max_messages`` is how many messages the stream may have unsettled; it
waits for acks then, and sends heartbeats meanwhile. A client that reads slowly is waited for as well.

**Resuming.** The id of an event is ``<stream>.<number>``. A client that comes again with the last one it saw,
as browsers do by themselves, goes on as if nothing had happened:

- what the old stream sent after that event is ready again at once, without a counted attempt, and is sent
  anew;
- what it sent up to that event is still in the client's hands: it is not sent again before its deadline, and
  its ack ids stay good.

Without the header, or when the broker does not remember the stream any more (it was restarted, or a minute
has passed), a new stream begins; what an old one left unsettled comes again after its deadline. An old stream
that is still open when its successor comes ends.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from typing import Any, Literal, NamedTuple

import msgspec

from sparrow.broker.courier import Portion
from sparrow.broker.subscription import BrokerSubscription
from sparrow.kernel.lease import name_offsets
from sparrow.model.access import Principal
from sparrow.model.errors import InvalidArgument, SparrowError
from sparrow.model.message import Delivered
from sparrow.server.api.envelope import enclose
from sparrow.server.api.family import Api, Req, encode, query
from sparrow.server.api.operation import described
from sparrow.server.api.receiving import TAG, in_order, to_cloudevent
from sparrow.server.api.routing import Stream, get
from sparrow.server.api.subscriptions import ONE, held

EVENT_STREAM = "text/event-stream"
MESSAGES_MAX = 100_000
PULL_MESSAGES = 2000
PULL_BYTES = 512 * 1024
"""What is sent at once: enough to make the cost small, little enough to stay fair."""
RESUME_S = 60.0
"""How long an ended stream is remembered."""
STREAMS_MAX = 1000
"""Ended streams that are remembered."""
RETRY_MS = 1000
"""When a browser should come again."""
_PAUSE_S = 0.01


class StreamQuery(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream is to be like."""

    max_messages: int = 1000
    """Unsettled messages that it may have."""
    limit: int | None = None
    """Ends after so many messages; without it never."""
    heartbeat_s: float = 15.0
    format: Literal["envelope", "cloudevents"] = "envelope"


class Sent(NamedTuple):
    """Messages of one lease that a stream has sent, and the number of the last of them."""

    last: int
    head: str
    offsets: list[int]
    deadline_us: int


class Sending:
    """One stream: what it sent and may have to take back."""

    def __init__(self, name: str, handle: BrokerSubscription) -> None:
        self.id = name
        self.handle = handle
        self.number = 0
        self.ended_at_s: float | None = None
        self.superseded = asyncio.Event()
        self.pulling: asyncio.Future[list[Any]] | None = None
        self._sent: deque[Sent] = deque()

    async def stop(self) -> None:
        """Another stream takes its place: it takes nothing more."""
        self.superseded.set()
        if self.pulling is not None and not self.pulling.done():
            self.pulling.cancel()
            await asyncio.wait({self.pulling})

    def note(self, head: str, offsets: list[int], deadline_us: int, now_us: int) -> None:
        """Messages are sent; those whose time has passed are forgotten."""
        self.number += len(offsets)
        self._sent.append(Sent(self.number, head, offsets, deadline_us))
        while self._sent[0].deadline_us < now_us:
            self._sent.popleft()

    def take_back(self, seen: int) -> int:
        """What came after the event that was seen last is ready again; how many messages those are."""
        unseen: dict[str, list[int]] = {}
        for each in self._sent:
            if each.last > seen:
                first = each.last - len(each.offsets)
                unseen.setdefault(each.head, []).extend(each.offsets[max(0, seen - first) :])
        self._sent.clear()
        if unseen:
            self.handle.return_names(name_offsets(unseen))
        return sum(map(len, unseen.values()))


class Streams:
    """The streams of a server, open ones and those that ended lately."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._known: OrderedDict[str, Sending] = OrderedDict()

    async def begin(self, name: str, last_event_id: str | None) -> Sending:
        """A stream of a subscription; takes up the one that it follows."""
        handle = await self._api.broker.subscription(name)
        before, _, number = (last_event_id or "").partition(".")
        old = self._known.pop(before, None)
        if old is not None and old.handle.name == name and number.isdecimal() and number.isascii():
            await old.stop()
            old.take_back(int(number))
        new = Sending(secrets.token_hex(8), handle)
        self._known[new.id] = new
        self._forget()
        return new

    def end(self, stream: Sending) -> None:
        """The stream is over; its client may come again."""
        stream.ended_at_s = self._api.clock.monotonic_s()
        if stream.id in self._known:
            self._known.move_to_end(stream.id)

    def _forget(self) -> None:
        now_s = self._api.clock.monotonic_s()
        ended = [each for each in self._known.values() if each.ended_at_s is not None]
        old = [each for each in ended if now_s - (each.ended_at_s or 0.0) > RESUME_S]
        for each in [*old, *ended[: max(0, len(ended) - STREAMS_MAX)]]:
            self._known.pop(each.id, None)


def routes(api: Api) -> list[Any]:
    """The handler."""
    streams = Streams(api)

    @get(
        f"{ONE}/messages",
        opt=described(
            "Receive messages as a stream of server-sent events",
            tag=TAG,
            description="The data of an event is a message as `pull` returns it. Acknowledge with"
            " `POST …/acknowledge`. `Last-Event-ID` resumes.",
            query=StreamQuery,
            headers={"last-event-id": "The id of the last event that was seen."},
            answers={200: EVENT_STREAM},
            errors=(404, 409),
        ),
    )
    async def stream_messages(request: Req, subscription: str) -> Stream:
        wanted = query(request, StreamQuery)
        _check(wanted)
        await held(api, request, subscription)
        principal = api.principal(request)
        stream = await streams.begin(subscription, request.headers.get("last-event-id"))
        stream.handle.allow(wanted.max_messages)
        events = _events(api, stream, wanted, principal)
        # The first look is taken before the answer begins, so that a refusal has its status.
        first = await anext(events)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return Stream(_all(first, events, streams, stream), EVENT_STREAM, headers)

    return [stream_messages]


def _check(wanted: StreamQuery) -> None:
    if not 1 <= wanted.max_messages <= MESSAGES_MAX:
        raise InvalidArgument(f"max_messages must be from 1 to {MESSAGES_MAX}, not {wanted.max_messages}")
    if wanted.limit is not None and not 1 <= wanted.limit <= 2**53:
        raise InvalidArgument(f"limit must be from 1, not {wanted.limit}")
    if not 0.1 <= wanted.heartbeat_s <= 3600:
        raise InvalidArgument(f"heartbeat_s must be from 0.1 to 3600, not {wanted.heartbeat_s}")


async def _all(
    first: bytes, events: AsyncIterator[bytes], streams: Streams, stream: Sending
) -> AsyncIterator[bytes]:
    try:
        yield first
        async for chunk in events:
            yield chunk
    finally:
        streams.end(stream)


async def _events(
    api: Api, stream: Sending, wanted: StreamQuery, principal: Principal
) -> AsyncIterator[bytes]:
    """The bytes of the stream. What is refused at first is raised, later it is an event and the end."""
    ends = [asyncio.ensure_future(each.wait()) for each in (api.closing, stream.superseded)]
    begin = f": stream {stream.id}\nretry: {RETRY_MS}\n\n".encode()
    rest = wanted.limit
    is_first = True
    try:
        while rest is None or rest > 0:
            count = PULL_MESSAGES if rest is None else min(PULL_MESSAGES, rest)
            asked_at_s = api.clock.monotonic_s()
            before = stream.number
            try:
                api.access.check_alive(principal)
                chunk = await _next(api, stream, wanted, count, 0.0 if is_first else wanted.heartbeat_s, ends)
            except SparrowError as error:
                if is_first:
                    raise
                yield b"event: error\ndata: " + encode({"error": error.to_dict()}) + b"\n\n"
                return
            if is_first:
                is_first = False
                yield begin + (chunk or b"")
            elif chunk:
                yield chunk
            elif any(end.done() for end in ends):
                return
            elif api.clock.monotonic_s() - asked_at_s < wanted.heartbeat_s / 2:
                await asyncio.sleep(_PAUSE_S)  # The subscription was changed, and is looked at anew.
            else:
                yield b": heartbeat\n\n"
            rest = None if rest is None else rest - (stream.number - before)
    finally:
        for end in ends:
            end.cancel()


async def _next(
    api: Api,
    stream: Sending,
    wanted: StreamQuery,
    count: int,
    timeout_s: float,
    ends: list[asyncio.Task[Any]],
) -> bytes:
    """The next messages as events; nothing when there are none in time, or the stream is to end."""
    handle = stream.handle
    is_cloud = wanted.format == "cloudevents"
    pull = stream.pulling = asyncio.ensure_future(
        handle.pull(count, timeout_s, max_bytes=PULL_BYTES)
        if is_cloud
        else handle.pull_portions(count, timeout_s, max_bytes=PULL_BYTES)
    )
    try:
        await asyncio.wait({pull, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if not pull.done() or pull.cancelled():
            return b""
        found = pull.result()
    finally:
        pull.cancel()
    now_us = api.clock.now_us()
    if stream.superseded.is_set():
        _note(stream, found, now_us)
        stream.take_back(0)
        return b""
    if is_cloud:
        return b"".join(_cloudevent(stream, message, now_us) for message in found)
    frames: list[str] = []
    name = stream.id
    for portion in in_order(found, handle.policy):
        number = stream.number + 1
        head, offsets, texts = enclose(portion)
        frames += [f"id: {name}.{place}\ndata: {text}\n\n" for place, text in enumerate(texts, number)]
        stream.note(head, offsets, portion.run.deadline_us, now_us)
    return "".join(frames).encode()


def _note(stream: Sending, found: list[Any], now_us: int) -> None:
    """Messages in hand that are not sent."""
    for each in found:
        if isinstance(each, Portion):
            offsets = each.rows.column("offset").to_pylist()
            stream.note(each.run.head, offsets, each.run.deadline_us, now_us)
        else:
            stream.note(each.lease, [each.offset], each.deadline_us, now_us)


def _cloudevent(stream: Sending, message: Delivered, now_us: int) -> bytes:
    stream.note(message.lease, [message.offset], message.deadline_us, now_us)
    event = to_cloudevent(message).replace(b"\n", b" ").replace(b"\r", b" ")
    return f"id: {stream.id}.{stream.number}\ndata: ".encode() + event + b"\n\n"
