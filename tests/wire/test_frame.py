"""Where frames end and begin, against docs/protocol.md §1; headers are built here with ``struct`` alone."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow.model.errors import ProtocolError, VersionUnsupported
from sparrow.wire.frame import (
    FRAME_BYTES_MAX,
    HEADER_BYTES,
    MAGIC,
    REQUEST_ID,
    VERSION,
    Frame,
    FrameReader,
    FrameType,
    pack,
)

KIB, MIB = 1 << 10, 1 << 20
EDGES = [
    0, 1, 32 * KIB - 1, 32 * KIB, 32 * KIB + 1, 64 * KIB - HEADER_BYTES - 1, 64 * KIB - HEADER_BYTES,
    64 * KIB - HEADER_BYTES + 1, 64 * KIB, MIB - 1, MIB, MIB + 1, 2 * MIB, 3 * MIB + 5, 16 * MIB,
]  # fmt: skip
"""Payload sizes around every size at which the reader changes its ways."""


def header(
    length: int,
    *,
    kind: int = FrameType.ACK,
    flags: int = 0,
    magic: int = 0x4D515545,
    version: int = 1,
    reserved: int = 0,
) -> bytes:
    """The 12 bytes by the page."""
    return struct.pack(">I4BI", magic, version, kind, flags, reserved, length)


def frame(payload: bytes, *, kind: int = FrameType.ACK, request_id: int | None = None) -> bytes:
    if request_id is None:
        return header(len(payload), kind=kind) + payload
    numbered = struct.pack(">I", request_id) + payload
    return header(len(numbered), kind=kind, flags=1) + numbered


def pattern(length: int, seed: int = 1) -> bytes:
    """Bytes that differ from place to place, so that a shifted or repeated piece shows."""
    return random.Random(seed).randbytes(length)


def plain(frames: list[Frame]) -> list[tuple[int, int | None, bytes]]:
    return [(found.type, found.request_id, bytes(found.payload)) for found in frames]


def chunks(stream: bytes, sizes: Iterator[int]) -> Iterator[bytes]:
    at = 0
    while at < len(stream):
        size = next(sizes)
        yield stream[at : at + size]
        at += size


def read(stream: bytes, size: int | None = None) -> list[tuple[int, int | None, bytes]]:
    """The frames of a stream that arrives whole, or in pieces of one size."""
    reader = FrameReader()
    found: list[Frame] = []
    for start in range(0, len(stream), size or len(stream) or 1):
        found += reader.feed(stream[start : start + (size or len(stream))])
    assert reader.is_between_frames
    return plain(found)


THREE = [(3, None, b"one"), (36, 7, b""), (99, None, b"")]
STREAM = frame(b"one", kind=3) + frame(b"", kind=36, request_id=7) + frame(b"", kind=99)


# The header.


def test_the_constants_are_those_of_the_page() -> None:
    assert (MAGIC, VERSION, HEADER_BYTES, REQUEST_ID) == (0x4D515545, 1, 12, 1)
    assert FRAME_BYTES_MAX == 16 * 1024 * 1024


def test_a_frame_is_packed_byte_by_byte_as_the_page_says() -> None:
    packed = b"".join(pack(FrameType.CLOSE, [b"\xaa\xbb", b"\xcc"]))
    assert packed.hex(" ") == "4d 51 55 45 01 33 00 00 00 00 00 03 aa bb cc"


def test_a_request_id_is_flagged_counted_and_put_in_front() -> None:
    packed = b"".join(pack(FrameType.CLOSE, [b"\xaa"], request_id=0x01020304))
    assert packed.hex(" ") == "4d 51 55 45 01 33 01 00 00 00 00 05 01 02 03 04 aa"


def test_a_frame_without_a_payload_is_its_header() -> None:
    assert b"".join(pack(FrameType.HEARTBEAT, [])) == header(0, kind=99)
    assert read(header(0, kind=99)) == [(99, None, b"")]


@pytest.mark.parametrize("request_id", [None, 0, 1, 2**31, 2**32 - 1])
@pytest.mark.parametrize("payload", [b"", b"x", pattern(70_000)], ids=len)
def test_what_is_packed_is_read_with_its_request_id(request_id: int | None, payload: bytes) -> None:
    packed = b"".join(pack(FrameType.CALL, [payload], request_id))
    assert packed == frame(payload, kind=34, request_id=request_id)
    assert read(packed) == [(34, request_id, payload)]


def test_types_that_are_not_known_are_frames_all_the_same() -> None:
    assert read(frame(b"?", kind=200)) == [(200, None, b"?")]


def test_the_pieces_of_a_frame_add_up_to_the_length_in_its_header() -> None:
    pieces = [b"a" * 3, bytearray(5), memoryview(b"c" * 70_000), b""]
    packed = pack(FrameType.PUBLISH_BATCH, pieces, request_id=9)
    total = sum(len(piece) for piece in packed)
    assert struct.unpack_from(">I", packed[0], 8) == (total - HEADER_BYTES,)
    assert total == HEADER_BYTES + 4 + 3 + 5 + 70_000


def test_pieces_are_not_copied() -> None:
    body = memoryview(bytes(70_000))
    assert pack(FrameType.PUBLISH_BATCH, [b"head", body])[2] is body


def test_pack_takes_the_largest_frame_and_refuses_one_byte_more() -> None:
    body = memoryview(bytes(FRAME_BYTES_MAX + 1))
    assert pack(FrameType.CALL, [body[:FRAME_BYTES_MAX]])[0] == header(FRAME_BYTES_MAX, kind=34)
    with pytest.raises(ProtocolError, match="too long"):
        pack(FrameType.CALL, [body])


def test_pack_counts_the_request_id_against_the_limit() -> None:
    body = memoryview(bytes(FRAME_BYTES_MAX))
    pack(FrameType.CALL, [body[:-4]], request_id=1)
    with pytest.raises(ProtocolError, match="too long"):
        pack(FrameType.CALL, [body[:-3]], request_id=1)


# Streams in pieces.


@pytest.mark.parametrize("cut", range(len(STREAM) + 1))
def test_frames_are_found_wherever_the_stream_is_cut(cut: int) -> None:
    reader = FrameReader()
    assert plain(reader.feed(STREAM[:cut]) + reader.feed(STREAM[cut:])) == THREE


def test_a_frame_comes_out_with_its_last_byte_and_not_before() -> None:
    reader = FrameReader()
    counts = [len(reader.feed(STREAM[at : at + 1])) for at in range(len(STREAM))]
    ends = [at + 1 for at, count in enumerate(counts) if count]
    assert ends == [15, 31, 43]


def test_many_frames_in_one_read_come_out_in_order() -> None:
    stream = b"".join(frame(b"%d" % n, request_id=n) for n in range(5000))
    assert read(stream) == [(3, n, b"%d" % n) for n in range(5000)]


def test_a_stream_of_one_byte_at_a_time_is_read() -> None:
    assert read(STREAM * 50, size=1) == THREE * 50


@pytest.mark.parametrize("size", [11, 12, 13, 4096, 65_535, 65_536, 65_537])
def test_frames_of_all_sizes_are_read_in_pieces_of_any_size(size: int) -> None:
    lengths = [0, 1, 100, 32 * KIB, 5, 40_000, 31_000, 31_000, 31_000, 200_000, 7]
    payloads = [pattern(length, seed) for seed, length in enumerate(lengths)]
    stream = b"".join(frame(payload, request_id=n) for n, payload in enumerate(payloads))
    assert read(stream, size) == [(3, n, payload) for n, payload in enumerate(payloads)]


@pytest.mark.parametrize("length", EDGES)
@pytest.mark.parametrize("request_id", [None, 5])
def test_a_frame_of_any_length_is_read_between_two_others(length: int, request_id: int | None) -> None:
    body = pattern(length - 4 if request_id and length >= 4 else length)
    stream = frame(b"before") + frame(body, request_id=request_id) + frame(b"behind")
    found = read(stream, size=256 * KIB)
    assert found == [(3, None, b"before"), (3, request_id, body), (3, None, b"behind")]


@pytest.mark.parametrize("length", [32 * KIB - 1, 32 * KIB, 64 * KIB, MIB, MIB + 1])
@pytest.mark.parametrize("first", [1, 11, 12, 13, 16, 17, 32 * KIB, 32 * KIB + 11, 32 * KIB + 12])
def test_a_large_frame_may_be_cut_anywhere(length: int, first: int) -> None:
    body = pattern(length)
    stream = frame(body, request_id=8) + STREAM
    reader = FrameReader()
    assert plain(reader.feed(stream[:first]) + reader.feed(stream[first:])) == [(3, 8, body), *THREE]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 70_000), st.none() | st.integers(0, 2**32 - 1)), max_size=6),
    st.randoms(use_true_random=False),
)
def test_how_a_stream_is_cut_changes_nothing(
    shapes: list[tuple[int, int | None]], chance: random.Random
) -> None:
    expected = [(3, number, pattern(length)) for length, number in shapes]
    stream = b"".join(frame(payload, request_id=number) for _, number, payload in expected)
    reader = FrameReader()
    sizes = iter(lambda: chance.choice([1, 7, 12, 900, 40_000, 65_536]), None)
    found = [item for piece in chunks(stream, sizes) for item in reader.feed(piece)]
    assert plain(found) == expected
    assert reader.is_between_frames


def test_the_lent_buffer_is_never_empty_and_never_small() -> None:
    """A read of a few bytes costs as much as one of many."""
    reader = FrameReader()
    stream = memoryview(b"".join(frame(pattern(n * 37 % 9000)) for n in range(600)))
    smallest, chance = 64 * KIB, random.Random(1)
    while stream:
        with reader.buffer() as room:
            smallest = min(smallest, len(room))
            count = min(len(room), len(stream), chance.randint(1, 20_000))
            room[:count] = stream[:count]
        reader.received(count)
        stream = stream[count:]
    assert smallest > 30 * KIB
    assert reader.is_between_frames


def test_a_reader_knows_whether_it_is_between_frames() -> None:
    reader = FrameReader()
    pieces = [b"", STREAM[:5], STREAM[5:], header(100_000), bytes(99_999), b"x"]
    found = []
    for piece in pieces:
        reader.feed(piece)
        found.append(reader.is_between_frames)
    assert found == [True, False, True, False, False, True]


def test_nothing_received_is_no_frame() -> None:
    assert FrameReader().feed(b"") == []
    assert FrameReader().received(0) == []


# What breaks the framing.


@pytest.mark.parametrize(
    ("broken", "error", "complaint"),
    [
        (header(0, magic=0x4D515546), ProtocolError, "begins with 0x4d515546"),
        (b"GET / HTTP/1.1\r\n", ProtocolError, "begins with 0x47455420"),
        (header(0, version=0), VersionUnsupported, "version 0"),
        (header(0, version=2), VersionUnsupported, "version 2"),
        (header(900, flags=2), ProtocolError, "flags 0x02"),
        (header(900, flags=0x81), ProtocolError, "flags 0x81"),
        (header(0, reserved=1), ProtocolError, "reserved bits 0x01"),
        (header(FRAME_BYTES_MAX + 1), ProtocolError, "too long"),
        (header(2**32 - 1), ProtocolError, "too long"),
        (header(3, flags=1), ProtocolError, "too short for its request id"),
        (header(0, flags=1), ProtocolError, "too short for its request id"),
    ],
)
def test_a_broken_header_has_its_typed_error(
    broken: bytes, error: type[ProtocolError], complaint: str
) -> None:
    for stream in (broken, STREAM + broken):
        with pytest.raises(ProtocolError, match=complaint) as caught:
            read(stream)
        assert type(caught.value) is error


@pytest.mark.parametrize("bit", range(7 * 8 + 8))
def test_each_bit_of_magic_version_flags_and_reserved_is_checked(bit: int) -> None:
    """All of the first 8 bytes but the type (any) and the flag of a request id."""
    raw = bytearray(header(2000))
    raw[bit // 8] ^= 0x80 >> bit % 8
    if bit // 8 == 5 or bit == 6 * 8 + 7:
        assert len(read(bytes(raw) + bytes(2000))) == 1
    else:
        with pytest.raises(ProtocolError):
            read(bytes(raw) + bytes(2000))


def test_checks_come_in_the_order_of_the_page() -> None:
    wrong = {"magic": 1, "version": 9, "flags": 0xFF, "reserved": 1}
    order = {"magic": "begins with", "version": "version 9", "reserved": "reserved", "flags": "flags"}
    for field, complaint in order.items():
        with pytest.raises(ProtocolError, match=complaint):
            FrameReader().feed(header(2**32 - 1, **wrong))
        del wrong[field]
    with pytest.raises(ProtocolError, match="too long"):
        FrameReader().feed(header(2**32 - 1, **wrong))


def test_a_broken_header_is_found_before_its_payload_has_come() -> None:
    reader = FrameReader()
    assert reader.feed(header(2**32 - 1)[:-1]) == []
    with pytest.raises(ProtocolError):
        reader.feed(b"\xff")


def test_an_unsupported_version_names_those_that_are_spoken() -> None:
    with pytest.raises(VersionUnsupported) as caught:
        FrameReader().feed(header(0, version=3))
    assert caught.value.details == {"versions": [1]}


def test_a_reader_with_a_lower_limit_names_it() -> None:
    reader = FrameReader(frame_bytes_max=100)
    assert len(reader.feed(frame(bytes(100)))) == 1
    with pytest.raises(ProtocolError) as caught:
        reader.feed(header(101))
    assert caught.value.details == {"frame_bytes_max": 100}


def test_a_broken_reader_stays_broken() -> None:
    reader = FrameReader()
    for _ in range(3):
        with pytest.raises(ProtocolError):
            reader.feed(b"no frame at all")


# Memory.


@pytest.mark.parametrize("length", [32 * KIB, MIB, MIB + 1, 16 * MIB])
def test_a_header_alone_reserves_little(length: int) -> None:
    reader = FrameReader()
    reader.feed(header(length))
    assert reader.reserved_bytes == min(length, MIB)


def test_a_small_frame_reserves_nothing() -> None:
    reader = FrameReader()
    reader.feed(header(32 * KIB - 1))
    assert reader.reserved_bytes == 0


def test_memory_is_reserved_as_the_payload_arrives() -> None:
    reader = FrameReader()
    arrived = -HEADER_BYTES
    stream = frame(bytes(16 * MIB))
    for start in range(0, len(stream) - 1, 100_000):
        piece = stream[start : min(start + 100_000, len(stream) - 1)]
        reader.feed(piece)
        arrived += len(piece)
        assert arrived <= reader.reserved_bytes <= max(MIB, 2 * arrived)
    reader.feed(stream[-1:])
    assert reader.reserved_bytes == 0


def test_connections_that_promise_much_and_send_little_cost_little() -> None:
    tracemalloc.start()
    try:
        readers = [FrameReader() for _ in range(20)]
        for reader in readers:
            reader.feed(header(FRAME_BYTES_MAX) + bytes(1000))
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < len(readers) * (MIB + 100 * KIB)


def test_a_reader_that_is_idle_holds_no_buffer_until_it_is_needed() -> None:
    tracemalloc.start()
    try:
        readers = [FrameReader() for _ in range(20)]
        for reader in readers:
            reader.feed(STREAM)
            reader.relax()
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < len(readers) * KIB
    assert plain(readers[0].feed(STREAM)) == THREE


@pytest.mark.parametrize("cut", range(len(STREAM)))
def test_a_reader_within_a_frame_keeps_what_it_has(cut: int) -> None:
    reader = FrameReader()
    found = reader.feed(STREAM[:cut])
    reader.relax()
    assert plain(found + reader.feed(STREAM[cut:])) == THREE


@pytest.mark.parametrize("length", [10, 31 * KIB, 33 * KIB, 100 * KIB, 3 * MIB])
@pytest.mark.parametrize("size", [1000, 65_536, None])
def test_a_payload_never_changes_while_later_frames_arrive(length: int, size: int | None) -> None:
    """Payloads are kept as views: none may share memory with the buffers that are written next."""
    reader = FrameReader()
    held: list[Frame] = []
    bodies = [pattern(length, seed) for seed in range(4)] + [pattern(50, seed) for seed in range(100)]
    for number, body in enumerate(bodies):
        stream = frame(body, request_id=number)
        for start in range(0, len(stream), size or len(stream)):
            held += reader.feed(stream[start : start + (size or len(stream))])
    reader.feed(frame(b"\xff" * 31 * KIB) * 3)
    assert plain(held) == [(3, number, body) for number, body in enumerate(bodies)]


def test_writing_into_one_payload_changes_no_other() -> None:
    first, second = FrameReader().feed(frame(b"aaaa") + frame(b"bbbb"))
    if not first.payload.readonly:
        first.payload[:] = b"xxxx"
    assert bytes(second.payload) == b"bbbb"


def test_a_small_payload_does_not_hold_the_buffer_it_came_in() -> None:
    (found,) = FrameReader().feed(frame(b"small"))
    assert len(found.payload.obj) == 5  # type: ignore[arg-type]


def test_a_large_payload_arrives_in_the_memory_it_is_handed_out_in() -> None:
    reader = FrameReader()
    reader.feed(header(MIB))
    lent = reader.buffer()
    lent[:] = pattern(MIB)
    (found,) = reader.received(MIB)
    assert found.payload.obj is lent.obj
