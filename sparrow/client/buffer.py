"""Messages that the broker has sent and the program has not asked for yet.

They stay the columns they came as. Objects are made for a pull, and only for what it takes.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sparrow.kernel.exchange import Run
from sparrow.kernel.lease import parse_head
from sparrow.model.message import Delivered, StreamId
from sparrow.store.handover import contents, deliveries
from sparrow.wire.heads import Deliver


class Parcel:
    """What one DELIVER frame brought."""

    __slots__ = ("bytes", "head", "received_s", "rows", "run")

    def __init__(self, head: Deliver, body: memoryview) -> None:
        self.head = head
        self.rows: pa.RecordBatch = pa.ipc.open_stream(pa.py_buffer(body)).read_next_batch()
        self.received_s = time.monotonic()
        self.bytes: int = self.rows.column("data").total_values_length
        first = parse_head(head.lease).first_offset
        stream = StreamId(head.topic_id, head.partition)
        count = self.rows.num_rows
        self.run = Run(stream, first, first + count, count, None, head.attempts, head.deadline_us, head.lease)

    @property
    def count(self) -> int:
        found: int = self.rows.num_rows
        return found

    def cut(self, count: int) -> pa.RecordBatch:
        """Takes the first rows out."""
        taken = self.rows.slice(0, count)
        self.rows = self.rows.slice(count)
        return taken

    def offsets(self) -> list[int]:
        found: list[int] = self.rows.column("offset").to_pylist()
        return found


class Buffer:
    """The parcels of one consumer, in the order in which they came."""

    def __init__(self) -> None:
        self._parcels: deque[Parcel] = deque()
        self.messages = 0
        self.bytes = 0
        """Of the parcels of which something is left, all bytes."""

    def add(self, parcel: Parcel) -> None:
        self._parcels.append(parcel)
        self.messages += parcel.count
        self.bytes += parcel.bytes

    def take(self, max_messages: int, max_bytes: int | None, owner: Any) -> list[Delivered]:
        """As many messages as fit, one at least if there is one."""
        found: list[Delivered] = []
        room = max_bytes
        while self._parcels and len(found) < max_messages:
            parcel = self._parcels[0]
            count = min(parcel.count, max_messages - len(found))
            if room is not None:
                count, used = _fitting(parcel.rows.slice(0, count), room)
                count = max(count, 0 if found else 1)
                room -= used
                if not count:
                    break
            is_whole = count == parcel.count
            rows = parcel.rows if is_whole else parcel.cut(count)
            published_at_us = rows.column("publish_time")[0].value
            found += deliveries(rows, contents(rows), parcel.run, parcel.head.topic, owner, published_at_us)
            self.messages -= count
            if is_whole:
                self._drop()
        return found

    def _drop(self) -> None:
        self.bytes -= self._parcels.popleft().bytes

    def drop_older(self, received_s: float) -> None:
        """Forgets what came before a moment: its leases have ended."""
        while self._parcels and self._parcels[0].received_s < received_s:
            self.messages -= self._parcels[0].count
            self._drop()

    def clear(self) -> list[Parcel]:
        """Takes everything out."""
        found, self._parcels = list(self._parcels), deque()
        self.messages = self.bytes = 0
        return found


def _fitting(rows: pa.RecordBatch, room: int) -> tuple[int, int]:
    """How many of the first rows have at most so many bytes of data, and how many bytes these are."""
    lengths = pc.cumulative_sum(pc.binary_length(rows.column("data")).fill_null(0)).to_pylist()
    count = sum(length <= room for length in lengths)
    return count, lengths[count - 1] if count else lengths[0]
