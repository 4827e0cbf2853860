"""A rebalance: the states of a group, what moves it between them, and how long it waits before one.

Empty: no members. Stable: the generation is in force. Preparing: something changed, and further changes
are gathered for a moment. Rebalancing: a generation has begun and waits for members and streams. What
changes meanwhile leaves the state alone and is due again when it is stable (queue.md §4.5, C12).

The moves are one table. Time is an argument.
"""

from __future__ import annotations

import enum

from sparrow.model.group import GroupPolicy


class State(enum.StrEnum):
    """Where a group is."""

    EMPTY = "empty"
    STABLE = "stable"
    PREPARING = "preparing"
    """Changes are gathered; everybody goes on with what it has."""
    REBALANCING = "rebalancing"
    """A generation has begun; it waits for members to accept and for streams to drain."""


class Event(enum.StrEnum):
    """What happens to a group. The values are the reasons that facts give."""

    JOINED = "consumer-joined"
    LEFT = "consumer-left"
    TIMED_OUT = "heartbeat-timeout"
    STREAMS_CHANGED = "streams-changed"
    STRATEGY_CHANGED = "strategy-changed"
    ADMIN = "admin"
    LAG_CRITICAL = "lag-critical"
    GATHERED = "changes-gathered"
    ALL_ACCEPTED = "all-accepted"
    MEMBER_SILENT = "member-silent"
    EMPTIED = "last-consumer-gone"


_CHANGES = (
    Event.JOINED,
    Event.LEFT,
    Event.TIMED_OUT,
    Event.STREAMS_CHANGED,
    Event.STRATEGY_CHANGED,
    Event.ADMIN,
    Event.LAG_CRITICAL,
)

TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.EMPTY, Event.JOINED): State.PREPARING,
    (State.EMPTY, Event.STREAMS_CHANGED): State.EMPTY,
    (State.EMPTY, Event.STRATEGY_CHANGED): State.EMPTY,
    (State.EMPTY, Event.ADMIN): State.EMPTY,
    **{(State.STABLE, event): State.PREPARING for event in _CHANGES},
    (State.STABLE, Event.MEMBER_SILENT): State.PREPARING,
    (State.STABLE, Event.EMPTIED): State.EMPTY,
    **{(State.PREPARING, event): State.PREPARING for event in _CHANGES},
    (State.PREPARING, Event.GATHERED): State.REBALANCING,
    (State.PREPARING, Event.EMPTIED): State.EMPTY,
    **{(State.REBALANCING, event): State.REBALANCING for event in _CHANGES},
    (State.REBALANCING, Event.MEMBER_SILENT): State.REBALANCING,
    (State.REBALANCING, Event.ALL_ACCEPTED): State.STABLE,
    (State.REBALANCING, Event.EMPTIED): State.EMPTY,
}
"""Every legal move; a pair that is missing is a bug of the caller."""


class IllegalMove(AssertionError):
    """An event that cannot happen in a state."""


def moved(state: State, event: Event) -> State:
    """Walk the table; an illegal move says so."""
    target = TRANSITIONS.get((state, event))
    if target is None:
        raise IllegalMove(f"a group that is {state} cannot have {event}")
    return target


def wait_us(policy: GroupPolicy, repeats: int) -> int:
    """How long changes are gathered; ``repeats`` is how many rebalances followed one another before."""
    if repeats == 0:
        return to_us(policy.stabilisation_s)
    backoff_s = policy.backoff_min_s * 2.0 ** min(repeats - 1, 64)
    return to_us(max(policy.stabilisation_s, min(policy.backoff_max_s, backoff_s)))


def to_us(seconds: float) -> int:
    """Whole microseconds."""
    return round(seconds * 1_000_000)
