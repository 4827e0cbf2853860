"""Stage files: what was written is read again, what a crash tore is cut, what failed is gone."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from pathlib import Path

import pytest

from sparrow.model.errors import DataDamaged, StorageError, StorageFull
from sparrow.model.message import StreamId
from sparrow.store import batch as batches
from sparrow.store.disk import Disk
from sparrow.store.ports import BatchDraft
from sparrow.store.stage import StageFiles, list_stages
from sparrow.testing.disk import FaultyDisk

STREAM = StreamId(3, 1)


def draft(*payloads: bytes, stream: StreamId = STREAM) -> BatchDraft:
    body = batches.encode(batches.build(payloads))
    return BatchDraft(stream, body.buffer, body.crc, body.record_count, body.columns, body.codec)


def opened(root: Path, disk: Disk | None = None) -> StageFiles:
    root.mkdir(exist_ok=True)
    return StageFiles.open(root, disk or Disk())


async def write(stages: StageFiles, part: str, *drafts: BatchDraft, now_us: int = 7) -> None:
    await stages.write(stages.open_part("t", part), drafts, 0, now_us)


async def payloads(stages: StageFiles, part: str) -> list[bytes]:
    number = stages.find("t", part)
    assert number is not None
    found = []
    for entry in await stages.read(number):
        decoded = batches.decode(entry.draft.body, entry.draft.columns)
        found += decoded.column("data").to_pylist()
    return found


async def test_what_was_written_is_read_again_also_after_a_restart(tmp_path: Path) -> None:
    stages = opened(tmp_path)
    await write(stages, "a", draft(b"1", b"22"), draft(b"333", stream=StreamId(3, 0)))
    await write(stages, "a", draft(b"4"), now_us=9)
    await write(stages, "b", draft(b"5"))
    before = dict(iter(stages))
    assert len(stages) == 2
    stages.close()
    again = opened(tmp_path)
    assert dict(iter(again)) == before
    assert (
        again.size_bytes == stages.size_bytes == sum(path.stat().st_size for _, path in list_stages(tmp_path))
    )
    assert await payloads(again, "a") == [b"1", b"22", b"333", b"4"]
    number = again.find("t", "a")
    assert number is not None
    stage = again.get(number)
    assert stage is not None
    assert (stage.calls, stage.messages, stage.written_at_us) == (2, 4, 9)
    entries = await again.read(number)
    assert [entry.draft.stream for entry in entries] == [STREAM, StreamId(3, 0), STREAM]
    await write(again, "a", draft(b"6"))
    assert await payloads(again, "a") == [b"1", b"22", b"333", b"4", b"6"]
    again.close()


async def test_a_torn_call_is_cut_whole_and_written_again(tmp_path: Path) -> None:
    stages = opened(tmp_path)
    await write(stages, "a", draft(b"1"))
    whole = list_stages(tmp_path)[0][1].stat().st_size
    await write(stages, "a", draft(b"2" * 100), draft(b"3" * 100))
    stages.close()
    path = list_stages(tmp_path)[0][1]
    full = path.read_bytes()
    for length in range(whole, len(full), 8):
        path.write_bytes(full[:length] + b"\0" * 16)
        again = opened(tmp_path)
        assert await payloads(again, "a") == [b"1"]
        assert path.stat().st_size == whole
        await write(again, "a", draft(b"2" * 100))
        assert await payloads(again, "a") == [b"1", b"2" * 100]
        again.close()


async def test_a_file_without_a_whole_call_is_removed(tmp_path: Path) -> None:
    stages = opened(tmp_path)
    await write(stages, "a", draft(b"1"))
    stages.close()
    path = list_stages(tmp_path)[0][1]
    full = path.read_bytes()
    for length in (0, 40, 64, 120, len(full) - 8):
        path.write_bytes(full[:length])
        again = opened(tmp_path)
        assert list(again) == []
        assert not path.exists()
        again.close()


async def test_a_copy_under_another_number_is_not_taken(tmp_path: Path) -> None:
    stages = opened(tmp_path)
    await write(stages, "a", draft(b"1"))
    stages.close()
    path = list_stages(tmp_path)[0][1]
    path.with_name("0000000009.stage").write_bytes(path.read_bytes())
    again = opened(tmp_path)
    assert [number for number, _ in again] == [1]
    again.close()


async def test_rot_is_found_when_it_is_read(tmp_path: Path) -> None:
    stages = opened(tmp_path)
    await write(stages, "a", draft(b"payload" * 50))
    path = list_stages(tmp_path)[0][1]
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"payload")] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DataDamaged):
        await payloads(stages, "a")
    stages.close()


@pytest.mark.parametrize(
    ("operation", "error", "kind"),
    [("pwritev", errno.ENOSPC, StorageFull), ("pwritev", errno.EIO, StorageError)],
)
async def test_a_part_whose_write_failed_is_gone(
    tmp_path: Path, operation: str, error: int, kind: type[StorageError]
) -> None:
    disk = FaultyDisk()
    stages = opened(tmp_path, disk)
    await write(stages, "a", draft(b"1"))
    disk.fail(operation, error=error)
    with pytest.raises(kind):
        await write(stages, "a", draft(b"2"))
    assert stages.find("t", "a") is None
    assert list_stages(tmp_path) == []
    await write(stages, "a", draft(b"3"))
    assert await payloads(stages, "a") == [b"3"]
    stages.close()


async def test_short_writes_are_continued(tmp_path: Path) -> None:
    disk = FaultyDisk(seed=4)
    stages = opened(tmp_path, disk)
    disk.write_short()
    await write(stages, "a", draft(b"1" * 500), draft(b"2" * 300))
    assert await payloads(stages, "a") == [b"1" * 500, b"2" * 300]
    stages.close()


async def test_what_was_synced_survives_power_loss(tmp_path: Path) -> None:
    for seed in range(20):
        root = tmp_path / str(seed)
        disk = FaultyDisk(root, seed)
        stages = opened(root, disk)
        await write(stages, "a", draft(b"1" * 5000), draft(b"2"))
        await write(stages, "b", draft(b"3"))
        number = stages.find("t", "a")
        assert number is not None
        await stages.sync([number])
        await write(stages, "b", draft(b"4"))
        stages.close()
        found = tmp_path / f"{seed}-after"
        disk.crash(found)
        again = opened(found)
        assert await payloads(again, "a") == [b"1" * 5000, b"2"]
        if again.find("t", "b") is not None:
            assert await payloads(again, "b") in ([b"3"], [b"3", b"4"])
        again.close()


async def test_dropped_parts_and_their_files_are_gone(tmp_path: Path) -> None:
    stages = opened(tmp_path)
    await write(stages, "a", draft(b"1"))
    await write(stages, "b", draft(b"2"))
    number = stages.find("t", "a")
    assert number is not None
    await stages.drop([number, 77])
    assert stages.find("t", "a") is None
    assert stages.size_bytes == sum(stage.bytes for _, stage in stages) > 0
    assert [number for number, _ in list_stages(tmp_path)] == [2]
    stages.close()


async def test_parts_written_at_once_do_not_mix(tmp_path: Path) -> None:
    stages = opened(tmp_path)

    async def fill(part: str) -> Sequence[bytes]:
        given = [f"{part}-{place}".encode() * 20 for place in range(10)]
        for payload in given:
            await write(stages, part, draft(payload))
        return given

    parts = [f"p{number}" for number in range(8)]
    for part, given in zip(parts, await asyncio.gather(*map(fill, parts)), strict=True):
        assert await payloads(stages, part) == given
    stages.close()
