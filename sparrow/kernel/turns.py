"""Jobs that are done every so often: when a turn is due, and which topics it is about.

Turns keep a beat: the next is one ``every`` after the last began, or the first beat that is left when it took
longer, so two never overlap and none are made up for. A turn that failed is tried again after a wait that
doubles up to a bound, whatever the beat says. A new job is due at once; so is one whose time came while
nobody was there.

Pure: moments come in, moments go out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from sparrow.kernel.pattern import parse_pattern
from sparrow.model.errors import PreconditionFailed, TopicNotFound
from sparrow.model.names import is_internal
from sparrow.model.pipeline import Pipeline, PipelineTurns
from sparrow.model.rewrite import RewriteKind
from sparrow.model.topic import Compaction, Topic

DONE, IDLE, FAILED = "done", "idle", "failed"
_DOUBLINGS_MAX = 20


class Pace(NamedTuple):
    """How often a job is done, and how long it waits after failures."""

    every_us: int
    wait_min_us: int
    wait_max_us: int


def next_turn_us(began_us: int, ended_us: int, failures: int, pace: Pace) -> int:
    """When the turn is due that follows one which took this long; ``failures`` are those in a row."""
    if failures:
        wait_us = pace.wait_min_us * (1 << min(failures - 1, _DOUBLINGS_MAX))
        return ended_us + min(pace.wait_max_us, wait_us)
    beats = -(-max(0, ended_us - began_us) // pace.every_us)
    return began_us + pace.every_us * max(1, beats)


def is_due(turns: PipelineTurns, now_us: int, pace: Pace) -> bool:
    """Whether the next turn has come. One that is further away than any wait was set by a clock that has
    been put back since."""
    ahead_us = turns.next_at_us - now_us
    return ahead_us <= 0 or ahead_us > max(pace.every_us, pace.wait_max_us)


def begun(turns: PipelineTurns, now_us: int) -> PipelineTurns:
    """A turn is under way."""
    return msgspec.structs.replace(turns, began_at_us=now_us)


def is_begun(turns: PipelineTurns) -> bool:
    """Whether a turn began whose end is not known."""
    return turns.began_at_us is not None and turns.began_at_us > (turns.ended_at_us or -1)


def ended(turns: PipelineTurns, now_us: int, pace: Pace, outcome: str, detail: str) -> PipelineTurns:
    """A turn is over; one that never began took no time."""
    began_us = min(turns.began_at_us or now_us, now_us) if is_begun(turns) else now_us
    failures = turns.failures + 1 if outcome == FAILED else 0
    return PipelineTurns(
        next_at_us=next_turn_us(began_us, now_us, failures, pace),
        count=turns.count + 1,
        began_at_us=began_us,
        ended_at_us=now_us,
        outcome=outcome,
        detail=detail,
        failures=failures,
    )


def topics_of(job: Pipeline, topics: Iterable[Topic]) -> list[str]:
    """What a job is about. A pattern means those topics that can be compacted or merged; a topic that is
    named must be there and be one of them."""
    (source,) = job.sources.values()
    pattern = parse_pattern(source.topic)
    found = [
        topic
        for topic in topics
        if pattern.matches(topic.name) and (pattern.is_literal or not is_internal(topic.name))
    ]
    if pattern.is_literal and not found:
        raise TopicNotFound(f"there is no topic {source.topic!r}")
    if job.builtin == RewriteKind.COMPACT:
        fit = [topic for topic in found if topic.policy.compaction is Compaction.KEY]
        if pattern.is_literal and not fit:
            raise PreconditionFailed(
                f"the topic {source.topic!r} is not compacted", hint="Set its option compaction to key first."
            )
        found = fit
    return sorted(topic.name for topic in found)
