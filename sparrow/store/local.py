"""The embedded store: journal, hot window, lake and catalog in one data directory.

It composes; the rules are in the parts. Threads: the event loop owns all state; one thread writes the
journal, one talks to the catalog, one decodes segments, one seals. Work handed to a thread is handed all
it needs, and its result is put in force on the loop.

A read is sent to the journal or to the lake by its offset alone: sealed offsets below ``sealed_end``,
the rest hot. Both sides move in one step on the loop, so no message is seen twice or not at all.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sparrow.model.errors import (
    Backlogged,
    DataDamaged,
    OffsetOutOfRange,
    SparrowError,
    StorageError,
    StorageFull,
    TopicNotFound,
)
from sparrow.model.message import StreamId
from sparrow.model.segment import SegmentInfo
from sparrow.model.settings import JournalSettings, LakeSettings
from sparrow.model.topic import Durability, Topic, TopicPolicy
from sparrow.store import batch as batches
from sparrow.store.catalog import Catalog
from sparrow.store.catalog_tables import CursorCheckpoint, ProducerState, Segment, SubscriptionRow
from sparrow.store.directory import DataDirectory
from sparrow.store.disk import Disk
from sparrow.store.hot import HotStream, HotWindow
from sparrow.store.journal import Journal
from sparrow.store.journalfile import JournalFile
from sparrow.store.lake import GroupCache
from sparrow.store.opening import Opened, open_directory
from sparrow.store.ports import (
    BatchDraft,
    Bounds,
    Commit,
    Damage,
    Draft,
    LogBatch,
    OnCommit,
    Recovered,
    StoreState,
)
from sparrow.store.sealing import Sealed, SealPlan, seal
from sparrow.store.segments import SegmentIndex

_CACHE_BYTES = 32 * 1024 * 1024  # decoded row groups: eight of the default size
_CACHE_READERS = 64
_SEAL_FILES_MAX = 8
_SEALING_WAIT_S = 30.0
_SEALING_NICENESS = 5  # a third of the share of a thread of normal priority, when both want a core


class LocalStore:
    """See the module's text; the meaning of each method is in ports.py."""

    def __init__(
        self,
        opened: Opened,
        disk: Disk,
        journal: JournalSettings,
        lake: LakeSettings,
        now_us: Callable[[], int],
        catalog_thread: ThreadPoolExecutor,
    ) -> None:
        self._directory: DataDirectory = opened.directory
        self._catalog: Catalog = opened.catalog
        self._hot: HotWindow = opened.hot
        self._index: SegmentIndex = opened.lake
        self._topics: dict[int, Topic] = {topic.id: topic for topic in opened.topics}
        self._subscriptions = opened.subscriptions
        self._recovered = opened.recovered
        self._damages: list[Damage] = list(opened.recovered.report.damages)
        self._disk = disk
        self._lake = lake
        self._cache = GroupCache(_CACHE_BYTES, _CACHE_READERS)
        self._catalog_version = opened.catalog.version
        self._catalog_thread = catalog_thread
        self._read_thread = ThreadPoolExecutor(1, thread_name_prefix="sparrow-lake")
        self._seal_thread = ThreadPoolExecutor(1, "sparrow-seal", initializer=_stand_back)
        self._keeping = asyncio.Lock()
        self._is_file_finished = asyncio.Event()
        self._is_sealed = asyncio.Event()
        self._unsealed_bytes_max = journal.unsealed_bytes_max
        self._finished_bytes = 0
        """What is finished and not sealed, as of the last change."""
        self._background: set[asyncio.Task[Any]] = set()
        self._journal = Journal(
            disk=disk,
            directory=self._directory.journal,
            hot=self._hot,
            now_us=now_us,
            catalog_version=lambda: self._catalog_version,
            file_bytes=journal.file_bytes,
            group_bytes_max=journal.group_bytes_max,
            pending_bytes_max=journal.pending_bytes_max,
            sync_interval_s=journal.sync_interval_s,
            on_new_file=self._remember_newest,
        )
        scan = opened.scan
        lengths = [scan.end_of(file) for file in scan.files]
        self._journal.adopt(scan.files, scan.last_number, (lengths or [0])[-1], scan.last_time_us)

    @classmethod
    async def open(
        cls,
        root: Path,
        *,
        journal: JournalSettings,
        lake: LakeSettings,
        now_us: Callable[[], int],
        disk: Disk | None = None,
    ) -> LocalStore:
        """Opens the directory and recovers what it holds."""
        disk = disk or Disk()
        thread = ThreadPoolExecutor(1, thread_name_prefix="sparrow-catalog")
        loop = asyncio.get_running_loop()
        start = perf_counter()
        try:
            opened = await loop.run_in_executor(
                thread,
                open_directory,
                root,
                disk,
                now_us(),
                journal.on_damage,
                lambda: perf_counter() - start,
            )
        except BaseException:
            thread.shutdown(wait=False)
            raise
        return cls(opened, disk, journal, lake, now_us, thread)

    @property
    def recovered(self) -> Recovered:
        return self._recovered

    def state(self) -> StoreState:
        complaint = self._journal.complaint
        return StoreState(
            is_writable=complaint is None,
            complaint=str(complaint) if complaint else None,
            journal_bytes=sum(file.end for file in self._journal.files.values()),
            journal_files=len(self._journal.files),
            lake_bytes=self._index.size_bytes,
            segments=self._index.count,
            pending_bytes=self._journal.pending_bytes,
            syncs=self._journal.syncs,
            sync_seconds=self._journal.sync_seconds,
            damages=tuple(self._damages),
        )

    async def close(self) -> None:
        """Orderly: the journal is synced and finished, the catalog leaves one clean file."""
        async with self._keeping:
            if self._background:
                await asyncio.wait(self._background)
            await self._journal.close()
            self._read_thread.shutdown(wait=True)
            self._cache.close()
            self._seal_thread.shutdown(wait=True)
            try:
                await self._in_catalog(self._catalog.close)
            finally:
                self._catalog_thread.shutdown(wait=True)
                self._directory.close()

    # The log.

    async def append(self, chain: Sequence[Draft], durability: Durability, on_commit: OnCommit) -> Commit:
        if self._finished_bytes > self._unsealed_bytes_max and isinstance(chain[0], BatchDraft):
            await self._wait_for_sealing()
        return await self._journal.append(chain, durability, on_commit)

    async def _wait_for_sealing(self) -> None:
        """Publishers that outrun the sealing wait for it, so that the journal cannot fill the disk."""
        try:
            async with asyncio.timeout(_SEALING_WAIT_S):
                while self._finished_bytes > self._unsealed_bytes_max:
                    self._is_sealed.clear()
                    await self._is_sealed.wait()
        except TimeoutError:
            raise Backlogged(
                f"{self._finished_bytes} bytes wait to be sealed; {self._unsealed_bytes_max} are allowed",
                hint="See the health report: sealing is slower than the publishers, or it fails.",
            ) from None

    def bounds(self, stream: StreamId) -> Bounds:
        hot = self._stream(stream)
        return Bounds(hot.start_offset, hot.end_offset)

    async def read(
        self, stream: StreamId, offset: int, max_bytes: int, *, is_whole: bool = False
    ) -> list[LogBatch]:
        hot = self._stream(stream)
        if not hot.start_offset <= offset <= hot.end_offset:
            raise OffsetOutOfRange(
                f"offset {offset} is not between {hot.start_offset} and {hot.end_offset}",
                start_offset=hot.start_offset,
                end_offset=hot.end_offset,
            )
        segment = self._index.find(stream, offset) if offset < hot.sealed_end else None
        if segment is None:
            return self._read_hot(stream, hot, offset, max_bytes, is_whole)
        path = self._path(segment)
        try:
            found: list[LogBatch] = await self._in(
                self._read_thread, self._read_segment, segment, path, offset, max_bytes, is_whole
            )
            return found
        except DataDamaged:
            if self._index.find(stream, offset) is not segment:
                return await self.read(stream, max(offset, hot.start_offset), max_bytes, is_whole=is_whole)
            raise

    def _read_hot(
        self, stream: StreamId, hot: HotStream, offset: int, max_bytes: int, is_whole: bool
    ) -> list[LogBatch]:
        found: list[LogBatch] = []
        size = 0
        for place in hot.places_from(offset):
            if size >= max_bytes:
                break
            file = self._journal.files[place.file_number]
            header = file.header(place.position)
            if header.end_offset <= offset:
                continue
            table = batches.to_table_form(
                batches.decode(file.body(header), header.columns),
                header.base_offset,
                header.publish_time_us,
                header.producer_id,
                header.base_sequence,
            )
            skip = 0 if is_whole else max(0, offset - header.base_offset)
            found.append(LogBatch(stream, header.base_offset + skip, header.end_offset, table.slice(skip)))
            size += header.body_length
        return found

    def _read_segment(
        self, segment: Segment, path: Path, offset: int, max_bytes: int, is_whole: bool
    ) -> list[LogBatch]:
        """Runs in the lake's thread."""
        reader = self._cache.reader(path, segment)
        groups = segment.row_groups()
        found: list[LogBatch] = []
        size = 0
        for index in range(reader.group_of(offset), len(groups)):
            try:
                table = self._cache.group(path, reader, index)
            except DataDamaged:
                if found:
                    break  # What is whole is served first; the next read meets the damage.
                raise
            end = groups[index + 1].first_offset if index + 1 < len(groups) else segment.end_offset
            if end <= offset:
                continue
            start = groups[index].first_offset
            if not is_whole and offset > start:
                table, start = _from_offset(table, start, offset), offset
            found.append(LogBatch(segment.stream, start, end, table))
            size += table.nbytes
            if size >= max_bytes:
                break
        return found

    async def offset_at(self, stream: StreamId, time_us: int) -> int:
        """The first offset whose message was published at or after ``time_us``."""
        hot = self._stream(stream)
        for segment in self._index.of(stream):
            if segment.last_time_us >= time_us:
                if segment.first_time_us >= time_us:
                    return segment.first_offset
                path = self._path(segment)
                try:
                    return int(
                        await self._in(self._read_thread, self._segment_offset_at, segment, path, time_us)
                    )
                except DataDamaged:
                    if self._index.find(stream, segment.first_offset) is segment:
                        raise
                    return await self.offset_at(stream, time_us)  # Retention took it meanwhile.
        for place in hot.places_from(hot.first_hot_offset):
            header = self._journal.files[place.file_number].header(place.position)
            if header.publish_time_us >= time_us:
                return header.base_offset
        return hot.end_offset

    def _segment_offset_at(self, segment: Segment, path: Path, time_us: int) -> int:
        reader = self._cache.reader(path, segment)
        moment = pa.scalar(time_us, pa.timestamp("us", tz="UTC"))
        for index in range(len(segment.row_groups())):
            table = self._cache.group(path, reader, index)
            late = pc.greater_equal(table.column("publish_time"), moment)
            place = pc.index(late, True).as_py()
            if place >= 0:
                return int(table.column("offset")[place].as_py())
        return segment.end_offset

    async def idempotency_keys(self, topic: Topic, since_us: int) -> list[LogBatch]:
        """What may hold keys that are still in their window, in publish order within each stream."""
        found: list[LogBatch] = []
        for partition in range(topic.partitions):
            stream = StreamId(topic.id, partition)
            # Taken in one step: what is sealed while segments are read must be in one of the two.
            segments, hot = list(self._index.of(stream)), self._hot_keys(stream)
            for segment in segments:
                if segment.has_idempotency_keys and segment.last_time_us >= since_us:
                    found.extend(await self._keys_unless_dropped(segment))
            found.extend(hot)
        return found

    async def _keys_unless_dropped(self, segment: Segment) -> list[LogBatch]:
        if self._index.find(segment.stream, segment.first_offset) is not segment:
            return []
        try:
            found: list[LogBatch] = await self._in(
                self._read_thread, self._keys_of, segment, self._path(segment)
            )
            return found
        except DataDamaged:
            if self._index.find(segment.stream, segment.first_offset) is not segment:
                return []
            raise

    def _keys_of(self, segment: Segment, path: Path) -> list[LogBatch]:
        reader = self._cache.reader(path, segment)
        columns = ["offset", "publish_time", "idempotency_key"]
        found = []
        for index in range(len(segment.row_groups())):
            table = reader.read_group(index, columns)
            found.append(LogBatch(segment.stream, segment.first_offset, segment.end_offset, table))
        return found

    def _hot_keys(self, stream: StreamId) -> list[LogBatch]:
        hot = self._stream(stream)
        found = []
        for place in hot.places_from(hot.first_hot_offset):
            header = self._journal.files[place.file_number].header(place.position)
            if header.columns & batches.BIT["idempotency_key"]:
                found.extend(self._read_hot(stream, hot, header.base_offset, 1, is_whole=True))
        return found

    def _stream(self, stream: StreamId) -> HotStream:
        hot = self._hot.get(stream)
        if hot is None:
            raise TopicNotFound(f"there is no partition {stream.partition} of topic id {stream.topic_id}")
        return hot

    def _path(self, segment: Segment) -> Path:
        topic = self._topics[segment.topic_id]
        return self._directory.partition(topic.name, segment.partition) / segment.file_name

    # The catalog.

    def topics(self) -> list[Topic]:
        return list(self._topics.values())

    async def create_topic(self, name: str, partitions: int, policy: TopicPolicy, now_us: int) -> Topic:
        topic: Topic = await self._in_catalog(self._catalog.create_topic, name, partitions, policy, now_us)
        try:
            await self._write_topic(topic)
        except StorageError:
            await self._in_catalog(self._catalog.delete_topic, topic.id)  # Refused, so as if never asked.
            raise
        for partition in range(partitions):
            self._hot.open(StreamId(topic.id, partition))
        self._topics[topic.id] = topic
        return topic

    async def update_topic(self, topic: Topic) -> None:
        before = self._topics[topic.id]
        await self._write_topic(topic)  # First, because it can be taken back when the catalog refuses.
        try:
            await self._in_catalog(self._catalog.update_topic, topic)
        except SparrowError:
            await self._write_topic(before)
            raise
        for partition in range(before.partitions, topic.partitions):
            self._hot.open(StreamId(topic.id, partition))
        self._topics[topic.id] = topic

    async def _write_topic(self, topic: Topic) -> None:
        await self._in_catalog(self._directory.write_topic, topic, self._catalog_version)

    async def delete_topic(self, topic: Topic) -> None:
        async with self._keeping:
            await self._in_catalog(self._catalog.delete_topic, topic.id)
            streams = [StreamId(topic.id, partition) for partition in range(topic.partitions)]
            paths = [self._path(segment) for stream in streams for segment in self._index.of(stream)]
            del self._topics[topic.id]
            self._hot.forget_topic(topic.id)
            self._index.forget_topic(topic.id)
            # A new topic of the name will use the same paths.
            await self._in(self._read_thread, self._forget_segments, paths)
            # The topic is gone by now; what cannot be removed is removed at the next start.
            with suppress(StorageError):
                await self._in_catalog(self._directory.remove_topic, self._directory.topic(topic.name))

    def subscriptions(self) -> list[SubscriptionRow]:
        return self._subscriptions

    async def create_subscription(self, row: SubscriptionRow) -> SubscriptionRow:
        created: SubscriptionRow = await self._in_catalog(
            self._catalog.create_subscription, row.name, row.pattern, row.policy_json, row.created_at_us
        )
        return created

    async def update_subscription(self, row: SubscriptionRow) -> None:
        await self._in_catalog(self._catalog.update_subscription, row)

    async def delete_subscription(self, subscription_id: int) -> None:
        await self._in_catalog(self._catalog.delete_subscription, subscription_id)

    async def checkpoint(self, cursors: Sequence[CursorCheckpoint]) -> None:
        await self._in_catalog(self._catalog.checkpoint, cursors)

    async def open_producer(self, name: str) -> tuple[int, int]:
        producer = await self._in_catalog(self._catalog.open_producer, name)
        return producer.id, producer.epoch

    async def put_document(self, kind: str, key: str, value: bytes) -> None:
        await self._in_catalog(self._catalog.put_document, kind, key, value)

    async def delete_document(self, kind: str, key: str) -> None:
        await self._in_catalog(self._catalog.delete_document, kind, key)

    async def documents(self, kind: str) -> dict[str, bytes]:
        found: dict[str, bytes] = await self._in_catalog(self._catalog.documents, kind)
        return found

    async def _in_catalog(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Runs in the catalog's thread; its version is known here as soon as the work is done."""
        try:
            return await self._in(self._catalog_thread, work, *arguments)
        except OSError as error:
            kind = StorageFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else StorageError
            raise kind(f"the data directory cannot be changed: {error}") from error
        finally:
            self._catalog_version = self._catalog.version

    def _remember_newest(self, number: int) -> None:
        """Keeps the newest file's number in the catalog, so that its loss would be noticed."""
        self._finished_bytes = self.finished_bytes()
        self._is_file_finished.set()
        self._spawn(self.put_document("journal", "newest", str(number).encode()))

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(_quietly(work))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # Keeping: sealing and dropping.

    def finished_bytes(self) -> int:
        return sum(file.end for file in self._journal.finished())

    async def rotate(self) -> None:
        await self._journal.rotate()

    async def wait_for_finished(self, bytes_min: int, timeout_s: float) -> None:
        """Returns when so much is finished, or after the timeout, when whatever there is gets finished."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.finished_bytes() < bytes_min:
                    self._is_file_finished.clear()
                    await self._is_file_finished.wait()
                return
        await self.rotate()

    async def seal(self, cursors: Iterable[CursorCheckpoint], producers: Iterable[ProducerState]) -> int:
        # Chosen before any waiting: the checkpoints include these files, and perhaps not those after them.
        files = self._journal.finished()[:_SEAL_FILES_MAX]
        async with self._keeping:
            files = [file for file in files if self._journal.files.get(file.number) is file]
            if not files:
                return 0
            plan = self._plan(files)
            compression, size = self._lake.compression, self._lake.row_group_bytes
            sealed: Sealed = await self._in(
                self._seal_thread,
                lambda: seal(self._disk, plan, compression=compression, row_group_bytes=size),
            )
            ends = {stream: self._sealed_end(stream, plan) for stream, _, _, _ in plan.streams}
            await self._in_catalog(
                self._catalog.commit_seal,
                plan.last_file,
                sealed.segments,
                ends,
                list(cursors),
                [state for state in producers if state.topic_id in self._topics],
            )
            # The segments are in force from here on: whatever fails, nobody may seal these files again.
            is_removable = await self._witness()
            self._move_over(plan, sealed, ends)
            if is_removable:
                await self._in(self._seal_thread, self._remove_files, files)
            return sum(segment.rows for segment in sealed.segments)

    async def _witness(self) -> bool:
        """Has the journal bear witness of the catalog's version; whether sealed files may go. On a full disk
        they go without: that makes the space. A frozen journal keeps them until the next start."""
        try:
            await self._journal.note()
        except StorageFull:
            return True
        except StorageError:
            return False
        return True

    def _plan(self, files: Sequence[JournalFile]) -> SealPlan:
        last = files[-1].number
        streams = []
        for stream, hot in self._hot:
            places = hot.places_through(last)
            topic = self._topics.get(stream.topic_id)
            if places and topic is not None:
                directory = self._directory.make_partition(topic.name, stream.partition)
                streams.append((stream, topic.name, directory, places))
        return SealPlan({file.number: file for file in files}, streams)

    def _sealed_end(self, stream: StreamId, plan: SealPlan) -> int:
        hot = self._stream(stream)
        places = hot.places_from(hot.first_hot_offset)
        later = (place.base_offset for place in places if place.file_number > plan.last_file)
        return next(later, hot.end_offset)

    def _move_over(self, plan: SealPlan, sealed: Sealed, ends: dict[StreamId, int]) -> None:
        """From here on the lake serves what was sealed."""
        for segment in sealed.segments:
            self._index.add(segment)
        for stream, end in ends.items():
            self._stream(stream).drop_files_through(plan.last_file, end)
        for number in plan.files:
            self._journal.forget(plan.files[number])
        self._damages.extend(sealed.damages)
        self._finished_bytes = self.finished_bytes()
        self._is_sealed.set()

    def _remove_files(self, files: Sequence[JournalFile]) -> None:
        for file in files:
            if file.has_damage:
                self._disk.rename(file.path, file.path.with_suffix(".damaged"))
            else:
                self._disk.remove(file.path)

    def segments(self, topic: Topic) -> list[SegmentInfo]:
        return [
            _info(segment)
            for partition in range(topic.partitions)
            for segment in self._index.of(StreamId(topic.id, partition))
        ]

    async def drop(self, segments: Sequence[SegmentInfo]) -> None:
        async with self._keeping:
            chosen = [self._index.find(info.stream, info.first_offset) for info in segments]
            doomed = [
                segment
                for segment, info in zip(chosen, segments, strict=True)
                if segment is not None and segment.first_offset == info.first_offset
            ]  # One that is gone already must not cost the next its life.
            if not doomed:
                return
            starts = self._starts_after(doomed)
            await self._in_catalog(self._catalog.drop_segments, [segment.key for segment in doomed], starts)
            paths = [self._path(segment) for segment in doomed]
            for segment in doomed:
                self._index.drop(segment)
            for stream, start in starts.items():
                self._stream(stream).drop_before(start)
            await self._in(self._read_thread, self._remove_segments, paths)

    def _starts_after(self, doomed: Sequence[Segment]) -> dict[StreamId, int]:
        starts: dict[StreamId, int] = {}
        for segment in doomed:
            starts[segment.stream] = max(starts.get(segment.stream, 0), segment.end_offset)
        return starts

    def _remove_segments(self, paths: Sequence[Path]) -> None:
        self._forget_segments(paths)
        for path in paths:
            self._disk.remove(path)

    def _forget_segments(self, paths: Sequence[Path]) -> None:
        for path in paths:
            self._cache.forget(path)

    async def _in(self, thread: ThreadPoolExecutor, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(thread, work, *arguments)


def _stand_back() -> None:
    """Sealing takes the processor time that publishing and delivery leave over."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _SEALING_NICENESS)


def _from_offset(table: pa.RecordBatch, first_offset: int, offset: int) -> pa.RecordBatch:
    """The rows from ``offset`` on; offsets are dense but for reported gaps, so the guess mostly holds."""
    if offset <= first_offset:
        return table
    guess = min(offset - first_offset, table.num_rows - 1)
    offsets = table.column("offset")
    if offsets[guess].as_py() == offset:
        return table.slice(guess)
    late = pc.index(pc.greater_equal(offsets, offset), True).as_py()
    return table.slice(late if late >= 0 else table.num_rows)


def _info(segment: Segment) -> SegmentInfo:
    return SegmentInfo(
        segment.stream,
        segment.first_offset,
        segment.end_offset,
        segment.rows,
        segment.size_bytes,
        segment.first_time_us,
        segment.last_time_us,
    )


async def _quietly(work: Any) -> None:
    """Bookkeeping that may fail without harm: the store's own state already says that it cannot write."""
    with suppress(SparrowError):
        await work
