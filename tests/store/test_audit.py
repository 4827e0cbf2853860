"""The audit log's file: lines are kept in order over rotations, and a torn one harms no other."""

from __future__ import annotations

from pathlib import Path

import msgspec

from sparrow.store.audit import NAME, AuditLog
from sparrow.store.disk import Disk


def line(number: int) -> bytes:
    return msgspec.json.encode({"n": number})


def numbers(log: AuditLog, count: int) -> list[int]:
    return [msgspec.json.decode(each)["n"] for each in log.last(count)]


def test_lines_come_back_the_newest_last(tmp_path: Path) -> None:
    log = AuditLog(tmp_path, Disk())
    assert log.last(5) == []
    assert not (tmp_path / NAME).exists()
    for number in range(10):
        log.append(line(number))
    assert numbers(log, 3) == [7, 8, 9]
    assert numbers(log, 100) == list(range(10))
    log.close()


def test_a_full_file_is_rotated_and_the_oldest_goes(tmp_path: Path) -> None:
    log = AuditLog(tmp_path, Disk(), file_bytes=40, files_max=3)
    for number in range(10, 40):
        log.append(line(number))
    assert sorted(path.name for path in tmp_path.iterdir()) == [NAME, f"{NAME}.1", f"{NAME}.2"]
    assert all(path.stat().st_size <= 40 for path in tmp_path.iterdir())
    found = numbers(log, 100)
    assert found == list(range(found[0], 40))
    assert 8 <= len(found) <= 12
    assert numbers(log, 5) == [35, 36, 37, 38, 39]
    log.close()


def test_a_line_cut_short_is_closed_and_left_out(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(line(1) + b"\n" + line(2)[:4])
    log = AuditLog(tmp_path, Disk())
    log.append(line(3))
    assert numbers(log, 10) == [1, 3]
    log.close()
    log = AuditLog(tmp_path, Disk())
    log.append(line(4))
    assert numbers(log, 10) == [1, 3, 4]
    log.close()
