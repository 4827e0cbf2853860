"""What the journal holds, read again after a stop of any kind.

Section 4 of docs/format.md is the law. Recovery reads every unsealed file once, checks every byte's crc,
tells damage from a torn tail by what later entries bear witness to, and only then changes anything: the
torn tail is cut. Its cost depends on the unsealed tail alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from sparrow.model.errors import CatalogDamaged, DataDamaged
from sparrow.model.message import StreamId
from sparrow.store import batch
from sparrow.store.disk import Disk
from sparrow.store.entry import FILE_HEADER_BYTES, SEQUENCES, Broken, Header, Kind, Scan, lsn
from sparrow.store.hot import HotWindow
from sparrow.store.journalfile import JournalFile
from sparrow.store.ports import Damage, ProducerBatch, ProducerPart


class JournalScan:
    """The result of reading the unsealed journal; ``cut`` makes the torn tail go."""

    def __init__(self) -> None:
        self.files: list[JournalFile] = []
        self.chains: list[list[Header]] = []
        self.damages: list[Damage] = []
        self.losses: list[tuple[int, Header]] = []
        """Entries of which only the header is left, with the number of chains before them: known gaps."""
        self.torn_bytes = 0
        self.removable: list[Path] = []
        self.last_number = 0
        self.last_time_us = 0
        self.catalog_version = 0
        self.entries = 0
        self._ends: dict[int, int] = {}

    @property
    def is_clean(self) -> bool:
        """Whether the journal ends in a note: it was closed in order, or is empty."""
        return not self.chains or self.chains[-1][-1].kind == Kind.NOTE

    def end_of(self, file: JournalFile) -> int:
        """Where the valid part of the file ends."""
        return self._ends[file.number]

    def set_end(self, file: JournalFile, end: int) -> None:
        self._ends[file.number] = end

    def cut(self) -> None:
        """Makes the last file end where its last valid entry ends, and closes all for writing."""
        for file in self.files:
            end = self._ends[file.number]
            if file is self.files[-1] and file.size > end:
                file.cut(end)
            file.end = end
            file.close()


def scan_journal(
    disk: Disk, files: Sequence[tuple[int, Path]], expected_first: int, newest: int
) -> JournalScan:
    """Reads the files; ``expected_first`` and ``newest`` are the numbers the catalog knows of."""
    scan = JournalScan()
    opened = _open_all(disk, files, scan)
    # A file that never came to be is no gap, and its number is given again.
    numbers = [file.number for file in opened]
    scan.last_number = max([*numbers, newest, expected_first - 1])
    _report_missing(scan, numbers, expected_first, newest)
    for index, file in enumerate(opened):
        following = opened[index + 1] if index + 1 < len(opened) else None
        _scan_file(scan, file, following)
    return scan


def _open_all(disk: Disk, files: Sequence[tuple[int, Path]], scan: JournalScan) -> list[JournalFile]:
    opened = []
    for place, (number, path) in enumerate(files):
        file = JournalFile.open(disk, path, number)
        is_last = place == len(files) - 1
        if file is None or (is_last and file.file_header() is None and not _holds_entries(file)):
            # A crash while the file was being made; nothing can be in it.
            scan.removable.append(path)
            continue
        opened.append(file)
    return opened


def _holds_entries(file: JournalFile) -> bool:
    return any(isinstance(item, Header) for item in Scan(file.source, file.buffer, file.number, file.size))


def _report_missing(scan: JournalScan, numbers: Sequence[int], expected_first: int, newest: int) -> None:
    if not numbers and newest < expected_first:
        return
    last = max([*numbers, newest])
    for number in sorted(set(range(expected_first, last + 1)) - set(numbers)):
        scan.damages.append(Damage(file=f"{number:010d}.wal", what="the journal file is missing"))


def _scan_file(scan: JournalScan, file: JournalFile, following: JournalFile | None) -> None:
    header = file.file_header()
    if header is None:
        scan.damages.append(Damage(file=file.path.name, what="the file header is damaged", end_position=64))
        file.has_damage = True
    items = list(Scan(file.source, file.buffer, file.number, file.size))
    witness = _witness(items, following)
    chain: list[Header] = []
    end = FILE_HEADER_BYTES
    for item in items:
        if isinstance(item, Broken):
            if item.position >= witness:
                break  # Never synced: the end of the log.
            _report_broken(scan, file, item)
            scan.chains.extend([one] for one in chain)  # Committed: later entries bear witness.
            scan.losses.extend((len(scan.chains), lost) for lost in item.headers)
            chain = []
            continue
        chain.append(item)
        if not item.continues:
            scan.chains.append(chain)
            chain = []
            end = item.end_position
        _note(scan, item)
    if chain and chain[-1].end_position <= witness:
        scan.chains.extend([one] for one in chain)  # Committed, and its last entry is gone.
        end = chain[-1].end_position
    last = max([end, *(item.end_position for item in items)])
    if last < witness:
        _report_broken(scan, file, Broken(last, witness))
    scan.torn_bytes += max(0, last - end) if following is None else 0
    scan.files.append(file)
    scan.set_end(file, end)


def _witness(items: Sequence[Header | Broken], following: JournalFile | None) -> int:
    """Up to where the file is known to have been synced."""
    durable = max((item.durable_position for item in items if isinstance(item, Header)), default=0)
    if following is None:
        return durable
    header = following.file_header()
    if header is None:
        ends = [item.end_position for item in items]
        return max([durable, *ends])
    return max(durable, header.previous_length)


def _report_broken(scan: JournalScan, file: JournalFile, broken: Broken) -> None:
    file.has_damage = True
    scan.damages.append(
        Damage(
            file=file.path.name,
            what="entries are damaged",
            position=broken.position,
            end_position=broken.end_position,
        )
    )


def _note(scan: JournalScan, header: Header) -> None:
    scan.entries += 1
    scan.last_time_us = max(scan.last_time_us, header.publish_time_us)
    scan.catalog_version = max(scan.catalog_version, header.catalog_version)


class Replay:
    """Puts what a scan found in force: batches into the hot window, the rest in lists for the broker."""

    def __init__(self, scan: JournalScan, hot: HotWindow) -> None:
        self.facts: list[tuple[int, bytes]] = []
        self.producers: list[tuple[int, ProducerBatch]] = []
        self.messages = 0
        self._hot = hot
        self._files = {file.number: file for file in scan.files}
        self._scan = scan
        losses = deque(scan.losses)
        for number, chain in enumerate(scan.chains):
            while losses and losses[0][0] <= number:
                self._take_loss(losses.popleft()[1])
            self._take(chain)
        for _, lost in losses:
            self._take_loss(lost)

    def _take(self, chain: list[Header]) -> None:
        at = lsn(chain[-1].file_number, chain[-1].position)
        for header in chain:
            if header.kind == Kind.BATCH:
                self._take_batch(header)
            elif header.kind == Kind.FACTS:
                body = self._files[header.file_number].body(header)
                self.facts.append((at, body.to_pybytes()))
        self.producers.extend((at, found) for found in self._producers(chain))

    def _take_loss(self, header: Header) -> None:
        """The offsets of a damaged batch stay taken, so that no other message ever gets them."""
        hot = self._hot.get(StreamId(header.topic_id, header.partition))
        if header.kind == Kind.BATCH and hot is not None and header.base_offset >= hot.end_offset:
            self._report_gap(header, header.base_offset, "messages are damaged", header.end_offset)
            hot.skip_to(header.end_offset)

    def _take_batch(self, header: Header) -> None:
        stream = StreamId(header.topic_id, header.partition)
        hot = self._hot.get(stream)
        if hot is None:
            return  # The topic was deleted since.
        if header.base_offset < hot.end_offset:
            self._report_gap(header, header.base_offset, "the batch repeats offsets")
            return
        if header.base_offset > hot.end_offset:
            self._report_gap(header, hot.end_offset, "messages are missing")
        hot.add(header)
        self.messages += header.record_count

    def _report_gap(
        self, header: Header, start_offset: int, what: str, end_offset: int | None = None
    ) -> None:
        file = self._files[header.file_number]
        self._scan.damages.append(
            Damage(
                file=file.path.name,
                what=what,
                position=header.position,
                topic_id=header.topic_id,
                partition=header.partition,
                start_offset=start_offset,
                end_offset=header.base_offset if end_offset is None else end_offset,
            )
        )

    def _producers(self, chain: list[Header]) -> Iterator[ProducerBatch]:
        grouped: dict[tuple[int, int, int], list[ProducerPart]] = {}
        for header in chain:
            if header.kind == Kind.BATCH and header.producer_id:
                key = (header.producer_id, header.producer_epoch, header.topic_id)
                grouped.setdefault(key, []).append(self._part(header))
        for (producer_id, epoch, topic_id), parts in grouped.items():
            yield ProducerBatch(producer_id, epoch, topic_id, tuple(parts))

    def _part(self, header: Header) -> ProducerPart:
        sequences: tuple[int, ...] | range = range(
            header.base_sequence, header.base_sequence + header.record_count
        )
        if header.flags & SEQUENCES:
            body = self._files[header.file_number].body(header)
            sequences = tuple(batch.decode(body, header.columns).column("sequence").to_pylist())
        return ProducerPart(header.partition, header.base_offset, header.publish_time_us, sequences)


def refuse_damage(damages: Sequence[Damage]) -> None:
    """The policy ``halt``."""
    if damages:
        listed = "; ".join(f"{damage.file}: {damage.what}" for damage in damages[:5])
        raise DataDamaged(
            f"the journal is damaged in {len(damages)} places: {listed}",
            hint="Look with `sparrow log verify`; open with journal.on_damage: skip to go on without them.",
        )


def refuse_older_catalog(version: int, witnessed: int) -> None:
    """A catalog that lost commits must not decide what is kept."""
    if version < witnessed:
        raise CatalogDamaged(f"the catalog is at version {version}, but the journal has seen {witnessed}")
