"""The heads of extended frames: MessagePack arrays that only ever grow at the end (docs/protocol.md §3.2)."""

from __future__ import annotations

import struct
from typing import Any, ClassVar, NamedTuple

import msgspec

from sparrow.model.errors import InvalidArgument, SparrowError, from_dict
from sparrow.wire.frame import FRAME_BYTES_MAX, VERSION, Frame, FrameType, pack

_U32 = struct.Struct(">I")
_NOT_DETAILS = frozenset({"self", "message", "hint"})
"""Names that no error has among its details, because its constructor takes them for something else."""


class Head(msgspec.Struct, array_like=True, frozen=True):
    """The typed part of a frame; ``type`` is the frame's."""

    type: ClassVar[FrameType]


class Hello(Head, array_like=True, frozen=True):
    type = FrameType.HELLO
    versions: list[int] = msgspec.field(default_factory=lambda: [VERSION])
    client: str = ""
    publisher: str = ""
    priority_class: str = "normal"
    token: str = ""
    capabilities: list[str] = []


class Welcome(Head, array_like=True, frozen=True):
    type = FrameType.WELCOME
    version: int
    server: str
    session: str
    frame_bytes_max: int
    connection_bytes_max: int
    heartbeat_s: float
    capabilities: list[str] = []


class Call(Head, array_like=True, frozen=True):
    type = FrameType.CALL
    verb: str
    arguments: dict[str, Any] = {}


class Result(Head, array_like=True, frozen=True):
    type = FrameType.RESULT
    value: Any = None


class PublishBatch(Head, array_like=True, frozen=True):
    type = FrameType.PUBLISH_BATCH
    topic: str
    partition: int
    record_count: int
    columns: int
    codec: int
    crc: int
    producer_id: int = 0
    producer_epoch: int = 0
    base_sequence: int = 0
    partitions: int = 0
    """How many the client counted on when it chose the partition; 0 says nothing."""


class WireRun(NamedTuple):
    """Messages that were stored together."""

    partition: int
    base_offset: int
    length: int
    publish_time_us: int
    is_duplicate: bool = False
    is_dropped: bool = False


class WireReceipts(Head, array_like=True, frozen=True):
    type = FrameType.RECEIPTS
    topic: str
    topic_id: int
    runs: list[WireRun]
    rows: list[tuple[int, int]] | None = None
    """For each message its run and its place there; nothing when they are in order."""


class Consume(Head, array_like=True, frozen=True):
    type = FrameType.CONSUME
    subscription: str
    credit_messages: int
    credit_bytes: int


class JoinGroup(Head, array_like=True, frozen=True):
    type = FrameType.JOIN_GROUP
    subscription: str
    member: str
    max_in_flight: int | None = None
    is_static: bool = False
    instance: str = ""
    credit_messages: int = 0
    credit_bytes: int = 0


class Deliver(Head, array_like=True, frozen=True):
    type = FrameType.DELIVER
    consumer: int
    topic: str
    topic_id: int
    partition: int
    lease: str
    first_offset: int
    deadline_us: int
    attempts: dict[int, int] = {}


class Credit(Head, array_like=True, frozen=True):
    type = FrameType.CREDIT
    consumer: int
    messages: int
    bytes: int


class Settle(Head, array_like=True, frozen=True):
    type = FrameType.SETTLE
    consumer: int
    kind: int
    leases: list[tuple[str, list[int]]]
    """Each with the ranges of its offsets: start, end, start, end …"""
    delay_s: float | None = None
    reason: str = ""
    retry: bool = True
    wait: bool = False


class Extend(Head, array_like=True, frozen=True):
    type = FrameType.EXTEND
    consumer: int
    leases: list[tuple[str, list[int]]]
    seconds: float


class Unsubscribe(Head, array_like=True, frozen=True):
    type = FrameType.UNSUBSCRIBE
    consumer: int
    is_graceful: bool = True


class Leave(Head, array_like=True, frozen=True):
    type = FrameType.LEAVE
    consumer: int


class Rebalance(Head, array_like=True, frozen=True):
    type = FrameType.REBALANCE
    consumer: int
    generation: int
    assignment: list[tuple[str, int]]
    must_rejoin: bool = False


class Commit(Head, array_like=True, frozen=True):
    type = FrameType.COMMIT
    consumer: int
    topic: str
    partition: int
    offset: int
    metadata: str = ""


class Flow(Head, array_like=True, frozen=True):
    type = FrameType.FLOW
    kind: str
    topic: str = ""
    cause: str = ""
    level: str = ""
    retry_after_s: float = 0.0


class WireError(Head, array_like=True, frozen=True):
    type = FrameType.ERROR
    code: str
    message: str
    hint: str = ""
    details: dict[str, Any] = {}
    is_fatal: bool = False

    def to_exception(self) -> SparrowError:
        """The typed error that the other end raised."""
        details = {name: value for name, value in self.details.items() if name not in _NOT_DETAILS}
        fields = {"code": self.code, "message": self.message, "hint": self.hint, "details": details}
        return from_dict(fields)


class Fetch(Head, array_like=True, frozen=True):
    type = FrameType.FETCH
    topic: str
    partition: int
    offset: int
    max_bytes: int
    wait_s: float = 0.0
    columns: list[str] = []
    """Of the table form, those that are wanted beside the offset; none is all."""


class Fetched(Head, array_like=True, frozen=True):
    type = FrameType.FETCHED
    topic_id: int
    start_offset: int
    end_offset: int
    batches: list[tuple[int, int, int]]
    """First offset, end offset and length in the body of each."""


class Close(Head, array_like=True, frozen=True):
    type = FrameType.CLOSE


class Beat(Head, array_like=True, frozen=True):
    type = FrameType.HEARTBEAT
    status: str = ""


HEADS: dict[int, type[Head]] = {
    head.type: head
    for head in (
        Hello, Welcome, Call, Result, PublishBatch, WireReceipts, Consume, JoinGroup, Deliver, Credit, Settle,
        Extend, Unsubscribe, Leave, Rebalance, Commit, Flow, WireError, Fetch, Fetched, Close, Beat,
    )
}  # fmt: skip
ACK, NACK, RETURN = 1, 2, 3
"""Kinds of SETTLE."""

_encoder = msgspec.msgpack.Encoder()
_decoders = {kind: msgspec.msgpack.Decoder(head) for kind, head in HEADS.items()}


def encode(head: Head, request_id: int | None = None, *body: Any) -> list[Any]:
    """An extended frame, as pieces to be written one after the other."""
    raw = _encoder.encode(head)
    return pack(head.type, [_U32.pack(len(raw)) + raw, *body], request_id)


def decode(frame: Frame, head_bytes_max: int = FRAME_BYTES_MAX) -> tuple[Any, memoryview]:
    """Head and body of an extended frame; the body is a view."""
    decoder = _decoders.get(frame.type)
    if decoder is None:
        raise InvalidArgument(f"frames of type {frame.type} are not known here")
    payload = frame.payload
    if frame.type == FrameType.HEARTBEAT and not payload:
        return Beat(), payload
    if len(payload) < _U32.size:
        raise InvalidArgument("the frame is too short for a head")
    (length,) = _U32.unpack_from(payload)
    if length > len(payload) - _U32.size:
        raise InvalidArgument(f"the frame is too short for its head of {length} bytes")
    if length > head_bytes_max:
        raise InvalidArgument(f"a head of {length} bytes is too long; {head_bytes_max} are allowed")
    try:
        head = decoder.decode(payload[_U32.size : _U32.size + length])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"the head of the frame does not parse: {error}") from error
    return head, payload[_U32.size + length :]


def error(problem: SparrowError, *, is_fatal: bool = False) -> WireError:
    """The frame that carries an error."""
    details = {name: value for name, value in problem.details.items() if _is_plain(value) and _fits(value)}
    return WireError(problem.code, _utf8(problem.message), _utf8(problem.hint), details, is_fatal)


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float | bool)


def _fits(value: object) -> bool:
    """MessagePack has no integers beyond 64 bits and no halves of characters; such a detail stays behind."""
    try:
        _encoder.encode(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def _utf8(value: str) -> str:
    """File names that are not UTF-8 get into messages as halves of characters, which cannot be sent."""
    return value.encode(errors="backslashreplace").decode()
