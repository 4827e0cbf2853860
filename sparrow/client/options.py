"""How a client reaches its broker: the address, and what may be set about the connection."""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING, Any, NamedTuple

from sparrow.model.errors import InvalidArgument
from sparrow.model.flow import parse_class, parse_publisher
from sparrow.model.limits import BATCH_MESSAGES_MAX, REQUEST_BYTES_MAX
from sparrow.model.names import parse_producer
from sparrow.model.topic import Codec

if TYPE_CHECKING:
    import ssl

HOST_DEFAULT = "127.0.0.1"
PORT_DEFAULT = 9092
_URL = re.compile(r"(sparrows?)://(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\s:\[\]/@]*))(?::(\d{1,5}))?/?\Z")


class Target(NamedTuple):
    """Where a broker listens."""

    host: str
    port: int
    is_secure: bool

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"sparrow{'s' if self.is_secure else ''}://{host}:{self.port}"


def parse_url(url: object) -> Target:
    """Where ``sparrow://host:port`` leads to; ``sparrows://`` is the same with TLS."""
    match = _URL.match(url) if isinstance(url, str) else None
    if match is None or not 0 < int(match[4] or PORT_DEFAULT) <= 65535:
        raise InvalidArgument(
            f"{url!r} is not the address of a broker", hint="Addresses look like sparrow://127.0.0.1:9092."
        )
    host = match[2] or match[3] or HOST_DEFAULT
    return Target(host, int(match[4] or PORT_DEFAULT), match[1] == "sparrows")


class Options(NamedTuple):
    """What may be set about a client."""

    token: str = ""
    client: str = ""
    """A name for the broker's logs and for the producer under which this client publishes."""
    publisher: str = ""
    """Whose quota the client's publishes count against."""
    priority_class: str = "normal"
    compression: str = "none"
    """Of what is published: none, lz4 or zstd."""
    linger_s: float = 0.005
    """How long single publishes wait for company while others are on their way."""
    batch_messages: int = 2000
    batch_bytes: int = 1024 * 1024
    """Single publishes are sent when so much has gathered."""
    max_in_flight: int = 8
    """Batches of one topic on their way at once."""
    pending_bytes_max: int = 64 * 1024 * 1024
    """What waits to be published; above it a publish waits."""
    prefetch_messages: int = 20_000
    prefetch_bytes: int = 16 * 1024 * 1024
    """What a subscription that is being pulled may hold ahead of its program at most."""
    timeout_s: float = 30.0
    """How long a call waits for its answer."""
    connect_s: float = 5.0
    """How long the first connection is tried for."""
    reconnect_s: float = 30.0
    """How long a broker may be away before those who wait are told; 0 tells them at once."""
    backoff_min_s: float = 0.05
    backoff_max_s: float = 2.0
    """Waits between two attempts to connect: from the first up to the second, with jitter."""
    tls: ssl.SSLContext | None = None
    """For sparrows://; none is the system's certificates."""

    def __repr__(self) -> str:
        shown = self._asdict() | ({"token": "***"} if self.token else {})
        return f"Options({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @property
    def codec(self) -> Codec:
        return Codec(self.compression)


_BOUNDS: dict[str, tuple[float, float]] = {
    "linger_s": (0, 10),
    "batch_messages": (1, BATCH_MESSAGES_MAX),
    "batch_bytes": (1, REQUEST_BYTES_MAX),
    "max_in_flight": (1, 64),
    "pending_bytes_max": (1, 2**40),
    "prefetch_messages": (0, 1_000_000),
    "prefetch_bytes": (1, 2**32),
    "timeout_s": (0.001, 86_400),
    "connect_s": (0, 86_400),
    "reconnect_s": (0, 86_400),
    "backoff_min_s": (0.001, 60),
    "backoff_max_s": (0.001, 600),
}
"""64 in flight: well below the 256 requests by which a broker recognises a producer's repeats."""


def parse_options(given: dict[str, Any]) -> Options:
    """The options that a program gave; refuses unknown names and bad values."""
    unknown = sorted(set(given) - set(Options._fields))
    if unknown:
        raise InvalidArgument(
            f"unknown option {', '.join(unknown)}", hint=f"Options are: {', '.join(Options._fields)}."
        )
    options = Options(**given)
    for name, (low, high) in _BOUNDS.items():
        value, is_whole = getattr(options, name), isinstance(Options._field_defaults[name], int)
        is_number = isinstance(value, int if is_whole else (int, float)) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:
            raise InvalidArgument(f"{name} must be a number from {low:,} to {high:,}, not {value!r}")
    if options.compression not in [codec.value for codec in Codec]:
        raise InvalidArgument(f"compression must be none, lz4 or zstd, not {options.compression!r}")
    parse_class(options.priority_class)
    if options.publisher:
        parse_publisher("publisher", options.publisher)
    if options.client:
        parse_producer(options.client)
    if options.tls is not None:
        import ssl  # Only where it is used: a process that lives for one commit has no time for it.

        if not isinstance(options.tls, ssl.SSLContext):
            raise InvalidArgument("tls must be an ssl.SSLContext")
    return options


def producer_name(options: Options) -> str:
    """A name that no other client has: under it the repeats of this one are recognised."""
    return f"{options.client[:200] or 'client'}-{secrets.token_hex(8)}"
