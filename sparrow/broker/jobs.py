"""Scheduled jobs, as far as the broker decides: whether a turn has come, and whether there is enough to do.

The work itself is Spark's (spark/pipelines/jobs.py). What is looked at here costs no file: the segments of a
topic are known, so a turn for which there is nothing to do does not start a JVM.
"""

from __future__ import annotations

from collections.abc import Callable

from sparrow.broker.clock import Clock
from sparrow.broker.topics import Topics
from sparrow.kernel import turns as kernel_turns
from sparrow.kernel.compaction import has_work
from sparrow.model.pipeline import Pipeline, PipelineSettings, PipelineTurns
from sparrow.model.rewrite import RewriteKind, RewritePlan


class Jobs:
    """See the module's text."""

    def __init__(
        self,
        topics: Topics,
        plan: Callable[[str, float], RewritePlan],
        settings: PipelineSettings,
        clock: Clock,
    ) -> None:
        self._topics = topics
        self._plan = plan
        self._settings = settings
        self._clock = clock

    def is_due(self, job: Pipeline, turns: PipelineTurns) -> bool:
        """Whether its next turn has come."""
        return kernel_turns.is_due(turns, self._clock.now_us(), self._pace(job))

    def ended(
        self, job: Pipeline, turns: PipelineTurns, now_us: int, outcome: str, detail: str
    ) -> PipelineTurns:
        """Its turns when one is over."""
        return kernel_turns.ended(turns, now_us, self._pace(job), outcome, detail)

    def has_work(self, job: Pipeline) -> bool:
        """Whether some topic of it has enough to do; a topic that cannot be the job's is refused."""
        kind = RewriteKind(job.builtin or "")
        topics = kernel_turns.topics_of(job, self._topics)
        return any(has_work(kind, self._plan(name, 0.0), job.segment_bytes) for name in topics)

    def _pace(self, job: Pipeline) -> kernel_turns.Pace:
        settings = self._settings
        spans = (job.every_s, settings.backoff_min_s, settings.backoff_max_s)
        return kernel_turns.Pace(*(round(seconds * 1_000_000) for seconds in spans))
