"""Exposure: whether a listener is reached from other machines, and whether that is meant.

An address beyond loopback is served only when those who come must prove something: a token, or a certificate
(``server.tls_client_ca``). Where tokens guard it, they stay wanted even when the last one is revoked.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping

from sparrow.broker import logs
from sparrow.broker.access import Access
from sparrow.model.errors import InvalidSettings
from sparrow.model.settings import Address, Settings

_log = logs.get("up")


def is_loopback(host: str) -> bool:
    """Whether an address of this machine is reached from this machine only."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def check(listeners: Mapping[str, socket.socket], settings: Settings, access: Access) -> None:
    """Refuses to serve strangers unless told to; called before anything listens."""
    names = {name: Address(*bound.getsockname()[:2]) for name, bound in listeners.items()}
    exposed = {name: address for name, address in names.items() if not is_loopback(address.host)}
    if not exposed:
        return
    shown = " and ".join(f"{name} {address}" for name, address in exposed.items())
    if access.has_tokens:
        access.insist()
        if not settings.server.tls_certificate:
            _log.warning("listener-in-the-clear", f"tokens to {shown} travel unencrypted; see server.tls_*")
    elif settings.access.insecure:
        _log.warning("listener-open", f"everybody who reaches {shown} may do everything")
    elif not settings.server.tls_client_ca:
        raise InvalidSettings(
            f"other machines can reach {shown}, and no token is wanted",
            hint="Create one with `sparrow token create admin --role admin --data DIR`, set server.tokens, "
            "listen on 127.0.0.1, or start with --insecure.",
            listeners=sorted(exposed),
        )
