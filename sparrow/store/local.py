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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

from sparrow.model.errors import (
    DataDamaged,
    SegmentsChanged,
    SparrowError,
    StorageError,
    StorageFull,
)
from sparrow.model.message import StreamId
from sparrow.model.rewrite import Swap
from sparrow.model.segment import (
    BatchPlace,
    Measured,
    PartitionSegments,
    SegmentFile,
    SegmentInfo,
    TopicSegments,
)
from sparrow.model.settings import JournalSettings, LakeSettings
from sparrow.model.topic import Durability, Topic, TopicPolicy
from sparrow.store import swapping
from sparrow.store.audit import AuditLog
from sparrow.store.catalog import Catalog
from sparrow.store.catalog_tables import (
    CursorCheckpoint,
    Document,
    ProducerState,
    Segment,
    SubscriptionRow,
)
from sparrow.store.directory import DataDirectory
from sparrow.store.disk import Disk
from sparrow.store.graves import Graves
from sparrow.store.holds import Holds
from sparrow.store.hot import HotWindow
from sparrow.store.journal import Journal
from sparrow.store.journalfile import JournalFile
from sparrow.store.machine import Space
from sparrow.store.opening import Opened, open_directory
from sparrow.store.ports import (
    Bounds,
    Commit,
    Damage,
    Draft,
    LogBatch,
    OnCommit,
    Recovered,
    Stages,
    StoreState,
)
from sparrow.store.reader import LogReader
from sparrow.store.sealing import Sealed, SealPlan, seal, step_back
from sparrow.store.segments import SegmentIndex

_CALM_BYTES_MIN = 16 * 1024 * 1024
"""A seal of less is over before anybody could notice it."""
_CALM_FILES_MAX = 2
"""The one that is written and one that is finished; with more of them sealing is behind."""
_SEAL_FILES_MAX = 8


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
        self.stages: Stages = opened.stages
        self._stage_files = opened.stages
        self._directory: DataDirectory = opened.directory
        self._catalog: Catalog = opened.catalog
        self._hot: HotWindow = opened.hot
        self._index: SegmentIndex = opened.lake
        self._topics: dict[int, Topic] = {topic.id: topic for topic in opened.topics}
        self._subscriptions = opened.subscriptions
        self._recovered = opened.recovered
        self._damages: list[Damage] = list(opened.recovered.report.damages)
        self._disk = disk
        self._audit = AuditLog(self._directory.root, disk)
        self._lake = lake
        self._catalog_version = opened.catalog.version
        self._catalog_thread = catalog_thread
        self._seal_thread = ThreadPoolExecutor(1, thread_name_prefix="sparrow-seal")
        self._calm_thread = ThreadPoolExecutor(1, thread_name_prefix="sparrow-calm", initializer=step_back)
        self._keeping = asyncio.Lock()
        self._holds = Holds(now_us)
        self._graves = Graves(disk)
        self.is_calm = False
        self._is_file_finished = asyncio.Event()
        self._unsealed_bytes_max = journal.unsealed_bytes_max
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
        self._reader = LogReader(
            self._hot, self._index, lambda: self._journal.files, self._path, self._report
        )
        scan = opened.scan
        lengths = [scan.end_of(file) for file in scan.files]
        self._journal.adopt(
            scan.files,
            scan.last_number,
            (lengths or [0])[-1],
            scan.last_time_us,
            is_clean=scan.is_clean,
        )

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
            sync_seconds=self._journal.sync_times.seconds,
            damages=tuple(self._damages),
            sync_buckets=self._journal.sync_times.buckets(),
            written_bytes=self._journal.written_bytes,
            unsealed_bytes=self.finished_bytes(),
        )

    async def space(self) -> Space:
        """Off the loop and off its threads: a disk that hangs keeps nobody waiting but whoever asks."""
        return await asyncio.to_thread(self._disk.space, self._directory.root)

    async def close(self) -> None:
        """Orderly: the journal is synced and finished, the catalog leaves one clean file."""
        async with self._keeping:
            if self._background:
                await asyncio.wait(self._background)
            await self._journal.close()
            self._reader.close()
            self._seal_thread.shutdown(wait=True)
            self._calm_thread.shutdown(wait=True)
            self._graves.sweep(is_last=True)
            self._stage_files.close()
            try:
                await self._in_catalog(self._catalog.close)
            finally:
                self._audit.close()
                self._catalog_thread.shutdown(wait=True)
                self._directory.close()

    # The log.

    async def append(self, chain: Sequence[Draft], durability: Durability, on_commit: OnCommit) -> Commit:
        return await self._journal.append(chain, durability, on_commit)

    def bounds(self, stream: StreamId) -> Bounds:
        return self._reader.bounds(stream)

    async def read(
        self, stream: StreamId, offset: int, max_bytes: int, *, is_whole: bool = False
    ) -> list[LogBatch]:
        return await self._reader.read(stream, offset, max_bytes, is_whole=is_whole)

    async def offset_at(self, stream: StreamId, time_us: int) -> int:
        return await self._reader.offset_at(stream, time_us)

    def measure(self, stream: StreamId, start_offset: int, end_offset: int, max_bytes: int) -> Measured:
        return self._reader.measure(stream, start_offset, end_offset, max_bytes)

    def places(self, stream: StreamId, start_offset: int, end_offset: int) -> list[BatchPlace]:
        return self._reader.places(stream, start_offset, end_offset)

    async def idempotency_keys(self, topic: Topic, since_us: int) -> list[LogBatch]:
        return await self._reader.idempotency_keys(topic, since_us)

    def _path(self, segment: Segment) -> Path:
        topic = self._topics[segment.topic_id]
        return self._directory.partition(topic.name, segment.partition) / segment.file_name

    def _report(self, damage: DataDamaged) -> None:
        self._damages.append(Damage(file="", what=damage.message))

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
            self._holds.forget_topic(topic.id)
            # A new topic of the name will use the same paths.
            await self._reader.forget(paths)
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

    async def note_audit(self, line: bytes) -> None:
        await self._in_catalog(self._audit.append, line)

    async def audit_lines(self, count: int) -> list[bytes]:
        found: list[bytes] = await self._in_catalog(self._audit.last, count)
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
        self._hold_publishers()
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

    async def seal(
        self,
        cursors: Iterable[CursorCheckpoint],
        producers: Iterable[ProducerState],
        documents: Iterable[Document] = (),
    ) -> int:
        # Chosen before any waiting: the checkpoints include these files, and perhaps not those after them.
        files = self._journal.finished()[:_SEAL_FILES_MAX]
        async with self._keeping:
            files = [file for file in files if self._journal.files.get(file.number) is file]
            if not files:
                return 0
            plan = self._plan(files)
            compression, size = self._lake.compression, self._lake.row_group_bytes
            is_behind = self._watch_pace(sum(file.end for file in files))
            sealed: Sealed = await self._in(
                self._seal_thread if is_behind(0) else self._calm_thread,
                lambda: seal(
                    self._disk, plan, compression=compression, row_group_bytes=size, is_behind=is_behind
                ),
            )
            ends = {stream: self._sealed_end(stream, plan) for stream, _, _, _ in plan.streams}
            await self._in_catalog(
                self._catalog.commit_seal,
                plan.last_file,
                sealed.segments,
                ends,
                list(cursors),
                [state for state in producers if state.topic_id in self._topics],
                list(documents),
            )
            # The segments are in force from here on: whatever fails, nobody may seal these files again.
            is_removable = await self._witness()
            self._move_over(plan, sealed, ends)
            if is_removable:
                await self._in(self._seal_thread, self._graves.bury, files)
            return sum(segment.rows for segment in sealed.segments)

    def _watch_pace(self, size: int) -> Callable[[int], bool]:
        """Tells, from the bytes that were sealed so far, whether somebody waits for this seal, files pile up,
        or publishers write faster than it goes on."""
        journal, start = self._journal, self._journal.written_bytes
        is_short = size < _CALM_BYTES_MIN
        return lambda done: (
            is_short
            or not self.is_calm
            or len(journal.files) > _CALM_FILES_MAX
            or journal.written_bytes - start > done
        )

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
        hot = self._reader.stream(stream)
        places = hot.places_from(hot.first_hot_offset)
        later = (place.base_offset for place in places if place.file_number > plan.last_file)
        return next(later, hot.end_offset)

    def _move_over(self, plan: SealPlan, sealed: Sealed, ends: dict[StreamId, int]) -> None:
        """From here on the lake serves what was sealed."""
        for segment in sealed.segments:
            self._index.add(segment)
        for stream, end in ends.items():
            self._reader.stream(stream).drop_files_through(plan.last_file, end)
        for number in plan.files:
            self._journal.forget(plan.files[number])
        self._damages.extend(sealed.damages)
        self._hold_publishers()

    def _hold_publishers(self) -> None:
        """Those who outrun the sealing wait for it, so that the journal cannot fill the disk."""
        self._journal.hold(self.finished_bytes() > self._unsealed_bytes_max)

    def segments(self, topic: Topic) -> list[SegmentInfo]:
        return [
            _info(segment)
            for partition in range(topic.partitions)
            for segment in self._index.of(StreamId(topic.id, partition))
        ]

    def layout(self, topic: Topic, hold_s: float) -> TopicSegments:
        self._holds.hold(topic.id, hold_s)
        partitions = []
        for partition in range(topic.partitions):
            stream = StreamId(topic.id, partition)
            hot = self._reader.stream(stream)
            files = [self._file(segment) for segment in self._index.of(stream)]
            partitions.append(
                PartitionSegments(partition, hot.start_offset, hot.sealed_end, hot.end_offset, files)
            )
        return TopicSegments(topic.name, topic.id, str(self._directory.root.absolute()), partitions)

    def _file(self, segment: Segment) -> SegmentFile:
        return SegmentFile(str(self._path(segment).relative_to(self._directory.root)), *_info(segment)[1:])

    async def release(self) -> None:
        async with self._keeping:
            due = self._holds.due()
            if due:
                await self._reader.forget(due, self._disk)
            if self._graves:
                await self._in(self._seal_thread, self._graves.sweep)

    async def drop(self, segments: Sequence[SegmentInfo]) -> None:
        async with self._keeping:
            chosen = [self._index.find(info.stream, info.first_offset) for info in segments]
            doomed = [
                segment
                for segment, info in zip(chosen, segments, strict=True)
                if segment is not None and _info(segment) == info
            ]  # One that is gone already, or was swapped, must not cost another its life.
            if not doomed:
                return
            starts = self._starts_after(doomed)
            await self._in_catalog(self._catalog.drop_segments, [segment.key for segment in doomed], starts)
            for segment in doomed:
                self._index.drop(segment)
            for stream, start in starts.items():
                self._reader.stream(stream).drop_before(start)
            await self._let_go(doomed)

    async def _let_go(self, segments: Sequence[Segment], *, may_remove: bool = True) -> None:
        """Segments are out of force: their files go, or wait until nobody holds them, or for the next start
        when that must not be yet."""
        paths = [(segment.topic_id, self._path(segment)) for segment in segments]
        held = [path for topic_id, path in paths if not may_remove or self._holds.keep(topic_id, path)]
        await self._reader.forget(held)
        await self._reader.forget([path for _, path in paths if path not in held], self._disk)

    async def swap(
        self,
        topic: Topic,
        partition: int,
        remove: Sequence[str],
        drafts: Sequence[str],
        *,
        is_compacted: bool,
        kept_from: int,
    ) -> Swap:
        stream = StreamId(topic.id, partition)
        swapping.check_draft_names(drafts)
        old = swapping.chosen(self._index.of(stream), remove)
        directory = self._directory.partition(topic.name, partition)
        try:
            checked = await asyncio.to_thread(
                swapping.check_drafts, self._disk, directory, topic.name, stream, old, drafts,
                is_compacted=is_compacted, kept_from=kept_from,
            )  # fmt: skip
        except (DataDamaged, OSError) as error:
            if swapping.chosen(self._index.of(stream), remove) == old and isinstance(error, DataDamaged):
                raise  # Of two that are damaged neither may go for the other.
            raise SegmentsChanged(f"the segments cannot be read any more: {error}") from error
        async with self._keeping:
            if self._topics.get(topic.id) is None or swapping.chosen(self._index.of(stream), remove) != old:
                raise SegmentsChanged("other segments took the place of these meanwhile")
            new = [draft.segment for draft in checked]
            try:
                await self._in_catalog(swapping.give_names, self._disk, checked)
            except SparrowError:
                with suppress(SparrowError):
                    await self._in_catalog(swapping.discard, self._disk, checked)
                raise
            # When this fails it may still have been done: the files stay, and the next start tells.
            await self._in_catalog(self._catalog.replace_segments, [one.key for one in old], new)
            may_remove = await self._witness()
            for segment in old:
                self._index.drop(segment)
            for segment in new:
                self._index.add(segment)
            await self._let_go(old, may_remove=may_remove)
        return Swap(
            partition, old[0].first_offset, old[-1].end_offset,
            sum(one.rows for one in old), sum(one.rows for one in new),
            sum(one.size_bytes for one in old), sum(one.size_bytes for one in new),
            [self._file(segment).file for segment in new],
        )  # fmt: skip

    def _starts_after(self, doomed: Sequence[Segment]) -> dict[StreamId, int]:
        starts: dict[StreamId, int] = {}
        for segment in doomed:
            starts[segment.stream] = max(starts.get(segment.stream, 0), segment.end_offset)
        return starts

    async def _in(self, thread: ThreadPoolExecutor, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(thread, work, *arguments)


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
