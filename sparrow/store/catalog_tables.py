"""What the catalog keeps: its tables, and the values that its rows are read into.

Every table opens with the column ``crc``: the crc32c of the table's name and of the array of the
row's other values, in column order, both as msgpack. SQLite keeps no checksums of its own; this one
turns any change of a stored value, of its type or of its table into something that can be seen.
Columns are integers, texts and bytes only (a truth value is 0 or 1), because those come back from
every database exactly as they went in, which a checksum needs.

A new column goes to the end of its table, so that a migrated catalog and a new one agree on the
order. The key's columns come right after the checksum. All tables are clustered on their key and have
no hidden row number: a row lies in one place, and ``catalog_salvage`` recognises it there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import google_crc32c
import msgspec
from sqlalchemy import (
    BigInteger,
    Column,
    ForeignKey,
    ForeignKeyConstraint,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
)

from sparrow.model.errors import DataDirectoryNewer
from sparrow.model.message import StreamId
from sparrow.model.topic import Topic, TopicPolicy

Value: TypeAlias = int | str | bytes
Row: TypeAlias = tuple[Value, ...]
"""The values of one row, in column order, without the checksum; the key's values come first."""
Key: TypeAlias = tuple[Value, ...]

METADATA = MetaData()


def _table(name: str, *parts: Column[int] | Column[str] | Column[bytes] | ForeignKeyConstraint) -> Table:
    crc = Column("crc", BigInteger, nullable=False)
    return Table(name, METADATA, crc, *parts, sqlite_with_rowid=False)


def _key(name: str, *rules: ForeignKey) -> Column[int]:
    return Column(name, BigInteger, *rules, primary_key=True, autoincrement=False)


def _number(name: str) -> Column[int]:
    return Column(name, BigInteger, nullable=False)


def _truth(name: str) -> Column[int]:
    return Column(name, SmallInteger, nullable=False)


def _bytes(name: str) -> Column[bytes]:
    return Column(name, LargeBinary, nullable=False)


def _name(name: str = "name") -> Column[str]:
    return Column(name, Text, nullable=False, unique=True)


def _stream() -> ForeignKeyConstraint:
    return ForeignKeyConstraint(["topic_id", "partition"], ["streams.topic_id", "streams.partition"])


SCHEMA_VERSION_TABLE = _table("schema_version", _key("id"), _number("version"))
LEDGER_TABLE = _table("ledger", _key("id"), _bytes("content"))

TOPICS = _table(
    "topics",
    _key("id"),
    _name(),
    _number("partitions"),
    _bytes("policy_json"),
    _number("created_at_us"),
)
STREAMS = _table(
    "streams",
    _key("topic_id", ForeignKey("topics.id")),
    _key("partition"),
    _number("start_offset"),
    _number("sealed_end_offset"),
)
SEGMENTS = _table(
    "segments",
    _key("topic_id"),
    _key("partition"),
    _key("first_offset"),
    _number("end_offset"),
    _number("rows"),
    _number("size_bytes"),
    _number("first_time_us"),
    _number("last_time_us"),
    Column("file_name", Text, nullable=False),
    _number("footer_crc"),
    _number("footer_length"),
    _truth("has_idempotency_keys"),
    _bytes("groups"),
    _stream(),
)
SUBSCRIPTIONS = _table(
    "subscriptions",
    _key("id"),
    _name(),
    Column("pattern", Text, nullable=False),
    _bytes("policy_json"),
    _number("created_at_us"),
    _truth("is_paused"),
)
CURSORS = _table(
    "cursors",
    _key("subscription_id", ForeignKey("subscriptions.id")),
    _number("as_of"),
    _bytes("state"),
)
PRODUCERS = _table("producers", _key("id"), _name(), _number("epoch"))
PRODUCER_STATES = _table(
    "producer_states",
    _key("producer_id", ForeignKey("producers.id")),
    _key("topic_id", ForeignKey("topics.id")),
    _number("as_of"),
    _bytes("state"),
)
DOCUMENTS = _table(
    "documents",
    Column("kind", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    _bytes("value"),
)

CONTENT_TABLES = (
    TOPICS,
    STREAMS,
    SEGMENTS,
    SUBSCRIPTIONS,
    CURSORS,
    PRODUCERS,
    PRODUCER_STATES,
    DOCUMENTS,
)
"""The tables that the ledger's digests cover, parents before children."""


_encode = msgspec.msgpack.Encoder().encode


def row_crc(table_name: str, row: Row) -> int:
    """The checksum that a row of this table carries."""
    return row_crcs(table_name, [row])[0]


def row_crcs(table_name: str, rows: Iterable[Row]) -> list[int]:
    """The checksums of many rows: each goes on from that of the table's name."""
    # SQLAlchemy's names are a subclass of str, which msgpack does not take.
    start = google_crc32c.value(_encode(str(table_name)))
    extend = google_crc32c.extend
    return [extend(start, encoded) for encoded in map(_encode, rows)]


def key_of(table: Table, row: Row) -> Key:
    """The values that tell a row from all others of its table."""
    return row[: len(table.primary_key)]


class RowGroup(NamedTuple):
    """One row group of a segment: which offsets it holds and where its bytes lie."""

    first_offset: int
    rows: int
    byte_start: int
    byte_length: int
    crc32c: int


_GROUP = struct.Struct("<qIQQI")


def pack_groups(groups: Iterable[RowGroup]) -> bytes:
    """The form in which a segment's row groups are stored."""
    return b"".join(_GROUP.pack(*group) for group in groups)


def unpack_groups(packed: bytes) -> list[RowGroup]:
    """The row groups that ``pack_groups`` packed."""
    return [RowGroup._make(fields) for fields in _GROUP.iter_unpack(packed)]


class SegmentKey(NamedTuple):
    """What tells one segment from all others."""

    topic_id: int
    partition: int
    first_offset: int


class StreamRow(msgspec.Struct, frozen=True, gc=False):
    """One partition of a topic: the first offset still kept, and the end of its sealed part."""

    topic_id: int
    partition: int
    start_offset: int = 0
    sealed_end_offset: int = 0

    @property
    def stream(self) -> StreamId:
        return StreamId(self.topic_id, self.partition)


class Segment(msgspec.Struct, frozen=True, gc=False):
    """One sealed Parquet file of a stream."""

    topic_id: int
    partition: int
    first_offset: int
    end_offset: int
    rows: int
    size_bytes: int
    first_time_us: int
    last_time_us: int
    file_name: str
    footer_crc: int
    footer_length: int
    has_idempotency_keys: bool
    groups: bytes

    @property
    def key(self) -> SegmentKey:
        return SegmentKey(self.topic_id, self.partition, self.first_offset)

    @property
    def stream(self) -> StreamId:
        return StreamId(self.topic_id, self.partition)

    def row_groups(self) -> list[RowGroup]:
        return unpack_groups(self.groups)


class SubscriptionRow(msgspec.Struct, frozen=True):
    """A subscription; what its policy means is the caller's to know."""

    id: int
    name: str
    pattern: str
    policy_json: bytes
    created_at_us: int
    is_paused: bool = False


class CursorCheckpoint(msgspec.Struct, frozen=True, gc=False):
    """A subscription's cursors, in the kernel's own form, true as of the journal position ``as_of``."""

    subscription_id: int
    as_of: int
    state: bytes


class Producer(msgspec.Struct, frozen=True, gc=False):
    """A named producer; a higher epoch fences every lower one."""

    id: int
    name: str
    epoch: int


class ProducerState(msgspec.Struct, frozen=True, gc=False):
    """What a producer has published to a topic, true as of the journal position ``as_of``."""

    producer_id: int
    topic_id: int
    as_of: int
    state: bytes


class Document(msgspec.Struct, frozen=True, gc=False):
    """A small named value of a kind that the catalog does not look into."""

    kind: str
    key: str
    value: bytes


_policy_from_json = msgspec.json.Decoder(TopicPolicy).decode


def topic_to_row(topic: Topic) -> Row:
    policy = msgspec.json.encode(topic.policy)
    return (topic.id, topic.name, topic.partitions, policy, topic.created_at_us)


def topic_from_row(row: tuple[int, str, int, bytes, int]) -> Topic:
    return Topic(
        id=row[0],
        name=row[1],
        partitions=row[2],
        policy=_known_policy(row[1], row[3]),
        created_at_us=row[4],
    )


def _known_policy(topic: str, policy_json: bytes) -> TopicPolicy:
    try:
        return _policy_from_json(policy_json)
    except msgspec.ValidationError as error:
        # The row has matched its checksum, so another version of Sparrow meant what it wrote.
        raise DataDirectoryNewer(f"the policy of topic {topic!r} is not known here: {error}") from error


def segment_from_row(
    row: tuple[int, int, int, int, int, int, int, int, str, int, int, int, bytes],
) -> Segment:
    return Segment(*row[:11], bool(row[11]), row[12])


def subscription_from_row(row: tuple[int, str, str, bytes, int, int]) -> SubscriptionRow:
    return SubscriptionRow(*row[:5], bool(row[5]))


def to_row(value: msgspec.Struct) -> Row:
    """The row of any value here but a topic: its fields in order, truth values as 0 or 1."""
    fields = msgspec.structs.astuple(value)
    return tuple(int(field) if isinstance(field, bool) else field for field in fields)


class CatalogRows(msgspec.Struct, kw_only=True):
    """Everything that a catalog holds, as values."""

    topics: list[Topic] = []
    streams: list[StreamRow] = []
    segments: list[Segment] = []
    subscriptions: list[SubscriptionRow] = []
    cursors: list[CursorCheckpoint] = []
    producers: list[Producer] = []
    producer_states: list[ProducerState] = []
    documents: list[Document] = []
    last_ids: dict[str, int] = {}
    """The highest ids given out, by table, as far as they are known; rows may hold higher ones."""

    def by_table(self) -> list[tuple[Table, list[Row]]]:
        """The rows of every table, parents before children."""
        return [
            (table, [topic_to_row(value) if table is TOPICS else to_row(value) for value in values])
            for table in CONTENT_TABLES
            for values in [getattr(self, table.name)]
        ]

    def highest_ids(self) -> list[tuple[Table, int]]:
        """The highest id that was given out in each table that gives them out."""
        named: list[tuple[Table, Sequence[Topic | SubscriptionRow | Producer]]] = [
            (TOPICS, self.topics),
            (SUBSCRIPTIONS, self.subscriptions),
            (PRODUCERS, self.producers),
        ]
        return [
            (table, max([self.last_ids.get(table.name, 0), *(value.id for value in values)]))
            for table, values in named
        ]
