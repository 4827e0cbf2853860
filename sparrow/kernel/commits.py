"""What is durable of a group: its generation, and the offsets that its members committed.

It changes by facts alone, live and in replay, and rests in the subscription's checkpoint as one value.
Membership is not part of it: after a restart a group is empty and goes on from the generation it had
(queue.md C37), so no number is ever used twice.

A commit is a note of a member, an offset and a text of its own, to be read back by whoever owns the
stream next. What is *done* is the cursor's business: a commit's ack is a fact of its own. When a group
has been empty for long its commits are forgotten; the cursor is not.
"""

from __future__ import annotations

import msgspec

from sparrow.kernel import facts
from sparrow.kernel.facts import Fact
from sparrow.kernel.offsets import OFFSET_MAX
from sparrow.model.errors import DataDamaged, DataDirectoryNewer, InvalidArgument
from sparrow.model.message import StreamId

FORMAT_VERSION = 1
METADATA_LENGTH_MAX = 4096
"""Characters of a commit's text; as Kafka allows, so that its clients meet no smaller limit."""


class Commit(msgspec.Struct, frozen=True, array_like=True):
    """The newest commit of one stream."""

    topic_id: int
    partition: int
    offset: int
    metadata: str
    member: str
    generation: int
    at_us: int


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    version: int
    generation: int
    advanced_at_us: int
    reason: str
    commits: list[Commit]


class GroupLedger:
    """Durable state of one group."""

    __slots__ = ("_commits", "advanced_at_us", "generation", "reason")

    def __init__(self) -> None:
        self.generation = 0
        """The newest generation; 0 before the first rebalance."""
        self.advanced_at_us = 0
        self.reason = ""
        self._commits: dict[StreamId, Commit] = {}

    def commit_of(self, stream: StreamId) -> Commit | None:
        """The newest commit of a stream; ``None`` when there is none or it was forgotten."""
        return self._commits.get(stream)

    @property
    def has_commits(self) -> bool:
        return bool(self._commits)

    def newest_at_us(self, now_us: int) -> int:
        """Now, or the time of the newest commit if the clock was set back since."""
        return max(now_us, *(commit.at_us for commit in self._commits.values()), 0)

    def commits(self) -> list[Commit]:
        """The newest commit of every stream that has one, sorted."""
        return [self._commits[stream] for stream in sorted(self._commits)]

    def apply(self, fact: Fact) -> None:
        """What happened; facts of other things are passed over."""
        if isinstance(fact, facts.GroupAdvanced):
            if fact.generation > self.generation:
                self.generation, self.advanced_at_us = fact.generation, fact.at_us
                self.reason = fact.reason
        elif isinstance(fact, facts.OffsetCommitted):
            self._commits[fact.stream] = Commit(
                *fact.stream, fact.offset, fact.metadata, fact.member, fact.generation, fact.at_us
            )
        elif isinstance(fact, facts.OffsetsForgotten):
            kept = {s: commit for s, commit in self._commits.items() if commit.at_us > fact.at_us}
            self._commits = kept
        elif isinstance(fact, facts.StreamDetached):
            self._commits.pop(fact.stream, None)

    def checkpoint(self) -> bytes:
        """All of it, in stable bytes; none when there never was a group."""
        if self.generation == 0 and not self._commits:
            return b""
        stored = _Stored(FORMAT_VERSION, self.generation, self.advanced_at_us, self.reason, self.commits())
        return msgspec.msgpack.encode(stored)

    def restore(self, raw: bytes) -> None:
        """Take over what ``checkpoint`` returned; only for a ledger that is empty."""
        assert not self.checkpoint(), "a ledger is restored once, before anything else"
        if not raw:
            return
        try:
            stored = msgspec.msgpack.decode(raw, type=_Stored)
        except msgspec.DecodeError as error:
            raise _complaint(raw, error) from error
        if stored.version > FORMAT_VERSION:
            raise DataDirectoryNewer(f"a stored group has the unknown version {stored.version}")
        self.generation, self.advanced_at_us = stored.generation, stored.advanced_at_us
        self.reason = stored.reason
        self._commits = {StreamId(c.topic_id, c.partition): c for c in stored.commits}


def _complaint(raw: bytes, cause: msgspec.DecodeError) -> Exception:
    """A newer version may have other fields: it is named before damage is."""
    try:
        loose = msgspec.msgpack.decode(raw)
    except msgspec.DecodeError:
        loose = None
    version = loose[0] if isinstance(loose, list) and loose else None
    if isinstance(version, int) and version > FORMAT_VERSION:
        return DataDirectoryNewer(f"a stored group has the unknown version {version}")
    return DataDamaged(f"a stored group does not decode: {cause}")


def check_commit(offset: int, metadata: str) -> None:
    """Refuse an offset or a text that no commit may have."""
    if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset <= OFFSET_MAX:
        raise InvalidArgument(f"a committed offset is a whole number from 0 on, not {offset!r}")
    if not isinstance(metadata, str) or len(metadata) > METADATA_LENGTH_MAX:
        told = f"{len(metadata)} characters" if isinstance(metadata, str) else repr(metadata)
        raise InvalidArgument(
            f"the metadata of a commit is text of up to {METADATA_LENGTH_MAX} characters, not {told}"
        )
