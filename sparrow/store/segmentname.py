"""How segment files are called: by their first offset and, when they were rewritten, how often.

``<first offset>.parquet`` came from the journal. ``<first offset>-c<round>.parquet`` was compacted,
``-m<round>`` merged of others. A rewritten file covers the offsets of all its sources and its round is above
theirs, so no name is ever given twice, a reader of an old file is never shown another one under its name, and
of two files that hold the same offsets the one with the higher round is the newer.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_NAME = re.compile(r"([0-9]{20})(?:-([cm])([1-9][0-9]{0,8}))?\.parquet")


class SegmentName(NamedTuple):
    """The parts of a segment file's name."""

    first_offset: int
    round: int = 0
    """How many times its messages were rewritten."""
    is_compacted: bool = False

    def __str__(self) -> str:
        kind = "c" if self.is_compacted else "m"
        return f"{self.first_offset:020d}{f'-{kind}{self.round}' if self.round else ''}.parquet"


def parse_name(text: str) -> SegmentName | None:
    """The parts of a name; None when it is not that of a segment."""
    found = _NAME.fullmatch(text)
    if found is None:
        return None
    return SegmentName(int(found[1]), int(found[3] or 0), found[2] == "c")
