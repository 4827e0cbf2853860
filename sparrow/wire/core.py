"""Core frames: fixed layouts for clients that are written in an afternoon (docs/protocol.md §3.1)."""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from sparrow.model.errors import InvalidArgument

_U8 = struct.Struct(">B")
_U16 = struct.Struct(">H")
_U32 = struct.Struct(">I")
_U64 = struct.Struct(">Q")
KEY_HEADER = "key"
"""The header that is a message's key."""


class Status(enum.IntEnum):
    """What became of a command; meanings of 1 and 2 depend on it."""

    DONE = 0
    NOT_FOUND = 1
    EXHAUSTED = 2
    INVALID = 3
    UNAUTHORIZED = 4
    TOO_LARGE = 16
    UNAVAILABLE = 17
    OTHER = 18


class NackAction(enum.IntEnum):
    """What becomes of a message that was nacked."""

    REQUEUED = 1
    DEAD_LETTER = 2
    DROPPED = 3


class Publish(NamedTuple):
    topic: str
    headers: dict[str, str]
    data: bytes
    ttl_s: int = 0
    requires_ack: bool = True


class Subscribe(NamedTuple):
    pattern: str
    group: str = ""
    max_in_flight: int = 10
    is_auto_ack: bool = False


class Ack(NamedTuple):
    message_id: str
    processing_ms: int = 0


class Nack(NamedTuple):
    message_id: str
    reason: int = 1
    is_retry: bool = True


class Delivery(NamedTuple):
    subscription: str
    message_id: str
    topic: str
    headers: dict[str, str]
    data: bytes
    deadline_ns: int


class Parser:
    """Takes a payload apart from the front; what is missing is a typed error and never a crash."""

    __slots__ = ("_at", "_payload")

    def __init__(self, payload: memoryview) -> None:
        self._payload = payload
        self._at = 0

    def _take(self, count: int, what: str) -> memoryview:
        end = self._at + count
        if end > len(self._payload):
            raise _ends_within(what)
        piece = self._payload[self._at : end]
        self._at = end
        return piece

    def _number(self, layout: struct.Struct, what: str) -> int:
        try:
            found: int = layout.unpack_from(self._payload, self._at)[0]
        except struct.error as error:
            raise _ends_within(what) from error
        self._at += layout.size
        return found

    def u8(self, what: str) -> int:
        return self._number(_U8, what)

    def u16(self, what: str) -> int:
        return self._number(_U16, what)

    def u32(self, what: str) -> int:
        return self._number(_U32, what)

    def u64(self, what: str) -> int:
        return self._number(_U64, what)

    def flag(self, what: str) -> bool:
        value = self.u8(what)
        if value > 1:
            raise InvalidArgument(f"{what} is 0 or 1, not {value}")
        return bool(value)

    def text(self, what: str) -> str:
        raw = self._take(self.u16(what), what)
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError as error:
            raise InvalidArgument(f"{what} is not UTF-8") from error

    def data(self, what: str) -> bytes:
        return bytes(self._take(self.u32(what), what))

    def headers(self) -> dict[str, str]:
        count = self.u16("headers")
        return {self.text("headers"): self.text("headers") for _ in range(count)}

    def end(self) -> None:
        """Nothing may be left."""
        rest = len(self._payload) - self._at
        if rest:
            raise InvalidArgument(f"the frame has {rest} bytes too many")


def _ends_within(what: str) -> InvalidArgument:
    return InvalidArgument(f"the frame ends within its {what}")


def text(value: str) -> bytes:
    try:
        raw = value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{value!a} cannot be written as UTF-8") from error
    if len(raw) > 0xFFFF:
        raise InvalidArgument(f"a text of {len(raw)} bytes is too long; 65,535 are allowed")
    return _U16.pack(len(raw)) + raw


def _headers(headers: dict[str, str]) -> bytes:
    if len(headers) > 0xFFFF:
        raise InvalidArgument(f"{len(headers)} headers are too many; 65,535 are allowed")
    pairs = [text(name) + text(value) for name, value in headers.items()]
    return _U16.pack(len(pairs)) + b"".join(pairs)


def _data(value: bytes) -> bytes:
    return _U32.pack(len(value)) + value


def parse_publish(payload: memoryview) -> Publish:
    at = Parser(payload)
    found = Publish(
        at.text("topic"), at.headers(), at.data("data"), at.u32("time to live"), at.flag("require-ack")
    )
    at.end()
    return found


def parse_subscribe(payload: memoryview) -> Subscribe:
    at = Parser(payload)
    found = Subscribe(at.text("pattern"), at.text("group"), at.u16("max in flight"), at.flag("auto-ack"))
    at.end()
    return found


def parse_ack(payload: memoryview) -> Ack:
    at = Parser(payload)
    found = Ack(at.text("message id"), at.u32("processing time"))
    at.end()
    return found


def parse_nack(payload: memoryview) -> Nack:
    at = Parser(payload)
    found = Nack(at.text("message id"), at.u8("reason"), at.flag("retry"))
    at.end()
    return found


def parse_delivery(payload: memoryview) -> Delivery:
    at = Parser(payload)
    found = Delivery(
        at.text("subscription"),
        at.text("message id"),
        at.text("topic"),
        at.headers(),
        at.data("data"),
        at.u64("deadline"),
    )
    at.end()
    return found


def publish(frame: Publish) -> bytes:
    tail = _U32.pack(frame.ttl_s) + bytes([frame.requires_ack])
    return text(frame.topic) + _headers(frame.headers) + _data(frame.data) + tail


def subscribe(frame: Subscribe) -> bytes:
    tail = _U16.pack(frame.max_in_flight) + bytes([frame.is_auto_ack])
    return text(frame.pattern) + text(frame.group) + tail


def ack(frame: Ack) -> bytes:
    return text(frame.message_id) + _U32.pack(frame.processing_ms)


def nack(frame: Nack) -> bytes:
    return text(frame.message_id) + bytes([frame.reason, frame.is_retry])


def delivery(frame: Delivery) -> bytes:
    head = text(frame.subscription) + text(frame.message_id) + text(frame.topic)
    return head + _headers(frame.headers) + _data(frame.data) + _U64.pack(frame.deadline_ns)


def publish_response(status: Status, message_id: str = "", timestamp_ns: int = 0) -> bytes:
    return bytes([status]) + text(message_id) + _U64.pack(timestamp_ns)


def subscribe_response(status: Status, subscription: str = "") -> bytes:
    return bytes([status]) + text(subscription)


def nack_response(status: Status, action: NackAction = NackAction.REQUEUED) -> bytes:
    return bytes([status, action])
