"""Core payloads against docs/protocol.md §3.1: the bytes are put down by hand, field by field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow.model.errors import InvalidArgument
from sparrow.wire import core


class Layout(NamedTuple):
    """A frame, its bytes, and the functions between the two."""

    name: str
    frame: Any
    hex: str
    build: Callable[[Any], bytes]
    parse: Callable[[memoryview], Any]

    @property
    def raw(self) -> bytes:
        return bytes.fromhex(self.hex)


LAYOUTS = [
    Layout(
        "PUBLISH",
        core.Publish("a.b", {"key": "k", "é": ""}, b"\x00\xff", 60, True),
        "0003 612e62  0002  0003 6b6579 0001 6b  0002 c3a9 0000  00000002 00ff  0000003c  01",
        core.publish,
        core.parse_publish,
    ),
    Layout(
        "SUBSCRIBE",
        core.Subscribe("a.#", "g", 10, True),
        "0003 612e23  0001 67  000a  01",
        core.subscribe,
        core.parse_subscribe,
    ),
    Layout("ACK", core.Ack("1-0-7", 250), "0005 312d302d37  000000fa", core.ack, core.parse_ack),
    Layout("NACK", core.Nack("1-0-7", 2, False), "0005 312d302d37  02  00", core.nack, core.parse_nack),
    Layout(
        "DELIVERY",
        core.Delivery("s", "1-0-7", "a.b", {"x": "y"}, b"hi", 2**56 + 1),
        "0001 73  0005 312d302d37  0003 612e62  0001 0001 78 0001 79  00000002 6869  0100000000000001",
        core.delivery,
        core.parse_delivery,
    ),
]
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)

texts = st.text(st.characters(codec="utf-8"), max_size=40)
headers = st.dictionaries(texts, texts, max_size=5)
u8, u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (8, 16, 32, 64))
FRAMES: dict[str, st.SearchStrategy[Any]] = {
    "PUBLISH": st.builds(core.Publish, texts, headers, st.binary(max_size=200), u32, st.booleans()),
    "SUBSCRIBE": st.builds(core.Subscribe, texts, texts, u16, st.booleans()),
    "ACK": st.builds(core.Ack, texts, u32),
    "NACK": st.builds(core.Nack, texts, u8, st.booleans()),
    "DELIVERY": st.builds(core.Delivery, texts, texts, texts, headers, st.binary(max_size=200), u64),
}


# The bytes.


@each_layout
def test_a_frame_is_built_byte_by_byte_as_the_page_says(layout: Layout) -> None:
    assert layout.build(layout.frame).hex() == layout.raw.hex()


@each_layout
def test_the_bytes_of_the_page_are_parsed(layout: Layout) -> None:
    assert layout.parse(memoryview(layout.raw)) == layout.frame


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (core.publish_response(core.Status.DONE, "1-0-7", 2**56 + 1), "00 0005 312d302d37 0100000000000001"),
        (core.publish_response(core.Status.EXHAUSTED), "02 0000 0000000000000000"),
        (core.subscribe_response(core.Status.DONE, "s"), "00 0001 73"),
        (core.subscribe_response(core.Status.NOT_FOUND), "01 0000"),
        (core.nack_response(core.Status.DONE, core.NackAction.DEAD_LETTER), "00 02"),
        (core.nack_response(core.Status.NOT_FOUND), "01 01"),
    ],
)
def test_a_response_is_built_byte_by_byte_as_the_page_says(payload: bytes, expected: str) -> None:
    assert payload.hex() == bytes.fromhex(expected).hex()


def test_statuses_and_actions_have_the_numbers_of_the_page() -> None:
    assert [int(status) for status in core.Status] == [0, 1, 2, 3, 4, 16, 17, 18]
    assert [int(action) for action in core.NackAction] == [1, 2, 3]


def test_the_defaults_of_the_specification_are_sent() -> None:
    assert core.subscribe(core.Subscribe("#")).hex() == "0001230000000a00"
    assert core.publish(core.Publish("t", {}, b"")).hex() == "0001740000000000000000000001"


@pytest.mark.parametrize("name", FRAMES)
@settings(deadline=None)
@given(data=st.data())
def test_every_frame_comes_back_as_it_was_sent(name: str, data: st.DataObject) -> None:
    layout = next(layout for layout in LAYOUTS if layout.name == name)
    frame = data.draw(FRAMES[name])
    assert layout.parse(memoryview(layout.build(frame))) == frame


def test_data_of_a_message_does_not_hold_the_frame_it_came_in() -> None:
    payload = memoryview(bytearray(core.publish(core.Publish("t", {}, b"data"))))
    found = core.parse_publish(payload)
    payload[:] = bytes(len(payload))
    assert found.data == b"data"


# What does not parse.


@each_layout
def test_a_frame_cut_at_any_byte_is_refused(layout: Layout) -> None:
    for end in range(len(layout.raw)):
        with pytest.raises(InvalidArgument, match="ends within"):
            layout.parse(memoryview(layout.raw)[:end])


@each_layout
@pytest.mark.parametrize("extra", [b"\0", b"\xff" * 9])
def test_bytes_behind_the_last_field_are_refused(layout: Layout, extra: bytes) -> None:
    with pytest.raises(InvalidArgument, match=f"{len(extra)} bytes too many"):
        layout.parse(memoryview(layout.raw + extra))


@each_layout
def test_text_that_is_not_utf8_is_refused(layout: Layout) -> None:
    raw = bytearray(layout.raw)
    raw[2] = 0xFF
    with pytest.raises(InvalidArgument, match="not UTF-8"):
        layout.parse(memoryview(raw))


def test_headers_that_are_not_utf8_are_refused() -> None:
    raw = LAYOUTS[0].raw.replace(b"\xc3\xa9", b"\xc3\x28")
    with pytest.raises(InvalidArgument, match="headers is not UTF-8"):
        core.parse_publish(memoryview(raw))


@pytest.mark.parametrize("name", ["PUBLISH", "SUBSCRIBE", "NACK"])
@pytest.mark.parametrize("value", [2, 0x80, 0xFF])
def test_a_flag_that_is_neither_0_nor_1_is_refused(name: str, value: int) -> None:
    layout = next(layout for layout in LAYOUTS if layout.name == name)
    for right in (0, 1):
        layout.parse(memoryview(layout.raw[:-1] + bytes([right])))
    with pytest.raises(InvalidArgument, match=f"is 0 or 1, not {value}"):
        layout.parse(memoryview(layout.raw[:-1] + bytes([value])))


@each_layout
@settings(deadline=None)
@given(garbage=st.binary(max_size=120))
def test_garbage_is_refused_or_parsed_and_nothing_else(layout: Layout, garbage: bytes) -> None:
    try:
        found = layout.parse(memoryview(garbage))
    except InvalidArgument:
        return
    assert type(found) is type(layout.frame)


def test_a_count_of_headers_beyond_the_frame_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="ends within its headers"):
        core.parse_publish(memoryview(bytes.fromhex("0001 74 ffff 0001 61 0001 62")))


# What cannot be sent.


@pytest.mark.parametrize("length", [65_535, 65_536])
def test_a_text_has_at_most_65535_bytes(length: int) -> None:
    if length <= 65_535:
        assert core.text("x" * length)[:2] == b"\xff\xff"
    else:
        with pytest.raises(InvalidArgument, match="too long"):
            core.text("x" * length)


def test_bytes_are_counted_and_not_characters() -> None:
    with pytest.raises(InvalidArgument, match="70000 bytes"):
        core.text("ü" * 35_000)


def test_half_a_character_cannot_be_sent() -> None:
    with pytest.raises(InvalidArgument, match="UTF-8"):
        core.text("\ud800")


def test_more_headers_than_can_be_counted_cannot_be_sent() -> None:
    many = {str(number): "" for number in range(65_536)}
    with pytest.raises(InvalidArgument, match="65536 headers"):
        core.publish(core.Publish("t", many, b""))
