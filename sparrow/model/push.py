"""Push: where a subscription sends its messages by itself, how, and how that goes.

A ``PushPolicy`` is part of a subscription's policy and is shown to whoever may see it, so it holds nothing
secret: what webhooks are signed with is kept elsewhere, and a URL or a header that carries a password is
refused. ``PushSettings`` are the operator's: which addresses and ports may be reached at all. A private
address is refused unless a network that holds it is named there, because a URL comes from a subscriber and
the broker may stand where the subscriber cannot reach.

Whether a *name* leads to an allowed address is not decided here: it is looked up for every connection
(broker/push/guard.py).
"""

from __future__ import annotations

import enum
import ipaddress
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import SplitResult, urlsplit

import msgspec
from msgspec import Meta

from sparrow.model.errors import InvalidArgument

URL_LENGTH_MAX = 2048
CONCURRENCY_MAX = 1000
TIMEOUT_S_MAX = 300.0
RATE_MAX = 1_000_000.0
HEADERS_MAX = 20
HEADER_LENGTH_MAX = 1024

_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}\Z")
_HEADER_VALUE = re.compile(r"[\x20-\x7e]*\Z")
_SECRET_HEADERS = frozenset({"authorization", "cookie", "proxy-authorization", "x-api-key"})
_OWN_HEADERS = frozenset(
    {
        "connection", "content-length", "content-type", "expect", "host", "keep-alive", "te", "trailer",
        "traceparent", "tracestate", "transfer-encoding", "upgrade", "user-agent",
    }
)  # fmt: skip
_OWN_PREFIXES = ("webhook-", "x-pubsub-", "ce-", "proxy-")

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class PushFormat(enum.StrEnum):
    """What the body of a webhook is."""

    ENVELOPE = "envelope"
    """JSON with id, type, timestamp, key, attributes and the data."""
    RAW = "raw"
    """The data as it was published."""
    CLOUDEVENTS = "cloudevents"
    """A CloudEvent in structured mode."""
    CLOUDEVENTS_BINARY = "cloudevents_binary"
    """A CloudEvent in binary mode: the data, and its attributes as headers."""


class PushPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a subscription pushes."""

    url: str
    format: PushFormat = PushFormat.ENVELOPE
    max_concurrency: int = 100
    """Requests under way at once at most; how many there are follows from how the receiver does."""
    rate_per_s: float | None = None
    """Requests a second at most; ``None`` is no limit."""
    timeout_s: float = 30.0
    """Time for the whole of a request; later is a failure."""
    headers: dict[str, str] = {}
    """Sent with every request; not for secrets, because policies can be read."""
    https_only: bool = False
    verify: bool = False
    """Ask the receiver first whether it wants to be sent webhooks (CloudEvents' OPTIONS handshake)."""


class PushStatus(enum.StrEnum):
    """Whether webhooks go out."""

    ACTIVE = "active"
    OPEN = "open"
    """The circuit breaker is open: the receiver fails, nothing is sent until it is tried again."""
    HALF_OPEN = "half_open"
    """One request tries whether the receiver is back."""
    PAUSED = "paused"
    DISABLED = "disabled"
    """The receiver said that it is gone; ``resume`` starts again."""


class PushState(msgspec.Struct, frozen=True, kw_only=True):
    """How pushing goes."""

    state: PushStatus
    why: str = ""
    url: str = ""
    concurrency: int = 0
    """Requests that may be under way at once now."""
    in_flight: int = 0
    delivered: int = 0
    """Requests that were answered with 2xx since the broker started."""
    failed: int = 0
    delivered_per_s: float = 0.0
    """Over the last seconds."""
    latency_s: float | None = None
    """How long the receiver takes, about."""
    retry_at_us: int | None = None
    """When something may be sent again, while nothing may."""
    last_status: int | None = None
    last_error: str = ""
    last_error_at_us: int | None = None
    secrets: int = 0
    """Secrets that webhooks are signed with now."""


class PushSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Webhooks that the broker sends."""

    allow_networks: Annotated[
        str,
        Meta(
            extra={"form": "networks"},
            description="Networks of private addresses that webhooks may reach, separated by commas.",
        ),
    ] = ""
    ports: Annotated[
        str,
        Meta(
            extra={"form": "ports"},
            description="Ports that webhooks may reach, separated by commas; a range as 1024-65535.",
        ),
    ] = "80,443,1024-65535"
    https_only: Annotated[bool, Meta(description="Whether URLs without TLS are refused.")] = False
    requests_max: Annotated[
        int, Meta(ge=1, le=1_000_000, description="Webhooks under way at once, over all subscriptions.")
    ] = 4096
    breaker_wait_s: Annotated[
        float,
        Meta(ge=0.01, le=3600.0, description="How long a failing receiver is left alone at first."),
    ] = 5.0
    breaker_wait_max_s: Annotated[
        float, Meta(ge=0.01, le=86400.0, description="How long a failing receiver is left alone at most.")
    ] = 300.0
    drain_s: Annotated[
        float,
        Meta(ge=0.0, le=300.0, description="How long webhooks under way may take when the broker stops."),
    ] = 3.0


NETWORKS_FORM = "networks as in 10.0.0.0/8,fd00::/8"
PORTS_FORM = "ports and ranges as in 443,8000-8999"


def parse_networks(text: str) -> tuple[Network, ...]:
    """The networks that a setting names."""
    found: list[Network] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        try:
            found.append(ipaddress.ip_network(part))
        except ValueError as error:
            raise InvalidArgument(f"{part!r} is not a network: {error}") from error
    return tuple(found)


def parse_ports(text: str) -> tuple[range, ...]:
    """The ports that a setting names."""
    found: list[range] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.match(r"(\d{1,5})(?:-(\d{1,5}))?\Z", part)
        low, high = (0, -1) if match is None else (int(match[1]), int(match[2] or match[1]))
        if not 1 <= low <= high <= 65535:
            raise InvalidArgument(f"{part!r} is not a port or a range of ports")
        found.append(range(low, high + 1))
    return tuple(found)


def parse_push_policy(options: Mapping[str, Any], base: PushPolicy | None = None) -> PushPolicy:
    """The policy that ``options`` describe, on top of ``base``; refuses what could not work."""
    known = PushPolicy.__struct_fields__
    unknown = sorted(str(name) for name in options if name not in known)
    if unknown:
        hint = f"Each push option is one of: {', '.join(sorted(known))}."
        raise InvalidArgument(f"unknown push option {', '.join(unknown)}", hint=hint)
    merged = {**({} if base is None else msgspec.to_builtins(base)), **options}
    if "url" not in merged:
        raise InvalidArgument("push needs a url", hint='As in push={"url": "https://example.com/hook"}.')
    try:
        policy = msgspec.convert(merged, PushPolicy)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"bad push option: {error}") from error
    _check_number("push.max_concurrency", policy.max_concurrency, 1, CONCURRENCY_MAX)
    _check_number("push.timeout_s", policy.timeout_s, 0.1, TIMEOUT_S_MAX)
    if policy.rate_per_s is not None:
        _check_number("push.rate_per_s", policy.rate_per_s, 0.001, RATE_MAX)
    _check_headers(policy.headers)
    parts = parse_url(policy.url)
    if policy.https_only and parts.scheme != "https":
        raise InvalidArgument(f"push.url {policy.url!r} is not https, as push.https_only asks")
    return policy


def parse_url(url: str) -> SplitResult:
    """The parts of a URL that webhooks can be sent to."""
    if len(url) > URL_LENGTH_MAX:
        raise InvalidArgument(f"push.url has {len(url)} characters; {URL_LENGTH_MAX} are allowed")
    if not url.isascii() or any(character <= " " or character in "\\\x7f" for character in url):
        raise InvalidArgument(
            "push.url must be plain ASCII without spaces or backslashes",
            hint="Write a name in its xn-- form and percent-encode the path.",
        )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InvalidArgument(f"push.url is not a URL: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidArgument(f"push.url must be http://… or https://… with a host, not {url[:100]!r}")
    if parts.username is not None or parts.password is not None:
        raise InvalidArgument(
            "push.url must not hold a user or a password",
            hint="Check the signature of a webhook instead: see docs/guides/webhooks.md.",
        )
    if parts.fragment or port == 0:
        raise InvalidArgument("push.url must have neither a fragment nor the port 0")
    return parts


def _check_headers(headers: Mapping[str, str]) -> None:
    if len(headers) > HEADERS_MAX:
        raise InvalidArgument(f"push.headers has {len(headers)} headers; {HEADERS_MAX} are allowed")
    for name, value in headers.items():
        lower = name.lower()
        if not _HEADER_NAME.match(name) or not _HEADER_VALUE.match(value) or len(value) > HEADER_LENGTH_MAX:
            raise InvalidArgument(f"push.headers: {name[:100]!r} is not a header of plain ASCII")
        if lower in _OWN_HEADERS or lower.startswith(_OWN_PREFIXES):
            raise InvalidArgument(f"push.headers: {name!r} is set by the broker")
        if lower in _SECRET_HEADERS:
            raise InvalidArgument(
                f"push.headers: {name!r} would hold a secret that everybody who sees the policy can read",
                hint="Check the signature of a webhook instead: see docs/guides/webhooks.md.",
            )


def _check_number(name: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidArgument(f"{name} must be from {low:g} to {high:g}, not {value!r}")
