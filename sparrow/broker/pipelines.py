"""Pipelines as the broker knows them: what is declared, whether it is to run, who runs it, how it goes.

A pipeline's position, its wish to run and its dead letters are those of its subscriptions. What is kept
beside them is one document: the declaration, the number of its run, and the last error. A *run* is one life
of its query, with a checkpoint of its own; a seek or another transformation begins the next.

Runners are processes elsewhere. One that runs a pipeline *holds* it, and says so again and again; nobody else
takes it up meanwhile. Holds are not durable: after a restart whoever asks first gets it, and the query's
checkpoint and the broker's memory of committed batches keep the results right all the same.

A seek while a batch is under way is followed by that batch's commit, which would move the cursor on. So the
positions of a new run are written down with it, and put into force when its runner begins.

A job (compact, merge) has no subscription: that it is stopped, and its turns, are in its document. Runners
see it when its turn has come; a turn with nothing to do is over without one (``pass_over``).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from sparrow.broker import logs
from sparrow.broker.clock import Clock
from sparrow.broker.jobs import Jobs
from sparrow.broker.positions import Positions
from sparrow.broker.subscriptions import Subscriptions
from sparrow.broker.telemetry import Extra
from sparrow.broker.topics import Topics
from sparrow.kernel import turns as kernel_turns
from sparrow.kernel.pattern import parse_pattern
from sparrow.model.errors import (
    InvalidArgument,
    InvalidPipeline,
    NotFound,
    PipelineHeld,
    PipelineNotFound,
    PreconditionFailed,
    SparrowError,
)
from sparrow.model.names import is_internal
from sparrow.model.pipeline import (
    Pipeline,
    PipelineLine,
    PipelineProgress,
    PipelineReport,
    PipelineTurns,
    Source,
    parse_pipeline,
)
from sparrow.model.subscription import Delivery, Subscription
from sparrow.store.ports import Store

KIND = "pipeline"
HOLD_S = 20.0
"""How long a runner that says nothing keeps what it holds."""
SAVE_S = 10.0
"""How often figures alone are written down."""
LINES_MAX = 1000
COUNT_MAX = 1000
_SUPERVISED = "sparrow up"

Place = tuple[str, int, int]
"""A topic, a partition, and the next offset."""


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored of a pipeline."""

    pipeline: Pipeline
    created_at_us: int
    changed_at_us: int
    run: int = 0
    positions: dict[str, list[Place]] | None = None
    """By subscription, where the run begins, until its runner took that up."""
    error: str = ""
    error_at_us: int | None = None
    progress: PipelineProgress | None = None
    is_stopped: bool = False
    """Of a job; others are stopped when their subscriptions are paused."""
    turns: PipelineTurns | None = None
    """Of a job."""


class _Hold:
    """A runner's claim on a pipeline."""

    def __init__(self, runner: str, until_s: float) -> None:
        self.runner = runner
        self.until_s = until_s


class Pipelines:
    """See the module's text."""

    def __init__(
        self,
        store: Store,
        topics: Topics,
        subscriptions: Subscriptions,
        positions: Positions,
        clock: Clock,
        subscribe: Callable[..., Awaitable[Any]],
        handle: Callable[[str], Awaitable[Any]],
        jobs: Jobs,
    ) -> None:
        self._store = store
        self._topics = topics
        self._subscriptions = subscriptions
        self._positions = positions
        self._clock = clock
        self._subscribe = subscribe
        self._handle = handle
        self._jobs = jobs
        self._kept: dict[str, Kept] = {}
        self._holds: dict[str, _Hold] = {}
        self._leaving: set[str] = set()
        """Subscriptions that go because their pipeline says so."""
        self._lines: dict[str, deque[PipelineLine]] = {}
        self._saved_at_s: dict[str, float] = {}
        self._changing = asyncio.Lock()
        self.changed = asyncio.Event()
        """Set when there may be something else to run."""
        self._log = logs.get("pipelines")

    async def load(self) -> None:
        """Takes up what there is after recovery."""
        for name, raw in (await self._store.documents(KIND)).items():
            self._kept[name] = msgspec.json.decode(raw, type=Kept)

    async def stop(self) -> None:
        """Writes down the newest figures."""
        for name, kept in self._kept.items():
            if kept.progress is not None:
                await self._store.put_document(KIND, name, msgspec.json.encode(kept))

    # Declaring.

    async def apply(self, declaration: Mapping[str, Any] | Pipeline, *, is_stopped: bool) -> PipelineReport:
        """Makes a pipeline be what is declared."""
        wanted = parse_pipeline(declaration)
        _check_patterns(wanted)
        async with self._changing:
            before = self._kept.get(wanted.name)
            if before is None:
                await self._create(wanted, is_stopped)
            elif before.pipeline != wanted:
                await self._change(before, wanted)
        self.changed.set()
        return self.report(wanted.name)

    async def _create(self, wanted: Pipeline, is_stopped: bool) -> None:
        for name, source in wanted.subscriptions().items():
            await self._subscribe_source(wanted, name, source)
            await self._subscriptions.pause(name, is_stopped)
        now_us = self._clock.now_us()
        turns = PipelineTurns(next_at_us=now_us) if wanted.is_job else None
        await self._save(
            Kept(
                pipeline=wanted,
                created_at_us=now_us,
                changed_at_us=now_us,
                is_stopped=is_stopped and wanted.is_job,
                turns=turns,
            )
        )
        self._log.info("pipeline-created", "", pipeline=wanted.name)

    async def _change(self, before: Kept, wanted: Pipeline) -> None:
        old, new = before.pipeline.subscriptions(), wanted.subscriptions()
        is_paused = not self._is_wanted(before)
        is_new_run = not before.pipeline.is_same_query(wanted)
        for name, source in old.items():
            if name not in new or parse_pattern(new[name].topic) != parse_pattern(source.topic):
                await self._unsubscribe(name)
        for name, source in new.items():
            if self._subscriptions.peek(name) is None:
                await self._subscribe_source(wanted, name, source)
                await self._subscriptions.pause(name, is_paused)
            elif self._subscriptions.get(name).subscription.policy.dead_letter_topic != (
                wanted.dead_letter_topic
            ):
                await (await self._handle(name)).update(dead_letter_topic=wanted.dead_letter_topic)
        now_us = self._clock.now_us()
        changed = msgspec.structs.replace(
            before,
            pipeline=wanted,
            changed_at_us=now_us,
            is_stopped=is_paused and wanted.is_job,
            turns=_due_at(before.turns, now_us) if wanted.is_job else None,
        )
        if is_new_run:
            changed = msgspec.structs.replace(changed, run=before.run + 1, positions=self._floors(wanted))
        await self._save(changed)
        self._log.info("pipeline-changed", "", pipeline=wanted.name, run=changed.run)

    async def _subscribe_source(self, wanted: Pipeline, name: str, source: Source) -> None:
        await self._subscribe(
            name,
            source.topic,
            start=_start(source),
            delivery=Delivery.PIPELINE.value,
            dead_letter_topic=wanted.dead_letter_topic,
        )

    async def _unsubscribe(self, name: str) -> None:
        self._leaving.add(name)
        try:
            await (await self._handle(name)).unsubscribe()
        finally:
            self._leaving.discard(name)

    async def delete(self, name: str) -> None:
        """The pipeline and its subscriptions go; what it wrote stays."""
        async with self._changing:
            kept = self._get(name)
            for each in kept.pipeline.subscriptions():
                if self._subscriptions.peek(each) is not None:
                    await self._unsubscribe(each)
            await self._store.delete_document(KIND, name)
            for known in (self._kept, self._holds, self._lines, self._saved_at_s):
                known.pop(name, None)
        self.changed.set()
        self._log.info("pipeline-deleted", "", pipeline=name)

    # Moving.

    async def set_running(self, name: str, is_running: bool) -> PipelineReport:
        """Whether it is to run, from now on and after restarts."""
        kept = self._get(name)
        for each in kept.pipeline.subscriptions():
            await self._subscriptions.pause(each, not is_running)
        changes: dict[str, Any] = {"is_stopped": kept.pipeline.is_job and not is_running}
        if is_running:
            changes |= {"error": "", "error_at_us": None}
            if kept.turns is not None and kept.turns.failures:
                changes["turns"] = _due_at(kept.turns, self._clock.now_us())
        await self._revise(name, **changes)
        self.changed.set()
        return self.report(name)

    async def seek(self, name: str, target: Any) -> PipelineReport:
        """Goes on elsewhere, with a new run; positions of a topic go to the source that reads it."""
        found = self._get(name).pipeline.subscriptions()
        if not found:
            raise PreconditionFailed(
                f"the pipeline {name!r} has no position: it looks at all that is sealed",
                hint="`sparrow pipeline run` does it now.",
            )
        for each, source in found.items():
            chosen = target
            if isinstance(target, Mapping):
                pattern = parse_pattern(source.topic)
                chosen = {key: at for key, at in target.items() if pattern.matches(_topic_of(key))}
                if not chosen:
                    continue
            await self._positions.seek(self._subscriptions.get(each), chosen)
        await self._begin_next_run(name)
        return self.report(name)

    async def sought(self, subscription: Subscription) -> None:
        """Somebody put a subscription elsewhere."""
        name = self.owner_of(subscription)
        if name is not None:
            await self._begin_next_run(name)

    async def _begin_next_run(self, name: str) -> None:
        kept = self._get(name)
        await self._save(
            msgspec.structs.replace(kept, run=kept.run + 1, positions=self._floors(kept.pipeline))
        )
        self.changed.set()

    def _floors(self, pipeline: Pipeline) -> dict[str, list[Place]]:
        """Where its subscriptions stand."""
        found: dict[str, list[Place]] = {}
        for name in pipeline.subscriptions():
            places = found.setdefault(name, [])
            delivery = self._subscriptions.get(name).delivery
            for stream in sorted(delivery.streams):
                topic = self._topics.find(stream.topic_id)
                if topic is not None:
                    places.append((topic.name, stream.partition, delivery.cursor(stream).floor))
        return found

    def owner_of(self, subscription: Subscription) -> str | None:
        """The pipeline that a subscription is part of."""
        if subscription.policy.delivery is not Delivery.PIPELINE:
            return None
        for name, kept in self._kept.items():
            if subscription.name in kept.pipeline.subscriptions():
                return name
        return None

    def check_unsubscribe(self, subscription: Subscription) -> None:
        """A pipeline's subscription goes with the pipeline."""
        name = self.owner_of(subscription)
        if name is not None and subscription.name not in self._leaving:
            raise PreconditionFailed(
                f"the subscription {subscription.name!r} is the pipeline {name!r}",
                hint="Delete the pipeline: `sparrow pipeline delete`.",
            )

    # Looking.

    def reports(self) -> list[PipelineReport]:
        return [self.report(name) for name in sorted(self._kept)]

    def report(self, name: str) -> PipelineReport:
        kept, hold = self._get(name), self._hold_of(name)
        is_wanted = self._is_wanted(kept)
        flat = None if kept.positions is None else [p for each in kept.positions.values() for p in each]
        return PipelineReport(
            pipeline=kept.pipeline,
            state=self._state(kept, hold, is_wanted),
            is_wanted=is_wanted,
            run=kept.run,
            positions=flat,
            runner="" if hold is None else hold.runner,
            lag=sum(
                self._positions.lag(self._subscriptions.get(each)) for each in kept.pipeline.subscriptions()
            ),
            created_at_us=kept.created_at_us,
            changed_at_us=kept.changed_at_us,
            error=kept.error,
            error_at_us=kept.error_at_us,
            progress=kept.progress,
            is_due=is_wanted and self._is_due(kept),
            turns=kept.turns,
        )

    def _state(self, kept: Kept, hold: _Hold | None, is_wanted: bool) -> str:
        if hold is None:
            if not is_wanted:
                return "stopped"
            if kept.error:
                return "failing"
            return "waiting" if self._is_due(kept) else "scheduled"
        if kept.progress is None or kept.progress.run != kept.run or _is_over(kept.progress):
            return "starting"
        return kept.progress.state

    def _is_wanted(self, kept: Kept) -> bool:
        return not kept.is_stopped and not any(
            self._subscriptions.get(each).subscription.is_paused for each in kept.pipeline.subscriptions()
        )

    def _is_due(self, kept: Kept) -> bool:
        return kept.turns is None or self._jobs.is_due(kept.pipeline, kept.turns)

    def _get(self, name: str) -> Kept:
        found = self._kept.get(name) if isinstance(name, str) else None
        if found is None:
            raise PipelineNotFound(f"there is no pipeline {name!r}")
        return found

    def lines(self, name: str, after: int, count: int) -> list[PipelineLine]:
        """The newest lines of its log behind a number."""
        self._get(name)
        if not 1 <= count <= COUNT_MAX:
            raise InvalidArgument(f"count is from 1 to {COUNT_MAX}, not {count!r}")
        return [line for line in self._lines.get(name, ()) if line.number > after][-count:]

    def figures(self) -> Iterable[Extra]:
        """For ``/metrics``."""
        seen = [(name, self._kept[name], self._hold_of(name)) for name in sorted(self._kept)]
        if not seen:
            return []
        progress = [
            (name, kept.progress or PipelineProgress(name=name, run=0, state="")) for name, kept, _ in seen
        ]
        running = [({"pipeline": name}, float(hold is not None)) for name, _, hold in seen]

        def of(field: str) -> list[tuple[dict[str, str], float]]:
            return [({"pipeline": name}, float(getattr(each, field))) for name, each in progress]

        return [
            Extra("sparrow_pipeline_running", "1 while a runner has the pipeline.", "gauge", running),
            Extra("sparrow_pipeline_batch_seconds", "How long its last batch took.", "gauge", of("batch_s")),
            Extra("sparrow_pipeline_rows_per_second", "Rows of the last batch.", "gauge", of("rows_per_s")),
            Extra("sparrow_pipeline_rows_total", "Rows since its runner began.", "counter", of("done_rows")),
            Extra("sparrow_pipeline_restarts_total", "Restarts after failures.", "counter", of("restarts")),
        ]

    # Runners.

    @property
    def is_wanted(self) -> bool:
        """Whether there is something to run that no other runner has."""
        for name, kept in self._kept.items():
            hold = self._hold_of(name)
            is_free = self._is_due(kept) if hold is None else hold.runner.startswith(_SUPERVISED)
            if is_free and self._is_wanted(kept):
                return True
        return False

    async def pass_over(self) -> None:
        """Turns that have come, and need no runner: there is not enough to do, or it cannot be done."""
        for name, kept in list(self._kept.items()):
            if kept.turns is None or not self._is_wanted(kept) or not self._is_due(kept):
                continue
            async with self._changing:
                if self._hold_of(name) is not None or self._kept.get(name) is not kept:
                    continue
                try:
                    if not self._jobs.has_work(kept.pipeline):
                        await self._end_turn(name, kernel_turns.IDLE, "")
                except SparrowError as error:
                    text = f"{error.message} [{error.code}] {error.hint}"
                    self._add_line(name, "error", text)
                    await self._end_turn(name, kernel_turns.FAILED, text)

    async def _end_turn(self, name: str, outcome: str, detail: str, **changes: Any) -> None:
        kept = self._get(name)
        assert kept.turns is not None
        now_us = self._clock.now_us()
        is_failed = outcome == kernel_turns.FAILED
        changes |= {"error": detail if is_failed else "", "error_at_us": now_us if is_failed else None}
        turns = self._jobs.ended(kept.pipeline, kept.turns, now_us, outcome, detail)
        await self._revise(name, turns=turns, **changes)
        self.changed.set()

    async def hold(self, name: str, runner: str) -> PipelineReport:
        """A runner takes up a pipeline, unless another one has it."""
        self._get(name)
        hold = self._hold_of(name)
        if hold is not None and hold.runner != runner:
            raise PipelineHeld(f"the pipeline {name!r} is run by {hold.runner!r}", runner=hold.runner)
        self._holds[name] = _Hold(runner, self._clock.monotonic_s() + HOLD_S)
        return self.report(name)

    async def begin(self, name: str, runner: str, run: int) -> dict[str, list[Place]]:
        """The runner begins a run: where each subscription stands, a seek put into force."""
        await self.hold(name, runner)
        async with self._changing:
            kept = self._get(name)
            if kept.run != run:
                raise PreconditionFailed(f"the pipeline {name!r} is at run {kept.run}, not {run}")
            for each, places in (kept.positions or {}).items():
                courier = self._subscriptions.get(each)
                target = self._still_there(places)
                if target:
                    await self._positions.seek(courier, target)
            changes: dict[str, Any] = {} if kept.positions is None else {"positions": None}
            if kept.turns is not None:
                changes["turns"] = kernel_turns.begun(kept.turns, self._clock.now_us())
            if changes:
                await self._revise(name, **changes)
        return self._floors(kept.pipeline)

    def _still_there(self, places: Sequence[Place]) -> dict[tuple[str, int], int]:
        found: dict[tuple[str, int], int] = {}
        for topic, partition, offset in places:
            with contextlib.suppress(NotFound):
                bounds = self._store.bounds(self._topics.stream(topic, partition)[1])
                found[topic, partition] = min(max(offset, bounds.start_offset), bounds.end_offset)
        return found

    async def tell(
        self, runner: str, progress: Sequence[PipelineProgress], lines: Sequence[tuple[str, str, str]]
    ) -> list[str]:
        """What a runner says of what it holds; the names that it has lost."""
        lost: list[str] = []
        for each in progress:
            hold = self._hold_of(each.name)
            if each.name not in self._kept or (hold is not None and hold.runner != runner):
                lost.append(each.name)
                continue
            self._holds[each.name] = _Hold(runner, self._clock.monotonic_s() + HOLD_S)
            await self._note(each)
        for name, level, text in lines:
            if name in self._kept:
                self._add_line(name, level, text)
        return lost

    async def release(self, name: str, runner: str) -> None:
        """The runner has stopped it."""
        hold = self._holds.get(name)
        if hold is not None and hold.runner == runner:
            del self._holds[name]
            self.changed.set()

    def release_all(self, runner: str) -> None:
        """A runner is gone."""
        self._holds = {name: hold for name, hold in self._holds.items() if hold.runner != runner}

    async def fail_all(self, error: str) -> None:
        """No pipeline can run, for this reason."""
        for name, kept in list(self._kept.items()):
            if not self._is_wanted(kept) or not self._is_due(kept) or self._hold_of(name) is not None:
                continue
            if kept.turns is not None and kernel_turns.is_begun(kept.turns):
                self._add_line(name, "error", error)
                await self._end_turn(name, kernel_turns.FAILED, error)
            elif kept.error != error:
                self._add_line(name, "error", error)
                await self._revise(name, error=error, error_at_us=self._clock.now_us())

    async def _note(self, progress: PipelineProgress) -> None:
        kept = self._kept[progress.name]
        before = kept.progress
        if kept.turns is not None and _is_over(progress):
            if progress.turn == kept.turns.count + 1:  # Else it has been told.
                detail = progress.error or progress.outcome
                await self._end_turn(progress.name, progress.state, detail, progress=progress)
            return
        changes: dict[str, Any] = {"progress": progress}
        if progress.error != kept.error:
            changes |= {
                "error": progress.error,
                "error_at_us": self._clock.now_us() if progress.error else None,
            }
        is_news = before is None or before.state != progress.state or progress.error != kept.error
        now_s = self._clock.monotonic_s()
        is_old = now_s - self._saved_at_s.get(progress.name, -SAVE_S) >= SAVE_S
        if is_news or (is_old and before != progress):
            await self._revise(progress.name, **changes)
        else:
            self._kept[progress.name] = msgspec.structs.replace(kept, **changes)

    def _add_line(self, name: str, level: str, text: str) -> None:
        lines = self._lines.setdefault(name, deque(maxlen=LINES_MAX))
        number = lines[-1].number + 1 if lines else 1
        lines.append(PipelineLine(number, self._clock.now_us(), level, text))

    def _hold_of(self, name: str) -> _Hold | None:
        hold = self._holds.get(name)
        return None if hold is None or hold.until_s < self._clock.monotonic_s() else hold

    async def _revise(self, name: str, **changes: Any) -> None:
        """In force at once, so that nobody who changes something else meanwhile takes it back."""
        self._kept[name] = kept = msgspec.structs.replace(self._get(name), **changes)
        self._saved_at_s[name] = self._clock.monotonic_s()
        await self._store.put_document(KIND, name, msgspec.json.encode(kept))

    async def _save(self, kept: Kept) -> None:
        name = kept.pipeline.name
        await self._store.put_document(KIND, name, msgspec.json.encode(kept))
        self._saved_at_s[name] = self._clock.monotonic_s()
        self._kept[name] = kept


def _is_over(progress: PipelineProgress) -> bool:
    """Whether it is the last word on a turn of a job."""
    return progress.state in (kernel_turns.DONE, kernel_turns.IDLE, kernel_turns.FAILED)


def _due_at(turns: PipelineTurns | None, at_us: int) -> PipelineTurns:
    if turns is None:
        return PipelineTurns(next_at_us=at_us)
    return msgspec.structs.replace(turns, next_at_us=at_us, failures=0)


def _topic_of(key: Any) -> str:
    return str(key[0] if isinstance(key, tuple) else key)


def _start(source: Source) -> Any:
    if isinstance(source.start, str) and source.start not in ("earliest", "latest"):
        from datetime import datetime

        return msgspec.convert(source.start, datetime)
    return source.start


def _check_patterns(wanted: Pipeline) -> None:
    """A pipeline must not feed itself."""
    for view, source in wanted.sources.items():
        try:
            pattern = parse_pattern(source.topic)
        except InvalidArgument as error:
            key = f"sources.{view}.topic"
            raise InvalidPipeline(f"{key}: {error.message}", hint=error.hint, key=key) from error
        written = {} if wanted.is_job else {"dead_letter_topic": wanted.dead_letter_topic}
        written |= {f"sinks[{n}].topic": sink.topic for n, sink in enumerate(wanted.sinks) if sink.topic}
        for key, topic in written.items():
            if pattern.matches(topic) and (pattern.is_literal or not is_internal(topic)):
                raise InvalidPipeline(
                    f"{key} {topic!r} is read by the source {view!r}, {source.topic!r}: it would feed itself",
                    hint="Write to a topic that the source does not match.",
                    key=key,
                )
