"""One turn of a scheduled job in a runner: compact or merge the topics that it names, one after the other.

A worker as those of streams are, but it ends when the turn is over, done or failed; the broker says when the
next one is. Jobs of a runner take turns: each has all cores, and no two rewrite the same segments. A stop
cancels what Spark does; whole pieces are in place by then and drafts go.
"""

from __future__ import annotations

import threading
from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING, Any

import msgspec

from sparrow.client.blocking import BlockingClient
from sparrow.kernel.turns import DONE, FAILED, IDLE, topics_of
from sparrow.model.errors import PipelineHeld
from sparrow.model.pipeline import PipelineProgress, PipelineReport
from sparrow.model.rewrite import RewriteKind
from sparrow.spark.pipelines import compact, merge
from sparrow.spark.pipelines.poison import describe
from sparrow.spark.pipelines.rewrites import Outcome

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LINES_MAX = 1000
_LOOK_S = 0.2


class JobWorker:
    """See the module's text."""

    def __init__(
        self,
        spark: SparkSession,
        report: PipelineReport,
        runner: str,
        client: BlockingClient,
        turn: threading.Lock,
        *,
        if_due: bool,
    ) -> None:
        self.pipeline = report.pipeline
        self.run = report.run
        self._spark = spark
        self._runner = runner
        self._client = client
        self._turn = turn
        self._if_due = if_due
        number = 0 if report.turns is None else report.turns.count + 1
        self._progress = PipelineProgress(
            name=self.pipeline.name, run=self.run, state="starting", turn=number
        )
        self._group = f"{self.pipeline.name} {number}"
        self._lines: deque[tuple[str, str, str]] = deque(maxlen=LINES_MAX)
        self._stopping = threading.Event()
        self.is_finished = False
        """Whether the turn is over, done or failed."""
        self._thread = threading.Thread(target=self._live, name=f"job-{self.pipeline.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Asks for a stop; ``is_alive`` tells when it is done."""
        if not self._stopping.is_set():
            self._stopping.set()
            self._spark.sparkContext.cancelJobGroup(self._group)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def progress(self) -> PipelineProgress:
        """How it goes."""
        told = self._progress
        if self._stopping.is_set() and not self.is_finished:
            told = msgspec.structs.replace(told, state="stopping")
        return told

    def take_lines(self) -> list[tuple[str, str, str]]:
        """What was written since the last time."""
        found = []
        while self._lines:
            found.append(self._lines.popleft())
        return found

    def note(self, level: str, text: str) -> None:
        self._lines.append((self.pipeline.name, level, text))

    def _live(self) -> None:
        while not self._turn.acquire(timeout=_LOOK_S):
            if self._stopping.is_set():
                return
        try:
            self._work()
        except PipelineHeld as error:
            self.note("warning", error.message)
        except _Stopped:
            self.note("info", "stopped")
        except Exception as error:  # noqa: BLE001 - the root of the thread: the broker says when it is tried again
            if self._stopping.is_set():
                self.note("info", "stopped")
            else:
                self.note("error", describe(error))
                self._finish(FAILED, error=describe(error))
        finally:
            self._turn.release()

    def _work(self) -> None:
        began_s = perf_counter()
        self._client.begin_pipeline(self.pipeline.name, self._runner, self.run)
        self._update(state="running")
        self._spark.sparkContext.setJobGroup(self._group, self._group, interruptOnCancel=False)
        session = self._spark.newSession()
        for key, value in self.pipeline.resources.config.items():
            session.conf.set(key, value)
        done: list[Outcome] = []
        for topic in topics_of(self.pipeline, self._client.topics()):
            self._check()
            outcome = self._rewrite(session, topic)
            self._update(done_rows=self._progress.done_rows + outcome.messages_before)
            if outcome.swaps or outcome.conflicts:
                done.append(outcome)
                self.note("info", _told(outcome))
        seconds = perf_counter() - began_s
        self._finish(DONE if done else IDLE, outcome="; ".join(map(_told, done)), batch_s=round(seconds, 3))

    def _rewrite(self, session: SparkSession, topic: str) -> Outcome:
        size = self.pipeline.segment_bytes
        if self.pipeline.builtin == RewriteKind.MERGE:
            return merge.run(session, self._client, topic, segment_bytes=size, on_progress=self._moved)
        return compact.run(
            session,
            self._client,
            topic,
            if_due=self._if_due,
            segment_bytes=size,
            on_progress=self._moved,
        )

    def _moved(self, done: int, total: int) -> None:
        self._update(done_bytes=done, total_bytes=total)
        self._check()

    def _check(self) -> None:
        if self._stopping.is_set():
            raise _Stopped

    def _finish(self, state: str, **changes: Any) -> None:
        self._update(state=state, **changes)
        self.is_finished = True

    def _update(self, **changes: Any) -> None:
        self._progress = msgspec.structs.replace(self._progress, **changes)


class _Stopped(Exception):
    """The turn was given up because somebody asked for that."""


def _told(outcome: Outcome) -> str:
    text = (
        f"{outcome.topic}: {outcome.messages_before} messages in {outcome.segments_before} segments became "
        f"{outcome.messages} in {outcome.segments}"
    )
    if outcome.conflicts:
        text += f", {outcome.conflicts} pieces had changed meanwhile"
    return text
