"""The heads of extended frames against docs/protocol.md §3.2: bytes, growth, garbage and errors."""

from __future__ import annotations

import enum
import struct
import tracemalloc
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow.model.errors import InvalidArgument, NotFound, SparrowError, registry
from sparrow.wire import heads
from sparrow.wire.frame import Frame, FrameReader, FrameType
from sparrow.wire.heads import HEADS


class Extended(NamedTuple):
    """A head and its MessagePack array."""

    head: heads.Head
    hex: str

    @property
    def raw(self) -> bytes:
        return bytes.fromhex(self.hex)


EXTENDED = [
    Extended(
        heads.JoinGroup("s", "m", 5, True, "i", 100, 65536),
        "97 a173 a16d 05 c3 a169 64 ce00010000",
    ),
    Extended(
        heads.Hello([1], "cli", "pub", "high", "tok", ["zstd"]),
        "96 9101 a3636c69 a3707562 a468696768 a3746f6b 91a47a737464",
    ),
    Extended(
        heads.Welcome(1, "sparrow", "s1", 16777216, 67108864, 10.0, ["zstd"]),
        "97 01 a773706172726f77 a27331 ce01000000 ce04000000 cb4024000000000000 91a47a737464",
    ),
    Extended(
        heads.Call("seek", {"to": "end", "n": None, "data": b"\xff"}),
        "92 a47365656b 83 a2746f a3656e64 a16e c0 a464617461 c401ff",
    ),
    Extended(heads.Result({"consumer": 3}), "91 81 a8636f6e73756d6572 03"),
    Extended(
        heads.PublishBatch("t", -1, 300, 7, 1, 0xDEADBEEF, 2**40, 2, 70000, 4),
        "9a a174 ff cd012c 07 01 cedeadbeef cf0000010000000000 02 ce00011170 04",
    ),
    Extended(
        heads.WireReceipts("t", 9, [heads.WireRun(0, 128, 2, 256, False, True)], [(0, 1), (0, 0)]),
        "94 a174 09 91 96 00 cc80 02 cd0100 c2 c3 92 920001 920000",
    ),
    Extended(heads.Consume("s", 1000, 65536), "93 a173 cd03e8 ce00010000"),
    Extended(
        heads.Deliver(3, "t", 9, 1, "L", 127, 1_700_000_000_000_000, {128: 2}),
        "98 03 a174 09 01 a14c 7f cf00060a24181e4000 81 cc80 02",
    ),
    Extended(heads.Credit(3, 10, -5), "93 03 0a fb"),
    Extended(
        heads.Settle(3, heads.NACK, [("L", [1, 3, 7, 8])], 1.5, "bad", False, True),
        "97 03 02 91 92 a14c 94 01 03 07 08 cb3ff8000000000000 a3626164 c2 c3",
    ),
    Extended(heads.Extend(3, [("L", [1, 3])], 30.0), "93 03 91 92 a14c 92 01 03 cb403e000000000000"),
    Extended(heads.Unsubscribe(3, False), "92 03 c2"),
    Extended(heads.Leave(3), "91 03"),
    Extended(heads.Rebalance(3, 12, [("t", 0), ("t", 1)], True), "94 03 0c 92 92a17400 92a17401 c3"),
    Extended(heads.Commit(3, "t", 1, 65535, "ü"), "95 03 a174 01 cdffff a2c3bc"),
    Extended(
        heads.Flow("throttle", "t", "lag", "hard", 0.25),
        "95 a87468726f74746c65 a174 a36c6167 a468617264 cb3fd0000000000000",
    ),
    Extended(
        heads.WireError("NOT_FOUND", "no", "look", {"at": [1, 2]}, True),
        "95 a94e4f545f464f554e44 a26e6f a46c6f6f6b 81 a26174 92 01 02 c3",
    ),
    Extended(
        heads.Fetch("t", 1, 5, 65536, 0.5, ["key"]),
        "96 a174 01 05 ce00010000 cb3fe0000000000000 91 a36b6579",
    ),
    Extended(heads.Fetched(9, 5, 8, [(5, 8, 256)]), "94 09 05 08 91 93 05 08 cd0100"),
    Extended(heads.Close(), "90"),
    Extended(heads.Beat("busy"), "91 a462757379"),
]
each_example = pytest.mark.parametrize("example", EXTENDED, ids=lambda example: example.head.type.name)
each_head = pytest.mark.parametrize("kind", HEADS.values(), ids=lambda kind: kind.type.name)


def extended(kind: int, head: bytes, body: bytes = b"") -> Frame:
    """A frame with this head, as it comes from a reader."""
    return Frame(kind, None, memoryview(struct.pack(">I", len(head)) + head + body))


def parse(kind: int, *fields: Any) -> Any:
    """The head that an array of these fields is taken for."""
    return heads.decode(extended(kind, msgspec.msgpack.encode(fields)))[0]


def over(head: heads.Head, request_id: int | None = None, *body: bytes) -> tuple[Any, bytes, int | None]:
    """Head, body and request id as they arrive at the other end."""
    (frame,) = FrameReader().feed(b"".join(heads.encode(head, request_id, *body)))
    found, rest = heads.decode(frame)
    return found, bytes(rest), frame.request_id


# The bytes.


def test_there_is_an_example_of_every_extended_frame() -> None:
    assert sorted(example.head.type for example in EXTENDED) == sorted(HEADS)
    fixed = {FrameType.PUBLISH, FrameType.SUBSCRIBE, FrameType.ACK, FrameType.NACK, FrameType.DELIVERY}
    assert set(FrameType) - set(HEADS) == fixed | {FrameType.RESPONSE}


@each_example
def test_no_example_rests_on_defaults(example: Extended) -> None:
    """Otherwise a default that changes would change the bytes unseen."""
    for field in msgspec.structs.fields(example.head):
        if field.name not in ("versions", "value"):
            assert getattr(example.head, field.name) != field.default


@each_example
def test_a_head_is_written_byte_by_byte_as_the_page_says(example: Extended) -> None:
    packed = b"".join(heads.encode(example.head, None, b"body"))
    assert packed[5] == example.head.type
    assert packed[12:].hex() == (struct.pack(">I", len(example.raw)) + example.raw + b"body").hex()


@each_example
def test_the_bytes_of_the_page_are_read_with_the_body_behind_them(example: Extended) -> None:
    head, body = heads.decode(extended(example.head.type, example.raw, b"body"))
    assert head == example.head
    assert bytes(body) == b"body"


def test_a_body_is_a_view_of_the_frame() -> None:
    frame = extended(FrameType.CLOSE, b"\x90", b"body")
    assert heads.decode(frame)[1].obj is frame.payload.obj


def test_a_body_of_several_pieces_arrives_as_one() -> None:
    assert over(heads.Close(), 7, b"one", b"", b"two") == (heads.Close(), b"onetwo", 7)


def test_a_heartbeat_may_be_empty() -> None:
    assert heads.decode(Frame(FrameType.HEARTBEAT, None, memoryview(b"")))[0] == heads.Beat("")


# Growth.


@each_example
def test_fields_that_are_not_known_yet_are_skipped(example: Extended) -> None:
    fields = msgspec.msgpack.decode(example.raw, strict=False)
    newer = msgspec.msgpack.encode([*fields, "new", {"a": [1, None]}, [[[]]], b"\xff", 1.5])
    assert heads.decode(extended(example.head.type, newer))[0] == example.head


@each_head
def test_fields_that_are_missing_at_the_end_get_their_defaults(kind: type[heads.Head]) -> None:
    example = next(example for example in EXTENDED if example.head.type == kind.type)
    values = msgspec.msgpack.decode(example.raw, strict=False)
    fields = msgspec.structs.fields(kind)
    needed = sum(field.required for field in fields)
    for count in range(needed, len(fields)):
        found = parse(kind.type, *values[:count])
        for field in fields[:count]:
            assert getattr(found, field.name) == getattr(example.head, field.name)
        for field in fields[count:]:
            made = None if field.default_factory is msgspec.NODEFAULT else field.default_factory()
            default = made if field.default is msgspec.NODEFAULT else field.default
            assert getattr(found, field.name) == default


@each_head
def test_fields_without_a_default_are_missed(kind: type[heads.Head]) -> None:
    needed = sum(field.required for field in msgspec.structs.fields(kind))
    example = next(example for example in EXTENDED if example.head.type == kind.type)
    values = msgspec.msgpack.decode(example.raw, strict=False)
    for count in range(needed):
        with pytest.raises(InvalidArgument, match="does not parse"):
            parse(kind.type, *values[:count])


@each_head
def test_required_fields_come_before_those_with_defaults(kind: type[heads.Head]) -> None:
    required = [field.required for field in msgspec.structs.fields(kind)]
    assert required == sorted(required, reverse=True)


def test_defaults_are_not_shared_between_heads() -> None:
    assert heads.Hello().versions == [1]
    assert heads.Hello().versions is not heads.Hello().versions
    assert heads.Call("x").arguments is not heads.Call("x").arguments


def test_a_run_may_be_short_of_its_last_fields() -> None:
    found = parse(FrameType.RECEIPTS, "t", 1, [[0, 5, 2, 9]])
    assert found.runs == [heads.WireRun(0, 5, 2, 9, False, False)]
    assert found.rows is None


# Round trips.


texts = st.text(st.characters(codec="utf-8"), max_size=20)
integers = st.integers(-(2**63), 2**64 - 1)
numbers = st.floats(allow_nan=False)
values = st.recursive(
    st.none() | st.booleans() | integers | numbers | texts | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
maps = st.dictionaries(texts, values, max_size=4)
leases = st.lists(st.tuples(texts, st.lists(integers, max_size=6)), max_size=4)
streams = st.lists(st.tuples(texts, integers), max_size=4)
OF_TYPE: dict[str, st.SearchStrategy[Any]] = {
    "str": texts,
    "int": integers,
    "float": numbers,
    "bool": st.booleans(),
    "Any": values,
    "int | None": st.none() | integers,
    "float | None": st.none() | numbers,
    "dict[str, Any]": maps,
    "dict[int, int]": st.dictionaries(integers, integers, max_size=4),
    "list[int]": st.lists(integers, max_size=4),
    "list[str]": st.lists(texts, max_size=4),
    "list[tuple[str, int]]": streams,
    "list[tuple[str, list[int]]]": leases,
    "list[tuple[int, int, int]]": st.lists(st.tuples(integers, integers, integers), max_size=4),
    "list[tuple[int, int]] | None": st.none() | st.lists(st.tuples(integers, integers), max_size=4),
    "list[WireRun]": st.lists(
        st.builds(heads.WireRun, integers, integers, integers, integers, st.booleans(), st.booleans()),
        max_size=4,
    ),
}


@each_head
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_head_comes_back_as_it_was_sent(kind: type[heads.Head], data: st.DataObject) -> None:
    fields = {name: data.draw(OF_TYPE[of]) for name, of in types_of(kind).items()}
    body = data.draw(st.binary(max_size=50))
    number = data.draw(st.none() | st.integers(0, 2**32 - 1))
    head = kind(**fields)
    assert over(head, number, body) == (head, body, number)


def types_of(kind: type[heads.Head]) -> dict[str, str]:
    return {name: kind.__annotations__[name] for name in kind.__struct_fields__}


# Garbage.


@each_head
@settings(max_examples=40, deadline=None)
@given(garbage=st.binary(max_size=80))
def test_garbage_is_refused_or_understood_and_nothing_else(kind: type[heads.Head], garbage: bytes) -> None:
    for frame in (extended(kind.type, garbage), Frame(kind.type, None, memoryview(garbage))):
        try:
            head, _ = heads.decode(frame)
        except InvalidArgument:
            continue
        assert type(head) is kind


@each_head
@settings(max_examples=15, deadline=None)
@given(fields=st.lists(values, max_size=10))
def test_fields_of_any_type_are_refused_or_understood(kind: type[heads.Head], fields: list[Any]) -> None:
    try:
        head = parse(kind.type, *fields)
    except InvalidArgument:
        return
    assert type(head) is kind


@each_example
def test_a_head_cut_at_any_byte_is_refused(example: Extended) -> None:
    for end in range(len(example.raw)):
        with pytest.raises(InvalidArgument):
            heads.decode(extended(example.head.type, example.raw[:end]))
        whole = bytes(extended(example.head.type, example.raw).payload)
        if end or example.head.type != FrameType.HEARTBEAT:
            with pytest.raises(InvalidArgument):
                heads.decode(Frame(example.head.type, None, memoryview(whole)[:end]))


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\xc1",
        b"\x80",
        b"\xc0",
        b"\x91\xa1\xff",
        b"\x91\xa3\xed\xa0\x80",
        b"\x91" * 5000,
        b"\x91" + b"\x81\x01" * 5000,
        b"\x91\xc0" + b"\xc0",
        b"\x91\xd7\xff" + b"\xff" * 8,
        b"\x91\x81\x80\x01",
    ],
    ids=lambda head: head[:6].hex() or "empty",
)
def test_a_head_that_is_no_array_of_values_is_refused(head: bytes) -> None:
    with pytest.raises(InvalidArgument):
        heads.decode(extended(FrameType.RESULT, head))


@pytest.mark.parametrize(
    "head",
    [
        bytes.fromhex("91 ddffffffff"),
        bytes.fromhex("91 dfffffffff"),
        bytes.fromhex("91 dbffffffff"),
        bytes.fromhex("91 c6ffffffff"),
        bytes.fromhex("91 c9ffffffff05"),
        b"\x91" + bytes.fromhex("ddffffffff") * 500,
        b"\x91" + bytes.fromhex("dcffff") * 500 + bytes(70_000),
        b"\x91" + bytes.fromhex("dd00010000") * 500 + bytes(70_000),
    ],
    ids=["array", "map", "text", "bytes", "extension", "nested", "nested and long", "nested, long, wide"],
)
def test_a_head_that_promises_much_reserves_little(head: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidArgument):
            heads.decode(extended(FrameType.RESULT, head))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4_000_000


@pytest.mark.parametrize("kind", [0, 1, 11, 31, 52, 98, 100, 255])
def test_a_type_without_a_head_is_refused(kind: int) -> None:
    with pytest.raises(InvalidArgument, match=f"type {kind} "):
        heads.decode(extended(kind, b"\x90"))


@pytest.mark.parametrize("length", [1, 2**31, 2**32 - 1])
def test_a_head_longer_than_its_frame_is_refused(length: int) -> None:
    payload = memoryview(struct.pack(">I", length))
    with pytest.raises(InvalidArgument, match="too short for its head"):
        heads.decode(Frame(FrameType.LEAVE, None, payload))


# Errors.


ERRORS = [kind for kind in registry().values() if kind.__module__.startswith("sparrow.")]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.code)
def test_every_error_arrives_as_the_type_that_was_raised(kind: type[SparrowError]) -> None:
    sent = kind("it broke", hint="mend it", position=3, names=["a", "b"], rate=0.5, is_x=True, none=None)
    head, _, _ = over(heads.error(sent, is_fatal=True))
    found = head.to_exception()
    assert type(found) is kind
    assert (found.message, found.hint, found.details) == (sent.message, sent.hint, sent.details)
    assert head.is_fatal
    assert found.to_dict() == sent.to_dict()


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.code)
def test_an_error_without_a_hint_arrives_with_that_of_its_class(kind: type[SparrowError]) -> None:
    head, _, _ = over(heads.error(kind("it broke")))
    assert head.to_exception().hint == kind.default_hint
    assert not head.is_fatal


def test_an_error_of_a_newer_broker_is_an_error_all_the_same() -> None:
    found = heads.WireError("FROM_THE_FUTURE", "m", "h", {"a": 1}).to_exception()
    assert type(found) is SparrowError
    assert (found.message, found.hint, found.details) == ("m", "h", {"a": 1})


@pytest.mark.parametrize("name", ["self", "message", "hint"])
def test_a_detail_with_the_name_of_something_else_does_no_harm(name: str) -> None:
    found = heads.WireError("NOT_FOUND", "m", "h", {name: 1, "other": 2, "code": 3}).to_exception()
    assert type(found) is NotFound
    assert (found.message, found.hint, found.details) == ("m", "h", {"other": 2, "code": 3})


class Colour(enum.StrEnum):
    RED = "red"


class Name(str):
    """Text of a type of its own."""

    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ((1, (2, "x")), {"it": [1, [2, "x"]]}),
        (Colour.RED, {"it": "red"}),
        (2**64 - 1, {"it": 2**64 - 1}),
        (2**64, {}),
        (-(2**63) - 1, {}),
        (["fine", [2**70]], {}),
        ("\udc80", {}),
        (Name("x"), {}),
        (object(), {}),
        (ValueError("x"), {}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_details_that_cannot_be_sent_stay_behind(value: object, expected: dict[str, Any]) -> None:
    head, _, _ = over(heads.error(NotFound("m", it=value)))
    assert head.details == expected


def test_a_message_with_half_a_character_is_sent_in_words() -> None:
    """File names that are not UTF-8 look like this in Python."""
    head, _, _ = over(heads.error(NotFound("no file \udcff", hint="look for \udcff")))
    assert (head.message, head.hint) == ("no file \\udcff", "look for \\udcff")
