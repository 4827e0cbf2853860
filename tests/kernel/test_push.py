"""The pace of a webhook receiver, in virtual time."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.kernel.breaker import State
from sparrow.kernel.push import (
    FAILURES_MAX,
    FAULT_WAIT_US,
    REJECTIONS_MAX,
    START,
    WAIT_JITTER,
    WAIT_US,
    WAIT_US_MAX,
    Answer,
    Endpoint,
    judge,
    parse_retry_after,
)

SECOND_US = 1_000_000


class Story:
    """An endpoint, a clock, and the requests under way."""

    def __init__(self, limit_max: int = 100, rate_per_s: float | None = None) -> None:
        self.now_us = 1_000 * SECOND_US
        self.endpoint = Endpoint(limit_max, rate_per_s, self.now_us)
        self.sent = 0

    def allowance(self) -> int:
        return self.endpoint.allowance(self.now_us)

    def pass_s(self, seconds: float) -> None:
        self.now_us += round(seconds * SECOND_US)

    def start(self, count: int | None = None) -> list[tuple[int, int, str]]:
        count = self.allowance() if count is None else count
        round_ = self.endpoint.started(count, self.now_us)
        self.sent += count
        return [(round_, self.now_us, f"m-{self.sent - place}") for place in range(count)]

    def finish(self, requests: list[tuple[int, int, str]], answer: Answer, **given: float | None) -> None:
        for round_, started_us, message in requests:
            self.endpoint.finished(
                answer,
                message,
                round=round_,
                started_at_us=started_us,
                now_us=self.now_us,
                retry_after_s=given.get("retry_after_s"),
                jitter=given.get("jitter") or 0.0,
            )

    def turn(self, answer: Answer, taken_s: float = 0.01, **given: float | None) -> int:
        """All that may go goes, and is answered alike."""
        requests = self.start()
        self.pass_s(taken_s)
        self.finish(requests, answer, **given)
        return len(requests)

    def open(self) -> None:
        while self.endpoint.state is State.CLOSED:
            assert self.turn(Answer.FAILED) > 0


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (200, Answer.ACCEPTED), (202, Answer.ACCEPTED), (204, Answer.ACCEPTED), (299, Answer.ACCEPTED),
        (301, Answer.REJECTED), (302, Answer.REJECTED), (304, Answer.REJECTED), (307, Answer.REJECTED),
        (400, Answer.REJECTED), (401, Answer.REJECTED), (404, Answer.REJECTED), (418, Answer.REJECTED),
        (408, Answer.FAILED), (425, Answer.FAILED), (429, Answer.THROTTLED), (410, Answer.GONE),
        (500, Answer.FAILED), (502, Answer.FAILED), (503, Answer.FAILED), (504, Answer.FAILED),
    ],
)  # fmt: skip
def test_only_2xx_is_a_success(status: int, answer: Answer) -> None:
    assert judge(status) is answer


# How many at once.


def test_a_start_is_small_and_doubles_while_all_goes_well() -> None:
    story = Story()
    assert [story.turn(Answer.ACCEPTED) for _ in range(6)] == [4, 8, 16, 32, 64, 100]


def test_concurrency_never_passes_the_policy() -> None:
    story = Story(limit_max=3)
    assert [story.turn(Answer.ACCEPTED) for _ in range(4)] == [3, 3, 3, 3]


def test_concurrency_that_nobody_uses_does_not_grow() -> None:
    story = Story()
    for _ in range(50):
        requests = story.start(1)
        story.pass_s(0.01)
        story.finish(requests, Answer.ACCEPTED)
    assert story.allowance() == START


@pytest.mark.parametrize("answer", [Answer.FAILED, Answer.THROTTLED, Answer.UNREACHABLE])
def test_trouble_halves_concurrency_once_for_all_that_was_under_way(answer: Answer) -> None:
    story = Story()
    for _ in range(4):
        story.turn(Answer.ACCEPTED)
    requests = story.start()
    assert len(requests) == 64
    story.pass_s(0.01)
    story.finish(requests[:3], answer)
    story.finish(requests[3:], Answer.ACCEPTED)
    assert 32 <= story.endpoint.concurrency <= 34


def test_after_trouble_concurrency_grows_by_one_a_round() -> None:
    story = Story()
    for _ in range(3):
        story.turn(Answer.ACCEPTED)
    requests = story.start()
    story.finish(requests[:1], Answer.FAILED)
    story.finish(requests[1:], Answer.ACCEPTED)
    story.pass_s(0.01)
    sizes = [story.turn(Answer.ACCEPTED) for _ in range(5)]
    assert all(0 <= after - before <= 1 for before, after in itertools.pairwise(sizes))
    assert sizes[-1] > sizes[0]


def test_answers_far_slower_than_usual_shrink_concurrency() -> None:
    story = Story()
    for _ in range(5):
        story.turn(Answer.ACCEPTED, taken_s=0.05)
    before = story.endpoint.concurrency
    story.turn(Answer.ACCEPTED, taken_s=3.0)
    assert story.endpoint.concurrency < before


def test_a_receiver_that_always_takes_long_is_not_slow() -> None:
    story = Story(limit_max=50)
    for _ in range(10):
        story.turn(Answer.ACCEPTED, taken_s=5.0)
    assert story.endpoint.concurrency == 50


def test_refusals_of_messages_leave_concurrency_alone() -> None:
    story = Story()
    story.turn(Answer.ACCEPTED)
    before = story.endpoint.concurrency
    story.turn(Answer.REJECTED)
    assert story.endpoint.concurrency == before
    assert story.endpoint.state is State.CLOSED


def test_a_rate_bounds_what_goes_in_any_second() -> None:
    story = Story(rate_per_s=10)
    sent = 0
    for _ in range(1000):
        sent += story.turn(Answer.ACCEPTED, taken_s=0.01)
    assert 95 <= sent <= 105


def test_a_rate_says_when_to_come_again() -> None:
    story = Story(rate_per_s=2)
    story.turn(Answer.ACCEPTED, taken_s=0.0)
    while story.allowance():
        story.turn(Answer.ACCEPTED, taken_s=0.0)
    at_us = story.endpoint.next_wakeup_us(story.now_us)
    assert at_us is not None
    assert story.now_us < at_us <= story.now_us + SECOND_US
    story.now_us = at_us
    assert story.allowance() == 1


# The breaker.


def test_failures_in_a_row_over_several_messages_open_the_breaker() -> None:
    story = Story()
    story.open()
    assert story.endpoint.failed <= FAILURES_MAX + START
    assert story.allowance() == 0
    story.pass_s(WAIT_US / SECOND_US - 0.1)
    assert story.allowance() == 0
    story.pass_s(0.2)
    assert story.allowance() == 1


def test_one_message_that_fails_for_ever_does_not_open_the_breaker() -> None:
    story = Story()
    for _ in range(3 * REJECTIONS_MAX):
        round_ = story.endpoint.started(1, story.now_us)
        story.pass_s(1)
        story.finish([(round_, story.now_us - SECOND_US, "the same")], Answer.FAILED)
    assert story.endpoint.state is State.CLOSED
    assert story.allowance() == 1


def test_a_success_in_between_keeps_the_breaker_closed() -> None:
    story = Story(limit_max=1)
    for _ in range(20):
        for _ in range(FAILURES_MAX - 1):
            story.turn(Answer.FAILED)
        story.turn(Answer.ACCEPTED)
    assert story.endpoint.state is State.CLOSED


def test_a_receiver_that_refuses_everything_opens_the_breaker() -> None:
    story = Story(limit_max=1)
    turns = 0
    while story.endpoint.state is State.CLOSED:
        story.turn(Answer.REJECTED)
        turns += 1
    assert turns == REJECTIONS_MAX
    story.pass_s(WAIT_US / SECOND_US + 1)
    story.turn(Answer.REJECTED)
    assert story.endpoint.state is State.OPEN


def test_half_open_lets_one_request_through_and_waits_for_its_answer() -> None:
    story = Story()
    story.open()
    story.pass_s(10)
    requests = story.start()
    assert len(requests) == 1
    story.pass_s(1000)
    assert story.allowance() == 0
    story.finish(requests, Answer.ACCEPTED)
    assert story.endpoint.state is State.CLOSED
    assert story.allowance() == START


def test_a_failed_probe_doubles_the_wait_up_to_its_bound() -> None:
    story = Story()
    story.open()
    waits = []
    for _ in range(9):
        at_us = story.endpoint.next_wakeup_us(story.now_us)
        assert at_us is not None
        waits.append((at_us - story.now_us) / SECOND_US)
        story.now_us = at_us
        assert story.turn(Answer.FAILED, taken_s=0.0) == 1
    assert waits == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    assert waits[-1] * SECOND_US == WAIT_US_MAX


def test_the_wait_starts_again_from_its_least_after_a_recovery() -> None:
    story = Story()
    for _ in range(3):
        story.open()
        at_us = story.endpoint.next_wakeup_us(story.now_us)
        assert at_us == story.now_us + WAIT_US
        story.now_us = at_us
        story.turn(Answer.ACCEPTED)


@given(st.floats(0, 1))
def test_jitter_only_lengthens_the_wait(jitter: float) -> None:
    story = Story()
    while story.endpoint.state is State.CLOSED:
        story.turn(Answer.FAILED, jitter=jitter)
    at_us = story.endpoint.next_wakeup_us(story.now_us)
    assert at_us is not None
    assert WAIT_US <= at_us - story.now_us <= WAIT_US * (1 + WAIT_JITTER) + 1


def test_a_probe_that_is_refused_shows_that_the_receiver_is_back() -> None:
    story = Story()
    story.open()
    story.pass_s(10)
    story.turn(Answer.REJECTED)
    assert story.endpoint.state is State.CLOSED


def test_answers_from_before_the_breaker_opened_change_nothing_but_the_count() -> None:
    story = Story()
    story.turn(Answer.ACCEPTED)
    late = story.start()
    story.finish(late[:FAILURES_MAX], Answer.FAILED)
    late = late[FAILURES_MAX:]
    assert story.endpoint.state is State.OPEN
    story.finish(late, Answer.ACCEPTED)
    assert story.endpoint.state is State.OPEN
    assert story.endpoint.in_flight == 0


def test_a_probe_that_was_not_sent_after_all_leaves_the_place_to_another() -> None:
    story = Story()
    story.open()
    story.pass_s(10)
    ((round_, _, _),) = story.start()
    assert story.endpoint.is_probe(round_)
    assert story.allowance() == 0
    story.endpoint.never_sent(1, round_)
    assert story.allowance() == 1


# What a receiver asks for.


@pytest.mark.parametrize("answer", [Answer.THROTTLED, Answer.FAILED])
def test_retry_after_is_respected_by_all(answer: Answer) -> None:
    story = Story()
    requests = story.start(2)
    story.finish(requests[:1], answer, retry_after_s=30.0)
    story.finish(requests[1:], Answer.ACCEPTED)
    assert story.allowance() == 0
    assert story.endpoint.next_wakeup_us(story.now_us) == story.now_us + 30 * SECOND_US
    story.pass_s(30)
    assert story.allowance() > 0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("120", 120.0), (" 7 ", 7.0), ("0", 0.0), ("999999999", 3600.0), ("9" * 400, 3600.0), ("", None),
        (None, None), ("soon", None), ("-5", None), ("1.5", None), ("٣", None),
    ],
)  # fmt: skip
def test_retry_after_is_a_number_of_seconds(text: str | None, seconds: float | None) -> None:
    assert parse_retry_after(text, 0) == seconds


def test_retry_after_may_be_a_date() -> None:
    moment = datetime(2026, 3, 1, 12, 0, 30, tzinfo=UTC)
    now_us = round(datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC).timestamp() * SECOND_US)
    assert parse_retry_after(format_datetime(moment, usegmt=True), now_us) == 30.0
    assert parse_retry_after(format_datetime(moment, usegmt=True), now_us + 60 * SECOND_US) == 0.0


def test_a_receiver_that_is_gone_gets_nothing_until_it_is_revived() -> None:
    story = Story()
    story.turn(Answer.GONE)
    story.pass_s(1e6)
    assert story.allowance() == 0
    assert story.endpoint.next_wakeup_us(story.now_us) is None
    story.endpoint.revive(story.now_us)
    assert story.allowance() == START


def test_a_fault_of_this_machine_is_not_held_against_the_receiver() -> None:
    story = Story()
    for _ in range(50):
        story.turn(Answer.FAULT)
        assert story.allowance() == 0
        story.pass_s(FAULT_WAIT_US / SECOND_US)
    assert story.endpoint.state is State.CLOSED
    assert (story.endpoint.failed, story.allowance()) == (0, START)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(list(Answer)), st.floats(0, 100), st.booleans(), st.sampled_from([None, 0.0, 5.0])
        ),
        max_size=80,
    ),
    st.integers(1, 20),
    st.sampled_from([None, 0.5, 50.0]),
)
def test_whatever_happens_the_bounds_hold_and_a_way_forward_is_named(
    steps: list[tuple[Answer, float, bool, float | None]], limit_max: int, rate: float | None
) -> None:
    story = Story(limit_max, rate)
    under_way: list[tuple[int, int, str]] = []
    for answer, seconds, starts, retry_after_s in steps:
        if starts:
            under_way += story.start()
        elif under_way:
            story.finish([under_way.pop(0)], answer, retry_after_s=retry_after_s)
        story.pass_s(seconds)
        assert story.endpoint.in_flight == len(under_way) <= limit_max
        assert 1 <= story.endpoint.concurrency <= limit_max
    for request in under_way:
        story.finish([request], Answer.ACCEPTED)
    if story.endpoint.is_gone:
        assert story.allowance() == 0
    elif not story.allowance():
        at_us = story.endpoint.next_wakeup_us(story.now_us)
        assert at_us is not None
        story.now_us = at_us
        assert story.allowance() > 0
