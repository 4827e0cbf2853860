"""Puts facts into the journal, many decisions at a time, and in force when they are there.

While one entry of facts is on its way the next decisions gather, as published messages do. A decision is
applied in log order, in the moment the journal has it, and abandoned when the journal refuses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sparrow.kernel.facts import Fact, encode
from sparrow.model.errors import JournalFrozen, SparrowError
from sparrow.model.topic import Durability
from sparrow.store.ports import BatchDraft, Commit, Draft, FactsDraft, Store

Apply = Callable[[Sequence[Fact], int], None]
"""Takes the facts and the log sequence number that they got."""
Abandon = Callable[[Sequence[Fact]], None]


class _Decision(NamedTuple):
    facts: Sequence[Fact]
    apply: Apply
    abandon: Abandon
    future: asyncio.Future[None]


class Settling:
    """The lane that all subscriptions share."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._gathered: list[_Decision] = []
        self._runner: asyncio.Task[None] | None = None

    def submit(self, facts: Sequence[Fact], apply: Apply, abandon: Abandon) -> asyncio.Future[None]:
        """The facts will be applied once they are durable; the future says when, or why not."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._gathered.append(_Decision(facts, apply, abandon, future))
        if self._runner is None:
            self._runner = loop.create_task(self._run())
        return future

    async def append_with(self, drafts: Sequence[BatchDraft], facts: Sequence[Fact], apply: Apply) -> Commit:
        """Messages and facts as one atomic chain: a dead letter and the ack of its original."""
        chain: list[Draft] = [*drafts, FactsDraft(encode(facts), len(facts))]
        return await self._store.append(chain, Durability.DURABLE, lambda commit: apply(facts, commit.lsn))

    async def flush(self) -> None:
        """Returns when everything submitted so far is durable."""
        while self._runner is not None:
            await asyncio.wait([self._runner])

    async def _run(self) -> None:
        try:
            while self._gathered:
                group, self._gathered = self._gathered, []
                await self._store_group(group)
        finally:
            self._runner = None

    async def _store_group(self, group: list[_Decision]) -> None:
        facts = [fact for decision in group for fact in decision.facts]

        def apply_all(commit: Commit) -> None:
            for decision in group:
                decision.apply(decision.facts, commit.lsn)

        try:
            await self._store.append([FactsDraft(encode(facts), len(facts))], Durability.DURABLE, apply_all)
        except SparrowError as error:
            _abandon(group, error)
        except asyncio.CancelledError:
            _abandon(group, JournalFrozen("the broker stopped before this was stored"))
            raise
        except Exception as error:  # noqa: BLE001 - those who wait must hear of a bug too
            _abandon(group, SparrowError(f"settling failed: {error!r}"))
        else:
            for decision in group:
                if not decision.future.done():
                    decision.future.set_result(None)


def _abandon(group: list[_Decision], error: SparrowError) -> None:
    for decision in group:
        decision.abandon(decision.facts)
        if not decision.future.done():
            decision.future.set_exception(error)
            decision.future.exception()  # Acks that nobody waits for are delivered again; that is enough.
