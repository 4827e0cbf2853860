"""Which partition a key belongs to.

The function is part of the format (docs/format.md §6): clients and brokers of any age must agree, so it
is built on CRC-32C and never on Python's ``hash``. The multiplication spreads the low bits, and taking
the partition from the high end means that doubling the count splits each partition's keys in two.
"""

from __future__ import annotations

from collections.abc import Sequence

import google_crc32c

_SPREAD = 2654435761  # 2^32 divided by the golden ratio, prime: Knuth's multiplicative constant
_MASK = 0xFFFFFFFF


def partition_of(key: str, partitions: int) -> int:
    """The partition of one key."""
    hashed: int = google_crc32c.value(key.encode()) * _SPREAD & _MASK
    return hashed * partitions >> 32


def partitions_of(keys: Sequence[str | None], partitions: int, without_key: int) -> list[int]:
    """The partition of each key; messages without one go to ``without_key``."""
    return [without_key if key is None else partition_of(key, partitions) for key in keys]
