"""A group: a subscription that several consumers, its members, share, and the policy they share it by.

*Shared*: every member may be handed any message; the strategy says who gets how many. *Partitioned*:
every stream has one member that it is handed to, and a rebalance moves streams when members come and
go. ``parse_group_policy`` is the one door for options from outside; it refuses unknown names, bad
values and contradictions before anything has changed, and names the option.

Times. A member says that it lives every ``heartbeat_s`` and is dead after ``session_timeout_s`` without
a word: at most 60 s (queue.md C7). Changes are gathered for ``stabilisation_s`` (C9); when rebalances
follow one another within ``calm_s`` the wait doubles from ``backoff_min_s`` up to ``backoff_max_s``.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from sparrow.model.errors import InvalidArgument

SESSION_TIMEOUT_S_MAX = 60.0
"""A dead member is found within this (queue.md C7)."""


class GroupMode(enum.StrEnum):
    """What members share."""

    SHARED = "shared"
    """The messages: any member may get any of them."""
    PARTITIONED = "partitioned"
    """The streams: each has one member at a time."""


class GroupStrategy(enum.StrEnum):
    """Who gets what."""

    ROUND_ROBIN = "round_robin"
    """Shared: by turns of messages. Partitioned: streams dealt out one by one."""
    LEAST_LOADED = "least_loaded"
    """Shared: to whom has the fewest in flight."""
    RANGE = "range"
    """Partitioned: of each topic, a run of neighbouring partitions."""
    STICKY = "sticky"
    """Partitioned: balanced, and as little as possible moves."""


class RebalanceProtocol(enum.StrEnum):
    """What pauses while streams move."""

    COOPERATIVE = "cooperative"
    """Only the streams that move."""
    EAGER = "eager"
    """Everything, until every member has accepted."""


STRATEGIES: dict[GroupMode, tuple[GroupStrategy, ...]] = {
    GroupMode.SHARED: (GroupStrategy.ROUND_ROBIN, GroupStrategy.LEAST_LOADED),
    GroupMode.PARTITIONED: (GroupStrategy.STICKY, GroupStrategy.RANGE, GroupStrategy.ROUND_ROBIN),
}
"""The strategies of each mode; the first is its default."""


class GroupPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the members of a group share a subscription."""

    mode: GroupMode = GroupMode.SHARED
    strategy: GroupStrategy = GroupStrategy.ROUND_ROBIN
    rebalance: RebalanceProtocol = RebalanceProtocol.COOPERATIVE
    heartbeat_s: float = 10.0
    """How often a member is to say that it lives (queue.md C6)."""
    session_timeout_s: float = 30.0
    """Silence after which it is dead: three heartbeats."""
    stabilisation_s: float = 0.2
    """Changes that come within this time are one rebalance; 0 is none waits."""
    rebalance_timeout_s: float = 30.0
    """A member that has not accepted a generation by then is dropped (queue.md §4.10)."""
    drain_timeout_s: float = 10.0
    """How long a stream that moves waits for its live owner to settle what it holds of it."""
    backoff_min_s: float = 0.1
    backoff_max_s: float = 10.0
    """Waits before a rebalance that follows another; below what a dead member costs anyhow."""
    calm_s: float = 30.0
    """After so long without a rebalance the next one is not a repetition."""
    lag_rebalance_s: float = 60.0
    """Critical lag starts one rebalance in this time at most (queue.md C51)."""
    offset_expiry_s: float | None = 7 * 86_400.0
    """Committed offsets are forgotten when the group had no member for so long; ``None`` is never."""
    member_max_in_flight: int = 1000
    """Messages leased to a member at once, unless it asks for another number when it joins."""


_BOUNDS: dict[str, tuple[float, float]] = {
    "heartbeat_s": (0.01, 30),
    "session_timeout_s": (0.02, SESSION_TIMEOUT_S_MAX),
    "stabilisation_s": (0, 30),
    "rebalance_timeout_s": (0.01, 120),
    "drain_timeout_s": (0, 120),
    "backoff_min_s": (0, 60),
    "backoff_max_s": (0, 120),
    "calm_s": (0, 3600),
    "lag_rebalance_s": (1, 86_400),
    "offset_expiry_s": (1, 10 * 365 * 86_400),
    "member_max_in_flight": (1, 1_000_000),
}
"""120 s is the longest that a rebalance may take (queue.md §4.10)."""
_CHOICES: dict[str, type[enum.StrEnum]] = {
    "mode": GroupMode,
    "strategy": GroupStrategy,
    "rebalance": RebalanceProtocol,
}


def parse_group_policy(options: dict[str, Any], base: GroupPolicy | None = None) -> GroupPolicy:
    """The policy that ``options`` describe, on top of ``base``; refuses unknown names and bad values.

    Another mode without a strategy has the default strategy of that mode.
    """
    _refuse_unknown(options)
    for name, value in options.items():
        if name in _CHOICES:
            _check_choice(name, value)
        else:
            _check_bounds(name, value)
    before = base or GroupPolicy()
    merged = msgspec.to_builtins(before) | options
    if "strategy" not in options and merged["mode"] != before.mode:
        merged["strategy"] = STRATEGIES[GroupMode(merged["mode"])][0].value
    policy = msgspec.convert(merged, GroupPolicy)
    _check_together(policy)
    return policy


def _refuse_unknown(options: dict[str, Any]) -> None:
    known = sorted(GroupPolicy.__struct_fields__)
    unknown = sorted(str(name) for name in options if name not in known)
    if unknown:
        hint = f"Each group option is one of: {', '.join(known)}."
        raise InvalidArgument(f"unknown group option {', '.join(unknown)}", hint=hint)


def _check_choice(name: str, value: Any) -> None:
    allowed = [choice.value for choice in _CHOICES[name]]
    if not isinstance(value, str) or value not in allowed:
        raise InvalidArgument(f"{name} must be one of {', '.join(allowed)}, not {value!r}")


def _check_bounds(name: str, value: Any) -> None:
    if value is None and name == "offset_expiry_s":
        return
    low, high = _BOUNDS[name]
    is_whole = name == "member_max_in_flight"
    noun = "a whole number" if is_whole else "a number"
    is_number = isinstance(value, int if is_whole else (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        raise InvalidArgument(f"{name} must be {noun} from {low:,} to {high:,}, not {value!r}")


def _check_together(policy: GroupPolicy) -> None:
    """Values that are good one by one and contradict each other."""
    allowed = STRATEGIES[policy.mode]
    if policy.strategy not in allowed:
        raise InvalidArgument(
            f"strategy {policy.strategy.value!r} is not one of a {policy.mode.value} group: "
            + ", ".join(strategy.value for strategy in allowed)
        )
    if policy.session_timeout_s < 2 * policy.heartbeat_s:
        raise InvalidArgument(
            f"session_timeout_s {policy.session_timeout_s:g} must be at least twice "
            f"heartbeat_s {policy.heartbeat_s:g}",
            hint="One lost heartbeat must not end a session.",
        )
    if policy.backoff_min_s > policy.backoff_max_s:
        raise InvalidArgument(
            f"backoff_min_s {policy.backoff_min_s:g} is above backoff_max_s {policy.backoff_max_s:g}"
        )


class Assigned(msgspec.Struct, frozen=True, order=True):
    """A partition that a member has."""

    topic: str
    partition: int


class MemberInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A member as its group sees it."""

    name: str
    generation: int
    """The newest generation that it has taken up."""
    assignment: tuple[Assigned, ...]
    in_flight: int
    max_in_flight: int
    is_static: bool
    instance: str
    status: str
    joined_at_us: int
    silent_s: float
    """Since its last sign of life."""
    pace: str
    """How it does next to the others: ok, warn or critical."""
    weight: float
    """Its share next to 1 for a healthy member."""
    acks_per_s: float | None
    ack_latency_s: float | None
    failure_share: float


class GroupInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A group as a whole."""

    state: str
    generation: int
    mode: str
    strategy: str
    members: int
    rebalances: int
    last_rebalance_s: float
    """How long the last one took."""
    draining: tuple[Assigned, ...]
    """Partitions that wait for the member that had them."""
    unassigned: tuple[Assigned, ...]
    """Partitions that nobody has; none in a stable group with members."""


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """A committed offset of a partition."""

    topic: str
    partition: int
    offset: int
    metadata: str
    member: str
    generation: int
    at_us: int


__all__ = [
    "STRATEGIES",
    "Assigned",
    "Committed",
    "GroupInfo",
    "GroupMode",
    "GroupPolicy",
    "GroupStrategy",
    "MemberInfo",
    "RebalanceProtocol",
    "parse_group_policy",
]
