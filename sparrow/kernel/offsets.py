"""Sets of offsets: roaring bitmaps, and the ranges they are made of.

Everywhere in the kernel "some messages of one stream" is a ``BitMap64``: a run of a million offsets
costs a few bytes per 65,536 of them, set algebra runs in C, and taking "the first thousand" is a
select and a cut. A bitmap handed to another owner is never changed afterwards by its giver.

``pack`` is the form that travels in facts and rests in cursors: few runs as plain numbers, otherwise
the portable roaring form, whichever is smaller to read. ``unpack`` refuses bytes that are neither.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from pyroaring import BitMap64

from sparrow.model.errors import DataDamaged

Offsets: TypeAlias = BitMap64
Packed: TypeAlias = tuple[tuple[int, ...], bytes]
"""Flat ``start, end, start, end …`` and, when these would be too many, roaring bytes instead."""

OFFSET_MAX = 2**63 - 1
SPAN_MAX = 2**40
"""Offsets of one run in a packed set. A set costs memory by its runs' length, if only a little: a
damaged end of 2**60 would cost all there is."""
PACKED_RANGES_MAX = 8
"""Above this many runs a bitmap travels as roaring bytes; finding runs costs a microsecond each."""


def span(start_offset: int, end_offset: int) -> BitMap64:
    """All offsets from start (inclusive) to end (exclusive)."""
    offsets = BitMap64()
    if start_offset < end_offset:
        offsets.add_range(start_offset, end_offset)
    return offsets


def to_offsets(source: BitMap64 | Iterable[int]) -> BitMap64:
    """The set itself, or one made of the numbers."""
    return source if isinstance(source, BitMap64) else BitMap64(source)


def to_list(offsets: BitMap64) -> array[int]:
    """The offsets in order, as numbers; many times faster than iterating over the bitmap."""
    numbers: array[int] = offsets.to_array()
    return numbers


def first_missing(offsets: BitMap64, start: int) -> int:
    """The lowest offset from ``start`` on that is not in the set.

    Doubles its stride while whole stretches are present, then halves it: logarithmic in the run.
    """
    stride = 1
    while offsets.contains_range(start, start + stride):
        start += stride
        stride *= 2
    while stride > 1:
        stride //= 2
        if offsets.contains_range(start, start + stride):
            start += stride
    return start


def ranges(offsets: BitMap64) -> Iterator[tuple[int, int]]:
    """The runs of the set in order, as (start, end)."""
    if not offsets:
        return
    start, last = offsets.min(), offsets.max()
    while True:
        end = first_missing(offsets, start)
        yield start, end
        if end > last:
            return
        start = offsets.next_set_bit(end)


def is_run(offsets: BitMap64) -> bool:
    """Whether the set is one unbroken range."""
    return bool(offsets) and len(offsets) == offsets.max() - offsets.min() + 1


def take_first(offsets: BitMap64, count: int) -> BitMap64:
    """Remove the ``count`` lowest offsets from the set and return them."""
    if count >= len(offsets):
        taken = offsets.copy()
        offsets.clear()
        return taken
    bound = offsets[count]
    low = offsets.min()
    if bound - low == count:
        taken = span(low, bound)
    else:
        taken = offsets.copy()
        taken.remove_range(bound, OFFSET_MAX)
    offsets.remove_range(low, bound)
    return taken


def pack(offsets: BitMap64) -> Packed:
    """The form that travels and rests."""
    flat: list[int] = []
    for start, end in ranges(offsets):
        if len(flat) == 2 * PACKED_RANGES_MAX:
            dense = offsets.copy()
            dense.run_optimize()
            return (), dense.serialize()
        flat += (start, end)
    return tuple(flat), b""


def unpack(flat: tuple[int, ...], dense: bytes = b"") -> BitMap64:
    """The set that ``pack`` described."""
    try:
        offsets = BitMap64.deserialize(dense) if dense else BitMap64()
    except ValueError as error:
        raise DataDamaged(f"a packed offset set does not decode: {error}") from error
    if len(flat) % 2:
        raise DataDamaged("a packed offset set has a range without an end")
    for start, end in zip(flat[::2], flat[1::2], strict=True):
        if not 0 <= start < end <= OFFSET_MAX or end - start > SPAN_MAX:
            raise DataDamaged(f"a packed offset set has the impossible range {start} to {end}")
        offsets.add_range(start, end)
    return offsets
