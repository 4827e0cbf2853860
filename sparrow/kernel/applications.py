"""Which batches of which applications are committed, and how far the newest of each is in the log.

An application (a Spark query, a job that writes once) commits staged batches under numbers that only rise.
A batch that is not above the newest one is a repeat: it is committed, whoever asks. The newest one may be
on its way from its stages into the log; until it is there, nothing newer is decided.

State changes through ``apply`` alone, live and in recovery. Facts applied again, on top of a later state,
change nothing: a batch below the newest is old news, and what is in the log only grows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from sparrow.kernel.facts import ApplicationFact, BatchCommitted, BatchPublished
from sparrow.model.errors import DataDamaged, DataDirectoryNewer

_VERSION = 1


class Newest(msgspec.Struct, frozen=True, array_like=True):
    """The newest committed batch of an application."""

    application: str
    batch: int
    stages: tuple[int, ...]
    entries: int
    messages: int
    at_us: int
    forget_at_us: int
    published: int = 0
    """How many of its entries are in the log."""

    @property
    def is_finished(self) -> bool:
        return self.published >= self.entries


class Applications:
    """One line an application; see the module's text."""

    def __init__(self) -> None:
        self._newest: dict[str, Newest] = {}
        self._changed: set[str] = set()

    def __len__(self) -> int:
        return len(self._newest)

    def __iter__(self) -> Iterator[Newest]:
        return iter(list(self._newest.values()))

    def newest(self, application: str) -> Newest | None:
        """Its newest batch; None of an application that never committed, or long ago."""
        return self._newest.get(application)

    def is_committed(self, application: str, batch: int) -> bool:
        """Whether the batch, or one above it, is committed."""
        found = self._newest.get(application)
        return found is not None and batch <= found.batch

    def unfinished(self) -> list[Newest]:
        """Batches that are committed and not yet all in the log."""
        return [found for found in self._newest.values() if not found.is_finished]

    def stages_needed(self) -> set[int]:
        """Stage files that must stay."""
        return {number for found in self.unfinished() for number in found.stages}

    def apply(self, fact: ApplicationFact) -> None:
        """The one way in which anything changes here."""
        found = self._newest.get(fact.application)
        if isinstance(fact, BatchCommitted):
            if found is None or fact.batch > found.batch:
                _, application, batch, *rest = msgspec.structs.astuple(fact)
                self._keep(Newest(application, batch, *rest))
        elif isinstance(fact, BatchPublished) and found is not None and found.batch == fact.batch:
            self._keep(msgspec.structs.replace(found, published=max(found.published, fact.entries)))

    def expire(self, now_us: int) -> list[str]:
        """Forgets the applications whose time is over; their names."""
        gone = [
            found.application
            for found in self._newest.values()
            if found.is_finished and found.forget_at_us <= now_us
        ]
        for application in gone:
            del self._newest[application]
            self._changed.discard(application)
        return gone

    def _keep(self, newest: Newest) -> None:
        self._newest[newest.application] = newest
        self._changed.add(newest.application)

    # What rests between two runs.

    def checkpoints(self) -> list[tuple[str, bytes]]:
        """The lines that changed since the last call."""
        changed, self._changed = self._changed, set()
        return [(name, _encode(self._newest[name])) for name in sorted(changed) if name in self._newest]

    def keep_changed(self, names: Iterable[str]) -> None:
        """A checkpoint could not be stored; it is due again."""
        self._changed.update(names)

    def restore(self, raw: bytes) -> None:
        """Takes a line over, before any fact."""
        saved = _decode(raw)
        self._newest[saved.application] = saved


def _encode(newest: Newest) -> bytes:
    return msgspec.msgpack.encode((_VERSION, newest))


def _decode(raw: bytes) -> Newest:
    try:
        version, fields = msgspec.msgpack.decode(raw, type=tuple[int, msgspec.Raw])
        if version > _VERSION:
            raise DataDirectoryNewer(f"an application is kept in form {version}; {_VERSION} is known")
        return msgspec.msgpack.decode(fields, type=Newest)
    except msgspec.MsgspecError as error:
        raise DataDamaged(f"what is known of an application does not decode: {error}") from error
