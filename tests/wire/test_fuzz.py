"""A million damaged frames: each is refused with a typed error or understood, and none is remembered.

A stream of valid frames is damaged in every payload (bits, cuts, insertions, repeated pieces, false lengths)
and often once more anywhere, headers included; it is read in pieces of random sizes, and all that comes out
is decoded. Every stream has a seed of its own: a failure prints the one command that repeats it.

``SPARROW_FUZZ_FRAMES`` says how many, ``SPARROW_FUZZ_SEED`` which, ``SPARROW_FUZZ_FIRST`` where to begin.
"""

from __future__ import annotations

import collections
import gc
import os
import random
import struct
import sys
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from sparrow.model.errors import InvalidArgument, ProtocolError, SparrowError
from sparrow.wire import core, heads
from sparrow.wire.frame import Frame, FrameReader, FrameType

FRAMES = int(os.environ.get("SPARROW_FUZZ_FRAMES", "1000000"))
SEED = int(os.environ.get("SPARROW_FUZZ_SEED", "1"))
FIRST = int(os.environ.get("SPARROW_FUZZ_FIRST", "0"))
STREAM_FRAMES = 64
MIB = 1 << 20
_HEADER = struct.Struct(">I4BI")
_U32 = struct.Struct(">I")

LEASES = [("1-0-5f3a", [10, 20, 31, 32]), ("1-1-77", [0, 1])]
HEADS: list[heads.Head] = [
    heads.JoinGroup("billing", "worker-1", 100, True, "i-1", 1000, 1 << 20),
    heads.Hello([1], "fuzz", "orders-svc", "high", "secret", ["zstd", "arrow"]),
    heads.Welcome(1, "sparrow", "s-1", 16 << 20, 64 << 20, 10.0, ["zstd"]),
    heads.Call(
        "create_topic", {"name": "orders", "partitions": 4, "policy": {"ttl_s": 1.5, "x": [None, b"y"]}}
    ),
    heads.Result([{"id": 1, "name": "orders", "deep": [[[[["x"]]]]]}, None, True, -1, 2**63]),
    heads.PublishBatch("orders.us", -1, 300, 7, 1, 0xDEADBEEF, 2**40, 2, 70_000, 4),
    heads.WireReceipts("orders.us", 9, [heads.WireRun(0, 128, 2, 256)] * 3, [(0, 1), (0, 0)]),
    heads.Consume("billing", 1000, 1 << 20),
    heads.Deliver(3, "orders.us", 9, 1, "1-0-5f3a", 127, 1_700_000_000_000_000, {128: 2, 129: 3}),
    heads.Credit(3, 10, 1 << 20),
    heads.Settle(3, heads.NACK, LEASES, 1.5, "bad", False, True),
    heads.Extend(3, LEASES, 30.0),
    heads.Unsubscribe(3),
    heads.Leave(3),
    heads.Rebalance(3, 12, [("orders.us", 0), ("orders.us", 1)], True),
    heads.Commit(3, "orders.us", 1, 65_535, "größe"),
    heads.Flow("throttle", "orders.us", "lag", "hard", 0.25),
    heads.WireError("TOPIC_NOT_FOUND", "no topic", "create it", {"name": "x", "near": ["y"]}, True),
    heads.Fetch("orders.us", 1, 5, 1 << 20, 0.5),
    heads.Fetched(9, 5, 8, [(5, 8, 256), (8, 9, 100)]),
    heads.Close(),
    heads.Beat("busy"),
]
PAYLOADS: list[tuple[int, bytes]] = [
    *((head.type, b"".join(heads.encode(head, None, b"body"))[12:]) for head in HEADS),
    (FrameType.PUBLISH, core.publish(core.Publish("orders.us", {"key": "k", "é": "x"}, b"data" * 9, 60))),
    (FrameType.SUBSCRIBE, core.subscribe(core.Subscribe("orders.#", "billing"))),
    (FrameType.ACK, core.ack(core.Ack("1-0-7", 250))),
    (FrameType.NACK, core.nack(core.Nack("1-0-7", 2, False))),
    (FrameType.DELIVERY, core.delivery(core.Delivery("s", "1-0-7", "orders.us", {"x": "y"}, b"hi", 5))),
    (FrameType.HEARTBEAT, b""),
]
PARSERS: dict[int, Callable[[memoryview], Any]] = {
    FrameType.PUBLISH: core.parse_publish,
    FrameType.SUBSCRIBE: core.parse_subscribe,
    FrameType.ACK: core.parse_ack,
    FrameType.NACK: core.parse_nack,
    FrameType.DELIVERY: core.parse_delivery,
}
LARGE = bytes(range(256)) * 300
# Every MessagePack marker that announces a length, and what announces too much or too little.
MARKERS = bytes(
    [0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, *range(0xC4, 0xCA), *range(0xD4, 0xE0), 0xFF]
)
LENGTHS = [
    _U32.pack(n) for n in (0, 1, 3, 4, 255, 65_535, 32_768, MIB, 16 * MIB, 16 * MIB + 1, 2**31, 2**32 - 1)
]


# The damage: each works in place, on bytes that are not empty.


def flip(raw: bytearray, at: int, chance: random.Random) -> None:
    raw[at] ^= 1 << int(chance.random() * 8)


def cut(raw: bytearray, at: int, chance: random.Random) -> None:
    del raw[at : at + 1 + int(chance.random() * 12)]


def cut_off(raw: bytearray, at: int, chance: random.Random) -> None:
    del raw[at:]


def insert(raw: bytearray, at: int, chance: random.Random) -> None:
    raw[at:at] = chance.randbytes(1 + int(chance.random() * 8))


def repeat(raw: bytearray, at: int, chance: random.Random) -> None:
    start = int(chance.random() * len(raw))
    raw[at:at] = raw[start : start + 24]


def lie(raw: bytearray, at: int, chance: random.Random) -> None:
    raw[at : at + 4] = LENGTHS[int(chance.random() * len(LENGTHS))]


def mark(raw: bytearray, at: int, chance: random.Random) -> None:
    raw[at] = MARKERS[int(chance.random() * len(MARKERS))]


DAMAGE = (flip, flip, flip, cut, cut_off, insert, repeat, lie, mark, mark)


def damage(raw: bytearray, chance: random.Random) -> None:
    """One to three faults."""
    times = 1 + int(chance.random() ** 2 * 3)
    for _ in range(times):
        if not raw:
            raw += b"\xff"
        DAMAGE[int(chance.random() * len(DAMAGE))](raw, int(chance.random() * len(raw)), chance)


def damaged_stream(chance: random.Random) -> bytearray:
    """Frames whose payloads are all damaged; in half of the streams the framing is too."""
    stream = bytearray()
    for _ in range(STREAM_FRAMES):
        kind, payload = PAYLOADS[int(chance.random() * len(PAYLOADS))]
        raw = bytearray(payload)
        damage(raw, chance)
        dice = chance.random()
        if dice < 0.001:
            raw += LARGE[: 20_000 + int(chance.random() * 60_000)]
        number = b"\0\0\0\7" if dice > 0.5 else b""
        stream += _HEADER.pack(0x4D515545, 1, kind, bool(number), 0, len(number) + len(raw)) + number + raw
    if chance.random() < 0.5:
        damage(stream, chance)
    return stream


def pieces(stream: bytearray, chance: random.Random) -> Iterator[bytes]:
    """The stream as it may come from a socket: whole, in equal or in random pieces."""
    whole, at = bytes(stream), 0
    largest = (1, 40, 400, 4000, 100_000)[int(chance.random() ** 0.4 * 5)]
    while at < len(whole):
        size = 1 + int(chance.random() * largest)
        yield whole[at : at + size]
        at += size


# The reading.


class Tally:
    """What became of the frames."""

    def __init__(self) -> None:
        self.understood: collections.Counter[int] = collections.Counter()
        self.refused: collections.Counter[int] = collections.Counter()
        self.broken = 0

    @property
    def frames(self) -> int:
        return self.understood.total() + self.refused.total() + self.broken

    def read(self, stream: bytearray, chance: random.Random) -> None:
        reader, fed = FrameReader(), 0
        for piece in pieces(stream, chance):
            fed += len(piece)
            try:
                frames = reader.feed(piece)
            except ProtocolError:
                self.broken += 1
                return
            assert reader.reserved_bytes <= max(MIB, 2 * fed)
            for frame in frames:
                self.decode(frame)

    def decode(self, frame: Frame) -> None:
        parse = PARSERS.get(frame.type)
        try:
            if parse is not None:
                parse(frame.payload)
            else:
                head, _ = heads.decode(frame)
                if frame.type == FrameType.ERROR:
                    assert isinstance(head.to_exception(), SparrowError)
        except InvalidArgument:
            self.refused[frame.type] += 1
        else:
            self.understood[frame.type] += 1


def run(tally: Tally, streams: Iterator[int], frames: int) -> int:
    """Reads until so many frames were met; the most memory that the process had meanwhile."""
    process, most = psutil.Process(), 0
    while tally.frames < frames:
        number = next(streams)
        chance = random.Random(SEED << 32 | number)
        try:
            tally.read(damaged_stream(chance), chance)
        except BaseException as error:
            again = f"SPARROW_FUZZ_SEED={SEED} SPARROW_FUZZ_FIRST={number} SPARROW_FUZZ_FRAMES=1"
            raise AssertionError(f"{error!r}; again: {again} pytest {__file__}") from error
        if number % 64 == 0:
            most = max(most, process.memory_info().rss)
    return most


def blocks() -> int:
    gc.collect()
    return sys.getallocatedblocks()


def test_damaged_frames_are_refused_or_understood_and_leave_nothing_behind() -> None:
    tally, streams = Tally(), iter(range(FIRST, 1 << 32))
    before_most = run(tally, streams, FRAMES // 10)
    before_blocks = blocks()
    most = run(tally, streams, FRAMES)
    assert tally.frames >= FRAMES
    assert blocks() - before_blocks < 2000
    assert most - before_most < 32 * MIB
    if FRAMES >= 100_000:
        assert_every_frame_was_tried(tally)


def assert_every_frame_was_tried(tally: Tally) -> None:
    """Damage that is always refused, or always overlooked, would test nothing."""
    assert tally.broken > tally.frames // 1000
    for kind in FrameType:
        if kind != FrameType.RESPONSE:
            assert min(tally.understood[kind], tally.refused[kind]) > 20, kind.name


@pytest.mark.parametrize(("kind", "payload"), PAYLOADS, ids=lambda value: str(value)[:12])
def test_the_frames_to_be_damaged_are_valid(kind: int, payload: bytes) -> None:
    tally = Tally()
    tally.decode(Frame(kind, None, memoryview(payload)))
    assert tally.understood == {kind: 1}
