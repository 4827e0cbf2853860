"""The bytes of a data directory against docs/format.md, built here a second time with ``struct`` alone."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparrow.model.message import StreamId
from sparrow.model.topic import Codec, Durability
from sparrow.store import batch as batches
from sparrow.store import journalfile, lake
from sparrow.store.directory import DataDirectory
from sparrow.store.disk import Disk
from sparrow.store.entry import FileHeader, Header, lsn, pack, pack_file_header, unpack
from sparrow.store.hot import HotWindow
from sparrow.store.journal import Journal
from sparrow.store.ports import BatchDraft, Commit, Draft, FactsDraft
from sparrow.store.segmentname import SegmentName

CREATED_US = 1_700_000_000_000_000
CATALOG_VERSION = 9
ORDERS = StreamId(5, 2)
PAGE = Path(__file__).parents[2] / "docs" / "format.md"


def crc32c(content: bytes) -> int:
    """CRC-32C by the book."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def file_header(number: int, previous_length: int) -> bytes:
    fields = b"SPRWJRNL" + struct.pack("<IIqQ", 1, number, CREATED_US, previous_length) + bytes(28)
    return fields + struct.pack("<I", crc32c(fields))


def entry(
    body: bytes,
    *,
    kind: int,
    position: int,
    flags: int = 0,
    codec: int = 0,
    count: int = 0,
    topic_id: int = 0,
    partition: int = 0,
    columns: int = 0,
    base_offset: int = 0,
    time_us: int = CREATED_US,
    producer_id: int = 0,
    base_sequence: int = 0,
    epoch: int = 0,
    file_number: int = 1,
    durable: int = 64,
) -> bytes:
    """Header, body and padding."""
    header = bytearray(104)
    struct.pack_into("<4s", header, 0, b"SPRW")
    struct.pack_into("<BBBB", header, 4, 1, kind, flags, codec)
    struct.pack_into("<I", header, 8, crc32c(body))
    struct.pack_into("<I", header, 12, len(body))
    struct.pack_into("<I", header, 16, count)
    struct.pack_into("<I", header, 20, topic_id)
    struct.pack_into("<I", header, 24, partition)
    struct.pack_into("<I", header, 28, columns)
    struct.pack_into("<Q", header, 32, base_offset)
    struct.pack_into("<q", header, 40, time_us)
    struct.pack_into("<Q", header, 48, producer_id)
    struct.pack_into("<q", header, 56, base_sequence)
    struct.pack_into("<I", header, 64, epoch)
    struct.pack_into("<I", header, 68, file_number)
    struct.pack_into("<Q", header, 72, position)
    struct.pack_into("<Q", header, 80, durable)
    struct.pack_into("<Q", header, 88, CATALOG_VERSION)
    struct.pack_into("<I", header, 100, crc32c(bytes(header[:100])))
    return bytes(header) + body + bytes(-len(body) % 8)


def batch_draft(batch: pa.RecordBatch, **values: int | bool) -> BatchDraft:
    body = batches.encode(batch)
    return BatchDraft(ORDERS, body.buffer, body.crc, body.record_count, body.columns, **values)  # type: ignore[arg-type]


class Log:
    """A journal of its own, with a fixed clock."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        hot = HotWindow()
        hot.open(ORDERS, sealed_end=40)
        self.journal = Journal(
            disk=Disk(),
            directory=directory,
            hot=hot,
            now_us=lambda: CREATED_US,
            catalog_version=lambda: CATALOG_VERSION,
            file_bytes=64 * 1024,
            group_bytes_max=1 << 20,
            pending_bytes_max=1 << 20,
            sync_interval_s=60.0,
            on_new_file=lambda number: None,
        )

    async def append(self, *drafts: Draft) -> Commit:
        return await self.journal.append(drafts, Durability.DURABLE, lambda commit: None)

    def content(self, number: int = 1) -> bytes:
        return (self.directory / f"{number:010d}.wal").read_bytes()


@pytest.fixture
def make_log(tmp_path: Path) -> Callable[[], Log]:
    return lambda: Log(tmp_path)


# The journal.


def test_the_checksum_used_here_is_the_standard_one() -> None:
    assert crc32c(b"123456789") == 0xE3069283


async def test_a_journal_file_starts_with_the_documented_64_bytes(make_log: Callable[[], Log]) -> None:
    log = make_log()
    await log.append(FactsDraft(b"x", 1))
    await log.journal.rotate()
    await log.append(FactsDraft(b"y", 1))
    await log.journal.close()
    length_of_first = 64 + 104 + 8
    assert log.content(1)[:64] == file_header(1, 0)
    assert log.content(2)[:64] == file_header(2, length_of_first)
    assert len(log.content(1)) == length_of_first


def test_a_file_header_is_these_bytes_for_ever() -> None:
    assert pack_file_header(FileHeader(3, CREATED_US, 4096)).hex() == (
        "535052574a524e4c010000000300000000401e18240a06000010000000000000"
        "00000000000000000000000000000000000000000000000000000000c557dc7e"
    )


def test_an_entry_header_is_these_bytes_for_ever() -> None:
    header = Header(
        kind=1,
        flags=3,
        codec=2,
        body_crc=crc32c(b"abc"),
        body_length=3,
        record_count=6,
        topic_id=7,
        partition=8,
        columns=0x7FF,
        base_offset=10,
        publish_time_us=11,
        producer_id=12,
        base_sequence=13,
        producer_epoch=14,
        file_number=15,
        position=4096,
        durable_position=16,
        catalog_version=9,
    )
    assert pack(header).hex() == (
        "5350525701010302b73f4b3603000000060000000700000008000000ff070000"
        "0a000000000000000b000000000000000c000000000000000d00000000000000"
        "0e0000000f000000001000000000000010000000000000000900000000000000"
        "0000000097cb9b72"
    )
    assert unpack(bytes(4096) + pack(header), 4096, 15) == header


async def test_a_message_batch_is_held_byte_for_byte(make_log: Callable[[], Log]) -> None:
    log = make_log()
    batch = batches.build([b"a", b"bc", None], key=["k", None, "k2"])
    commit = await log.append(batch_draft(batch, producer_id=77, producer_epoch=3, base_sequence=1000))
    body = batch.serialize().to_pybytes()
    expected = entry(
        body,
        kind=1,
        position=64,
        count=3,
        topic_id=5,
        partition=2,
        columns=0b11,
        base_offset=40,
        producer_id=77,
        base_sequence=1000,
        epoch=3,
    )
    assert log.content()[64 : 64 + len(expected)] == expected
    assert commit.lsn == 1 << 40 | 64
    await log.journal.close()


def test_a_batch_body_is_one_arrow_record_batch_message_without_its_schema() -> None:
    batch = batches.build([b"a", b"bc", None], key=["k", None, "k2"])
    body = batches.encode(batch).buffer.to_pybytes()
    metadata_length = struct.unpack_from("<I", body, 4)[0]
    buffers = (
        struct.pack("<Q", 0b011)  # data: which are there
        + struct.pack("<4i", 0, 1, 3, 3)
        + b"abc".ljust(8, b"\0")
        + struct.pack("<Q", 0b101)  # key: which are there
        + struct.pack("<4i", 0, 1, 1, 3)
        + b"kk2".ljust(8, b"\0")
    )
    assert body[:4] == b"\xff\xff\xff\xff"
    assert body[8 + metadata_length :] == buffers
    message = pa.ipc.read_message(body)
    assert message.type == "record batch"
    assert message.metadata_version == pa.ipc.MetadataVersion.V5


async def test_a_facts_entry_is_held_byte_for_byte(make_log: Callable[[], Log]) -> None:
    log = make_log()
    facts = bytes.fromhex("919601070102920305c400")
    await log.append(FactsDraft(facts, 1))
    expected = entry(facts, kind=2, position=64, count=1)
    assert len(expected) == 104 + 16
    assert log.content()[64 : 64 + len(expected)] == expected
    await log.journal.close()


async def test_a_note_has_no_body_and_bears_witness(make_log: Callable[[], Log]) -> None:
    log = make_log()
    await log.append(FactsDraft(b"12345678", 1))
    await log.journal.note()
    at = 64 + 104 + 8
    assert log.content()[at : at + 104] == entry(b"", kind=3, position=at, durable=at)
    await log.journal.close()


async def test_entries_are_padded_with_zeros_to_a_multiple_of_eight(make_log: Callable[[], Log]) -> None:
    log = make_log()
    for length in range(1, 10):
        await log.append(FactsDraft(b"f" * length, 1))
    await log.journal.close()
    content, position = log.content(), 64
    for length in range(1, 10):
        body = b"f" * length
        expected = entry(body, kind=2, position=position, count=1, durable=position)
        assert content[position : position + len(expected)] == expected
        position += 104 + (length + 7) // 8 * 8
    assert position % 8 == 0


async def test_all_but_the_last_entry_of_a_chain_continue(make_log: Callable[[], Log]) -> None:
    log = make_log()
    one, two = batches.build([b"1"]), batches.build([b"2", b"3"])
    commit = await log.append(
        batch_draft(one, producer_id=7, base_sequence=4, has_sequences=True),
        FactsDraft(b"f", 1),
        batch_draft(two),
    )
    first = entry(
        one.serialize().to_pybytes(),
        kind=1,
        flags=0b11,
        position=64,
        count=1,
        topic_id=5,
        partition=2,
        columns=1,
        base_offset=40,
        producer_id=7,
        base_sequence=4,
    )
    second = entry(b"f", kind=2, flags=0b01, position=64 + len(first), count=1)
    at = 64 + len(first) + len(second)
    third = entry(
        two.serialize().to_pybytes(),
        kind=1,
        position=at,
        count=2,
        topic_id=5,
        partition=2,
        columns=1,
        base_offset=41,
    )
    expected = first + second + third
    assert log.content()[64 : 64 + len(expected)] == expected
    assert commit.lsn == lsn(1, at)
    await log.journal.close()


def test_a_log_sequence_number_is_the_file_above_forty_bits_of_position() -> None:
    assert lsn(1, 64) == 0x1_00_0000_0040
    assert lsn(7, 2**40 - 8) == (7 << 40) + 2**40 - 8
    assert lsn(2, 0) > lsn(1, 2**40 - 1)


# The columns.


def test_the_column_bits_are_the_documented_table() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| ([^|]+?) \|", PAGE.read_text(), re.MULTILINE)
    documented = [(int(bit), name, kind) for bit, name, kind in rows]
    kinds = {
        "binary": pa.binary(),
        "utf8": pa.string(),
        "map<utf8, utf8>": pa.map_(pa.string(), pa.string()),
        "timestamp[us, UTC]": pa.timestamp("us", tz="UTC"),
        "int8": pa.int8(),
        "int64": pa.int64(),
        "list<utf8>": pa.list_(pa.string()),
    }
    assert len(documented) == 11
    assert [(bit, name, kinds[kind]) for bit, name, kind in documented] == [
        (bit, field.name, field.type) for bit, field in enumerate(batches.PUBLISH_FIELDS)
    ]


@pytest.mark.parametrize(("codec", "number"), [(Codec.NONE, 0), (Codec.LZ4, 1), (Codec.ZSTD, 2)])
def test_the_codec_numbers_are_the_documented_ones(codec: Codec, number: int) -> None:
    assert batches.encode(batches.build([b"a" * 100]), codec).codec == number


# Names of files.


def test_journal_files_have_ten_digits_and_segments_twenty() -> None:
    assert journalfile.file_name(1) == "0000000001.wal"
    assert str(SegmentName(4711)) == "00000000000000004711.parquet"


def test_the_directory_is_laid_out_as_documented(tmp_path: Path) -> None:
    directory = DataDirectory.open(tmp_path / "data", Disk(), CREATED_US)
    try:
        assert (
            tmp_path / "data" / "sparrow.json"
        ).read_bytes() == b'{"format":1,"created_at_us":%d}' % CREATED_US
        assert (tmp_path / "data" / "lock").is_file()
        assert directory.journal == tmp_path / "data" / "journal"
        assert directory.catalog == tmp_path / "data" / "catalog.db"
        assert directory.partition("orders.us", 3) == tmp_path / "data" / "topics" / "orders.us" / "3"
    finally:
        directory.close()


# The lake.

LAKE_COLUMNS = [
    ("offset", "int64", False),
    ("publish_time", "timestamp[us, tz=UTC]", False),
    ("key", "string", True),
    ("data", "binary", True),
    ("attributes", "map<string, string>", True),
    ("event_time", "timestamp[us, tz=UTC]", True),
    ("priority", "int8", True),
    ("ttl_ms", "int64", True),
    ("deliver_at", "timestamp[us, tz=UTC]", True),
    ("idempotency_key", "string", True),
    ("producer_id", "int64", True),
    ("sequence", "int64", True),
    ("depends_on", "list<element: string>", True),
    ("original_id", "string", True),
]


@pytest.fixture
def segment_path(tmp_path: Path) -> Path:
    first = batches.to_table_form(batches.build([b"a", b"b"], key=["x", None]), 40, CREATED_US)
    later = batches.to_table_form(batches.build([b"c"], attributes=[{"e": "f"}]), 42, CREATED_US + 1, 9, 100)
    segment = lake.write_segment(
        Disk(), tmp_path, "orders.us", ORDERS, [first, later], compression="zstd", row_group_bytes=1 << 20
    )
    return tmp_path / segment.file_name


def test_a_segment_has_the_documented_columns_in_their_order(segment_path: Path) -> None:
    schema = pq.read_schema(segment_path)
    found = [
        (
            field.name,
            re.sub(r" \('\w+'\)|item(?=:)", lambda m: "element" if m[0] == "item" else "", str(field.type)),
        )
        for field in schema
    ]
    assert [(n, t, schema.field(n).nullable) for n, t in found] == LAKE_COLUMNS
    listed = re.search(r"all but the first two nullable:\n\n(.+)", PAGE.read_text())
    assert listed is not None
    assert re.findall(r"`(\w+)`", listed[1]) == [name for name, _, _ in LAKE_COLUMNS]


def test_a_segment_is_named_by_its_first_offset(segment_path: Path) -> None:
    assert segment_path.name == "00000000000000000040.parquet"


def test_a_segment_says_whose_it_is_in_its_metadata(segment_path: Path) -> None:
    metadata = pq.read_metadata(segment_path).metadata
    ours = {key.decode(): value.decode() for key, value in metadata.items() if key.startswith(b"sparrow.")}
    assert ours == {
        "sparrow.topic": "orders.us",
        "sparrow.topic_id": "5",
        "sparrow.partition": "2",
        "sparrow.first_offset": "40",
        "sparrow.end_offset": "43",
        "sparrow.format": "1",
    }


def test_a_segment_holds_what_was_published_and_what_the_broker_added(segment_path: Path) -> None:
    rows = pq.read_table(segment_path).to_pylist()
    assert [row["offset"] for row in rows] == [40, 41, 42]
    assert [row["data"] for row in rows] == [b"a", b"b", b"c"]
    assert [row["key"] for row in rows] == ["x", None, None]
    assert [row["producer_id"] for row in rows] == [None, None, 9]
    assert [row["sequence"] for row in rows] == [None, None, 100]
    assert rows[2]["attributes"] == [("e", "f")]
