"""Segments: written once, read from anywhere, never served wrong."""

from __future__ import annotations

from pathlib import Path

import google_crc32c
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparrow.model.errors import DataDamaged
from sparrow.model.message import StreamId
from sparrow.store.batch import TABLE_SCHEMA, build, to_table_form
from sparrow.store.catalog_tables import Segment
from sparrow.store.disk import Disk
from sparrow.store.lake import GroupCache, SegmentReader, describe, write_segment

STREAM = StreamId(4, 1)
KIB = 1024


def table(
    first: int, count: int, size: int = 1000, time_us: int = 1_000, **columns: list[str]
) -> pa.RecordBatch:
    data = [f"{offset:08d}".encode() * (size // 8) for offset in range(first, first + count)]
    return to_table_form(build(data, **columns), first, time_us)


def write(
    directory: Path, *tables: pa.RecordBatch, size: int = 64 * KIB, compression: str = "zstd"
) -> tuple[Path, Segment]:
    segment = write_segment(
        Disk(), directory, "orders", STREAM, tables, compression=compression, row_group_bytes=size
    )
    return directory / segment.file_name, segment


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x20
    path.write_bytes(content)


def offsets(batch: pa.RecordBatch) -> list[int]:
    found: list[int] = batch.column("offset").to_pylist()
    return found


# Writing.


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd", "snappy"])
def test_a_segment_gives_back_what_was_written(tmp_path: Path, compression: str) -> None:
    tables = [table(0, 10), table(10, 5, key=[f"k{n}" for n in range(5)])]
    path, segment = write(tmp_path, *tables, compression=compression)
    reader = SegmentReader(path, segment)
    read = [reader.read_group(index) for index in range(len(segment.row_groups()))]
    assert pa.Table.from_batches(read).equals(pa.Table.from_batches(tables))
    assert read[0].schema.equals(TABLE_SCHEMA)


def test_a_segment_is_described_by_its_offsets_times_and_size(tmp_path: Path) -> None:
    path, segment = write(tmp_path, table(40, 3, time_us=500), table(43, 2, time_us=900))
    assert (segment.topic_id, segment.partition) == STREAM
    assert (segment.first_offset, segment.end_offset, segment.rows) == (40, 45, 5)
    assert (segment.first_time_us, segment.last_time_us) == (500, 900)
    assert segment.size_bytes == path.stat().st_size
    assert segment.file_name == path.name == "00000000000000000040.parquet"


def test_a_segment_can_be_described_again_from_its_file_alone(tmp_path: Path) -> None:
    path, segment = write(tmp_path, table(0, 300))
    assert describe(path, STREAM) == segment


def test_no_half_written_file_is_left_beside_a_segment(tmp_path: Path) -> None:
    write(tmp_path, table(0, 10))
    assert [path.name for path in tmp_path.iterdir()] == ["00000000000000000000.parquet"]


def test_a_failure_while_writing_leaves_nothing(tmp_path: Path) -> None:
    def tables() -> object:
        yield table(0, 10)
        raise DataDamaged("the journal broke")

    with pytest.raises(DataDamaged, match="the journal broke"):
        write_segment(
            Disk(), tmp_path, "orders", STREAM, tables(), compression="zstd", row_group_bytes=64 * KIB
        )
    assert list(tmp_path.iterdir()) == []


def test_a_segment_knows_whether_it_holds_idempotency_keys(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    _, without = write(tmp_path / "a", table(0, 100))
    _, one_in_many = write(
        tmp_path / "b", table(0, 100), table(100, 2, idempotency_key=["i", None]), table(102, 100)
    )
    assert not without.has_idempotency_keys
    assert one_in_many.has_idempotency_keys


# Row groups.


def test_row_groups_are_cut_near_their_size_from_small_batches(tmp_path: Path) -> None:
    _, segment = write(tmp_path, *(table(first, 10) for first in range(0, 1000, 10)))
    groups = segment.row_groups()
    assert 12 <= len(groups) <= 20
    assert sum(group.rows for group in groups) == 1000
    assert all(group.rows * 1000 < 64 * KIB + 12_000 for group in groups)


def test_row_groups_are_cut_near_their_size_from_one_large_batch(tmp_path: Path) -> None:
    _, segment = write(tmp_path, table(0, 1000))
    groups = segment.row_groups()
    assert 12 <= len(groups) <= 20
    assert all(group.rows * 1000 < 64 * KIB + 12_000 for group in groups)


def test_a_message_larger_than_a_row_group_has_one_of_its_own(tmp_path: Path) -> None:
    _, segment = write(tmp_path, table(0, 3, size=100 * KIB))
    assert [group.rows for group in segment.row_groups()] == [1, 1, 1]


def test_row_groups_lie_side_by_side_and_carry_their_checksums(tmp_path: Path) -> None:
    path, segment = write(tmp_path, table(0, 500))
    content = path.read_bytes()
    at = 4
    for group in segment.row_groups():
        assert group.byte_start == at
        assert google_crc32c.value(content[at : at + group.byte_length]) == group.crc32c
        at += group.byte_length
    assert segment.footer_crc == google_crc32c.value(content[-segment.footer_length :])


def test_every_offset_leads_to_the_group_that_holds_it(tmp_path: Path) -> None:
    path, segment = write(tmp_path, table(100, 500))
    reader = SegmentReader(path, segment)
    for offset in range(100, 600, 7):
        assert offset in offsets(reader.read_group(reader.group_of(offset)))


def test_a_group_can_be_read_in_part(tmp_path: Path) -> None:
    path, segment = write(tmp_path, table(0, 10, idempotency_key=["i"] * 10))
    batch = SegmentReader(path, segment).read_group(0, ["offset", "idempotency_key"])
    assert batch.schema.names == ["offset", "idempotency_key"]
    assert batch.column("idempotency_key").to_pylist() == ["i"] * 10


def test_a_gap_in_offsets_is_kept_as_it_is(tmp_path: Path) -> None:
    path, segment = write(tmp_path, table(0, 100), table(250, 100))
    reader = SegmentReader(path, segment)
    read = [o for index in range(len(segment.row_groups())) for o in offsets(reader.read_group(index))]
    assert read == [*range(100), *range(250, 350)]
    assert (segment.first_offset, segment.end_offset, segment.rows) == (0, 350, 200)


# Damage.


def test_a_flipped_bit_in_a_group_is_found_before_it_is_decoded(tmp_path: Path) -> None:
    path, segment = write(tmp_path, table(0, 300))
    groups = segment.row_groups()
    flip(path, groups[1].byte_start + 500)
    reader = SegmentReader(path, segment)
    assert offsets(reader.read_group(0))[0] == 0
    with pytest.raises(DataDamaged, match="row group 1 does not match its checksum") as caught:
        reader.read_group(1)
    assert caught.value.details == {
        "topic_id": 4,
        "partition": 1,
        "start_offset": groups[1].first_offset,
        "end_offset": groups[2].first_offset,
    }
    assert offsets(reader.read_group(2))[0] == groups[2].first_offset


def test_a_flipped_bit_in_the_footer_is_found_when_the_segment_is_opened(tmp_path: Path) -> None:
    path, segment = write(tmp_path, table(0, 300))
    flip(path, segment.size_bytes - segment.footer_length + 20)
    with pytest.raises(DataDamaged, match="footer that does not match"):
        SegmentReader(path, segment)


def test_a_segment_of_another_length_is_not_opened(tmp_path: Path) -> None:
    path, segment = write(tmp_path, table(0, 300))
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(DataDamaged, match=f"instead of {segment.size_bytes}"):
        SegmentReader(path, segment)


def test_a_segment_that_is_gone_is_called_damaged_with_its_offsets(tmp_path: Path) -> None:
    path, segment = write(tmp_path, table(7, 30))
    path.unlink()
    with pytest.raises(DataDamaged, match="cannot be opened") as caught:
        SegmentReader(path, segment)
    assert (caught.value.details["start_offset"], caught.value.details["end_offset"]) == (7, 37)


def test_pages_carry_parquets_own_checksums_for_other_readers(tmp_path: Path) -> None:
    path, _ = write(tmp_path, table(0, 300), compression="none")
    pq.read_table(path, page_checksum_verification=True)
    place = path.read_bytes().index(b"00000100" * 20)
    flip(path, place)
    with pytest.raises(OSError, match=r"(?i)crc|checksum"):
        pq.read_table(path, page_checksum_verification=True)


def test_what_is_no_segment_is_not_described(tmp_path: Path) -> None:
    stranger = tmp_path / "x.parquet"
    stranger.write_bytes(b"PAR1")
    with pytest.raises(DataDamaged, match="too short"):
        describe(stranger, STREAM)
    stranger.write_bytes(b"PAR1" + bytes(100))
    with pytest.raises(DataDamaged, match="does not end as a segment"):
        describe(stranger, STREAM)


# The cache.


class CountingReader(SegmentReader):
    """Counts what it decodes."""

    def __init__(self, path: Path, segment: Segment) -> None:
        super().__init__(path, segment)
        self.decoded: list[int] = []

    def read_group(self, index: int, columns: list[str] | None = None) -> pa.RecordBatch:
        self.decoded.append(index)
        return super().read_group(index, columns)


def test_a_cached_group_is_not_decoded_again(tmp_path: Path) -> None:
    path, segment = write(tmp_path, table(0, 300))
    reader, cache = CountingReader(path, segment), GroupCache(10 << 20, 4)
    first = cache.group(path, reader, 2)
    assert cache.group(path, reader, 2) is first
    assert reader.decoded == [2]


def test_the_cache_stays_within_its_bytes_and_keeps_what_was_used_last(tmp_path: Path) -> None:
    path, segment = write(tmp_path, table(0, 600))
    reader = CountingReader(path, segment)
    size = reader.read_group(0).nbytes
    reader.decoded.clear()
    cache = GroupCache(3 * size + size // 2, 4)
    for index in (0, 1, 2, 0, 3):
        cache.group(path, reader, index)
    assert reader.decoded == [0, 1, 2, 3]
    cache.group(path, reader, 0)
    assert reader.decoded == [0, 1, 2, 3], "0 was used after 1, so 1 had to go"
    cache.group(path, reader, 1)
    assert reader.decoded == [0, 1, 2, 3, 1]
    assert sum(batch.nbytes for batch in cache._groups.values()) == cache._bytes <= 3 * size + size // 2


def test_a_group_larger_than_the_cache_is_still_served(tmp_path: Path) -> None:
    path, segment = write(tmp_path, table(0, 300))
    reader, cache = CountingReader(path, segment), GroupCache(1, 4)
    assert offsets(cache.group(path, reader, 0))[0] == 0
    assert offsets(cache.group(path, reader, 1))[0] > 0
    assert len(cache._groups) == 1


def test_the_cache_keeps_few_readers_open(tmp_path: Path) -> None:
    cache, made = GroupCache(1 << 20, 2), []
    for number in range(4):
        directory = tmp_path / str(number)
        directory.mkdir()
        made.append(write(directory, table(0, 10)))
    first = cache.reader(*made[0])
    assert cache.reader(*made[0]) is first
    for path, segment in made:
        cache.reader(path, segment)
    assert len(cache._readers) == 2
    assert cache.reader(*made[0]) is not first


def test_a_forgotten_segment_leaves_nothing_in_the_cache(tmp_path: Path) -> None:
    path, segment = write(tmp_path, table(0, 300))
    cache = GroupCache(10 << 20, 4)
    reader = cache.reader(path, segment)
    cache.group(path, reader, 0)
    cache.group(path, reader, 1)
    cache.forget(path)
    assert (cache._bytes, len(cache._groups), len(cache._readers)) == (0, 0, 0)


def test_a_reader_of_a_removed_file_goes_on_with_what_it_had(tmp_path: Path) -> None:
    path, segment = write(tmp_path, table(0, 300))
    reader = SegmentReader(path, segment)
    path.unlink()
    assert offsets(reader.read_group(1))[0] == segment.row_groups()[1].first_offset


def test_another_segment_under_the_same_path_is_not_answered_from_the_cache(tmp_path: Path) -> None:
    """A topic that is deleted and made again writes its first segment under the old name."""
    cache = GroupCache(10 << 20, 4)
    path, old = write(tmp_path, table(0, 10, size=80))
    cache.group(path, cache.reader(path, old), 0)
    cache.forget(path)
    path.unlink()
    path, new = write(tmp_path, table(0, 10, size=160))
    assert cache.group(path, cache.reader(path, new), 0).column("data")[0].as_py() == b"00000000" * 20
