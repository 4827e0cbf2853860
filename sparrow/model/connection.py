"""A connection as an operator sees it, and whoever keeps connections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec


class ConnectionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One connection of a listener."""

    listener: str
    """``tcp`` or ``http``."""
    id: str
    address: str
    """Host and port of the other end."""
    age_s: float
    silent_s: float
    """Since it was last heard."""
    protocol: str
    """Name and version of what is spoken."""
    name: str = ""
    """What the client calls itself, or its token is called."""
    held_bytes: int = 0
    """Commands under way and answers unread."""


class Door(Protocol):
    """A listener, as far as those who count connections know it."""

    @property
    def listener(self) -> str: ...

    @property
    def connections(self) -> int: ...

    @property
    def connections_max(self) -> int:
        """How many it lets in; 0 is no limit."""

    def describe(self) -> Sequence[ConnectionInfo]: ...
