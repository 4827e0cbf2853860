"""Replays: a table of moves, jobs that survive, a rate that loses no fractions."""

from __future__ import annotations

import itertools

import pytest

from sparrow.kernel import facts
from sparrow.kernel.replay import (
    REPLAYS_MAX,
    TRANSITIONS,
    ReplayPlan,
    Replays,
    ReplaySelection,
    ReplayStatus,
    TokenBucket,
    original_of,
    parse_selection,
)
from sparrow.model.errors import InvalidArgument, MessageNotFound, PreconditionFailed, ReplayNotFound
from sparrow.model.message import MessageId, StreamId

DEAD = StreamId(9, 0)
LETTER = {"dlq_message_id": "3-0-7", "dlq_reason": "rejected", "dlq_round": "1"}
WAYS = {
    ReplayStatus.PENDING: [],
    ReplayStatus.RUNNING: [ReplayStatus.RUNNING],
    ReplayStatus.PAUSED: [ReplayStatus.RUNNING, ReplayStatus.PAUSED],
    ReplayStatus.COMPLETED: [ReplayStatus.RUNNING, ReplayStatus.COMPLETED],
    ReplayStatus.FAILED: [ReplayStatus.RUNNING, ReplayStatus.FAILED],
    ReplayStatus.ABORTED: [ReplayStatus.ABORTED],
}


def apply(replays: Replays, found: list[facts.Fact]) -> None:
    for fact in facts.decode(facts.encode(found)):
        assert isinstance(fact, facts.ReplayStarted | facts.ReplayAdvanced | facts.ReplayMoved)
        replays.apply(fact)


def started(status: ReplayStatus = ReplayStatus.PENDING) -> Replays:
    replays = Replays(1)
    apply(replays, replays.start("r", ReplaySelection(reason="rejected"), [(DEAD, 0, 10)], 10, 5))
    for step in WAYS[status]:
        apply(replays, replays.move("r", step, 6))
    assert replays.get("r").status is status
    return replays


@pytest.mark.parametrize(("before", "after"), list(itertools.product(ReplayStatus, ReplayStatus)))
def test_every_move_is_by_the_table_or_refused(before: ReplayStatus, after: ReplayStatus) -> None:
    replays = started(before)
    if after in TRANSITIONS[before]:
        apply(replays, replays.move("r", after, 9, "why"))
        assert replays.get("r").status is after
    else:
        with pytest.raises(PreconditionFailed):
            replays.move("r", after, 9)
        assert replays.get("r").status is before


def test_a_job_goes_through_its_spans_and_knows_how_far_it_is() -> None:
    replays = started(ReplayStatus.RUNNING)
    assert replays.get("r").next_span() == (DEAD, 0, 10)
    apply(replays, replays.advance("r", DEAD, 4, 7, replayed=3, skipped=1))
    job = replays.get("r")
    assert (job.next_span(), job.replayed, job.skipped, job.progress()) == ((DEAD, 4, 10), 3, 1, 0.4)
    apply(replays, replays.advance("r", DEAD, 10, 8, replayed=6))
    assert replays.get("r").next_span() is None


def test_a_job_goes_on_after_a_crash_where_it_was() -> None:
    replays = started(ReplayStatus.RUNNING)
    apply(replays, replays.advance("r", DEAD, 4, 7, replayed=4))
    again = Replays(1)
    again.restore(replays.to_bytes())
    assert again.jobs == replays.jobs


def test_a_job_keeps_its_destination_over_a_crash() -> None:
    replays = Replays(1)
    apply(replays, replays.start("r", ReplaySelection(), [(DEAD, 0, 10)], 10, 5, destination="audit"))
    again = Replays(1)
    again.restore(replays.to_bytes())
    assert again.get("r").destination == "audit"
    assert started().get("r").destination == ""


def test_facts_may_be_applied_again_on_top_of_a_later_state() -> None:
    replays = Replays(1)
    found = replays.start("r", ReplaySelection(), [(DEAD, 0, 10)], 10, 5)
    apply(replays, found)
    for step in (replays.move("r", ReplayStatus.RUNNING, 6),):
        apply(replays, step)
        found += step
    step = replays.advance("r", DEAD, 4, 7, replayed=4)
    apply(replays, step)
    before = replays.to_bytes()
    apply(replays, found + step)
    assert replays.to_bytes() == before


def test_only_a_running_job_advances() -> None:
    with pytest.raises(PreconditionFailed):
        started(ReplayStatus.PAUSED).advance("r", DEAD, 4, 7)


def test_unknown_and_repeated_ids_are_refused() -> None:
    replays = started()
    with pytest.raises(ReplayNotFound):
        replays.get("other")
    with pytest.raises(PreconditionFailed):
        replays.start("r", ReplaySelection(), [], 0, 5)
    with pytest.raises(InvalidArgument):
        replays.start("s", ReplaySelection(), [], 0, 5, rate_per_s=0)


def test_finished_jobs_are_forgotten_in_time_and_unfinished_ones_are_bounded() -> None:
    replays = started(ReplayStatus.COMPLETED)
    for number in range(REPLAYS_MAX):
        apply(replays, replays.start(f"n{number}", ReplaySelection(), [], 0, 5))
    assert "r" not in replays.jobs
    with pytest.raises(PreconditionFailed):
        replays.start("one more", ReplaySelection(), [], 0, 5)


@pytest.mark.parametrize(
    ("options", "takes"),
    [
        ({}, True),
        ({"ids": ["3-0-7"]}, True),
        ({"ids": ["3-0-8"]}, False),
        ({"start_at_us": 100, "end_at_us": 101}, True),
        ({"start_at_us": 101}, False),
        ({"end_at_us": 100}, False),
        ({"reason": "rejected"}, True),
        ({"reason": "expired"}, False),
    ],
)
def test_a_selection_takes_what_it_says(options: dict[str, object], takes: bool) -> None:
    assert parse_selection(options).takes(LETTER, 100) is takes


def test_a_letter_that_loops_is_taken_by_its_id_only() -> None:
    loop = {**LETTER, "dlq_loop": "true"}
    assert not parse_selection({}).takes(loop, 100)
    assert parse_selection({"ids": ["3-0-7"]}).takes(loop, 100)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"id": ["3-0-7"]}, InvalidArgument),
        ({"ids": "3-0-7"}, InvalidArgument),
        ({"ids": ["garbage"]}, MessageNotFound),
        ({"ids": ["1-0-1"] * 10_001}, InvalidArgument),
        ({"start_at_us": 5, "end_at_us": 5}, InvalidArgument),
    ],
)
def test_a_bad_selection_is_refused(options: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        parse_selection(options)


def test_the_original_is_found_from_its_letter() -> None:
    assert original_of(LETTER) == (MessageId(3, 0, 7), 1)
    assert original_of({}) is None


def test_a_dry_run_counts_and_warns() -> None:
    plan = ReplayPlan()
    for letter in (LETTER, LETTER, {**LETTER, "dlq_loop": "true"}, {}):
        plan.add(ReplaySelection(), letter, 5)
    plan.finish(rate_per_s=4)
    assert (plan.total, plan.loops, plan.unreadable, plan.estimated_s) == (2, 1, 1, 0.5)
    assert plan.by_reason == {"rejected": 2}
    assert len(plan.warnings) == 2


def test_a_bucket_keeps_fractions() -> None:
    bucket = TokenBucket(3.0, 0)
    granted = sum(bucket.take(10, now_us) for now_us in range(0, 10_000_001, 1_000))
    assert granted == 30


def test_a_bucket_says_when_the_next_may_go_and_is_not_early() -> None:
    bucket = TokenBucket(4.0, 0)
    at_us = bucket.next_at_us(0)
    assert at_us == 250_000
    assert bucket.take(1, at_us - 1) == 0
    assert bucket.take(1, at_us) == 1


def test_an_idle_bucket_does_not_save_up_without_bound() -> None:
    bucket = TokenBucket(10.0, 0)
    assert bucket.take(1000, 3_600_000_000) == 10


def test_time_that_goes_back_gives_nothing() -> None:
    bucket = TokenBucket(1.0, 5_000_000)
    assert bucket.take(1, 0) == 0
    assert bucket.take(1, 6_000_000) == 1
