"""Which addresses a webhook may reach, checked where the connection is made.

A URL comes from a subscriber, and the broker stands where the subscriber cannot reach: next to the metadata
service of a cloud, a database without a password, its own API. To look at the URL once is not enough, because
a name may lead elsewhere the next time. So three places check, and all by address:

- the resolver hands on only the allowed ones of the addresses that a name leads to;
- the socket is made only for an allowed address and port, whether it was looked up or written in the URL;
- the peer of a new connection is looked at once more before anything is sent.

An IPv6 address that stands for an IPv4 one (mapped, compatible, NAT64, 6to4, Teredo, ISATAP) is as good
as that one, and those that only tunnel are refused. The operator's networks are the one exception.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from sparrow.model.errors import EndpointRefused
from sparrow.model.push import PushSettings, parse_networks, parse_ports, parse_url

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_REFUSED = [
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",  # carrier-grade NAT
        "127.0.0.0/8",
        "169.254.0.0/16",  # link-local: cloud metadata
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",  # documentation
        "192.31.196.0/24",
        "192.52.193.0/24",
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",
        "192.175.48.0/24",
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
        "168.63.129.16/32",  # a cloud's own service on a public address
        "64:ff9b:1::/48",  # NAT64 of a site
        "100::/64",  # discard
        "100:0:0:1::/64",
        "2001::/23",  # Teredo, benchmarks, ORCHID and other protocol assignments
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4
        "3fff::/20",  # documentation
        "5f00::/16",  # segment routing
        "fc00::/7",  # unique local
        "fe80::/10",  # link-local
        "fec0::/10",  # site-local
        "ff00::/8",  # multicast
    )
]
_GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_COMPATIBLE = ipaddress.IPv6Network("::/96")
_ISATAP = (0x00005EFE, 0x02005EFE)

_LOOKUPS_AT_ONCE = 32
_NAMES_KEPT_S = 30

Lookup = Callable[[str, int], Awaitable[Sequence[tuple[int, str]]]]
"""Addresses of a name: family and address each."""


class Guard:
    """What the operator allows."""

    def __init__(self, settings: PushSettings) -> None:
        self._allowed = parse_networks(settings.allow_networks)
        self._ports = parse_ports(settings.ports)
        self._https_only = settings.https_only

    def check_url(self, url: str) -> None:
        """Refuses what can be seen to be wrong without looking a name up."""
        parts = parse_url(url)
        if self._https_only and parts.scheme != "https":
            raise EndpointRefused(f"{url!r} is not https, as the setting push.https_only asks")
        self.check_port(parts.port or (443 if parts.scheme == "https" else 80))
        host = parts.hostname or ""
        literal = _to_address(host)
        if literal is not None:
            self.check_address(literal)
        elif _looks_numeric(host):
            raise EndpointRefused(f"the host {host!r} is neither a name nor an address in its usual form")

    def check_port(self, port: int) -> None:
        if not any(port in ports for ports in self._ports):
            raise EndpointRefused(f"the port {port} is not one of the setting push.ports")

    def check_address(self, address: Address | str) -> None:
        """Refuses an address that webhooks may not reach."""
        found = _to_address(address) if isinstance(address, str) else address
        if found is None:
            raise EndpointRefused(f"{address!r} is not an address")
        for each in meanings(found):
            if not self._is_allowed(each):
                raise EndpointRefused(
                    f"the address {found} is private, local or reserved, and webhooks may not reach it",
                    hint="Use a public address, or let the operator name its network in push.allow_networks.",
                )

    def _is_allowed(self, address: Address) -> bool:
        if any(address in network for network in self._allowed):
            return True
        if any(address in network for network in _REFUSED):
            return False
        return address.version == 4 or address in _GLOBAL_V6

    def make_socket(self, info: tuple[Any, Any, int, str, tuple[Any, ...]]) -> socket.socket:
        """The socket for one address, which is about to be connected."""
        family, kind, protocol, _, target = info
        self.check_address(str(target[0]))
        self.check_port(int(target[1]))
        made = socket.socket(family=family, type=kind, proto=protocol)
        made.setblocking(False)
        return made


def meanings(address: Address) -> list[Address]:
    """What an address may stand for: an IPv4 one inside it, else itself. All of them have to be allowed."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    low = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    if address.ipv4_mapped is not None or address in _NAT64:
        return [low]
    if address in _COMPATIBLE and int(address) > 1:
        return [address, low]
    if (int(address) >> 32) & 0xFFFFFFFF in _ISATAP:
        return [address, low]
    return [address]


def _to_address(text: str) -> Address | None:
    """An address as it is written in a URL or told by the system: with brackets, with a scope, or without."""
    try:
        return ipaddress.ip_address(text.strip("[]").partition("%")[0])
    except ValueError:
        return None


def _looks_numeric(host: str) -> bool:
    """Whether some resolver would read the host as a number: 2130706433, 0x7f.1, 0177.0.0.1."""
    last = host.rstrip(".").rpartition(".")[2].lower()
    return last.isdigit() or (last.startswith("0x") and all(c in "0123456789abcdef" for c in last[2:]))


class SystemLookup:
    """Asks the system, in threads of its own: names that are slow to find hold up nobody else's work."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_LOOKUPS_AT_ONCE, thread_name_prefix="webhook-names")

    async def __call__(self, host: str, port: int) -> Sequence[tuple[int, str]]:
        found = await asyncio.get_running_loop().run_in_executor(self._threads, _ask_system, host, port)
        return [(int(family), str(target[0])) for family, _, _, _, target in found]

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _ask_system(host: str, port: int) -> Sequence[tuple[Any, Any, int, str, tuple[Any, ...]]]:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)


class GuardedResolver(AbstractResolver):
    """Names become addresses; those that may not be reached are left out."""

    def __init__(self, guard: Guard, look_up: Lookup | None = None) -> None:
        self._guard = guard
        self._look_up: Lookup
        self._system: SystemLookup | None = None
        if look_up is None:
            self._look_up = self._system = SystemLookup()
        else:
            self._look_up = look_up

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        allowed: list[ResolveResult] = []
        refused: EndpointRefused | None = None
        for found_family, address in await self._look_up(host, port):
            try:
                self._guard.check_address(address)
            except EndpointRefused as error:
                refused = error
                continue
            allowed.append(
                ResolveResult(
                    hostname=host,
                    host=address,
                    port=port,
                    family=found_family,
                    proto=0,
                    flags=socket.AI_NUMERICHOST,
                )
            )
        if not allowed and refused is not None:
            raise refused
        if not allowed:
            raise OSError(f"{host!r} has no address")
        return allowed

    async def close(self) -> None:
        if self._system is not None:
            self._system.close()


class GuardedConnector(aiohttp.TCPConnector):
    """Connections to allowed addresses only, however their hosts are written."""

    def __init__(self, guard: Guard, look_up: Lookup | None = None, *, keepalive_s: float = 15.0) -> None:
        super().__init__(
            resolver=GuardedResolver(guard, look_up),
            socket_factory=guard.make_socket,
            limit=0,
            ttl_dns_cache=_NAMES_KEPT_S,
            keepalive_timeout=keepalive_s,
        )
        self._guard = guard

    async def _wrap_create_connection(self, *args: Any, **kwargs: Any) -> Any:
        transport, protocol = await super()._wrap_create_connection(*args, **kwargs)
        try:
            self._guard.check_address(str((transport.get_extra_info("peername") or ("",))[0]))
        except EndpointRefused:
            transport.abort()
            raise
        return transport, protocol
