"""The partition of a key is part of the format: it must never change."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.kernel.partition import partition_of, partitions_of
from sparrow.model.limits import PARTITIONS_MAX

COUNTS = (1, 2, 3, 4, 7, 16, 1024)
GOLDEN = {
    "": (0, 0, 0, 0, 0, 0, 0),
    "a": (0, 1, 1, 2, 3, 8, 512),
    "o-1": (0, 1, 1, 2, 3, 8, 532),
    "orders": (0, 1, 1, 2, 3, 8, 514),
    "key-0": (0, 1, 2, 2, 4, 10, 686),
    "key-1": (0, 1, 1, 2, 4, 10, 648),
    "ключ": (0, 0, 0, 0, 0, 1, 99),
    "🐦": (0, 0, 0, 0, 1, 3, 253),
    "x" * 1024: (0, 1, 2, 2, 4, 10, 695),
}


def crc32c_by_the_book(content: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize("key", GOLDEN, ids=ascii)
def test_the_partition_of_a_key_is_what_it_always_was(key: str) -> None:
    assert tuple(partition_of(key, count) for count in COUNTS) == GOLDEN[key]


@given(st.text(max_size=40), st.integers(1, PARTITIONS_MAX))
def test_the_partition_is_the_documented_formula(key: str, partitions: int) -> None:
    hashed = crc32c_by_the_book(key.encode()) * 2654435761 % 2**32
    assert partition_of(key, partitions) == hashed * partitions // 2**32


@given(st.text(max_size=40), st.integers(1, PARTITIONS_MAX))
def test_a_partition_lies_within_the_count(key: str, partitions: int) -> None:
    assert 0 <= partition_of(key, partitions) < partitions


@pytest.mark.parametrize("form", ["{}", "key-{}", "user-{:08d}", "{:x}", "o-{}@example.com"])
@pytest.mark.parametrize("partitions", [2, 3, 8, 64])
def test_counted_keys_spread_evenly(form: str, partitions: int) -> None:
    keys = [form.format(number) for number in range(20_000)]
    load = Counter(partition_of(key, partitions) for key in keys)
    assert len(load) == partitions
    fair = len(keys) / partitions
    assert max(load.values()) < fair * 1.35
    assert min(load.values()) > fair * 0.65


@given(st.text(max_size=20), st.integers(1, PARTITIONS_MAX // 2))
def test_doubling_the_count_splits_each_partition_in_two(key: str, partitions: int) -> None:
    assert partition_of(key, partitions * 2) // 2 == partition_of(key, partitions)


def test_many_keys_get_what_each_gets_alone_and_the_keyless_go_together() -> None:
    keys = ["a", None, "o-1", None, "key-0", "a"]
    assert partitions_of(keys, 7, without_key=5) == [3, 5, 3, 5, 4, 3]


def test_no_keys_have_no_partitions() -> None:
    assert partitions_of([], 7, without_key=0) == []


def test_another_process_with_another_hash_seed_agrees() -> None:
    code = (
        "from sparrow.kernel.partition import partition_of as p; print([p(k, 1024) for k in ('a', 'ключ')])"
    )
    ran = subprocess.run(
        [sys.executable, "-X", "utf8", "-c", code],
        env={"PYTHONHASHSEED": "4711"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.strip() == "[512, 99]"
