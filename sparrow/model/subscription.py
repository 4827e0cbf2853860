"""A subscription: a durable, named reader of a topic or a pattern, and the policy it delivers by.

The policy is frozen data: every decision of the delivery kernel reads it and none changes it.
``parse_policy`` is the one door for options from outside; it refuses unknown names and bad values
before anything has changed and names the value and what would have been allowed.

Two of the numbers need their meaning stated:

- ``ack_deadline_s = 0`` means that a lease is due in the moment it is made. The message may be handed
  to the next consumer at the following tick; the first ack to arrive wins. It suits consumers that
  only peek. Under *exactly once* it is refused, because no ack could ever arrive in time.
- ``max_attempts`` counts hand-overs, not retries: with 5, the fifth failure dead-letters the message.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from sparrow.model.errors import InvalidArgument
from sparrow.model.flow import LagLimits, SamplePolicy, parse_lag_limits, parse_sample_policy
from sparrow.model.group import GroupMode, GroupPolicy, parse_group_policy
from sparrow.model.names import parse_subscription, parse_topic
from sparrow.model.push import PushPolicy, parse_push_policy

MAX_ATTEMPTS_DEFAULT = 5
"""Hand-overs before a message is dead-lettered, when there is a dead-letter topic (queue.md C18)."""

FILTER_LENGTH_MAX = 16_384
"""Characters of a filter expression; far above what people write by hand."""


class Ordering(enum.StrEnum):
    """Which messages wait for each other."""

    NONE = "none"
    KEY = "key"
    """Messages of one key, in the order of the log."""
    PUBLISHER = "publisher"
    """Messages of one publisher, over all streams of the subscription, by publish time."""
    TOTAL = "total"
    """All messages of the subscription, by publish time."""


class Guarantee(enum.StrEnum):
    """What a consumer may count on."""

    AT_MOST_ONCE = "at_most_once"
    """Acked when handed over; a crash of the consumer loses what it held."""
    AT_LEAST_ONCE = "at_least_once"
    """Handed over until acked; a late ack is honoured while nobody else holds the message."""
    EXACTLY_ONCE = "exactly_once"
    """As above, but acks are confirmed when durable, and an ack of an ended lease is refused."""


class Expired(enum.StrEnum):
    """What happens to a message whose time to live has passed."""

    DROP = "drop"
    DEAD_LETTER = "dead_letter"


class Delivery(enum.StrEnum):
    """Who gets the messages."""

    CONSUMERS = "consumers"
    """Programs that pull, members of a group, or the receiver of webhooks."""
    PIPELINE = "pipeline"
    """A Spark query, which reads the log by offsets and commits them here; nothing can be pulled."""


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a failed message is tried again: at once, then 1 s, 4 s, 16 s … 5 min (queue.md C17)."""

    min_backoff_s: float = 1.0
    max_backoff_s: float = 300.0
    multiplier: float = 4.0
    jitter: float = 0.1
    """Share of the wait by which it may be shorter or longer, within the two bounds above."""
    immediate_retries: int = 1
    """How many retries skip the wait."""
    max_attempts: int | None = None
    """Hand-overs before dead-lettering; ``None`` is 5 with a dead-letter topic, no limit without."""


class SubscriptionPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a subscription delivers."""

    filter: str = ""
    ordering: Ordering = Ordering.NONE
    guarantee: Guarantee = Guarantee.AT_LEAST_ONCE
    ack_deadline_s: float = 10.0
    retry: RetryPolicy = RetryPolicy()
    dead_letter_topic: str | None = None
    expired: Expired = Expired.DROP
    key_window: int = 1
    """Messages of one key outstanding at once. 1 is strict. With more, the consumer promises to
    process a key serially: they go to one consumer at a time, and a failure of one redelivers it
    and the later ones of its key."""
    poison_rules: bool = False
    """Judge failures by the patterns of queue.md §5.4, and pause consumers that fail most of what
    they get. Off by default, because "three failures in 30 s" is stricter than max_attempts."""
    max_in_flight: int = 100_000
    """Messages leased at once, over all consumers."""
    max_retrying: int = 100_000
    """Messages with failed attempts that are remembered; above it only retries are handed over."""
    max_scheduled: int = 200_000
    """Messages waiting for their ``deliver_at`` that are held; above it reading pauses."""
    read_ahead: int = 50_000
    """Messages read and not yet leased."""
    sample: SamplePolicy | None = None
    """What it agrees to miss when it lags; ``None``, the default, is nothing."""
    adaptive_deadline: bool = False
    """Leases last about twice as long as nearly all work took lately, 5 to 600 s, from ack_deadline_s on."""
    group: GroupPolicy = GroupPolicy()
    """How its members share it; of no concern while nobody joins."""
    lag: LagLimits | None = None
    """When its lag is worth a warning and when it is critical; ``None`` is the defaults."""
    push: PushPolicy | None = None
    """Where the broker sends its messages by itself; ``None`` is nowhere, they are pulled."""
    delivery: Delivery = Delivery.CONSUMERS
    """Who gets the messages."""

    @property
    def attempts_max(self) -> int | None:
        """Hand-overs before dead-lettering, the default filled in; ``None`` is no limit."""
        if self.dead_letter_topic is None:
            return None
        return self.retry.max_attempts or MAX_ATTEMPTS_DEFAULT


class Subscription(msgspec.Struct, frozen=True, kw_only=True):
    """A subscription as the catalog knows it. The id is never used again, even when the name is."""

    id: int
    name: str
    pattern: str
    policy: SubscriptionPolicy
    created_at_us: int
    is_paused: bool = False


_Part = TypeVar("_Part", SamplePolicy, LagLimits, GroupPolicy, PushPolicy)

_BOUNDS: dict[str, tuple[float, float]] = {
    "ack_deadline_s": (0, 600),
    "key_window": (1, 1000),
    "max_in_flight": (1, 10_000_000),
    "max_retrying": (1, 1_000_000),
    "max_scheduled": (1, 1_000_000),
    "read_ahead": (1, 1_000_000),
}
_RETRY_BOUNDS: dict[str, tuple[float, float]] = {
    "min_backoff_s": (0, 86_400),
    "max_backoff_s": (0, 86_400),
    "multiplier": (1, 100),
    "jitter": (0, 1),
    "immediate_retries": (0, 1000),
    "max_attempts": (1, 1000),
}
_CHOICES: dict[str, type[enum.StrEnum]] = {
    "ordering": Ordering,
    "guarantee": Guarantee,
    "expired": Expired,
    "delivery": Delivery,
}
_WHOLE = {
    "key_window",
    "max_in_flight",
    "max_retrying",
    "max_scheduled",
    "read_ahead",
    "immediate_retries",
    "max_attempts",
}


def parse_policy(options: dict[str, Any], base: SubscriptionPolicy | None = None) -> SubscriptionPolicy:
    """The policy that ``options`` describe, on top of ``base``; refuses unknown names and bad values.

    ``retry``, ``sample``, ``lag``, ``group`` and ``push`` may be given in part; the rest is ``base``'s.
    """
    _refuse_unknown(options, SubscriptionPolicy, "subscription option")
    base = base or SubscriptionPolicy()
    merged = msgspec.to_builtins(base)
    sample = _part(options, "sample", SamplePolicy, parse_sample_policy, base.sample)
    lag = _part(options, "lag", LagLimits, parse_lag_limits, base.lag)
    group = _part(options, "group", GroupPolicy, parse_group_policy, base.group) or GroupPolicy()
    push = _part(options, "push", PushPolicy, parse_push_policy, base.push)
    retry = options.get("retry", {})
    if isinstance(retry, RetryPolicy):
        retry = msgspec.to_builtins(retry)
    if not isinstance(retry, dict):
        raise InvalidArgument(f"retry must be a mapping of retry options, not {retry!r}")
    _refuse_unknown(retry, RetryPolicy, "retry option")
    _check_values(options, _BOUNDS)
    _check_values(retry, _RETRY_BOUNDS, "retry.")
    merged |= {**options, "retry": {**merged["retry"], **retry}}
    merged |= {"sample": msgspec.to_builtins(sample), "lag": msgspec.to_builtins(lag)}
    merged |= {"group": msgspec.to_builtins(group), "push": msgspec.to_builtins(push)}
    try:
        policy = msgspec.convert(merged, SubscriptionPolicy)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"bad subscription option: {error}") from error
    _check_together(policy)
    return policy


def _part(
    options: dict[str, Any], name: str, kind: type[_Part], parse: Any, base: _Part | None
) -> _Part | None:
    """An option that is a group of options: given whole, in part, or as ``None``."""
    given = options.get(name, base)
    if given is None:
        return None
    if isinstance(given, kind):
        given, base = msgspec.to_builtins(given), None
    if not isinstance(given, Mapping):
        raise InvalidArgument(f"{name} must be a mapping of options, not {given!r}")
    found: _Part = parse(given, base)
    return found


def _refuse_unknown(options: dict[str, Any], kind: type[msgspec.Struct], noun: str) -> None:
    known = sorted(kind.__struct_fields__)
    unknown = sorted(str(name) for name in options if name not in known)
    if unknown:
        hint = f"Each {noun} is one of: {', '.join(known)}."
        raise InvalidArgument(f"unknown {noun} {', '.join(unknown)}", hint=hint)


def _check_values(options: dict[str, Any], bounds: dict[str, tuple[float, float]], prefix: str = "") -> None:
    for name, value in options.items():
        if name in bounds:
            _check_bounds(prefix + name, value, *bounds[name], is_whole=name in _WHOLE)
        elif name in _CHOICES:
            _check_choice(name, value, _CHOICES[name])


def _check_bounds(name: str, value: Any, low: float, high: float, *, is_whole: bool) -> None:
    if value is None and name == "retry.max_attempts":
        return
    kinds = int if is_whole else (int, float)
    noun = "a whole number" if is_whole else "a number"
    is_number = isinstance(value, kinds) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        raise InvalidArgument(f"{name} must be {noun} from {low:,} to {high:,}, not {value!r}")


def _check_choice(name: str, value: Any, choices: type[enum.StrEnum]) -> None:
    allowed = [choice.value for choice in choices]
    if not isinstance(value, str) or value not in allowed:
        raise InvalidArgument(f"{name} must be one of {', '.join(allowed)}, not {value!r}")


def _check_together(policy: SubscriptionPolicy) -> None:
    """Values that are good one by one and contradict each other."""
    retry = policy.retry
    if retry.min_backoff_s > retry.max_backoff_s:
        raise InvalidArgument(
            f"retry.min_backoff_s {retry.min_backoff_s} is above retry.max_backoff_s {retry.max_backoff_s}"
        )
    if policy.dead_letter_topic is not None:
        parse_topic(policy.dead_letter_topic)
    elif retry.max_attempts is not None or policy.expired is Expired.DEAD_LETTER:
        what = "retry.max_attempts" if retry.max_attempts is not None else "expired='dead_letter'"
        raise InvalidArgument(f"{what} needs a dead_letter_topic", hint="Name one, so that nothing is lost.")
    if policy.guarantee is Guarantee.EXACTLY_ONCE and policy.ack_deadline_s == 0:
        raise InvalidArgument("ack_deadline_s must be above 0 with exactly_once, not 0")
    if policy.group.mode is GroupMode.PARTITIONED and policy.ordering in (Ordering.PUBLISHER, Ordering.TOTAL):
        raise InvalidArgument(
            f"a partitioned group cannot keep the {policy.ordering.value} order, which spans partitions",
            hint="Use ordering='key' or 'none', or a shared group.",
        )
    if policy.push is not None:
        _check_push(policy)
    if policy.delivery is Delivery.PIPELINE and (policy.push or policy.group.mode is GroupMode.PARTITIONED):
        raise InvalidArgument("delivery='pipeline' goes with neither push nor a partitioned group")
    if policy.key_window > 1 and policy.ordering is Ordering.NONE:
        raise InvalidArgument(f"key_window {policy.key_window} needs an ordering")
    if len(policy.filter) > FILTER_LENGTH_MAX:
        length = len(policy.filter)
        raise InvalidArgument(f"filter has {length} characters; {FILTER_LENGTH_MAX} are allowed")


def _check_push(policy: SubscriptionPolicy) -> None:
    """A receiver of webhooks gets them side by side, answers each, and is no member of a group."""
    if policy.guarantee is Guarantee.AT_MOST_ONCE:
        raise InvalidArgument(
            "push cannot be at_most_once: a webhook that fails is sent again",
            hint="Use at_least_once; receivers know repeats by their webhook-id.",
        )
    if policy.group.mode is GroupMode.PARTITIONED:
        raise InvalidArgument("push cannot go with a partitioned group: it has no members")
    if policy.key_window > 1:
        raise InvalidArgument(f"push needs a key_window of 1, not {policy.key_window}")


__all__ = [
    "Delivery",
    "Expired",
    "Guarantee",
    "Ordering",
    "RetryPolicy",
    "Subscription",
    "SubscriptionPolicy",
    "parse_policy",
    "parse_subscription",
]
