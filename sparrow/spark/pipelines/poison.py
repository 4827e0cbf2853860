"""Finds the rows at which a transformation fails, so that they can be refused and the rest go on.

A query that fails at a row fails there for ever. After it failed twice, the plan is run over the messages
that the next batches would read, without writing anything, and over halves of them, and so on, until the
rows are alone. A plan that fails over no rows at all, or over none of the halves, is not the rows' fault.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sparrow.model.pipeline import Pipeline
from sparrow.spark.causes import cause
from sparrow.spark.options import Where
from sparrow.spark.origins import open_broker
from sparrow.spark.pipelines.outlet import to_messages
from sparrow.spark.pipelines.plan import Place, Poisons, make_frame, stretch_loader

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FOUND_MAX = 20
TRIES_MAX = 400
"""Above these the pipeline waits for a person: this many rows are rather a wrong transformation."""

Stretch = tuple[str, str, int, int, int]
"""A subscription, topic, partition, start and end."""


class Search:
    """One search for poison."""

    def __init__(self, spark: SparkSession, pipeline: Pipeline, where: Where, known: Poisons) -> None:
        self._spark = spark
        self._pipeline = pipeline
        self._where = where
        self._known = known
        self._tries = 0
        self.found: dict[str, dict[Place, str]] = {}

    def run(self, positions: Mapping[str, Sequence[Place]]) -> Poisons:
        """The rows that fail, among those that come next."""
        if self._error([]) is None:
            self._look(self._ahead(positions))
        return Poisons(self.found)

    def _ahead(self, positions: Mapping[str, Sequence[Place]]) -> list[Stretch]:
        found: list[Stretch] = []
        for name, source in self._pipeline.subscriptions().items():
            starts = {(topic, partition): at for topic, partition, at in positions.get(name, ())}
            for extent in open_broker(self._where).extents([source.topic]):
                for partition, (kept, end) in enumerate(extent.bounds):
                    start = max(kept, starts.get((extent.topic, partition), kept))
                    end = min(end, start + source.max_offsets_per_trigger)
                    if start < end:
                        found.append((name, extent.topic, partition, start, end))
        return found

    def _look(self, stretches: list[Stretch]) -> None:
        total = sum(end - start for *_, start, end in stretches)
        if not total or self._tries >= TRIES_MAX or len(self.found) >= FOUND_MAX:
            return
        error = self._error(stretches)
        if error is None:
            return
        if total == 1:
            (name, topic, partition, start, _), *_ = [each for each in stretches if each[3] < each[4]]
            self.found.setdefault(name, {})[topic, partition, start] = error
            return
        one, other = _halves(stretches, total // 2)
        self._look(one)
        self._look(other)

    def _error(self, stretches: Sequence[Stretch]) -> str | None:
        """What goes wrong over these rows."""
        self._tries += 1
        chosen: dict[str, list[Any]] = {}
        for name, *place in stretches:
            chosen.setdefault(name, []).append(tuple(place))
        load = stretch_loader(self._spark, self._where, chosen)
        try:
            result = make_frame(self._spark, self._pipeline, load, self._known)
            for frame in to_messages(self._pipeline, result) or [result]:
                frame.write.format("noop").mode("overwrite").save()
        except Exception as error:  # noqa: BLE001 - whatever a transformation raises is what is looked for
            return describe(error)
        return None


def _halves(stretches: Sequence[Stretch], rows: int) -> tuple[list[Stretch], list[Stretch]]:
    one: list[Stretch] = []
    other: list[Stretch] = []
    for name, topic, partition, start, end in stretches:
        middle = min(end, start + max(0, rows))
        rows -= middle - start
        if start < middle:
            one.append((name, topic, partition, start, middle))
        if middle < end:
            other.append((name, topic, partition, middle, end))
    return one, other


def describe(error: BaseException) -> str:
    """One line that says what went wrong, for people."""
    ours = cause(error)
    if ours is not None:
        return f"{ours.message} [{ours.code}] {ours.hint}"
    text = str(error)
    conditions = [found[0] for found in _CONDITION.finditer(text) if found[1] not in _WRAPPERS]
    if conditions:
        return conditions[-1].strip()[:_LENGTH_MAX]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    raised = [line for line in lines if _is_python_error(line)]
    return (raised[0] if raised else lines[0] if lines else type(error).__name__)[:_LENGTH_MAX]


_LENGTH_MAX = 1000
_CONDITION = re.compile(r"\[([A-Z][A-Z0-9_.]{3,})\] [^\n]+")
_WRAPPERS = frozenset({"STREAM_FAILED", "FOREACH_BATCH_USER_FUNCTION_ERROR"})
"""What Spark says around the reason."""
_OF_THE_WORLD = ("Python worker failed to connect back", "Python worker exited", "No space left on device")


def is_of_the_world(error: BaseException) -> bool:
    """Whether a failure has nothing to do with rows: a broker that is away, a machine without breath."""
    ours = cause(error)
    if ours is not None:
        return ours.retryable
    return any(sign in str(error) for sign in _OF_THE_WORLD)


def _is_python_error(line: str) -> bool:
    head, colon, _ = line.partition(": ")
    return bool(colon) and head.endswith(("Error", "Exception")) and head.isidentifier()
