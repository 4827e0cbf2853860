"""When a job is due next, as arithmetic: no clock, no waiting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.kernel import turns
from sparrow.kernel.turns import DONE, FAILED, IDLE, Pace, is_due, next_turn_us, topics_of
from sparrow.model.errors import PreconditionFailed, TopicNotFound
from sparrow.model.pipeline import Pipeline, PipelineTurns, parse_pipeline
from sparrow.model.topic import Compaction, Topic, TopicPolicy

HOUR = 3_600_000_000
SECOND = 1_000_000
PACE = Pace(HOUR, SECOND, 60 * SECOND)


def test_turns_keep_the_beat_of_their_beginnings() -> None:
    assert next_turn_us(1000, 1000, 0, PACE) == 1000 + HOUR
    assert next_turn_us(1000, 1000 + HOUR // 2, 0, PACE) == 1000 + HOUR


def test_a_turn_that_took_longer_than_its_beat_is_followed_at_the_next_one() -> None:
    assert next_turn_us(0, HOUR + 1, 0, PACE) == 2 * HOUR
    assert next_turn_us(0, 5 * HOUR - 1, 0, PACE) == 5 * HOUR


def test_the_wait_after_failures_doubles_up_to_its_bound() -> None:
    waits = [next_turn_us(0, HOUR, failures, PACE) - HOUR for failures in (1, 2, 3, 6, 7, 1000)]
    assert waits == [SECOND, 2 * SECOND, 4 * SECOND, 32 * SECOND, 60 * SECOND, 60 * SECOND]


@given(
    began_us=st.integers(0, 2**50),
    took_us=st.integers(-HOUR, 50 * HOUR),
    failures=st.integers(0, 40),
    every_s=st.integers(1, 31 * 86400),
)
def test_the_next_turn_is_never_before_the_end_and_never_out_of_sight(
    began_us: int, took_us: int, failures: int, every_s: int
) -> None:
    pace = Pace(every_s * SECOND, SECOND, 60 * SECOND)
    end_us = began_us + took_us
    after = next_turn_us(began_us, end_us, failures, pace)
    assert after >= end_us
    if took_us >= 0:
        assert after <= end_us + max(pace.every_us, pace.wait_max_us)
        assert not is_due(PipelineTurns(next_at_us=after), after - 1, pace)
    assert is_due(PipelineTurns(next_at_us=after), after, pace)


def test_a_clock_that_was_put_back_does_not_put_off_the_turn() -> None:
    at = PipelineTurns(next_at_us=10 * HOUR)
    assert is_due(at, 8 * HOUR, PACE), "no turn is set for so late"
    assert not is_due(at, 9 * HOUR + 1, PACE)


def test_what_is_known_of_a_turn_when_it_is_over() -> None:
    at = turns.begun(PipelineTurns(next_at_us=0), 10)
    assert turns.is_begun(at)
    failed = turns.ended(at, 20, PACE, FAILED, "no space")
    assert (failed.count, failed.failures, failed.outcome, failed.detail) == (1, 1, FAILED, "no space")
    assert (failed.began_at_us, failed.ended_at_us, failed.next_at_us) == (10, 20, 20 + SECOND)
    assert not turns.is_begun(failed)
    again = turns.ended(turns.begun(failed, 30), 40, PACE, FAILED, "no space")
    assert (again.failures, again.next_at_us) == (2, 40 + 2 * SECOND)
    done = turns.ended(turns.begun(again, 50), 60, PACE, DONE, "")
    assert (done.count, done.failures, done.next_at_us) == (3, 0, 50 + HOUR)
    idle = turns.ended(done, 70, PACE, IDLE, "")
    assert (idle.began_at_us, idle.next_at_us) == (70, 70 + HOUR), "it never began"


def job(topic: str, builtin: str = "compact") -> Pipeline:
    return parse_pipeline({"name": "tidy", "source": topic, "builtin": builtin, "every": "1h"})


def named(name: str, compaction: Compaction = Compaction.NONE) -> Topic:
    return Topic(id=1, name=name, partitions=1, policy=TopicPolicy(compaction=compaction), created_at_us=0)


def test_a_pattern_takes_what_fits_and_a_name_must_fit() -> None:
    topics = [named("state.b", Compaction.KEY), named("state.a"), named("~sparrow.own", Compaction.KEY)]
    assert topics_of(job("#"), topics) == ["state.b"]
    assert topics_of(job("#", "merge"), topics) == ["state.a", "state.b"]
    assert topics_of(job("~sparrow.own"), topics) == ["~sparrow.own"]
    assert topics_of(job("other.#"), topics) == []
    with pytest.raises(TopicNotFound, match=r"other"):
        topics_of(job("other"), topics)
    with pytest.raises(PreconditionFailed, match="not compacted"):
        topics_of(job("state.a"), topics)
