"""One pipeline in a runner: its query is started, watched, started again after failures, and stopped.

A worker is a thread. Between two looks at its query it does what it was told: stop, or go on with another
declaration or run. A failure is waited out, longer each time; a batch that is done forgets them. From the
second failure on, it is asked whether a row is to blame (poison.py).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql.streaming.listener import StreamingQueryListener

from sparrow.client.blocking import BlockingClient
from sparrow.model.errors import InvalidPipeline, PipelineHeld, SparrowError
from sparrow.model.pipeline import PipelineProgress, PipelineReport, PipelineSettings
from sparrow.spark.options import Where
from sparrow.spark.pipelines.batches import Batches
from sparrow.spark.pipelines.outlet import Outlet
from sparrow.spark.pipelines.plan import Place, Poisons, make_frame, stream_loader
from sparrow.spark.pipelines.poison import Search, describe, is_of_the_world
from sparrow.spark.progress import positions
from sparrow.spark.subscribing import SubscriptionCursor

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

LOOK_S = 0.2
LINES_MAX = 1000
SEARCHES_MAX = 4
START_S = 60.0
_INITIALIZING = "Initializing sources"
_SESSION = {
    # Small batches: planning costs more than it saves.
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.streaming.metricsEnabled": "false",
}


class Worker:
    """See the module's text."""

    def __init__(
        self,
        spark: SparkSession,
        report: PipelineReport,
        runner: str,
        client: BlockingClient,
        where: Where,
        home: str,
        settings: PipelineSettings,
        turn: threading.Lock,
        *,
        is_once: bool = False,
    ) -> None:
        self.pipeline = report.pipeline
        self.run = report.run
        self._spark = spark
        self._runner = runner
        self._client = client
        self._where = where
        self._home = home.rstrip("/")
        self._settings = settings
        self._turn = turn
        self._is_once = is_once
        self._created_at_us = report.created_at_us
        self._progress = PipelineProgress(name=self.pipeline.name, run=self.run, state="starting")
        self._lines: deque[tuple[str, str, str]] = deque(maxlen=LINES_MAX)
        self._stopping = threading.Event()
        self._poisons = Poisons()
        self._failures = 0
        self._suspects = 0
        """Of these, the failures that a row may be to blame for."""
        self.is_finished = False
        """With ``is_once``: everything that was there is done, or it was given up."""
        self._thread = threading.Thread(target=self._live, name=f"pipeline-{self.pipeline.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Asks for a stop; ``is_alive`` tells when it is done."""
        self._stopping.set()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def progress(self) -> PipelineProgress:
        """How it goes."""
        state = "stopping" if self._stopping.is_set() else self._progress.state
        return msgspec.structs.replace(self._progress, state=state, run=self.run)

    def take_lines(self) -> list[tuple[str, str, str]]:
        """What was written since the last time."""
        found = []
        while self._lines:
            found.append(self._lines.popleft())
        return found

    def note(self, level: str, text: str) -> None:
        self._lines.append((self.pipeline.name, level, text))

    # Its life.

    def _live(self) -> None:
        while not self._stopping.is_set() and not self.is_finished:
            try:
                self._run_query()
            except PipelineHeld as error:
                self.note("warning", error.message)
                return
            except Exception as error:  # noqa: BLE001 - the root of the thread: whatever fails is tried again
                self._failed(error)

    def _run_query(self) -> None:
        """One life of the query."""
        places = self._client.begin_pipeline(self.pipeline.name, self._runner, self.run)
        if 2 <= self._suspects <= SEARCHES_MAX:
            self._look_for_poison(places)
        with self._turn:
            listener, query = self._start(places)
        try:
            self._watch(query)
        finally:
            # Spark may tell the listener of the last batch later than this, or never.
            listener.see(query.lastProgress)
            listener.close()

    def _start(self, places: Mapping[str, Sequence[Place]]) -> tuple[_Listener, StreamingQuery]:
        """A query that has found its sources. One pipeline at a time: a start is Spark's heaviest work."""
        session = self._session()
        load = stream_loader(session, self._where, places)
        frame = make_frame(session, self.pipeline, load, self._poisons)
        batches = Batches(session, self._checkpoint(), places)
        outlet = Outlet(self.pipeline, self._where, self._poisons, f"{self._home}/tables", batches)
        listener = _Listener(self, places, session)
        try:
            writer = frame.writeStream.outputMode(self.pipeline.mode).queryName(self.pipeline.name)
            writer = writer.option("checkpointLocation", self._checkpoint())
            millis = round(self.pipeline.trigger_s * 1000)
            trigger: dict[str, Any] = {"processingTime": f"{millis} milliseconds"}
            if self._is_once:
                trigger = {"availableNow": True}
            query = writer.trigger(**trigger).foreachBatch(outlet).start()
        except BaseException:
            listener.close()
            raise
        listener.run_id = str(query.runId)
        deadline_s = time.monotonic() + START_S
        while query.isActive and query.status["message"] == _INITIALIZING and time.monotonic() < deadline_s:
            self._stopping.wait(LOOK_S)
        self._update(state="running")
        self.note("info", f"run {self.run} began, query {query.id}")
        return listener, query

    def _watch(self, query: StreamingQuery) -> None:
        while not query.awaitTermination(LOOK_S):  # type: ignore[arg-type]
            if self._stopping.is_set():
                query.stop()
                self.note("info", "stopped")
                return
        if query.exception() is None and self._is_once:
            self.is_finished = True
            self.note("info", "everything is done")

    def _session(self) -> SparkSession:
        session = self._spark.newSession()
        resources = self.pipeline.resources
        chosen = {**_SESSION, "spark.sql.shuffle.partitions": str(resources.shuffle_partitions)}
        for key, value in {**chosen, **resources.config}.items():
            try:
                session.conf.set(key, value)
            except Exception as error:
                raise InvalidPipeline(f"resources.config.{key}: {describe(error)}") from error
        return session

    def _checkpoint(self) -> str:
        return f"{self._home}/checkpoints/{self.pipeline.name}/{self._created_at_us}-{self.run}"

    def _failed(self, error: BaseException) -> None:
        if self._stopping.is_set():
            return
        text = describe(error)
        self._failures += 1
        self._suspects += not is_of_the_world(error)
        wait_s = min(
            self._settings.backoff_max_s, self._settings.backoff_min_s * 2 ** min(self._failures - 1, 20)
        )
        self._update(state="failing", error=text, restarts=self._progress.restarts + 1)
        if self._is_once and self._failures > SEARCHES_MAX:
            self.note("error", f"{text}; given up")
            self.is_finished = True
            return
        self.note("error", f"{text}; tried again in {wait_s:g} s")
        self._stopping.wait(wait_s)

    def _look_for_poison(self, places: Any) -> None:
        self.note("info", "it failed more than once: looking for a row that is to blame")
        found = Search(self._session(), self.pipeline, self._where, self._poisons).run(places)
        for rows in found.places.values():
            for (topic, partition, offset), error in rows.items():
                self.note("warning", f"{topic}/{partition} offset {offset} goes to the dead letters: {error}")
        self._poisons = self._poisons.joined(found)

    # What its listener says.

    def batch_done(self, query_progress: Any, rows: int) -> None:
        """A batch of so many messages is done, or nothing was there to do."""
        seconds = float((query_progress.durationMs or {}).get("triggerExecution", 0)) / 1000
        if rows:
            self._failures = self._suspects = 0
            self._poisons = Poisons()
        self._update(
            error="" if rows or not self._failures else self._progress.error,
            batch=int(query_progress.batchId),
            rows=rows,
            batch_s=seconds,
            rows_per_s=round(rows / seconds, 1) if seconds else 0.0,
            done_rows=self._progress.done_rows + rows,
        )

    def commit(self, offsets: Any) -> None:
        with contextlib.suppress(SparrowError):
            # The next batch commits further; what is lost is that the lag is seen.
            SubscriptionCursor.of(self._where, offsets.subscription).commit(offsets)

    def _update(self, **changes: Any) -> None:
        self._progress = msgspec.structs.replace(self._progress, **changes)


class _Listener(StreamingQueryListener):
    """Commits a query's positions after every batch, also the last, and tells its figures."""

    def __init__(self, worker: Worker, starts: Mapping[str, Sequence[Place]], session: SparkSession) -> None:
        self._worker = worker
        self._session = session
        self._starts = {(t, p): at for places in starts.values() for t, p, at in places}
        """Of the first batch Spark does not say where it began."""
        self.run_id = ""
        self._lock = threading.Lock()
        self._seen = -1
        session.streams.addListener(self)

    def onQueryStarted(self, event: Any) -> None:
        self.run_id = str(event.runId)

    def onQueryIdle(self, event: Any) -> None:
        """Nothing is new."""

    def onQueryTerminated(self, event: Any) -> None:
        """Its thread sees that."""

    def onQueryProgress(self, event: Any) -> None:
        if self.run_id in ("", str(event.progress.runId)):
            self.see(event.progress)

    def see(self, progress: Any) -> None:
        """A batch is done; a repeat is passed over."""
        if progress is None:
            return
        with self._lock:
            if int(progress.batchId) <= self._seen:
                return
            self._seen = int(progress.batchId)
            rows = 0
            for source in progress.sources:
                start, end = positions(source.startOffset), positions(source.endOffset)
                if end is not None and end.subscription is not None:
                    self._worker.commit(end)
                    # Spark counts rows as often as a plan reads them; offsets say how many there were.
                    before = self._starts if start is None else start.next
                    rows += sum(max(0, at - before.get(place, 0)) for place, at in end.next.items())
            self._worker.batch_done(progress, rows)

    def close(self) -> None:
        self.run_id = "closed"
        self._session.streams.removeListener(self)
