"""The shared write-ahead log and its group commit.

One group is written and synced at a time; whatever arrives meanwhile becomes the next group. So one
sync serves every publisher and every topic, a lone message waits for no timer, and under load a group
grows to what the disk takes in one sync. The thread that writes takes the next group by itself, so the
disk does not wait for the event loop; new files and faults are the loop's business.

Offsets are given when a group is laid out, which happens only after its space in a file is certain.
A full disk is therefore refused with nothing changed. A failed write or sync is different: nobody knows
what reached the disk, so the journal freezes and recovery decides when the directory is opened again.

A group in which nobody asked for a sync completes when it is written, and a sync follows within
``sync_interval_s``. In a mixed group all wait for the sync, because commits are reported in log order.
"""

from __future__ import annotations

import asyncio
import errno
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

import google_crc32c

from sparrow.model.errors import (
    Backlogged,
    BrokerClosed,
    JournalFrozen,
    SparrowError,
    StorageFull,
    TopicNotFound,
)
from sparrow.model.message import StreamId
from sparrow.model.topic import Durability
from sparrow.store.disk import Disk
from sparrow.store.entry import (
    CONTINUES,
    FILE_HEADER_BYTES,
    HEADER_BYTES,
    SEQUENCES,
    Header,
    Kind,
    lsn,
    pack,
    padded,
)
from sparrow.store.hot import HotStream, HotWindow
from sparrow.store.journalfile import JournalFile
from sparrow.store.ports import Appended, BatchDraft, Commit, Draft, FactsDraft, OnCommit
from sparrow.store.synctimes import SyncTimes

_WAITING_BYTES_MAX = 1024 * 1024 * 1024  # beyond pending_bytes_max; a runaway publisher must not fill memory
_HOLD_S = 30.0
_LINGER_S = 0.002  # about two batches of 1 MB are built in this time
_PADDING = [bytes(length) for length in range(8)]


class Chain:
    """Drafts that are stored together, and who waits for them."""

    __slots__ = ("commit", "drafts", "durability", "future", "headers", "on_commit", "size")

    def __init__(
        self,
        drafts: Sequence[Draft],
        durability: Durability,
        on_commit: OnCommit,
        future: asyncio.Future[Commit],
    ) -> None:
        self.drafts = drafts
        self.durability = durability
        self.on_commit = on_commit
        self.future = future
        self.size = sum(HEADER_BYTES + padded(len(draft.body)) for draft in drafts)
        self.headers: list[Header] = []
        self.commit: Commit | None = None

    def resolve(self) -> None:
        assert self.commit is not None
        if not self.future.done():
            self.future.set_result(self.commit)

    def refuse(self, error: SparrowError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class Journal:
    """Appends chains to numbered files; see the module's text."""

    def __init__(
        self,
        *,
        disk: Disk,
        directory: Path,
        hot: HotWindow,
        now_us: Callable[[], int],
        catalog_version: Callable[[], int],
        file_bytes: int,
        group_bytes_max: int,
        pending_bytes_max: int,
        sync_interval_s: float,
        on_new_file: Callable[[int], None],
    ) -> None:
        self.files: dict[int, JournalFile] = {}
        self.sync_times = SyncTimes()
        self._disk = disk
        self._directory = directory
        self._hot = hot
        self._now_us = now_us
        self._catalog_version = catalog_version
        self._file_bytes = file_bytes
        self._group_bytes_max = group_bytes_max
        self._pending_bytes_max = pending_bytes_max
        self._sync_interval_s = sync_interval_s
        self._on_new_file = on_new_file
        self._current: JournalFile | None = None
        self._last_number = 0
        self._last_length = 0
        self._last_time_us = 0
        self._pending: deque[Chain] = deque()
        self._pending_bytes = 0
        self.written_bytes = 0
        self._waiting: deque[Chain] = deque()
        self._group: list[Chain] = []
        self._runner: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._has_content = False
        self._needs_note = False
        self._is_held = False
        self._hold_timer: asyncio.TimerHandle | None = None
        self._waiting_bytes = 0
        self._more = threading.Event()
        self._loop_thread = 0
        self._is_rotation_wanted = False
        self._is_sync_wanted = False
        self._frozen: SparrowError | None = None
        self._complaint: SparrowError | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sparrow-journal")

    # What others may know.

    @property
    def frozen(self) -> SparrowError | None:
        return self._frozen

    @property
    def complaint(self) -> SparrowError | None:
        """Why the last group was refused, until one succeeds again."""
        return self._frozen or self._complaint

    @property
    def pending_bytes(self) -> int:
        return self._pending_bytes

    @property
    def syncs(self) -> int:
        return self.sync_times.count

    def finished(self) -> list[JournalFile]:
        """Files that will not be written again, oldest first."""
        return [file for number, file in sorted(self.files.items()) if file is not self._current]

    def adopt(
        self,
        files: Sequence[JournalFile],
        last_number: int,
        last_length: int,
        last_time_us: int,
        *,
        is_clean: bool = True,
    ) -> None:
        """Takes over what recovery found; writing goes on in a new file. What does not end in a note gets
        one when the journal is closed, so that its last entries have a witness too."""
        self._needs_note = not is_clean
        self.files = {file.number: file for file in files}
        self._last_number = last_number
        self._last_length = last_length
        self._last_time_us = last_time_us

    def forget(self, file: JournalFile) -> None:
        """The file has been sealed; nobody will be sent to it again."""
        del self.files[file.number]

    # Appending.

    async def append(self, drafts: Sequence[Draft], durability: Durability, on_commit: OnCommit) -> Commit:
        """Stores the drafts as one atomic chain."""
        if self._frozen:
            raise self._frozen
        future: asyncio.Future[Commit] = asyncio.get_running_loop().create_future()
        chain = Chain(drafts, durability, on_commit, future)
        if self._waiting_bytes + chain.size > _WAITING_BYTES_MAX and self._waiting:
            raise Backlogged(
                f"{self._waiting_bytes} bytes wait for the disk; {_WAITING_BYTES_MAX} are allowed"
            )
        self._waiting.append(chain)
        self._waiting_bytes += chain.size
        self._admit_waiting()
        self._kick()
        return await future

    async def note(self) -> None:
        """A durable entry without content; it witnesses the catalog version."""
        if self._frozen:
            raise self._frozen
        future: asyncio.Future[Commit] = asyncio.get_running_loop().create_future()
        chain = Chain([FactsDraft(b"", 0)], Durability.DURABLE, _ignore, future)
        self._pending.append(chain)  # Past those who wait: they may wait for what this note completes.
        self._pending_bytes += chain.size
        self._kick()
        await future

    def hold(self, is_held: bool) -> None:
        """Publishers wait while the sealing is far behind; those who waited too long are refused."""
        if is_held == self._is_held:
            return
        self._is_held = is_held
        if is_held:
            loop = asyncio.get_running_loop()
            self._hold_timer = loop.call_later(_HOLD_S, self._refuse_held)
        else:
            if self._hold_timer is not None:
                self._hold_timer.cancel()
            self._admit_waiting()
            self._kick()

    def _refuse_held(self) -> None:
        refused, self._waiting, self._waiting_bytes = list(self._waiting), deque(), 0
        for chain in refused:
            chain.refuse(
                Backlogged(
                    "sealing is far behind the publishers",
                    hint="See the health report: sealing is slower than the publishers, or it fails.",
                )
            )
        if self._is_held:
            self._hold_timer = asyncio.get_running_loop().call_later(_HOLD_S, self._refuse_held)

    async def rotate(self) -> None:
        """Finishes the current file, when it holds more than notes."""
        if self._has_content and self._frozen is None:
            self._is_rotation_wanted = True
            self._kick()
            while self._is_rotation_wanted and self._runner is not None:
                await asyncio.wait([self._runner])

    async def close(self) -> None:
        """Writes what is pending, leaves a note, and finishes the file."""
        for timer in (self._timer, self._hold_timer):
            if timer is not None:
                timer.cancel()
        self.hold(False)
        try:
            if self._frozen is None and (self._current is not None or self._needs_note):
                await self.note()
                self._is_rotation_wanted = True
                self._kick()
            if self._runner is not None:
                await self._runner
        except SparrowError:
            pass  # Frozen or full: what was receipted is safe, and the log was told already.
        self._frozen = self._frozen or BrokerClosed("the broker is closed")
        self._thread.shutdown(wait=True)
        if self._current is not None:
            self._current.close()

    def _admit_waiting(self) -> None:
        """Lets chains in, in the order in which they came and as far as there is room. A publisher that gave
        up meanwhile is stored all the same: what remembers its request counts on the commit."""
        while self._waiting and self._has_room(self._waiting[0].size):
            chain = self._waiting.popleft()
            self._waiting_bytes -= chain.size
            self._pending.append(chain)
            self._pending_bytes += chain.size

    def _has_room(self, size: int) -> bool:
        if self._is_held:
            return False
        return not self._pending or self._pending_bytes + size <= self._pending_bytes_max

    def _kick(self) -> None:
        self._more.set()
        if self._runner is None and self._frozen is None:
            self._runner = asyncio.get_running_loop().create_task(self._run(self._begin()))

    def _begin(self) -> asyncio.Future[None] | None:
        """Starts the first group at once when that takes no new file: the disk works while the others that
        are about to publish still build their batches."""
        current, flags = self._current, self._is_rotation_wanted or self._is_sync_wanted
        if flags or current is None or current.end + self._pending_bytes > current.size:
            return None
        group = self._take_group()
        return self._submit(group) if group else None

    # The one task that writes.

    async def _run(self, begun: asyncio.Future[None] | None) -> None:
        try:
            if begun is not None:
                await self._until_written(begun)
            while self._pending or self._is_rotation_wanted or self._is_sync_wanted:
                await self._step()
        except asyncio.CancelledError:
            self._freeze(JournalFrozen("the journal's task was cancelled"), self._group)
            raise
        except Exception as error:  # noqa: BLE001 - a task's root: waiting publishers must be told
            self._freeze(JournalFrozen(f"the journal failed: {error!r}"), self._group)
        finally:
            self._runner = None

    async def _step(self) -> None:
        self._group = group = self._take_group()
        size = sum(chain.size for chain in group)
        try:
            await self._finish_if_due(size)
        except OSError as error:
            self._freeze(JournalFrozen(f"a journal file could not be finished: {error}"), group)
            return
        try:
            await self._start_if_due(size)
        except OSError as error:
            self._refuse_all(group, error)
            return
        self._group = group = [chain for chain in group if self._is_possible(chain)]
        self._is_rotation_wanted = False
        if not group and not self._is_sync_wanted:
            return
        await self._until_written(self._submit(group))

    def _submit(self, group: list[Chain]) -> asyncio.Future[None]:
        """Hands a group to the thread, which goes on by itself with what arrives meanwhile."""
        self._group = group
        pieces = self._lay_out(group)
        _answer_hasty(group)
        wants_sync = self._is_sync_wanted or _is_durable(group)
        loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        return loop.run_in_executor(self._thread, self._write_groups, loop, group, pieces, wants_sync)

    async def _until_written(self, writing: asyncio.Future[None]) -> None:
        try:
            await writing
        except OSError as error:
            self._freeze(JournalFrozen(f"a journal write failed: {error}"), self._group)

    def _write_groups(
        self, loop: asyncio.AbstractEventLoop, group: list[Chain], pieces: list[Any], wants_sync: bool
    ) -> None:
        """Runs in the journal's thread: one group after the other, as long as they fit the file. Each is
        reported to the loop in log order; while it waits there, the next one is written."""
        while True:
            self._write_and_sync(pieces, wants_sync)
            loop.call_soon_threadsafe(self._report, group, wants_sync)
            self._more.clear()
            group = self._take_more()
            if not group and self._linger():
                group = self._take_more()
            if not group:
                return
            self._group = group
            pieces, wants_sync = self._lay_out(group), _is_durable(group)
            loop.call_soon_threadsafe(_answer_hasty, group)

    def _linger(self) -> bool:
        """Waits a moment for the next chain, because publishers that have just been answered are about to
        publish again; True when one came. Never on the loop's own thread, which would wait for itself."""
        return threading.get_ident() != self._loop_thread and self._more.wait(_LINGER_S)

    def _take_more(self) -> list[Chain]:
        """What gathered meanwhile; nothing when the task must look after something else first."""
        group: list[Chain] = []
        file, size = self._current, 0
        if file is None:  # A sync was wanted of a file that has been finished, and so synced, meanwhile.
            return group
        room = min(self._group_bytes_max, file.size - file.end)
        while self._pending and not (self._is_rotation_wanted or self._is_sync_wanted):
            chain = self._pending[0]
            if size + chain.size > room or not self._has_streams(chain):
                break
            group.append(self._pending.popleft())
            size += chain.size
        return group

    def _report(self, group: list[Chain], is_synced: bool) -> None:
        """A group is written: back on the event loop."""
        try:
            if is_synced:
                self._is_sync_wanted = False
            else:
                self._sync_later()
            self.written_bytes += sum(chain.size for chain in group)
            self._complete(group)
        except Exception as error:  # noqa: BLE001 - those who wait must be told of a bug
            self._freeze(JournalFrozen(f"the journal failed: {error!r}"), group)

    def _take_group(self) -> list[Chain]:
        group: list[Chain] = []
        size = 0
        while self._pending and (not group or size + self._pending[0].size <= self._group_bytes_max):
            chain = self._pending.popleft()
            if self._is_possible(chain):
                group.append(chain)
                size += chain.size
        return group

    def _is_possible(self, chain: Chain) -> bool:
        """A topic may have been deleted while a chain waited for its turn."""
        if self._has_streams(chain):
            return True
        chain.refuse(TopicNotFound("the topic was deleted while the message waited"))
        self._pending_bytes -= chain.size
        self._admit_waiting()
        return False

    def _has_streams(self, chain: Chain) -> bool:
        drafts = [draft for draft in chain.drafts if isinstance(draft, BatchDraft)]
        return all(self._hot.get(draft.stream) is not None for draft in drafts)

    async def _finish_if_due(self, size: int) -> None:
        """Finishes the current file when it does not take ``size`` bytes more. That syncs it, so an error
        leaves in doubt what it holds, whatever its number says: also a full disk freezes here."""
        current = self._current
        if current is not None and (self._is_rotation_wanted or current.end + size > current.size):
            await self._in_thread(current.finish)
            self._last_length = current.end
            self._current = None
            self._has_content = False

    async def _start_if_due(self, size: int) -> None:
        """A new file with room for ``size`` bytes, when there is none."""
        if self._current is None and size:
            self._current = await self._in_thread(self._create, size)
            self._last_number = self._current.number
            self.files[self._current.number] = self._current
            self._on_new_file(self._current.number)

    def _create(self, size: int) -> JournalFile:
        size = max(self._file_bytes, FILE_HEADER_BYTES + size)
        number = self._last_number + 1
        return JournalFile.create(
            self._disk, self._directory, number, size, self._now_us(), self._last_length
        )

    def _lay_out(self, group: list[Chain]) -> list[Any]:
        """Gives offsets and positions; returns the bytes to write."""
        if not group:
            return []
        file = self._current
        assert file is not None
        self._last_time_us = now_us = max(self._last_time_us, self._now_us())
        position, version, durable = file.end, self._catalog_version(), file.durable
        pieces: list[Any] = []
        padding = b""
        for chain in group:
            self._has_content = self._has_content or chain.drafts[0].record_count > 0
            last = len(chain.drafts) - 1
            appended = []
            for index, draft in enumerate(chain.drafts):
                header = self._header(
                    draft,
                    CONTINUES if index < last else 0,
                    now_us,
                    file.number,
                    position,
                    durable,
                    version,
                )
                pieces.append(padding + pack(header))
                pieces.append(draft.body)
                padding = _PADDING[-len(draft.body) % 8]
                chain.headers.append(header)
                appended.append(Appended(header.base_offset, now_us))
                position = header.end_position
            chain.commit = Commit(lsn(file.number, chain.headers[-1].position), tuple(appended))
        pieces.append(padding)
        return pieces

    def _header(
        self,
        draft: Draft,
        flags: int,
        now_us: int,
        number: int,
        position: int,
        durable: int,
        version: int,
    ) -> Header:
        if isinstance(draft, FactsDraft):
            kind = Kind.FACTS if draft.record_count else Kind.NOTE
            crc, place = _crc(draft.body), (0, 0, 0, 0)
            producer = (0, 0, 0)
            codec = 0
        else:
            kind, crc, codec = Kind.BATCH, draft.body_crc, draft.codec
            hot = self._hot.get(draft.stream)
            if hot is None:
                hot = HotStream()  # The topic was deleted this instant: its offsets mean nothing any more.
            place = (*draft.stream, draft.columns, hot.next_offset)
            hot.next_offset += draft.record_count
            producer = (draft.producer_id, draft.base_sequence, draft.producer_epoch)
            flags |= SEQUENCES if draft.has_sequences else 0
        return Header(
            kind, flags, codec, crc, len(draft.body), draft.record_count, *place, now_us, *producer,
            number, position, durable, version,
        )  # fmt: skip

    def _write_and_sync(self, pieces: list[Any], wants_sync: bool) -> None:
        """Runs in the journal's thread."""
        file = self._current
        if file is None:
            return
        if pieces:
            file.write(pieces)
        if wants_sync:
            start = perf_counter()
            file.sync()
            self.sync_times.add(perf_counter() - start)

    def _complete(self, group: list[Chain]) -> None:
        """Makes the group readable and tells everybody, in log order."""
        for chain in group:
            for header in chain.headers:
                if header.kind == Kind.BATCH:
                    self._publish(header)
            assert chain.commit is not None
            chain.on_commit(chain.commit)
            chain.resolve()
            self._pending_bytes -= chain.size
        self._complaint = None
        self._admit_waiting()

    def _publish(self, header: Header) -> None:
        hot = self._hot.get(StreamId(header.topic_id, header.partition))
        if hot is not None:
            hot.add(header)

    def _sync_later(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._sync_interval_s, self._want_sync)

    def _want_sync(self) -> None:
        self._timer = None
        self._is_sync_wanted = True
        self._kick()

    # When it goes wrong.

    def _refuse_all(self, group: list[Chain], error: OSError) -> None:
        """No space could be reserved. Nothing was written, so nothing is frozen; everything that
        waits is refused too, because a later message must not pass an earlier one of its producer."""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not full:
            self._freeze(JournalFrozen(f"a journal file could not be made: {error}"), group)
            return
        self._complaint = StorageFull(f"no space for the journal: {error.strerror}")
        for chain in [*group, *self._pending, *self._waiting]:
            chain.refuse(StorageFull(f"no space for the journal: {error.strerror}"))
        self._drop_pending()

    def _freeze(self, error: SparrowError, group: list[Chain]) -> None:
        self._frozen = error
        for chain in [*group, *self._pending, *self._waiting]:
            chain.refuse(error)
        self._drop_pending()

    def _drop_pending(self) -> None:
        self._pending.clear()
        self._waiting.clear()
        self._pending_bytes = self._waiting_bytes = 0
        self._is_rotation_wanted = self._is_sync_wanted = False

    async def _in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)


def _answer_hasty(group: list[Chain]) -> None:
    """Those who wait for nothing have their receipt as soon as their offsets are known."""
    for chain in group:
        if chain.durability is Durability.NONE:
            chain.resolve()


def _is_durable(group: list[Chain]) -> bool:
    return any(chain.durability is Durability.DURABLE for chain in group)


def _ignore(commit: Commit) -> None:
    """Notes change nothing."""


def _crc(body: bytes) -> int:
    return int(google_crc32c.value(body))
