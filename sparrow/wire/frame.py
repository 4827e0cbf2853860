"""Frames: where one ends and the next begins, without any I/O (docs/protocol.md §1).

``FrameReader`` is fed by whoever owns the socket: it lends a buffer, is told how much of it was filled, and
returns the frames that are complete. A large payload is received into memory of its own, so that an Arrow
batch travels from the socket to the journal without a copy; small ones are copied out of a shared buffer.
What breaks the framing raises ``ProtocolError``, after which the reader is of no more use.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from sparrow.model.errors import ProtocolError, VersionUnsupported

MAGIC = 0x4D515545
VERSION = 1
HEADER_BYTES = 12
FRAME_BYTES_MAX = 16 * 1024 * 1024
REQUEST_ID = 1
"""Flag: the payload begins with a request id."""

_HEADER = struct.Struct(">IBBBBI")
_U32 = struct.Struct(">I")
_SHARED_BYTES = 64 * 1024
_LARGE_BYTES = 32 * 1024
_GROWTH_BYTES = 1024 * 1024
"""Memory is reserved for a payload as it arrives: a header alone costs at most this."""
_ZEROS = memoryview(bytes(4 * _GROWTH_BYTES))
"""Payloads grow by these: memory that is zeroed anew for each growth costs nine tenths of the speed."""


class FrameType(enum.IntEnum):
    """What a frame is; docs/protocol.md §3."""

    PUBLISH = 1
    SUBSCRIBE = 2
    ACK = 3
    NACK = 4
    JOIN_GROUP = 5
    DELIVERY = 10
    RESPONSE = 11
    HELLO = 32
    WELCOME = 33
    CALL = 34
    RESULT = 35
    PUBLISH_BATCH = 36
    RECEIPTS = 37
    CONSUME = 38
    DELIVER = 39
    CREDIT = 40
    SETTLE = 41
    EXTEND = 42
    UNSUBSCRIBE = 43
    LEAVE = 44
    REBALANCE = 45
    COMMIT = 46
    FLOW = 47
    ERROR = 48
    FETCH = 49
    FETCHED = 50
    CLOSE = 51
    HEARTBEAT = 99


class Frame(NamedTuple):
    """One frame, taken apart as far as its header goes."""

    type: int
    request_id: int | None
    payload: memoryview
    """Without the request id."""


def pack(kind: int, pieces: Sequence[Any], request_id: int | None = None) -> list[Any]:
    """The bytes of a frame as pieces to be written one after the other; large ones are not copied."""
    length = sum(len(piece) for piece in pieces)
    flags = 0
    prefix = b""
    if request_id is not None:
        flags, prefix = REQUEST_ID, _U32.pack(request_id)
        length += _U32.size
    if length > FRAME_BYTES_MAX:
        raise ProtocolError(f"a frame of {length} bytes is too long; {FRAME_BYTES_MAX} are allowed")
    header = _HEADER.pack(MAGIC, VERSION, kind, flags, 0, length)
    return [header + prefix, *pieces]


class FrameReader:
    """Cuts a stream of bytes into frames."""

    __slots__ = ("_end", "_filled", "_frame_bytes_max", "_kind", "_large", "_length", "_shared", "_start")

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._frame_bytes_max = frame_bytes_max
        self._shared = bytearray()
        self._start = self._end = 0
        self._large: bytearray | None = None
        self._filled = 0
        self._length = 0
        self._kind = (0, 0)

    @property
    def reserved_bytes(self) -> int:
        """Memory held for a payload that has not arrived whole."""
        return len(self._large) if self._large is not None else 0

    @property
    def is_between_frames(self) -> bool:
        """Whether nothing of a frame has arrived yet."""
        return self._large is None and self._start == self._end

    def buffer(self) -> memoryview:
        """Where the next bytes are to go; never empty."""
        if self._large is not None:
            if self._filled == len(self._large):
                self._large += _ZEROS[: min(self._length - self._filled, self._filled)]
            return memoryview(self._large)[self._filled :]
        if not self._shared:
            self._shared = bytearray(_SHARED_BYTES)
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start and self._end > _LARGE_BYTES:
            rest = self._shared[self._start : self._end]
            self._shared[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        return memoryview(self._shared)[self._end :]

    def relax(self) -> None:
        """Gives the shared buffer back while nothing arrives: ten thousand idle connections hold little."""
        if self.is_between_frames:
            self._shared = bytearray()
            self._start = self._end = 0

    def received(self, count: int) -> list[Frame]:
        """So many bytes of the lent buffer were filled; the frames that are complete with them."""
        if self._large is None:
            self._end += count
            return self._cut()
        self._filled += count
        if self._filled < self._length:
            return []
        kind, flags = self._kind
        payload = memoryview(self._large)
        self._large = None
        if flags:
            return [Frame(kind, _U32.unpack_from(payload)[0], payload[_U32.size :])]
        return [Frame(kind, None, payload)]

    def feed(self, data: bytes) -> list[Frame]:
        """The same for bytes that are at hand."""
        found: list[Frame] = []
        rest = memoryview(data)
        while rest:
            room = self.buffer()
            count = min(len(room), len(rest))
            room[:count] = rest[:count]
            room.release()
            found += self.received(count)
            rest = rest[count:]
        return found

    def _cut(self) -> list[Frame]:
        found: list[Frame] = []
        shared, start, end = self._shared, self._start, self._end
        while end - start >= HEADER_BYTES:
            magic, version, kind, flags, reserved, length = _HEADER.unpack_from(shared, start)
            is_right = magic == MAGIC and version == VERSION and not reserved and flags <= REQUEST_ID
            if not is_right or not flags * _U32.size <= length <= self._frame_bytes_max:
                raise self._problem(magic, version, flags, reserved, length)
            begin = start + HEADER_BYTES
            stop = begin + length
            if stop > end:
                if length >= _LARGE_BYTES:
                    self._begin_large(kind, flags, length, begin)
                    return found
                break
            # A slice of a bytearray is a copy: the frame has memory of its own.
            if flags:
                number = _U32.unpack_from(shared, begin)[0]
                found.append(Frame(kind, number, memoryview(shared[begin + _U32.size : stop])))
            else:
                found.append(Frame(kind, None, memoryview(shared[begin:stop])))
            start = stop
        self._start = start
        return found

    def _begin_large(self, kind: int, flags: int, length: int, begin: int) -> None:
        some = self._shared[begin : self._end]
        self._large = bytearray(max(len(some), min(length, _GROWTH_BYTES)))
        self._large[: len(some)] = some
        self._filled, self._length, self._kind = len(some), length, (kind, flags)
        self._start = self._end = 0

    def _problem(self, magic: int, version: int, flags: int, reserved: int, length: int) -> ProtocolError:
        if magic != MAGIC:
            return ProtocolError(f"a frame begins with {magic:#010x} instead of {MAGIC:#010x}")
        if version != VERSION:
            return VersionUnsupported(f"version {version} is not spoken here", versions=[VERSION])
        if reserved or flags & ~REQUEST_ID:
            return ProtocolError(f"unknown flags {flags:#04x} or reserved bits {reserved:#04x}")
        if length > self._frame_bytes_max:
            return ProtocolError(
                f"a frame of {length} bytes is too long; {self._frame_bytes_max} are allowed",
                frame_bytes_max=self._frame_bytes_max,
            )
        return ProtocolError(f"a frame of {length} bytes is too short for its request id")
