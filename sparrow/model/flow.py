"""Flow control of a topic: what happens when publishers are faster than consumers.

By default nothing does. A topic is a durable log: that is what takes the difference up, for days if it
must, and a consumer that is down or slow must not stop those who publish, nor the other
subscriptions that keep up. Limits are for topics where old messages lose their worth or where it is
better to slow the source; whoever sets one says which.

The watermarks look at the subscription that is furthest behind. Three numbers belong to the backlog:
below ``backlog_low`` a throttle is released, above ``backlog_high`` it sets in, gradually, and at
``backlog_max`` nothing passes, not even from critical publishers. ``drop_oldest`` takes un-acked
messages away from subscriptions, ``drop_newest``, ``drop_lowest_priority`` and ``sample`` never store
what they drop: to choose one of them is the consent that queue.md C38 asks for.

Rates are quotas and not a reaction to anything: their excess waits, or is rejected under ``reject``.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from sparrow.model.errors import InvalidArgument


class Overflow(enum.StrEnum):
    """What happens to a publish while its topic is throttled."""

    BLOCK = "block"
    """It waits, so that publishers come down to the pace of the consumers; in the end it is rejected."""
    REJECT = "reject"
    """What is above the pace of the consumers is refused at once and told when to come again."""
    DROP_OLDEST = "drop_oldest"
    """It passes, and the oldest messages that wait are given up."""
    DROP_NEWEST = "drop_newest"
    """What is above the pace of the consumers is taken and thrown away."""
    DROP_LOWEST_PRIORITY = "drop_lowest_priority"
    """Of each batch the messages of the lowest priority are thrown away."""
    SAMPLE = "sample"
    """Of each batch a share is kept, the smaller the further consumers are behind."""


class PublisherClass(enum.StrEnum):
    """Who is slowed first when not all can pass."""

    CRITICAL = "critical"
    """Last: only at the hard limit."""
    NORMAL = "normal"
    BULK = "bulk"
    """First."""


class Sender(NamedTuple):
    """Who publishes, as far as flow control is concerned."""

    name: str | None = None
    """Whose quota it counts against; those without a name share one."""
    kind: PublisherClass = PublisherClass.NORMAL
    token: str | None = None
    """The name of the token that it came with, not its secret."""


ANYONE = Sender()
"""Somebody who said nothing of themselves."""


class RateLimit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A quota. ``None`` is no limit."""

    messages_per_s: float | None = None
    bytes_per_s: float | None = None
    burst_s: float = 1.0
    """How much may come at once, as seconds of the rate."""

    @property
    def is_limited(self) -> bool:
        """Whether it limits anything."""
        return self.messages_per_s is not None or self.bytes_per_s is not None


class FlowPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The flow control of one topic. ``None`` is no limit, or, where it says so, a value derived."""

    overflow: Overflow = Overflow.BLOCK
    backlog_high: int | None = None
    """Messages not acked by the slowest subscription above which publishers are throttled."""
    backlog_low: int | None = None
    """Below it they are released; half of ``backlog_high`` when not given."""
    backlog_max: int | None = None
    """At it nothing passes; twice ``backlog_high`` when not given."""
    lag_high_s: float | None = None
    """Age of the oldest message not acked above which publishers are throttled."""
    lag_low_s: float | None = None
    """Below it they are released; half of ``lag_high_s`` when not given."""
    block_timeout_s: float = 30.0
    """How long a publish waits before it is rejected."""
    sample_share_min: float = 0.01
    """The least share that ``sample`` keeps before the hard limit."""
    messages_per_s: float | None = None
    bytes_per_s: float | None = None
    """Quotas of the topic, over all publishers."""
    publisher_messages_per_s: float | None = None
    publisher_bytes_per_s: float | None = None
    """Quotas of each publisher to this topic."""
    burst_s: float = 1.0
    """How much of any quota may come at once, as seconds of its rate."""

    @property
    def has_watermarks(self) -> bool:
        """Whether consumers can slow publishers at all."""
        return self.backlog_high is not None or self.lag_high_s is not None

    @property
    def is_limited(self) -> bool:
        """Whether anything at all may happen to a publish."""
        return self.has_watermarks or self.topic_rate.is_limited or self.publisher_rate.is_limited

    @property
    def backlog_marks(self) -> tuple[float, float, float] | None:
        """Low, high and hard limit of the backlog, the derived ones filled in."""
        high = self.backlog_high
        if high is None:
            return None
        low = high / 2 if self.backlog_low is None else self.backlog_low
        return low, high, 2 * high if self.backlog_max is None else self.backlog_max

    @property
    def lag_marks_us(self) -> tuple[float, float, float] | None:
        """The same of the age of the oldest message, in microseconds; the hard limit is twice high."""
        high_s = self.lag_high_s
        if high_s is None:
            return None
        low_s = high_s / 2 if self.lag_low_s is None else self.lag_low_s
        return low_s * 1e6, high_s * 1e6, 2e6 * high_s

    @property
    def topic_rate(self) -> RateLimit:
        """The quota of the topic."""
        return RateLimit(
            messages_per_s=self.messages_per_s, bytes_per_s=self.bytes_per_s, burst_s=self.burst_s
        )

    @property
    def publisher_rate(self) -> RateLimit:
        """The quota of each publisher."""
        return RateLimit(
            messages_per_s=self.publisher_messages_per_s,
            bytes_per_s=self.publisher_bytes_per_s,
            burst_s=self.burst_s,
        )


class FlowReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a topic treats its publishers now, and what became of what they sent since the broker opened."""

    topic: str
    mode: str
    """``normal``, ``warning`` (watched, not slowed) or ``throttled``."""
    level: str
    """The mode, or ``full`` at the hard limit."""
    is_paused: bool = False
    """Whether it is full and publishers wait until it is not."""
    cause: str
    """What the pressure comes from: ``backlog`` or ``lag``."""
    intensity: float
    """How firmly publishers are slowed, from 0 to 1."""
    pressure: float
    """Smoothed: 0.5 at the low watermark, 1 at high, 2 at the hard limit."""
    retry_after_s: float
    backlog: int
    """Messages that the slowest subscription has not acked."""
    slowest: str | None
    """Its name."""
    drained_per_s: float
    waiting: int
    """Publishes that wait now."""
    mode_changes: int
    passed: int
    rejected: int
    dropped: int
    """Messages that were never stored."""
    given_up: int
    """Messages taken away from subscriptions, by ``drop_oldest``."""


class SamplePolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Adaptive sampling of a slow subscription: what it agrees to miss when it lags."""

    lag_high_s: float = 30.0
    """Age of its oldest message not acked above which it gets fewer."""
    lag_low_s: float | None = None
    """Below it all are delivered again; half of ``lag_high_s`` when not given."""
    share_min: float = 0.01
    """The least share it gets."""

    @property
    def low_s(self) -> float:
        """``lag_low_s``, the default filled in."""
        return self.lag_high_s / 2 if self.lag_low_s is None else self.lag_low_s


class LagLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When lag is worth a warning and when it is critical (queue.md §7.2); settable at run time.

    They are for those who watch. What slows publishers is a ``FlowPolicy``, and what makes a broker
    unhealthy is ``unhealthy_age_s``: three questions with three answers (queue.md C46).
    """

    end_to_end_warn_s: float = 5.0
    end_to_end_critical_s: float = 15.0
    assignment_warn_s: float = 2.0
    assignment_critical_s: float = 5.0
    processing_warn_s: float = 10.0
    processing_critical_s: float = 30.0
    depth_warn: int = 1000
    depth_critical: int = 5000
    throughput_warn_share: float = 0.5
    throughput_critical_share: float = 0.25
    """Of its own baseline, while there is work to do."""
    hold_s: float = 5.0
    """How long a value must stay beyond a limit before its level changes."""
    unhealthy_age_s: float = 300.0
    """Age of the oldest message not acked above which a subscription counts as unhealthy."""


_POSITIVE_OR_NONE = (
    "backlog_high",
    "backlog_low",
    "backlog_max",
    "lag_high_s",
    "lag_low_s",
    "messages_per_s",
    "bytes_per_s",
    "publisher_messages_per_s",
    "publisher_bytes_per_s",
)
RATE_MIN = 1e-3
"""The least rate of a quota: one in a quarter of an hour. To stop publishing, pause the topic."""
BLOCK_TIMEOUT_S_MAX = 3600.0

PUBLISHER_LENGTH_MAX = 255

_Policy = TypeVar("_Policy", FlowPolicy, SamplePolicy, LagLimits, RateLimit)


def parse_sender(publisher: object, priority_class: object, token: object) -> Sender:
    """Who publishes, from what a caller gave; refuses unknown classes and names that are none."""
    if publisher is None and priority_class is None and token is None:
        return ANYONE
    kind = PublisherClass.NORMAL if priority_class is None else parse_class(priority_class)
    name = None if publisher is None else parse_publisher("publisher", publisher)
    return Sender(name, kind, None if token is None else parse_publisher("token", token))


def parse_class(priority_class: object) -> PublisherClass:
    """A publisher's class by its name."""
    names = [kind.value for kind in PublisherClass]
    if not isinstance(priority_class, str) or priority_class not in names:
        raise InvalidArgument(f"priority_class must be one of {', '.join(names)}, not {priority_class!r}")
    return PublisherClass(priority_class)


def parse_publisher(noun: str, name: object) -> str:
    """The name of a publisher or a token."""
    if not isinstance(name, str) or not 1 <= len(name) <= PUBLISHER_LENGTH_MAX:
        raise InvalidArgument(
            f"{noun} must be a name of 1 to {PUBLISHER_LENGTH_MAX} characters, not {name!r}"
        )
    return name


def parse_rate_limit(options: Mapping[str, Any], base: RateLimit | None = None) -> RateLimit:
    """The quota that ``options`` describe, on top of ``base``."""
    limit = _merged(options, base or RateLimit(), "quota option")
    for name in ("messages_per_s", "bytes_per_s"):
        value = getattr(limit, name)
        if value is not None and not RATE_MIN <= value < math.inf:
            raise InvalidArgument(f"{name} must be at least {RATE_MIN}, or None for no limit, not {value!r}")
    _check_range("burst_s", limit.burst_s, 0.001, 3600)
    return limit


def parse_flow_policy(options: Mapping[str, Any], base: FlowPolicy | None = None) -> FlowPolicy:
    """The policy that ``options`` describe, on top of ``base``; refuses what contradicts itself."""
    policy = _merged(options, base or FlowPolicy(), "flow option")
    for name in _POSITIVE_OR_NONE:
        value = getattr(policy, name)
        if value is not None and not 0 < value < math.inf:
            raise InvalidArgument(f"{name} must be positive, or None for no limit, not {value!r}")
        if value is not None and name.endswith("_per_s") and value < RATE_MIN:
            raise InvalidArgument(f"{name} must be at least {RATE_MIN}, not {value!r}")
    _check_range("block_timeout_s", policy.block_timeout_s, 0, BLOCK_TIMEOUT_S_MAX)
    _check_range("sample_share_min", policy.sample_share_min, 0, 1)
    _check_range("burst_s", policy.burst_s, 0.001, 3600)
    _check_marks(policy)
    return policy


def parse_sample_policy(options: Mapping[str, Any], base: SamplePolicy | None = None) -> SamplePolicy:
    """The sampling that ``options`` describe, on top of ``base``."""
    policy = _merged(options, base or SamplePolicy(), "sampling option")
    _check_range("lag_high_s", policy.lag_high_s, 0.001, 1e9)
    _check_range("share_min", policy.share_min, 0, 1)
    _check_below("lag_low_s", policy.low_s, "lag_high_s", policy.lag_high_s)
    if policy.low_s <= 0:
        raise InvalidArgument(f"lag_low_s must be positive, not {policy.low_s!r}")
    return policy


def parse_lag_limits(options: Mapping[str, Any], base: LagLimits | None = None) -> LagLimits:
    """The limits that ``options`` describe, on top of ``base``."""
    limits = _merged(options, base or LagLimits(), "lag limit")
    for name in LagLimits.__struct_fields__:
        value = getattr(limits, name)
        if not (0 < value < math.inf or (name == "hold_s" and value == 0)):
            raise InvalidArgument(f"{name} must be positive, not {value!r}")
    for name in ("end_to_end_{}_s", "assignment_{}_s", "processing_{}_s", "depth_{}"):
        warn, critical = name.format("warn"), name.format("critical")
        _check_below(warn, getattr(limits, warn), critical, getattr(limits, critical))
    _check_below(
        "throughput_critical_share",
        limits.throughput_critical_share,
        "throughput_warn_share",
        limits.throughput_warn_share,
    )
    _check_range("throughput_warn_share", limits.throughput_warn_share, 0, 1)
    return limits


def _merged(options: Mapping[str, Any], base: _Policy, noun: str) -> _Policy:
    known = type(base).__struct_fields__
    unknown = sorted(str(name) for name in options if name not in known)
    if unknown:
        hint = f"Each {noun} is one of: {', '.join(sorted(known))}."
        raise InvalidArgument(f"unknown {noun} {', '.join(unknown)}", hint=hint)
    try:
        return msgspec.convert({**msgspec.to_builtins(base), **options}, type(base))
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"bad {noun}: {error}") from error


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise InvalidArgument(f"{name} must be from {low:g} to {high:g}, not {value!r}")


def _check_below(lower: str, low: float, upper: str, high: float) -> None:
    if low >= high:
        raise InvalidArgument(
            f"{lower} {low:g} must be below {upper} {high:g}",
            hint="The space between the two is what keeps a limit from flapping.",
        )


def _check_marks(policy: FlowPolicy) -> None:
    """Watermarks in their order, and an overflow that has one to act at."""
    for noun, unit in (("backlog", ""), ("lag", "_s")):
        if getattr(policy, f"{noun}_high{unit}") is None:
            for name in (f"{noun}_low{unit}", f"{noun}_max{unit}"):
                if getattr(policy, name, None) is not None:
                    raise InvalidArgument(f"{name} needs a {noun}_high{unit}")
    if policy.backlog_marks is not None:
        low, high, top = policy.backlog_marks
        _check_below("backlog_low", low, "backlog_high", high)
        _check_below("backlog_high", high, "backlog_max", top)
    if policy.lag_marks_us is not None:
        low, high, _ = policy.lag_marks_us
        _check_below("lag_low_s", low / 1e6, "lag_high_s", high / 1e6)
    waits = policy.overflow in (Overflow.BLOCK, Overflow.REJECT)
    if not waits and not policy.has_watermarks:
        raise InvalidArgument(
            f"overflow {policy.overflow.value!r} needs a backlog_high or a lag_high_s",
            hint="Without one it would never act. Rates alone go with 'block' or 'reject'.",
        )
