"""Finding entries in a file's bytes: what is one, what is not, and where reading goes on."""

from __future__ import annotations

import google_crc32c
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.store.entry import (
    FILE_HEADER_BYTES,
    HEADER_BYTES,
    Broken,
    FileHeader,
    Header,
    Kind,
    Scan,
    is_body_right,
    pack,
    pack_file_header,
    padded,
    unpack,
    unpack_file_header,
)

NUMBER = 3


class Tape:
    """A journal file in memory."""

    def __init__(self, number: int = NUMBER) -> None:
        self.number = number
        self.content = bytearray(pack_file_header(FileHeader(number, 5, 0)))
        self.headers: list[Header] = []

    def add(self, body: bytes, flags: int = 0) -> Header:
        at = len(self.content)
        header = Header(
            Kind.FACTS, flags, 0, google_crc32c.value(body), len(body), 1, 0, 0, 0, 0, 7, 0, 0, 0,
            self.number, at, at, 1,
        )  # fmt: skip
        self.content += pack(header) + body + bytes(padded(len(body)) - len(body))
        self.headers.append(header)
        return header

    def flip(self, position: int) -> None:
        self.content[position] ^= 0x10

    def scan(self) -> list[Header | Broken]:
        return scan(bytes(self.content), self.number)


def scan(content: bytes, number: int = NUMBER) -> list[Header | Broken]:
    return list(Scan(content, pa.py_buffer(content), number, len(content)))


def filled(*bodies: bytes) -> Tape:
    tape = Tape()
    for body in bodies:
        tape.add(body)
    return tape


# One header.


def test_a_header_knows_where_its_body_and_the_next_entry_are() -> None:
    tape = filled(b"12345", b"")
    first, second = tape.headers
    assert first.body_position == FILE_HEADER_BYTES + HEADER_BYTES
    assert first.end_position == second.position == FILE_HEADER_BYTES + HEADER_BYTES + 8
    assert second.end_position == len(tape.content)


@pytest.mark.parametrize(("length", "expected"), [(0, 0), (1, 8), (7, 8), (8, 8), (9, 16)])
def test_lengths_are_padded_to_eight(length: int, expected: int) -> None:
    assert padded(length) == expected


def test_a_header_is_valid_in_its_own_place_and_file_only() -> None:
    tape = filled(b"x")
    content = bytes(tape.content)
    assert unpack(content, 64, NUMBER) == tape.headers[0]
    assert unpack(content, 64, NUMBER + 1) is None
    assert unpack(bytes(8) + content, 72, NUMBER) is None


@pytest.mark.parametrize("position", range(HEADER_BYTES))
def test_no_byte_of_a_header_can_change_unnoticed(position: int) -> None:
    tape = filled(b"x")
    tape.flip(64 + position)
    assert unpack(bytes(tape.content), 64, NUMBER) is None


@pytest.mark.parametrize("position", range(FILE_HEADER_BYTES))
def test_no_byte_of_a_file_header_can_change_unnoticed(position: int) -> None:
    content = bytearray(pack_file_header(FileHeader(3, 5, 900)))
    assert unpack_file_header(bytes(content)) == FileHeader(3, 5, 900)
    content[position] ^= 1
    assert unpack_file_header(bytes(content)) is None


def test_a_short_piece_is_no_header() -> None:
    tape = filled(b"x")
    assert unpack(bytes(tape.content[: 64 + HEADER_BYTES - 1]), 64, NUMBER) is None
    assert unpack_file_header(bytes(tape.content[:63])) is None


def test_a_body_is_right_only_as_it_was_written() -> None:
    header = filled(b"abc").headers[0]
    assert is_body_right(header, b"abc")
    assert not is_body_right(header, b"abd")


# Whole files.


def test_a_clean_file_gives_its_entries_in_order() -> None:
    tape = filled(b"a", b"", b"c" * 1000)
    assert tape.scan() == tape.headers


def test_an_empty_file_gives_nothing() -> None:
    assert Tape().scan() == []


def test_zeros_behind_the_last_entry_are_unused_space() -> None:
    tape = filled(b"a", b"b")
    tape.content += bytes(5000)
    assert tape.scan() == tape.headers


def test_a_preallocated_file_larger_than_one_look_is_still_seen_as_unused() -> None:
    tape = filled(b"a")
    tape.content += bytes(3 << 20)
    assert tape.scan() == tape.headers


def test_garbage_behind_the_last_entry_is_one_broken_stretch_to_the_end() -> None:
    tape = filled(b"a", b"b")
    end = len(tape.content)
    tape.content += b"\x01" * 333
    assert tape.scan() == [*tape.headers, Broken(end, end + 333)]


def test_garbage_far_behind_zeros_is_reported_too() -> None:
    tape = filled(b"a")
    end = len(tape.content)
    tape.content += bytes(2 << 20) + b"\x01"
    assert tape.scan() == [*tape.headers, Broken(end, len(tape.content))]


def test_half_an_entry_at_the_end_is_broken_from_its_start() -> None:
    tape = filled(b"a", b"b" * 100)
    del tape.content[-50:]
    half = tape.headers[1]
    assert tape.scan() == [tape.headers[0], Broken(half.position, len(tape.content), (half,))]


@pytest.mark.parametrize("where", ["header", "body"])
def test_a_broken_middle_is_skipped_to_the_next_entry(where: str) -> None:
    tape = filled(b"a" * 50, b"b" * 50, b"c" * 50)
    first, second, third = tape.headers
    tape.flip(second.position + 20 if where == "header" else second.body_position + 20)
    known = () if where == "header" else (second,)
    assert tape.scan() == [first, Broken(second.position, third.position, known), third]


def test_two_broken_entries_side_by_side_are_one_stretch() -> None:
    tape = filled(b"a" * 50, b"b" * 50, b"c" * 50, b"d" * 50)
    _, second, third, fourth = tape.headers
    tape.flip(second.body_position)
    tape.flip(third.position)
    assert tape.scan() == [tape.headers[0], Broken(second.position, fourth.position, (second,)), fourth]


def test_a_broken_first_entry_does_not_hide_the_rest() -> None:
    tape = filled(b"a" * 50, b"b" * 50)
    tape.flip(70)
    assert tape.scan() == [Broken(64, tape.headers[1].position), tape.headers[1]]


def test_a_flipped_bit_in_the_padding_harms_nobody() -> None:
    tape = filled(b"a", b"b")
    tape.flip(tape.headers[0].end_position - 1)
    assert tape.scan() == tape.headers


# Payloads that look like a journal.


@pytest.mark.parametrize("shift", range(8))
def test_the_magic_inside_a_payload_is_never_taken_for_an_entry(shift: int) -> None:
    tape = filled(b"x" * shift + b"SPRW" * 500, b"behind")
    assert tape.scan() == tape.headers
    tape.flip(tape.headers[0].position + 1)
    assert tape.scan() == [Broken(64, tape.headers[1].position), tape.headers[1]]


def test_a_whole_journal_inside_a_payload_is_never_taken_for_entries() -> None:
    inner = bytes(filled(b"one", b"two", b"three" * 40).content)
    tape = filled(b"before", inner, b"behind")
    assert tape.scan() == tape.headers
    before, carrier, behind = tape.headers
    tape.flip(carrier.position + 1)
    assert tape.scan() == [before, Broken(carrier.position, behind.position), behind]


def test_a_copy_of_the_files_own_beginning_inside_a_broken_entry_is_not_believed() -> None:
    """The strongest imitation: same file number, right checksums, only the place is another."""
    tape = filled(b"first" * 30)
    copy = bytes(tape.content)
    carrier = tape.add(b"\0" * 4 + copy + copy)
    tape.flip(carrier.position + 1)
    behind = tape.add(b"behind")
    found = tape.scan()
    assert found == [tape.headers[0], Broken(carrier.position, behind.position), behind]


@given(st.lists(st.binary(max_size=200), max_size=8), st.binary(max_size=64))
def test_whatever_bodies_hold_a_clean_file_gives_exactly_its_entries(
    bodies: list[bytes], salt: bytes
) -> None:
    tape = filled(*(salt + b"SPRW" + body for body in bodies))
    assert tape.scan() == tape.headers


@given(st.data())
def test_one_flipped_bit_costs_at_most_the_entry_it_hit(data: st.DataObject) -> None:
    tape = filled(*(bytes([65 + n]) * (n * 13) for n in range(6)))
    bit = data.draw(st.integers(64 * 8, len(tape.content) * 8 - 1))
    tape.content[bit // 8] ^= 1 << bit % 8
    found = [item for item in tape.scan() if isinstance(item, Header)]
    hit = [h for h in tape.headers if h.position <= bit // 8 < h.body_position + h.body_length]
    assert found == [h for h in tape.headers if h not in hit]
