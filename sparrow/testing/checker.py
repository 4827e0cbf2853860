"""Proves what a log must hold after any crash, from what its publishers know.

``Claims`` is the publishers' side: what was sent, what was receipted, and where. ``judge`` compares it with
the logs as they are read, and lists every broken promise:

* a receipted message is where its receipt says, byte for byte, unless retention has passed it;
* offsets are dense from the start of a partition to its end;
* nothing is there twice, and nothing that nobody sent;
* of a producer's sequences none is missing below the highest that was receipted;
* a topic whose creation was answered is there, one whose deletion was answered is not.

A message that was sent and not receipted may or may not be there. Once a check has seen it, it must stay:
what one reader has read, the next one finds. Payloads must be unique, since they are the identity here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from sparrow.broker.broker import Broker
from sparrow.model.errors import SparrowError

_LISTED_MAX = 20

Print = bytes
"""A payload's fingerprint."""


class Partition(NamedTuple):
    """One partition of one topic, by the topic's name."""

    topic: str
    number: int


class Log(NamedTuple):
    """A partition as it was read."""

    start_offset: int
    end_offset: int
    offsets: list[int]
    payloads: list[bytes]


class Seen(NamedTuple):
    """What a check learned of a partition: its start, and the messages that were not known before."""

    start_offset: int
    adopted: list[tuple[int, Print]]


class Origin(NamedTuple):
    """Whose message it is: a producer and its sequence; an empty name for none."""

    topic: str
    producer: str = ""
    sequence: int = 0


class Place(NamedTuple):
    """Where a message lies."""

    partition: Partition
    offset: int


class CheckFailed(AssertionError):
    """Promises are broken; all of them are listed."""


class Claims:
    """What the publishers know."""

    def __init__(self) -> None:
        self.known: dict[Partition, dict[int, Print]] = {}
        """What must be there: receipted, or seen by an earlier check."""
        self.unknown: dict[Print, Origin] = {}
        """Sent, and neither receipted nor seen."""
        self.origins: dict[Print, Origin] = {}
        """The producers' messages among the known."""
        self.sequences: dict[tuple[str, str], range] = {}
        """From the first to the highest receipted sequence of a topic and producer."""
        self.topics: set[str] = set()
        """Topics that must be there."""
        self.doomed: set[str] = set()
        """Topics whose deletion was asked for, and may or may not have happened."""

    def sent(self, topic: str, payload: bytes, producer: str = "", sequence: int = 0) -> None:
        """A publisher is about to send this, maybe not for the first time."""
        self.unknown[fingerprint(payload)] = Origin(topic, producer, sequence)

    def receipted(self, topic: str, partition: int, offset: int, payload: bytes) -> None:
        """A publisher holds a receipt."""
        found = fingerprint(payload)
        origin = self.unknown[found] if found in self.unknown else self.origins.get(found, Origin(topic))
        self.adopt(Place(Partition(topic, partition), offset), found)
        if origin.producer:
            key = (topic, origin.producer)
            before = self.sequences.get(key, range(origin.sequence, origin.sequence))
            self.sequences[key] = range(
                min(before.start, origin.sequence), max(before.stop, origin.sequence + 1)
            )

    def adopt(self, place: Place, found: Print) -> None:
        """A message is known to be in the log."""
        self.known.setdefault(place.partition, {})[place.offset] = found
        origin = self.unknown.pop(found, None)
        if origin is not None and origin.producer:
            self.origins[found] = origin

    def created(self, topic: str) -> None:
        """A topic's creation was answered."""
        self.topics.add(topic)

    def deleting(self, topic: str) -> None:
        """A topic is about to be deleted."""
        self.topics.discard(topic)
        self.doomed.add(topic)

    def deleted(self, topic: str) -> None:
        """A topic's deletion was answered, or seen: nothing of it may come back."""
        self.doomed.discard(topic)
        for partition in [partition for partition in self.known if partition.topic == topic]:
            del self.known[partition]
        self.unknown = {mark: origin for mark, origin in self.unknown.items() if origin.topic != topic}
        self.sequences = {key: value for key, value in self.sequences.items() if key[0] != topic}

    def look(self, logs: Mapping[Partition, Log]) -> dict[Partition, Seen]:
        """What there is to learn from logs that have passed the check."""
        return {
            partition: Seen(
                log.start_offset,
                [
                    (offset, fingerprint(payload))
                    for offset, payload in zip(log.offsets, log.payloads, strict=True)
                    if offset not in self.known.get(partition, ())
                ],
            )
            for partition, log in logs.items()
        }

    def learn(self, seen: Mapping[Partition, Seen]) -> None:
        """After a check that passed: what was read must stay, what was not there was never stored, and
        sequences that retention has dropped are no longer asked for."""
        dropped: dict[tuple[str, str], int] = {}
        for partition, (start, adopted) in seen.items():
            for offset, mark in adopted:
                self.adopt(Place(partition, offset), mark)
            known = self.known.setdefault(partition, {})
            for offset in [offset for offset in known if offset < start]:
                origin = self.origins.pop(known.pop(offset), None)
                if origin is not None:
                    key = (origin.topic, origin.producer)
                    dropped[key] = max(dropped.get(key, -1), origin.sequence)
        for key, sequence in dropped.items():
            before = self.sequences.get(key, range(0))
            self.sequences[key] = range(max(before.start, sequence + 1), max(before.stop, sequence + 1))
        for topic in self.doomed - {partition.topic for partition in seen}:
            self.deleted(topic)
        self.unknown.clear()


def fingerprint(payload: bytes | None) -> Print:
    return hashlib.blake2b(payload or b"", digest_size=16).digest()


def judge(claims: Claims, logs: Mapping[Partition, Log], shortened: Collection[str] = ()) -> list[str]:
    """Every broken promise. Topics in ``shortened`` may have lost their front to retention."""
    complaints: list[str] = []
    places: dict[Print, Place] = {}
    for partition, log in logs.items():
        known = claims.known.get(partition, {})
        complaints += _shape(partition, log, partition.topic in shortened)
        complaints += _content(claims, partition, log, known, places)
        complaints += _lost(partition, log, known)
    complaints += _missing_topics(claims, {partition.topic for partition in logs})
    complaints += _missing_sequences(claims, logs, places)
    return complaints


def _missing_topics(claims: Claims, there: Collection[str]) -> Iterable[str]:
    known = {partition.topic for partition, messages in claims.known.items() if messages}
    for topic in sorted((known | claims.topics) - claims.doomed - set(there)):
        yield f"the topic {topic} is gone"


def _shape(partition: Partition, log: Log, may_start_late: bool) -> Iterable[str]:
    if log.start_offset and not may_start_late:
        yield f"{partition} starts at {log.start_offset}"
    if log.offsets != list(range(log.start_offset, log.end_offset)):
        yield f"{partition} is not dense from {log.start_offset} to {log.end_offset}"


def _content(
    claims: Claims, partition: Partition, log: Log, known: Mapping[int, Print], places: dict[Print, Place]
) -> Iterable[str]:
    for offset, payload in zip(log.offsets, log.payloads, strict=True):
        found, place = fingerprint(payload), Place(partition, offset)
        expected = known.get(offset)
        if expected is None:
            origin = claims.unknown.get(found)
            if origin is None or origin.topic != partition.topic:
                yield f"{place} holds {payload[:40]!r}, which nobody sent there and then"
        elif expected != found:
            yield f"{place} holds {payload[:40]!r}, not what its receipt is for"
        if found in places:
            yield f"{place} repeats {places[found]}: {payload[:40]!r}"
        places[found] = place


def _lost(partition: Partition, log: Log, known: Mapping[int, Print]) -> Iterable[str]:
    there = set(log.offsets)
    lost = sorted(offset for offset in known if offset >= log.start_offset and offset not in there)
    if lost:
        yield f"{partition} has lost {len(lost)} messages from offset {lost[0]} on"


def _missing_sequences(
    claims: Claims, logs: Mapping[Partition, Log], places: Mapping[Print, Place]
) -> Iterable[str]:
    dropped = {
        mark
        for partition, log in logs.items()
        for offset, mark in claims.known.get(partition, {}).items()
        if offset < log.start_offset
    }
    found: dict[tuple[str, str], set[int]] = {}
    passed: dict[tuple[str, str], int] = {}
    for mark, origin in [*claims.origins.items(), *claims.unknown.items()]:
        key = (origin.topic, origin.producer)
        if origin.producer and mark in places:
            found.setdefault(key, set()).add(origin.sequence)
        elif origin.producer and mark in dropped:
            passed[key] = max(passed.get(key, -1), origin.sequence)
    for key, expected in claims.sequences.items():
        kept = range(max(expected.start, passed.get(key, -1) + 1), expected.stop)
        missing = [sequence for sequence in kept if sequence not in found.get(key, ())]
        if missing and key[0] not in claims.doomed:
            yield f"producer {key[1]} of {key[0]} misses {len(missing)} sequences from {missing[0]} on"


async def read_logs(broker: Broker) -> dict[Partition, Log]:
    """Every partition of every topic, whole."""
    logs: dict[Partition, Log] = {}
    for topic in await broker.topics():
        for number in range(topic.partitions):
            logs[Partition(topic.name, number)] = await _read_log(broker, topic.name, number)
    return logs


async def _read_log(broker: Broker, topic: str, partition: int) -> Log:
    """Retention may move the start while the log is read; then reading starts again."""
    while True:
        start, end = await broker.bounds(topic, partition)
        offsets: list[int] = []
        payloads: list[bytes] = []
        offset = start
        try:
            while offset < end:
                found = await broker.read_batches(topic, partition=partition, offset=offset)
                if not found:
                    break
                for batch in found:
                    _take(batch, end, offsets, payloads)
                offset = max(offset + 1, found[-1].column("offset")[-1].as_py() + 1)
        except SparrowError:
            if (await broker.bounds(topic, partition)).start_offset == start:
                raise
            continue
        return Log(start, end, offsets, payloads)


def _take(batch: pa.RecordBatch, end: int, offsets: list[int], payloads: list[bytes]) -> None:
    kept = batch.filter(pc.less(batch.column("offset"), end))
    offsets.extend(kept.column("offset").to_pylist())
    payloads.extend(kept.column("data").to_pylist())


async def check(broker: Broker, claims: Claims, shortened: Collection[str] = ()) -> dict[Partition, Log]:
    """Reads everything, refuses every broken promise, and lets the claims learn from what was read."""
    logs = await read_logs(broker)
    complaints = judge(claims, logs, shortened)
    if complaints:
        more = f"\n  and {len(complaints) - _LISTED_MAX} more" if len(complaints) > _LISTED_MAX else ""
        listed = "\n  ".join(complaints[:_LISTED_MAX])
        raise CheckFailed(f"{len(complaints)} promises are broken:\n  {listed}{more}")
    claims.learn(claims.look(logs))
    return logs
