"""Staged publishes: parts gather what writers stage, a commit publishes them once.

The decision is a fact, in the log before any message of it can be read (docs/decisions/0010). A commit that
fits one chain is one. A larger one is decided first and then rolled forward: each chain says how many entries
are in the log with it, so whoever goes on after a crash, or after a fault, goes on exactly there.

Commits of one application run one after the other, calls to one part too. A commit that has begun goes on to
its end when its caller gives up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pyarrow as pa

from sparrow.broker import logs
from sparrow.broker.clock import Clock
from sparrow.broker.ingress import Encoded, Ingress
from sparrow.broker.topics import Topics
from sparrow.kernel import facts
from sparrow.kernel.applications import Applications, Newest
from sparrow.kernel.facts import ApplicationFact, BatchCommitted, BatchPublished, Fact
from sparrow.model.errors import (
    InvalidArgument,
    PreconditionFailed,
    SparrowError,
    StageIncomplete,
    StageNotFound,
    StagingFull,
    StorageError,
    TopicNotFound,
)
from sparrow.model.flow import ANYONE, Sender
from sparrow.model.message import StreamId
from sparrow.model.stage import (
    Committed,
    Part,
    Stage,
    StagingSettings,
    parse_batch,
    parse_name,
    parse_parts,
)
from sparrow.model.topic import Durability, Topic
from sparrow.store.catalog_tables import Document
from sparrow.store.ports import BatchDraft, Commit, Draft, FactsDraft, StagedEntry, Store

KIND = "application"
"""The kind of the documents that applications rest in."""
_PARTS_OPEN_MAX = 100_000
_LOOK_S_MAX = 60.0


class Staging:
    """See the module's text."""

    def __init__(
        self,
        store: Store,
        topics: Topics,
        ingress: Ingress,
        settings: StagingSettings,
        clock: Clock,
        arrived: Callable[[StreamId], None],
    ) -> None:
        self._store = store
        self._stages = store.stages
        self._topics = topics
        self._ingress = ingress
        self._settings = settings
        self._clock = clock
        self._arrived = arrived
        self._applications = Applications()
        self._turns = _Turns()
        self._pinned: set[int] = set()
        """Parts of commits under way: nobody may drop them."""
        self._tasks: set[asyncio.Task[Committed]] = set()
        self._keeper: asyncio.Task[None] | None = None
        self._log = logs.get("staging")

    # Life.

    async def load(self) -> None:
        """Takes over what rested, before any fact of the log."""
        for raw in (await self._store.documents(KIND)).values():
            self._applications.restore(raw)

    def replay(self, fact: Fact) -> None:
        """A fact of the unsealed log, in its order."""
        if isinstance(fact, ApplicationFact):
            self._applications.apply(fact)

    async def start(self) -> None:
        """Finishes what a crash interrupted, before anybody is let in, and begins to look after the rest."""
        self._stages.reserve_numbers(max(self._applications.stages_needed(), default=0))
        await self._resume()
        self._keeper = asyncio.get_running_loop().create_task(self._keep_for_ever())

    async def stop(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def checkpoints(self) -> list[Document]:
        """What changed of the applications since the last call."""
        return [Document(KIND, name, raw) for name, raw in self._applications.checkpoints()]

    def keep_changed(self, documents: Iterable[Document]) -> None:
        """A checkpoint could not be stored; it is due again."""
        self._applications.keep_changed(document.key for document in documents)

    # Staging.

    def stages(self) -> list[Stage]:
        """The parts that wait for a commit."""
        return [stage for _, stage in self._stages]

    async def stage(
        self,
        transaction: object,
        part: object,
        topic: object,
        batches: Sequence[pa.RecordBatch],
        *,
        position: int | None = None,
        sender: Sender = ANYONE,
    ) -> Stage:
        """Adds checked batches to a part, each as one call; ``position`` is the number of the first."""
        found: Stage | None = None
        for index, batch in enumerate(batches):
            at = None if position is None else position + index
            found = await self.stage_one(transaction, part, topic, batch, position=at, sender=sender)
        assert found is not None, "a table that was checked has a batch"
        return found

    async def stage_one(
        self,
        transaction: object,
        part: object,
        topic: object,
        batch: pa.RecordBatch,
        *,
        position: int | None = None,
        encoded: Encoded | None = None,
        partitions: int = 0,
        sender: Sender = ANYONE,
    ) -> Stage:
        """Adds one checked batch. A call that is there already is not added again; one that leaves out
        others is refused."""
        name = (parse_name("a transaction", transaction), parse_name("a part", part))
        if "idempotency_key" in batch.schema.names:
            raise InvalidArgument(
                "staged messages have no idempotency keys",
                hint="A commit publishes them once; leave keys out.",
            )
        async with self._turns.of(name):
            known = self._known(name, position)
            if known is not None:
                return known
            found = await self._topics.resolve(topic)
            _check_partitions(found, partitions)
            if encoded is not None and not -1 <= encoded.partition < found.partitions:
                raise InvalidArgument(f"{found.name!r} has no partition {encoded.partition}")
            await self._ingress.admit_ahead(found, batch, sender)
            drafts = self._ingress.drafts(found, batch, encoded)
            self._check_room(name, sum(len(draft.body) for draft in drafts))
            counted = found.partitions if found.partitions > 1 and "key" in batch.schema.names else 0
            number = self._stages.open_part(*name)
            if number in self._applications.stages_needed():
                raise PreconditionFailed(f"part {name[1]!r} is committed", hint="Stage under another name.")
            return await self._stages.write(number, drafts, counted, self._clock.now_us())

    def _known(self, name: tuple[str, str], position: int | None) -> Stage | None:
        number = self._stages.find(*name)
        stage = None if number is None else self._stages.get(number)
        calls = 0 if stage is None else stage.calls
        if position is None or position == calls:
            return None
        if type(position) is not int or position < 0:
            raise InvalidArgument(f"a position is a whole number from 0, not {position!r}")
        if position > calls:
            raise StageIncomplete(f"part {name[1]!r} holds {calls} calls, and this is number {position}")
        return stage

    def _check_room(self, name: tuple[str, str], size: int) -> None:
        if self._stages.size_bytes + size > self._settings.bytes_max:
            raise StagingFull(
                f"{self._stages.size_bytes} bytes are staged; staging.bytes_max is {self._settings.bytes_max}"
            )
        if self._stages.find(*name) is None and len(self._stages) >= _PARTS_OPEN_MAX:
            raise StagingFull(
                f"{_PARTS_OPEN_MAX} parts wait for a commit", hint="Commit or abort some of them."
            )

    async def abort(self, transaction: object, parts: Sequence[str] | None = None) -> int:
        """Drops the parts of a transaction, or those that are named; how many there were."""
        parse_name("a transaction", transaction)
        if isinstance(parts, str):
            raise InvalidArgument("parts are a list of names")
        needed = self._needed()
        doomed = [
            number
            for number, stage in self._stages
            if stage.transaction == transaction
            and number not in needed
            and (parts is None or stage.part in parts)
        ]
        await self._stages.drop(doomed)
        return len(doomed)

    # Committing.

    def committed(self, application: object) -> int | None:
        """The newest batch of an application; None when none is known."""
        found = self._applications.newest(parse_name("an application", application))
        return None if found is None else found.batch

    async def commit(
        self, application: object, batch: object, parts: object, *, remember_s: float | None = None
    ) -> Committed:
        """Publishes the parts, in their order, unless the batch was committed before."""
        name, number, chosen = (
            parse_name("an application", application),
            parse_batch(batch),
            parse_parts(parts),
        )
        keep_s = self._settings.remember_s if remember_s is None else remember_s
        if not isinstance(keep_s, int | float) or isinstance(keep_s, bool) or not 0 <= keep_s <= 1e10:
            raise InvalidArgument(f"remember_s is a number of seconds, not {remember_s!r}")
        task = asyncio.get_running_loop().create_task(self._commit_in_turn(name, number, chosen, keep_s))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Committed]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # Whoever waits has it.

    async def _commit_in_turn(self, name: str, batch: int, parts: list[Part], keep_s: float) -> Committed:
        async with self._turns.of((name,)):
            newest = self._applications.newest(name)
            if newest is not None and not newest.is_finished:
                await self._roll_forward(newest)
            if newest is not None and self._applications.is_committed(name, batch):
                await self._drop_all(parts)
                messages = newest.messages if newest.batch == batch else 0
                return Committed(application=name, batch=batch, messages=messages, is_repeat=True)
            async with AsyncExitStack() as held:
                for part in sorted(parts):
                    await held.enter_async_context(self._turns.of(part[:2]))
                numbers = [self._check_part(part) for part in parts]
                self._pinned.update(numbers)
                try:
                    messages = await self._commit(name, batch, numbers, keep_s)
                finally:
                    self._pinned.difference_update(numbers)
            await self._drop_all(parts)
            return Committed(application=name, batch=batch, messages=messages)

    async def _commit(self, name: str, batch: int, numbers: list[int], keep_s: float) -> int:
        entries = [entry for number in numbers for entry in await self._stages.read(number)]
        self._check_entries(entries)
        messages = sum(entry.draft.record_count for entry in entries)
        now_us = self._clock.now_us()
        decided = BatchCommitted(
            0, name, batch, (), len(entries), messages, now_us, now_us + int(keep_s * 1_000_000)
        )
        drafts = [entry.draft for entry in entries]
        if sum(len(draft.body) for draft in drafts) <= self._settings.chain_bytes_max:
            await self._append([decided, BatchPublished(0, name, batch, len(entries))], drafts)
            return messages
        await self._stages.sync(numbers)
        decided = _with_stages(decided, numbers)
        await self._append([decided], [])
        newest = self._applications.newest(name)
        assert newest is not None
        assert newest.batch == batch
        await self._roll_forward(newest)
        return messages

    def _check_part(self, part: Part) -> int:
        number = self._stages.find(part.transaction, part.part)
        stage = None if number is None else self._stages.get(number)
        if number is None or stage is None:
            raise StageNotFound(f"no part {part.part!r} of {part.transaction!r} is staged")
        if stage.messages != part.messages:
            raise StageIncomplete(
                f"part {part.part!r} holds {stage.messages} messages, not {part.messages}", part=part.part
            )
        return number

    def _check_entries(self, entries: Iterable[StagedEntry]) -> None:
        for topic_id, partitions in {(e.draft.stream.topic_id, e.partitions) for e in entries}:
            topic = self._topics.find(topic_id)
            if topic is None:
                raise TopicNotFound(
                    "a topic was deleted after messages for it were staged", hint="Stage them again."
                )
            _check_partitions(topic, partitions)

    async def _append(self, found: Sequence[ApplicationFact], drafts: Sequence[BatchDraft]) -> None:
        def on_commit(commit: Commit) -> None:
            for fact in found:
                self._applications.apply(fact)
            for draft in drafts:
                self._arrived(draft.stream)

        chain: list[Draft] = [FactsDraft(facts.encode(found), len(found)), *drafts]
        await self._store.append(chain, Durability.DURABLE, on_commit)

    async def _drop_all(self, parts: Iterable[Part]) -> None:
        """The transactions of a batch that is committed go, with the parts of attempts that failed."""
        transactions = {part.transaction for part in parts}
        needed = self._needed()
        doomed = [n for n, stage in self._stages if stage.transaction in transactions and n not in needed]
        with suppress(StorageError):  # What stays is swept later.
            await self._stages.drop(doomed)

    def _needed(self) -> set[int]:
        return self._pinned | self._applications.stages_needed()

    # Rolling forward.

    async def _roll_forward(self, newest: Newest) -> None:
        """Brings what is missing of a committed batch from its stages into the log."""
        name, batch, position = newest.application, newest.batch, 0
        for number in newest.stages:
            if self._stages.get(number) is None:
                self._log.error("stage-missing", "messages of a committed batch are lost", application=name)
                continue
            entries = await self._stages.read(number)
            for start, some in _pieces(entries, self._settings.chain_bytes_max):
                end = position + start + len(some)
                if end > newest.published:
                    left = some[max(0, newest.published - position - start) :]
                    await self._append_existing(BatchPublished(0, name, batch, end), left)
            position += len(entries)
        if position < newest.entries:
            await self._append([BatchPublished(0, name, batch, newest.entries)], [])
        self._log.info("batch-rolled-forward", "", application=name, batch=batch, messages=newest.messages)
        with suppress(StorageError):
            await self._stages.drop(newest.stages)

    async def _append_existing(self, fact: BatchPublished, entries: Sequence[StagedEntry]) -> None:
        """Messages of a topic that was deleted meanwhile went with it."""
        while True:
            known = {topic.id for topic in self._store.topics()}
            drafts = [entry.draft for entry in entries if entry.draft.stream.topic_id in known]
            try:
                await self._append([fact], drafts)
            except TopicNotFound:
                continue  # One was deleted while the chain waited; it is not known any more.
            return

    async def _resume(self) -> None:
        for newest in self._applications.unfinished():
            async with self._turns.of((newest.application,)):
                now = self._applications.newest(newest.application)
                if now is None or now.is_finished:
                    continue
                try:
                    await self._roll_forward(now)
                except SparrowError as error:
                    self._log.error("roll-forward-failed", str(error), application=now.application)

    # Looking after.

    async def _keep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(min(_LOOK_S_MAX, self._settings.keep_s / 2))
            try:
                await self._resume()
                await self.sweep()
            except SparrowError as error:
                self._log.error("sweep-failed", str(error))

    async def sweep(self) -> int:
        """Drops parts that nobody wrote to for long, and forgets applications whose time is over."""
        now_us = self._clock.now_us()
        before_us, needed = (
            now_us - int(self._settings.keep_s * 1_000_000),
            self._needed(),
        )
        doomed = [
            number
            for number, stage in self._stages
            if stage.calls and stage.written_at_us < before_us and number not in needed
        ]
        await self._stages.drop(doomed)
        if doomed:
            self._log.info("stages-swept", "nobody committed them", parts=len(doomed))
        for name in self._applications.expire(now_us):
            await self._store.delete_document(KIND, name)
        return len(doomed)


class _Turns:
    """One at a time for each name, in the order in which they came."""

    def __init__(self) -> None:
        self._locks: dict[tuple[str, ...], tuple[asyncio.Lock, int]] = {}

    @asynccontextmanager
    async def of(self, name: tuple[str, ...]) -> AsyncIterator[None]:
        lock, users = self._locks.get(name) or (asyncio.Lock(), 0)
        self._locks[name] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks[name]
            if users == 1:
                del self._locks[name]
            else:
                self._locks[name] = (lock, users - 1)


def _check_partitions(topic: Topic, partitions: int) -> None:
    if partitions and partitions != topic.partitions:
        raise PreconditionFailed(
            f"{topic.name!r} has {topic.partitions} partitions, not {partitions}",
            hint="Divide the messages anew.",
            partitions=topic.partitions,
        )


def _with_stages(decided: BatchCommitted, numbers: Sequence[int]) -> BatchCommitted:
    return BatchCommitted(
        0,
        decided.application,
        decided.batch,
        tuple(numbers),
        decided.entries,
        decided.messages,
        decided.at_us,
        decided.forget_at_us,
    )


def _pieces(entries: Sequence[StagedEntry], bytes_max: int) -> Iterator[tuple[int, Sequence[StagedEntry]]]:
    """Runs of entries that fit one chain, each with its place; one entry always does."""
    start = size = 0
    for place, entry in enumerate(entries):
        length = len(entry.draft.body)
        if place > start and size + length > bytes_max:
            yield start, entries[start:place]
            start, size = place, 0
        size += length
    if entries:
        yield start, entries[start:]
