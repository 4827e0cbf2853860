"""The broker's verbs for staged publishes; the rules are in staging.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa

from sparrow.broker.ingress import Encoded
from sparrow.broker.staging import Staging
from sparrow.model.errors import InvalidArgument
from sparrow.model.flow import ANYONE, Sender, parse_sender
from sparrow.model.stage import Committed, Part, Stage
from sparrow.store import admission
from sparrow.store import batch as batches
from sparrow.store.batch import Body


class StageVerbs:
    """A part of the broker."""

    _staging: Staging
    _check_open: Callable[[], None]

    async def stage(
        self,
        transaction: str,
        part: str,
        topic: str,
        table: pa.Table | pa.RecordBatch,
        *,
        position: int | None = None,
        publisher: str | None = None,
        priority_class: str | None = None,
        token: str | None = None,
    ) -> Stage:
        """Adds an Arrow table to a part that a commit will publish. The part counts calls, one for each
        batch of a large table; with ``position``, the number of the first, a repeat is recognised."""
        self._check_open()
        sender = parse_sender(publisher, priority_class, token)
        if not isinstance(table, pa.Table | pa.RecordBatch):
            raise InvalidArgument(f"stage takes an Arrow table or record batch, not {type(table).__name__}")
        chosen = batches.from_table(table)
        admission.check_batch(chosen)
        return await self._staging.stage(
            transaction, part, topic, batches.cut(chosen), position=position, sender=sender
        )

    async def stage_encoded(
        self,
        transaction: str,
        part: str,
        topic: str,
        body: Body,
        *,
        position: int | None = None,
        partition: int = -1,
        partitions: int = 0,
        sender: Sender = ANYONE,
    ) -> Stage:
        """The same for one batch that a client encoded as the journal does (docs/format.md §3)."""
        self._check_open()
        return await self._staging.stage_one(
            transaction,
            part,
            topic,
            admission.open_body(body),
            position=position,
            encoded=Encoded(body, partition),
            partitions=partitions,
            sender=sender,
        )

    async def commit_staged(
        self,
        application: str,
        batch: int,
        parts: Sequence[Part | tuple[str, str, int]],
        *,
        remember_s: float | None = None,
    ) -> Committed:
        """Publishes staged parts, each (transaction, part, messages), in this order, once: when the batch of
        the application, or a newer one, is committed already, they are dropped and the answer says so.
        ``remember_s`` is how long that is known; the setting staging.remember_s otherwise."""
        self._check_open()
        return await self._staging.commit(application, batch, parts, remember_s=remember_s)

    async def abort_staged(self, transaction: str, parts: Sequence[str] | None = None) -> int:
        """Drops what a transaction staged, or only the named parts of it; how many parts there were."""
        self._check_open()
        return await self._staging.abort(transaction, parts)

    async def stages(self) -> list[Stage]:
        """The parts that wait for a commit."""
        self._check_open()
        return self._staging.stages()

    async def committed_batch(self, application: str) -> int | None:
        """The newest batch that an application committed; None when none is known."""
        self._check_open()
        return self._staging.committed(application)
