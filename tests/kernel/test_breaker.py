"""The breaker's table, walked pair by pair, and what it lets through."""

from __future__ import annotations

import itertools

import pytest

from sparrow.kernel.breaker import (
    COOLDOWN_US,
    SAMPLE_MIN,
    TRANSITIONS,
    Breaker,
    Event,
    IllegalMove,
    State,
)


def at(state: State) -> Breaker:
    """A breaker brought to a state by the shortest way."""
    breaker = Breaker()
    if state is not State.CLOSED:
        breaker.move(Event.FAILED_TOO_OFTEN, 0)
    if state is State.HALF_OPEN:
        breaker.move(Event.COOLED_DOWN, COOLDOWN_US)
    assert breaker.state is state
    return breaker


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_every_pair_moves_by_the_table_or_is_refused(state: State, event: Event) -> None:
    breaker = at(state)
    target = TRANSITIONS.get((state, event))
    if target is None:
        with pytest.raises(IllegalMove):
            breaker.move(event, 7)
        assert breaker.state is state
    else:
        breaker.move(event, 7)
        assert breaker.state is target


def test_it_opens_when_more_than_half_fails() -> None:
    breaker = Breaker()
    breaker.record(successes=SAMPLE_MIN, now_us=0)
    breaker.record(failures=SAMPLE_MIN, now_us=0)
    assert breaker.state is State.CLOSED
    breaker.record(failures=1, now_us=0)
    assert breaker.state is State.OPEN
    assert breaker.allowance(10, 0) == 0


def test_a_few_failures_mean_nothing() -> None:
    breaker = Breaker()
    breaker.record(failures=SAMPLE_MIN - 1, now_us=0)
    assert breaker.allowance(10, 0) == 10


def test_after_cooling_down_one_probe_goes_and_its_success_closes() -> None:
    breaker = at(State.OPEN)
    assert breaker.next_wakeup_us() == COOLDOWN_US
    assert breaker.allowance(10, COOLDOWN_US) == 1
    breaker.probe_sent(COOLDOWN_US)
    assert breaker.allowance(10, COOLDOWN_US) == 0
    breaker.record(successes=1, now_us=COOLDOWN_US)
    assert breaker.allowance(10, COOLDOWN_US) == 10


def test_a_failed_probe_doubles_the_wait() -> None:
    breaker = at(State.HALF_OPEN)
    breaker.record(failures=1, now_us=COOLDOWN_US)
    assert breaker.next_wakeup_us() == 3 * COOLDOWN_US


def test_a_probe_that_is_never_heard_of_is_repeated() -> None:
    breaker = at(State.HALF_OPEN)
    breaker.probe_sent(0)
    assert breaker.allowance(1, COOLDOWN_US) == 1


def test_old_outcomes_lose_their_weight() -> None:
    breaker = Breaker()
    breaker.record(successes=10_000, now_us=0)
    breaker.record(failures=60, now_us=0)
    assert breaker.state is State.OPEN
