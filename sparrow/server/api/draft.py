"""A message that somebody wants to publish, as JSON says it."""

from __future__ import annotations

from datetime import datetime

import msgspec
from msgspec import UNSET, Raw, UnsetType

Moment = datetime | float
"""ISO 8601 with a time zone, or seconds since 1970."""


class MessageOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What may be said of a message beside its data."""

    ordering_key: str | None = None
    idempotency_key: str | None = None
    priority: int | None = None
    ttl_s: float | None = None
    deliver_at: Moment | None = None
    delay_s: float | None = None
    """Deliver after so many seconds; in place of ``deliver_at``."""
    event_time: Moment | None = None


class NewMessage(MessageOptions, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A message to be published: data or data_base64, and what else there is to say."""

    data: Raw | UnsetType = UNSET
    data_base64: bytes | UnsetType | None = UNSET
    attributes: dict[str, str] | None = None
    depends_on: list[str] | None = None
