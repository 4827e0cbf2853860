"""Verification: is every byte what was written, and does everything fit together?

Checked are the catalog (its structure, the checksum of every row, its digests, its clean marker), every
journal entry (both crcs, and that each stream goes on where its segments end), every segment (see
``soundness``), and the names: every listed file is there, and files that nobody lists are named.

A *damage* is something that was stored and cannot be read, or a catalog that cannot be used. A *note*
is worth knowing and costs no message: a torn tail that was never receipted as durable, leftovers of an
interrupted step, files kept for inspection, strangers. Nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from sparrow.kernel import facts
from sparrow.model.errors import CatalogDamaged, DataDamaged, DataDirectoryNewer
from sparrow.model.message import StreamId
from sparrow.store import audit
from sparrow.store.catalog_tables import Segment, StreamRow
from sparrow.store.directory import TopicFile
from sparrow.store.entry import Header, unpack
from sparrow.store.hot import HotWindow
from sparrow.store.offline import access
from sparrow.store.offline.access import CatalogView
from sparrow.store.offline.examiner import Examiner
from sparrow.store.offline.findings import Finding, from_damage, gap, unreadable
from sparrow.store.offline.soundness import flaws
from sparrow.store.ports import Damage
from sparrow.store.recovery import JournalScan, Replay, scan_journal

OnProgress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""

_ROOT_NAMES = {"sparrow.json", "lock", "journal", "stage", "topics", "lost+found", "set-aside"}


class Verdict(msgspec.Struct, kw_only=True):
    """The outcome of a verification."""

    directory: str
    is_whole: bool = True
    is_fast: bool = False
    catalog_version: int | None = None
    topics: int = 0
    journal_files: int = 0
    journal_entries: int = 0
    journal_bytes: int = 0
    torn_bytes: int = 0
    segments: int = 0
    segment_bytes: int = 0
    damages: list[Finding] = []
    notes: list[Finding] = []


def verify(root: Path, *, is_fast: bool = False, on_progress: OnProgress | None = None) -> Verdict:
    """Looks at everything in the directory of a stopped broker."""
    with access.looking(root):
        return _Verification(root, is_fast, on_progress or _ignore).run()


class _Verification:
    def __init__(self, root: Path, is_fast: bool, on_progress: OnProgress) -> None:
        self._root = root
        self._on_progress = on_progress
        self._done = 0
        self._verdict = Verdict(directory=str(root), is_fast=is_fast)
        self._topic_files = access.topic_files(root)
        self._journal = access.journal_files(root)
        lake = [path for path in (root / "topics").rglob("*.parquet") if path.is_file()]
        sizes = [path.stat().st_size for _, path in self._journal]
        self._total = sum(sizes) + (0 if is_fast else sum(path.stat().st_size for path in lake))

    def run(self) -> Verdict:
        try:
            catalog = access.read_catalog(self._root)
        except CatalogDamaged as error:
            self._damage(
                "catalog.db",
                error.message,
                "the broker does not start; `sparrow log rebuild` makes a new catalog",
            )
            self._without_catalog()
        else:
            self._with_catalog(catalog)
        self._kept_aside()
        verdict = self._verdict
        verdict.is_whole = not verdict.damages
        self._on_progress(self._total, self._total)
        return verdict

    # With a sound catalog.

    def _with_catalog(self, catalog: CatalogView) -> None:
        self._verdict.catalog_version = catalog.version
        self._verdict.topics = len(catalog.topics)
        self._check_topics(catalog)
        self._check_journal(catalog)
        self._check_lake(catalog)
        self._name_strangers(catalog)

    def _check_topics(self, catalog: CatalogView) -> None:
        files = {path.name: found for path, found in self._topic_files}
        known = {topic.id for topic in catalog.topics}
        for topic in catalog.topics:
            found = files.get(topic.name)
            name = f"topics/{topic.name}/topic.json"
            if found is None or found.topic.id != topic.id:
                what = "it is missing or cannot be read" if found is None else "it is of another topic"
                meaning = "no message is affected; a lost catalog could not be rebuilt in full"
                self._damage(name, what, meaning, topic=topic.name)
        for name, found in files.items():
            if found and found.topic.id not in known and found.catalog_version > catalog.version:
                self._damage(
                    "catalog.db",
                    f"it is at version {catalog.version} and has lost topic {name!r}",
                    "the broker does not start; `sparrow log rebuild` makes a new catalog",
                    topic=name,
                )

    def _check_journal(self, catalog: CatalogView) -> None:
        live = [file for file in self._journal if file[0] > catalog.sealed_through]
        for number, path in self._journal:
            if number <= catalog.sealed_through:
                self._note(self._name(path), "it has been sealed", "the next start removes it")
                self._advance(path.stat().st_size)
        scan = self._scan(live, max(1, catalog.sealed_through + 1), catalog.newest_file)
        if scan.catalog_version > catalog.version:
            self._damage(
                "catalog.db",
                f"it is at version {catalog.version}, but the journal has seen {scan.catalog_version}",
                "the broker does not start; `sparrow log rebuild` makes a new catalog",
            )
        hot = HotWindow()
        for row in catalog.streams:
            hot.open(row.stream, row.start_offset, row.sealed_end_offset)
        before = len(scan.damages)
        replay = Replay(scan, hot)
        names = {topic.id: topic.name for topic in catalog.topics}
        self._journal_damages(scan, before, names)
        for at, body in replay.facts:
            self._check_facts(at, body)

    def _check_facts(self, at: int, body: bytes) -> None:
        try:
            facts.decode(body)
        except (DataDamaged, DataDirectoryNewer) as error:
            number, position = at >> 40, at & ((1 << 40) - 1)
            self._damage(
                f"journal/{number:010d}.wal",
                error.message,
                "what it says of a subscription is not known: messages may be delivered again",
                position=position,
            )

    def _check_lake(self, catalog: CatalogView) -> None:
        names = {topic.id: topic.name for topic in catalog.topics}
        by_stream: dict[StreamId, list[Segment]] = {}
        for segment in catalog.segments:
            by_stream.setdefault(segment.stream, []).append(segment)
            self._check_segment(names[segment.topic_id], segment)
        for row in catalog.streams:
            listed = by_stream.get(row.stream, [])
            self._check_density(names[row.topic_id], row, listed)

    def _check_segment(self, topic: str, segment: Segment) -> None:
        path = access.segment_path(self._root, topic, segment)
        self._verdict.segments += 1
        self._verdict.segment_bytes += segment.size_bytes
        before = self._done
        if path.exists():
            found = flaws(path, segment, self._advance, footer_only=self._verdict.is_fast)
            for flaw in found:
                self._lost(path, flaw.what, topic, segment, flaw.start_offset, flaw.end_offset, flaw.position)
            if not self._verdict.is_fast:
                self._done = before
                self._advance(path.stat().st_size)
        else:
            self._lost(path, "it is missing", topic, segment, segment.first_offset, segment.end_offset)

    def _lost(
        self, path: Path, what: str, topic: str, segment: Segment, start: int, end: int, position: int = 0
    ) -> None:
        found = gap(self._name(path), what, topic, segment.partition, start, end, position)
        self._verdict.damages.append(found)

    def _check_density(self, topic: str, row: StreamRow, listed: Sequence[Segment]) -> None:
        """Segments follow one another from the start of the stream to the end of its sealed part."""
        end = row.start_offset
        place = f"topics/{topic}/{row.partition}"
        for segment in listed:
            name = f"{place}/{segment.file_name}"
            if segment.first_offset > end:
                what = "no segment holds what comes before it"
                self._verdict.damages.append(gap(name, what, topic, row.partition, end, segment.first_offset))
            elif segment.first_offset < end and segment is not listed[0]:
                self._damage(
                    name,
                    f"it overlaps with the segment before it, which ends at {end}",
                    f"messages of {topic} partition {row.partition} may be read twice",
                    topic=topic,
                    partition=row.partition,
                    start_offset=segment.first_offset,
                    end_offset=min(end, segment.end_offset),
                )
            end = max(end, segment.end_offset)
        if end < row.sealed_end_offset:
            what = "no segment holds the end of the sealed part"
            self._verdict.damages.append(gap(place, what, topic, row.partition, end, row.sealed_end_offset))

    def _name_strangers(self, catalog: CatalogView) -> None:
        listed = {(segment.stream, segment.file_name) for segment in catalog.segments}
        topics = {topic.name: topic for topic in catalog.topics}
        for directory, _ in self._topic_files:
            topic = topics.get(directory.name)
            if topic is None:
                self._note(self._name(directory), "no topic of this name exists", "the next start removes it")
                continue
            for partition, path in access.partition_files(directory):
                if (StreamId(topic.id, partition), path.name) not in listed:
                    self._name_leftover(path)

    def _name_leftover(self, path: Path) -> None:
        if path.suffix == ".tmp":
            self._note(self._name(path), "it is half-written", "the next start removes it")
        elif path.suffix == ".parquet":
            what = "the catalog does not list it"
            meaning = "an interrupted step left it, or it is a stranger; nothing is read from it"
            self._note(self._name(path), what, meaning)
        elif path.suffix not in (".damaged", ".doubled"):
            self._note(self._name(path), "it is not a file of Sparrow", "it is left alone")

    # Without one.

    def _without_catalog(self) -> None:
        """Bytes can still be checked; what fits together cannot be told."""
        numbers = [number for number, _ in self._journal]
        scan = self._scan(self._journal, min(numbers, default=1), 0)
        known = [(path, found) for path, found in self._topic_files if found is not None]
        names = {found.topic.id: found.topic.name for _, found in known}
        self._verdict.topics = len(names)
        self._journal_damages(scan, len(scan.damages), names)
        for path, found in self._topic_files:
            if found is None:
                self._damage(
                    f"{self._name(path)}/topic.json",
                    "it is missing or cannot be read",
                    "the topic's policy is lost with the catalog",
                    topic=path.name,
                )
            else:
                with Examiner() as examiner:
                    self._check_files(path, found, examiner)
        self._note(
            "catalog.db",
            "what fits together cannot be told without it",
            "`sparrow log rebuild --dry-run` says which messages can be served",
        )

    def _check_files(self, directory: Path, found: TopicFile, examiner: Examiner) -> None:
        for partition, path in access.partition_files(directory):
            if path.suffix != ".parquet":
                continue
            size = path.stat().st_size
            self._verdict.segments += 1
            self._verdict.segment_bytes += size
            if self._verdict.is_fast:
                continue
            report = examiner.examine(path, found.topic.name, StreamId(found.topic.id, partition))
            if report.complaint:
                self._damage(
                    self._name(path),
                    report.complaint,
                    f"messages in it, from offset {path.stem.lstrip('0') or '0'} on, cannot be read",
                    topic=found.topic.name,
                    partition=partition,
                )
            self._advance(size)

    # The journal, either way.

    def _scan(self, files: Sequence[tuple[int, Path]], expected_first: int, newest: int) -> JournalScan:
        scan = scan_journal(access.ReadOnlyDisk(), files, expected_first, newest)
        for file in scan.files:
            self._advance(file.path.stat().st_size)
            self._verdict.journal_bytes += scan.end_of(file)
            file.close()
        self._verdict.journal_files = len(files)
        self._verdict.journal_entries = scan.entries
        self._verdict.torn_bytes = scan.torn_bytes
        if scan.torn_bytes and scan.files:
            self._note(
                self._name(scan.files[-1].path),
                f"its last {scan.torn_bytes} bytes are torn",
                "they were never receipted as durable; the next start cuts them off",
            )
        for path in scan.removable:
            self._note(self._name(path), "it holds nothing", "a crash cut its making short; the next start "
                       "removes it")  # fmt: skip
        return scan

    def _journal_damages(self, scan: JournalScan, scanned: int, names: dict[int, str]) -> None:
        """Damages of the scan come first and may tell the offsets; gaps that they explain are left out."""
        files = {file.path.name: file for file in scan.files}
        told: list[Finding] = []
        for damage in scan.damages[:scanned]:
            file = files.get(damage.file)
            header = unpack(file.source, damage.position, file.number) if file and damage.position else None
            told.append(from_damage(damage, names) if header is None else _named(damage, header, names))
        for damage in scan.damages[scanned:]:
            found = from_damage(damage, names)
            if not any(earlier.covers(found) for earlier in told):
                told.append(found)
        self._verdict.damages.extend(told)

    # Telling.

    def _kept_aside(self) -> None:
        for path in sorted((self._root / "journal").glob("*")):
            if path.suffix == ".damaged":
                self._note(self._name(path), "it held damage", "it was sealed and kept for inspection")
            elif path.suffix != ".wal" or not path.stem.isdigit():
                self._note(self._name(path), "it is not a file of Sparrow", "it is left alone")
        for pattern, what in ((".damaged", "it was damaged"), (".doubled", "others hold what it holds")):
            for path in sorted((self._root / "topics").glob(f"*/*/*.parquet{pattern}")):
                self._note(self._name(path), what, "a rebuild set it aside; nothing is read from it")
        for path in sorted(self._root.iterdir()):
            if path.name not in _ROOT_NAMES and not path.name.startswith(("catalog.", audit.NAME)):
                self._note(self._name(path), "it is not a file of Sparrow", "it is left alone")

    def _damage(self, file: str, what: str, meaning: str, **place: int | str) -> None:
        fields = {"file": file, "what": what, "meaning": meaning, **place}
        self._verdict.damages.append(msgspec.convert(fields, Finding))

    def _note(self, file: str, what: str, meaning: str) -> None:
        self._verdict.notes.append(Finding(file=file, what=what, meaning=meaning))

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self._root))

    def _advance(self, count: int) -> None:
        self._done += count
        self._on_progress(min(self._done, self._total), self._total)


def _named(damage: Damage, header: Header, names: dict[int, str]) -> Finding:
    """A broken stretch whose first header is whole: it tells which messages were there."""
    found = from_damage(damage, names)
    topic = names.get(header.topic_id)
    if topic is None:
        return found
    return msgspec.structs.replace(
        found,
        meaning=unreadable(topic, header.partition, header.base_offset, header.end_offset),
        topic=topic,
        partition=header.partition,
        start_offset=header.base_offset,
        end_offset=header.end_offset,
    )


def _ignore(done: int, total: int) -> None:
    """Nobody watches."""


__all__ = ["Finding", "OnProgress", "Verdict", "verify"]
