"""Which catalog fits the evidence. Decides; reads and writes nothing.

Whether the lake or the journal serves a message is decided in ``precedence``.

Ids are never given twice. Every id that was ever given out cost a catalog version, so when the old
ledger is lost the next ids start above the version that the journal has witnessed. The end of a stream
is the end of its last batch or segment, or what the old catalog said. When nothing tells it, though the
stream once had segments, offsets go on at a round number that no publisher can have reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from sparrow.model.message import StreamId
from sparrow.model.topic import Topic
from sparrow.store.catalog_tables import (
    CatalogRows,
    Document,
    Producer,
    Segment,
    StreamRow,
)
from sparrow.store.offline.evidence import DamagedSegment, Evidence, SoundSegment
from sparrow.store.offline.findings import Finding, gap, span
from sparrow.store.offline.precedence import (
    Reseal,
    is_within,
    reseals,
    sealed_through,
    without_doubles,
)

_ROWS_LOST = {
    "subscriptions": "they must be created again",
    "cursors": "messages that were acked may be delivered again",
    "producers": "a request that a producer repeats may be stored twice",
    "producer_states": "a request that a producer repeats may be stored twice",
    "documents": "what they held is lost",
}


class Reconstruction:
    """The new catalog, and what must be done to the files before it is true."""

    def __init__(self, evidence: Evidence, now_us: int) -> None:
        self._evidence = evidence
        self._now_us = now_us
        self.losses: list[Finding] = []
        self.notes: list[Finding] = []
        self.topics = self._choose_topics()
        self._names = {topic.id: topic.name for topic in self.topics}
        self.doubled: list[Path] = []
        self.redundant: list[Path] = []
        self.reseals: list[Reseal] = []
        self.rescues: list[tuple[str, SoundSegment]] = []
        """Topics, and parts of damaged segments that are to be copied."""
        self._listed = set(evidence.listed.values()) if evidence.is_salvage_fresh else set()
        self._sound = {stream: self._without_doubles(stream) for stream in evidence.sound}
        self.sealed_through = sealed_through(
            self._sound, evidence.batches, evidence.file_numbers, self._newest_file
        )
        self.version = max(evidence.witnessed_version, self._salvaged_version) + 1
        self.segments: list[Segment] = []
        self.streams = [
            self._choose_stream(topic, partition)
            for topic in self.topics
            for partition in range(topic.partitions)
        ]
        self._tell_unknown_topics()
        self._tell_missing_files()
        self._tell_rows_lost()

    @property
    def _salvaged_version(self) -> int:
        return (self._evidence.salvaged.version or 0) if self._evidence.salvaged else 0

    @property
    def set_aside(self) -> list[Path]:
        """Damaged segments that still bear the name of a sound one."""
        return [found.path for found in self._evidence.damaged if found.path.suffix == ".parquet"]

    def rows(self, resealed: Sequence[Segment]) -> CatalogRows:
        """Everything that the new catalog holds, with the segments that were made meanwhile."""
        old = self._evidence.salvaged.rows if self._evidence.salvaged else CatalogRows()
        producers = self._producers(old.producers)
        subscriptions = {row.id for row in old.subscriptions}
        known = {producer.id for producer in producers}
        return CatalogRows(
            topics=self.topics,
            streams=self.streams,
            segments=[*self.segments, *resealed],
            subscriptions=old.subscriptions,
            cursors=[row for row in old.cursors if row.subscription_id in subscriptions],
            producers=producers,
            producer_states=[
                row for row in old.producer_states if row.producer_id in known and row.topic_id in self._names
            ],
            documents=[
                *(row for row in old.documents if (row.kind, row.key) != ("journal", "newest")),
                Document("journal", "newest", str(self._newest_file).encode()),
            ],
            last_ids=self._last_ids(old),
        )

    # Ids.

    def _last_ids(self, old: CatalogRows) -> dict[str, int]:
        if self._evidence.is_salvage_fresh:
            return dict(old.last_ids)
        return {
            name: max(self.version, old.last_ids.get(name, 0))
            for name in ("topics", "subscriptions", "producers")
        }

    def _producers(self, old: Sequence[Producer]) -> list[Producer]:
        """The old ones, and one for each that the journal alone knows, so that its state can be kept."""
        epochs = self._evidence.producers
        found = [Producer(row.id, row.name, max(row.epoch, epochs.get(row.id, 0))) for row in old]
        known, names = {row.id for row in found}, {row.name for row in found}
        for producer_id, epoch in sorted(epochs.items()):
            if producer_id not in known:
                name = f"lost-producer-{producer_id}"
                while name in names:
                    name += "-"
                names.add(name)
                found.append(Producer(producer_id, name, epoch))
        return found

    @property
    def _newest_file(self) -> int:
        """The highest number that a journal file can have had: positions in it must not come again."""
        rows = self._evidence.salvaged.rows if self._evidence.salvaged else CatalogRows()
        as_of = [row.as_of >> 40 for row in rows.cursors]
        as_of += [row.as_of >> 40 for row in rows.producer_states]
        told = [int(row.value) for row in rows.documents if (row.kind, row.key) == ("journal", "newest")]
        kept = [int(p.stem) for p in (self._evidence.root / "journal").glob("*.damaged") if p.stem.isdigit()]
        return max([0, *self._evidence.file_numbers, *as_of, *told, *kept, self._old_sealed_through])

    @property
    def _old_sealed_through(self) -> int:
        salvaged = self._evidence.salvaged
        return max(0, salvaged.sealed_through or 0) if salvaged else 0

    # Topics.

    def _choose_topics(self) -> list[Topic]:
        by_id: dict[int, Topic] = dict(self._topics_with_files())
        for topic in self._evidence.topics_by_segment.values():
            by_id.setdefault(topic.id, topic)
            self.losses.append(
                Finding(
                    file=f"topics/{topic.name}/topic.json",
                    what="it cannot be read, and the old catalog does not have the topic either",
                    meaning=f"{topic.name} gets the default policy and {topic.partitions} partitions; "
                    "check both",
                    topic=topic.name,
                )
            )
        by_name: dict[str, Topic] = {}
        for topic in sorted(by_id.values(), key=lambda topic: topic.id):
            by_name[topic.name] = self._widened(topic)  # Of two of one name the later is in force.
        return sorted(by_name.values(), key=lambda topic: topic.id)

    def _topics_with_files(self) -> dict[int, Topic]:
        salvaged = self._evidence.salvaged
        rows = {topic.id: topic for topic in salvaged.rows.topics} if salvaged else {}
        chosen = dict(rows)
        for name, file in self._evidence.topic_files.items():
            is_older = file.catalog_version <= self._salvaged_version
            if file.topic.id in rows and is_older:
                continue
            if is_older and salvaged is not None and not salvaged.missing.get("topics"):
                self.notes.append(
                    Finding(
                        file=f"topics/{name}",
                        what="the topic was deleted before the catalog was lost",
                        meaning="the next start removes its directory",
                        topic=name,
                    )
                )
                continue
            chosen[file.topic.id] = file.topic
        return chosen

    def _widened(self, topic: Topic) -> Topic:
        """With as many partitions as anything has been stored in."""
        seen = [
            s.partition + 1
            for s in (*self._evidence.batches, *self._evidence.sound)
            if s.topic_id == topic.id
        ]
        return msgspec.structs.replace(topic, partitions=max([topic.partitions, *seen]))

    # Segments against the journal.

    def _without_doubles(self, stream: StreamId) -> list[SoundSegment]:
        row = self._row(stream)
        start = row.start_offset if row else 0
        offered = [found for found in self._evidence.sound[stream] if found.segment.end_offset > start]
        kept, doubled = without_doubles(offered, self._listed)
        self.doubled += [found.path for found in doubled if found.groups is None]
        return kept

    # Streams.

    def _row(self, stream: StreamId) -> StreamRow | None:
        return self._evidence.stream_rows.get(stream)

    def _choose_stream(self, topic: Topic, partition: int) -> StreamRow:
        stream = StreamId(topic.id, partition)
        batches = self._evidence.batches.get(stream, [])
        unsealed = [batch for batch in batches if batch.file_number > self.sealed_through]
        staying = []
        for found in self._sound.get(stream, []):
            if not is_within(found.segment, unsealed):
                staying.append(found)
            elif found.groups is None:
                self.redundant.append(found.path)
        self.segments += [found.segment for found in staying if found.groups is None]
        self.rescues += [(topic.name, found) for found in staying if found.groups is not None]
        spans = [(found.segment.first_offset, found.segment.end_offset) for found in staying]
        sealed = [batch for batch in batches if batch.file_number <= self.sealed_through]
        for reseal in reseals(stream, topic.name, sealed, spans):
            self.reseals.append(reseal)
            spans.append((reseal.start_offset, reseal.end_offset))
        hot = [(batch.start_offset, batch.end_offset) for batch in unsealed]
        return self._measured(topic, stream, sorted(spans), hot, staying)

    def _measured(
        self,
        topic: Topic,
        stream: StreamId,
        sealed: list[tuple[int, int]],
        hot: list[tuple[int, int]],
        staying: Sequence[SoundSegment],
    ) -> StreamRow:
        row = self._row(stream)
        served = [*sealed, *hot]
        sealed_end = hot[0][0] if hot else self._sealed_end(topic, stream, row, sealed)
        first = served[0][0] if served else sealed_end
        start = min(row.start_offset, first) if row else first
        damaged = [d for d in self._evidence.damaged if d.stream == stream]
        if row is None and damaged:
            start = min(start, *(d.first_offset for d in damaged))
        self._tell_gaps(
            topic, stream, start, max(sealed_end, *(end for _, end in [*served, (0, 0)])), served, damaged
        )
        for hole in [hole for found in staying for hole in found.holes]:
            self._lose(topic.name, stream, hole.start_offset, hole.end_offset, hole.what)
        if row is None and not damaged and first > 0 and served:
            self.notes.append(
                Finding(
                    file=f"topics/{topic.name}/{stream.partition}",
                    what=f"it starts at offset {first}",
                    meaning="retention dropped what was before, or it is lost: only the old catalog knew",
                    topic=topic.name,
                    partition=stream.partition,
                )
            )
        return StreamRow(topic.id, stream.partition, start, sealed_end)

    def _sealed_end(
        self, topic: Topic, stream: StreamId, row: StreamRow | None, sealed: Sequence[tuple[int, int]]
    ) -> int:
        """Where publishing goes on when the journal holds nothing of the stream."""
        known = max([0, *(end for _, end in sealed), row.sealed_end_offset if row else 0])
        damaged = [found for found in self._evidence.damaged if found.stream == stream]
        known = max([known, *(found.end_offset or 0 for found in damaged)])
        is_told = row is not None or bool(sealed) or stream not in self._evidence.partitions_on_disk
        is_cut = any(found.end_offset is None and found.first_offset >= known for found in damaged)
        if is_told and not is_cut:
            return known
        end = _beyond_any(self._now_us - topic.created_at_us)
        self.notes.append(
            Finding(
                file=f"topics/{topic.name}/{stream.partition}",
                what="nothing tells how many messages it has had",
                meaning=f"publishing goes on at offset {end}, so that no message id comes again",
                topic=topic.name,
                partition=stream.partition,
            )
        )
        return end

    # What is lost.

    def _tell_gaps(
        self,
        topic: Topic,
        stream: StreamId,
        start: int,
        end: int,
        served: Sequence[tuple[int, int]],
        damaged: Sequence[DamagedSegment],
    ) -> None:
        at = start
        for first, stop in [*served, (end, end)]:
            if first > at:
                cause = next((d for d in damaged if _is_cause(d, at, first)), None)
                what = f"{cause.path.name} is damaged: {cause.what}" if cause else "no file holds them"
                self._lose(topic.name, stream, at, first, what)
            at = max(at, stop)

    def _lose(self, topic: str, stream: StreamId, start: int, end: int, what: str) -> None:
        place = f"topics/{topic}/{stream.partition}"
        self.losses.append(gap(place, what, topic, stream.partition, start, end))

    def _tell_unknown_topics(self) -> None:
        for stream, batches in sorted(self._evidence.batches.items()):
            if stream.topic_id in self._names:
                continue
            spans = span(batches[0].start_offset, batches[-1].end_offset)
            self.notes.append(
                Finding(
                    file=f"journal/{batches[0].file_number:010d}.wal",
                    what=f"it holds {spans} of topic id {stream.topic_id}, which is not there",
                    meaning="the topic was deleted, or its topic.json is lost; restore that to keep them",
                    partition=stream.partition,
                )
            )
        for path in self._evidence.unknown_directories:
            self.losses.append(
                Finding(
                    file=f"topics/{path.name}",
                    what="neither its topic.json nor a segment says which topic it is",
                    meaning=f"topic {path.name} is not restored; its files go to set-aside/{path.name}",
                    topic=path.name,
                )
            )

    def _tell_missing_files(self) -> None:
        numbers = self._evidence.file_numbers
        is_fresh = self._evidence.is_salvage_fresh
        expected = 1 + (self._old_sealed_through if is_fresh else self.sealed_through)
        newest = max(numbers, default=self._newest_file if is_fresh else 0)
        for number in sorted(set(range(expected, newest + 1)) - set(numbers)):
            self.losses.append(
                Finding(
                    file=f"journal/{number:010d}.wal",
                    what="the journal file is missing",
                    meaning="what it held and no segment holds is lost",
                )
            )
        for damage in self._evidence.scan.damages:
            if damage.end_position:
                self.losses.append(
                    Finding(
                        file=f"journal/{damage.file}",
                        what=damage.what,
                        meaning="what these bytes held and no segment holds is lost",
                        position=damage.position,
                        end_position=damage.end_position,
                    )
                )

    def _tell_rows_lost(self) -> None:
        salvaged = self._evidence.salvaged
        if salvaged is None:
            self._lose_rows(
                "nothing of the old catalog is left",
                "subscriptions must be created again, acked messages may be delivered again, "
                "and a request that a producer repeats may be stored twice",
            )
        elif salvaged.version is None:
            self._lose_rows(
                "the old ledger is lost, so that nobody can tell which rows are missing",
                "subscriptions, cursors, producers and documents may be missing",
            )
        elif not self._evidence.is_salvage_fresh:
            self._lose_rows(
                f"the old catalog is at version {salvaged.version}, the journal has seen {self.version - 1}",
                "subscriptions, cursors and producers are as they were then",
            )
        for name, count in salvaged.missing.items() if salvaged else []:
            if name in _ROWS_LOST:
                what = f"rows of the old table {name} that are damaged: {count}"
                self._lose_rows(what, _ROWS_LOST[name])

    def _lose_rows(self, what: str, meaning: str) -> None:
        self.losses.append(Finding(file="catalog.db", what=what, meaning=meaning))


def _is_cause(damaged: DamagedSegment, start: int, end: int) -> bool:
    """Whether the segment may have held some of these offsets."""
    stop = damaged.end_offset
    return damaged.first_offset < end and (damaged.first_offset >= start if stop is None else stop > start)


def _beyond_any(age_us: int) -> int:
    """A round number above ten messages a microsecond for the topic's whole life."""
    return int(10 ** len(str(10 * max(1, age_us))))
