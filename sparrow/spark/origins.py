"""Where a read gets its rows from: a broker over TCP, or the data directory of a broker that is stopped.

Both answer the same few questions. A connection is made once a process and kept, because Spark uses its
Python workers again; it makes itself anew when the broker comes back. A directory is looked at under its
shared lock, a question at a time and for as long as a task reads, so nothing changes under a reader and a
broker is kept from starting only meanwhile. The directory of a running broker is refused: ask the broker.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sparrow.client.loop import LoopThread
from sparrow.client.remote import RemoteBroker
from sparrow.model.errors import (
    ConnectionLost,
    DataDamaged,
    DataDirectoryLocked,
    DataLost,
    InvalidOption,
    NotFound,
    OffsetOutOfRange,
    SparrowError,
    TopicNotFound,
    TopicRecreated,
)
from sparrow.model.message import StreamId
from sparrow.model.schema import TopicSchema
from sparrow.model.segment import BatchPlace, Extent, Measured, Stretch, TopicSegments
from sparrow.spark.options import Where
from sparrow.spark.ranges import Range
from sparrow.store.journalstretch import read_places
from sparrow.store.ports import LogBatch
from sparrow.store.segmentfile import scan_segment

if TYPE_CHECKING:
    from sparrow.store.offline.log import OfflineLog

_FETCH_BYTES = 8 * 1024 * 1024
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Origin(Protocol):
    """What a reader asks of a log."""

    def extents(self, patterns: Sequence[str]) -> list[Extent]: ...

    def segments(self, topic: str, hold_s: float = 0.0) -> TopicSegments: ...

    def measure(self, topic: str, stretches: Sequence[Stretch], max_bytes: int) -> list[Measured]: ...

    def places(self, topic: str, stretches: Sequence[Stretch]) -> list[list[BatchPlace]]: ...

    def offset_at(self, topic: str, partition: int, time_us: int) -> int: ...

    def topic_schema(self, topic: str) -> TopicSchema | None: ...

    def scan(self, wanted: Range, columns: Sequence[str], is_loss_fatal: bool) -> Iterator[LogBatch]:
        """The batches of a range, in order; the last may go beyond its end."""
        ...


_brokers: dict[tuple[int, Where], BrokerOrigin] = {}
_logs: dict[str, tuple[Any, OfflineLog]] = {}


def open_origin(where: Where) -> Origin:
    """The log that options name."""
    if where.path is not None:
        return DirectoryOrigin(where.path)
    return open_broker(where)


def open_broker(where: Where) -> BrokerOrigin:
    """The broker that options name, by the connection that this process has."""
    key = (os.getpid(), where)  # A forked worker must not share a socket with its parent.
    found = _brokers.get(key)
    if found is None or found.is_closed:
        found = _brokers[key] = BrokerOrigin(where)
    return found


class BrokerOrigin:
    """A running broker."""

    def __init__(self, where: Where) -> None:
        assert where.servers is not None
        self._thread = LoopThread()
        opening = RemoteBroker.open(
            where.servers,
            token=where.token,
            client="spark",
            connect_s=where.retry_s,
            reconnect_s=where.retry_s,
        )
        try:
            self.broker = self._thread.run(opening)
        except BaseException as error:
            self._thread.stop()
            if isinstance(error, ConnectionLost):
                raise ConnectionLost(
                    f"option servers: no broker answers at {where.servers} within {where.retry_s:g} s",
                    hint="Start it, correct the address, or give it longer with the option retryTimeout.",
                ) from error
            raise

    @property
    def is_closed(self) -> bool:
        return self._thread._loop.is_closed()

    def close(self) -> None:
        if not self.is_closed:
            try:
                self._thread.run(self.broker.close())
            finally:
                self._thread.stop()

    def run(self, work: Any) -> Any:
        """Waits for a coroutine of the client."""
        return self._thread.run(work)

    def extents(self, patterns: Sequence[str]) -> list[Extent]:
        found: list[Extent] = self.run(self.broker.extents(list(patterns)))
        return found

    def segments(self, topic: str, hold_s: float = 0.0) -> TopicSegments:
        found: TopicSegments = self.run(self.broker.segments(topic, hold_s=hold_s))
        return found

    def measure(self, topic: str, stretches: Sequence[Stretch], max_bytes: int) -> list[Measured]:
        found: list[Measured] = self.run(self.broker.measure(topic, list(stretches), max_bytes=max_bytes))
        return found

    def places(self, topic: str, stretches: Sequence[Stretch]) -> list[list[BatchPlace]]:
        found: list[list[BatchPlace]] = self.run(self.broker.places(topic, list(stretches)))
        return found

    def offset_at(self, topic: str, partition: int, time_us: int) -> int:
        moment = _EPOCH + timedelta(microseconds=time_us)
        return int(self.run(self.broker.offset_at(topic, moment, partition=partition)))

    def topic_schema(self, topic: str) -> TopicSchema | None:
        found: TopicSchema | None = self.run(self.broker.topic_schema(topic))
        return found

    def scan(self, wanted: Range, columns: Sequence[str], is_loss_fatal: bool) -> Iterator[LogBatch]:
        if wanted.file is not None:
            try:
                yield from _scan_file(Path(wanted.file), wanted, columns)
                return
            except NotFound:
                pass  # Not a file of this machine, or retention took it: the broker knows.
        at, ahead = wanted.start, None
        if wanted.directory is not None and wanted.places:
            try:
                for batch in read_places(Path(wanted.directory), wanted.places, _stream(wanted)):
                    yield batch
                    at = batch.end_offset
            except NotFound:
                pass  # Not of this machine, or sealed meanwhile: what is left the broker gives.
        while at < wanted.end:
            pending, ahead = ahead or self._begin(wanted, at, columns), None
            try:
                topic_id, found = self.run(_result(pending))
            except (OffsetOutOfRange, TopicNotFound, DataDamaged) as error:
                at = _go_on(wanted, at, error, is_loss_fatal)
                continue
            if topic_id != wanted.topic_id:
                if is_loss_fatal:
                    raise TopicRecreated(f"the topic {wanted.topic!r} was made anew while it was read")
                return
            if not found:
                return
            at = found[-1].end_offset
            if at < wanted.end:
                ahead = self._begin(wanted, at, columns)
            yield from found

    def _begin(self, wanted: Range, at: int, columns: Sequence[str]) -> asyncio.Task[Any]:
        """Asks for what comes next; the answer arrives while Spark takes what is there."""
        work = self.broker.fetch(
            wanted.topic, partition=wanted.partition, offset=at, max_bytes=_FETCH_BYTES, columns=columns
        )

        def begin() -> asyncio.Task[Any]:
            return asyncio.get_running_loop().create_task(work)

        return self._thread.call(begin)


async def _result(task: asyncio.Task[Any]) -> Any:
    return await task


class DirectoryOrigin:
    """A data directory that no broker has open."""

    def __init__(self, path: str) -> None:
        self._root = Path(path).absolute()

    def _log(self) -> OfflineLog:
        """Within a look: the log as it is, read once as long as nobody writes."""
        from sparrow.store.offline.log import OfflineLog, stamp

        key, now = str(self._root), stamp(self._root)
        found = _logs.get(key)
        if found is None or found[0] != now:
            found = _logs[key] = (now, OfflineLog(self._root))
        return found[1]

    def _looking(self) -> _Look:
        return _Look(self._root)

    def extents(self, patterns: Sequence[str]) -> list[Extent]:
        with self._looking():
            return self._log().extents(patterns)

    def segments(self, topic: str, hold_s: float = 0.0) -> TopicSegments:
        with self._looking():
            return self._log().segments(topic)

    def measure(self, topic: str, stretches: Sequence[Stretch], max_bytes: int) -> list[Measured]:
        with self._looking():
            return self._log().measure(topic, stretches, max_bytes)

    def places(self, topic: str, stretches: Sequence[Stretch]) -> list[list[BatchPlace]]:
        return [[] for _ in stretches]  # Tasks find them by themselves.

    def offset_at(self, topic: str, partition: int, time_us: int) -> int:
        with self._looking():
            return self._log().offset_at(topic, partition, time_us)

    def topic_schema(self, topic: str) -> TopicSchema | None:
        with self._looking():
            return self._log().topic_schema(topic)

    def scan(self, wanted: Range, columns: Sequence[str], is_loss_fatal: bool) -> Iterator[LogBatch]:
        with self._looking():
            log, at = self._log(), wanted.start
            while at < wanted.end:
                try:
                    for batch in log.scan(wanted.topic, wanted.partition, at, wanted.end, columns):
                        yield batch
                        at = batch.end_offset
                    return
                except (OffsetOutOfRange, NotFound, DataDamaged) as error:
                    at = _go_on(wanted, at, error, is_loss_fatal)


class _Look:
    """The shared lock of a directory, with complaints that speak of the option."""

    def __init__(self, root: Path) -> None:
        from sparrow.store.offline import access

        self._look = access.looking(root)

    def __enter__(self) -> None:
        try:
            self._look.__enter__()
        except DataDirectoryLocked as error:
            raise DataDirectoryLocked(
                f"option path: {error.message}",
                hint="Read from the running broker: give servers instead of path.",
            ) from error
        except SparrowError as error:
            raise InvalidOption(
                f"option path: {error.message} [{error.code}]", hint=error.hint, option="path"
            ) from error

    def __exit__(self, *details: Any) -> None:
        self._look.__exit__(*details)


def _scan_file(path: Path, wanted: Range, columns: Sequence[str]) -> Iterator[LogBatch]:
    stream, at = _stream(wanted), wanted.start
    for batch in scan_segment(path, stream, wanted.start, wanted.end, columns):
        if batch.num_rows:
            end = batch.column("offset")[-1].as_py() + 1
            yield LogBatch(stream, at, end, batch)
            at = end


def _stream(wanted: Range) -> StreamId:
    return StreamId(wanted.topic_id, wanted.partition)


def _go_on(wanted: Range, at: int, error: SparrowError, is_loss_fatal: bool) -> int:
    """Where to read on after something was not there; raises where that must not be passed over."""
    if is_loss_fatal:
        if isinstance(error, DataDamaged):
            raise error
        raise DataLost(
            f"{wanted.topic}/{wanted.partition}: offsets {at} to {wanted.end - 1} cannot be read any more: "
            f"{error.message}"
        ) from error
    kept = error.details.get("end_offset" if isinstance(error, DataDamaged) else "start_offset")
    return max(at + 1, int(kept)) if kept is not None else wanted.end
