"""For receivers of webhooks: is this request from the broker that shares a secret with me, and fresh?

    from sparrow import webhooks

    webhook = webhooks.verify("whsec_...", request.headers, request.body)   # raises WebhookNotVerified

Webhooks are signed as Standard Webhooks 1.0 says: HMAC-SHA256 of ``id.timestamp.body`` under each secret in
use. Give the body as it came, byte for byte; JSON that was parsed and written again has other bytes. Give
several secrets while one is being replaced. An id that was seen before is a repeat: every attempt of one
message has the same id, and delivery is at least once.

This module needs nothing of a broker.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from sparrow.model.errors import InvalidArgument, WebhookNotVerified

PREFIX = "whsec_"
TOLERANCE_S = 300
SECRET_BYTES_MIN, SECRET_BYTES_MAX = 24, 64


class Webhook(NamedTuple):
    """What a verified request says of itself."""

    id: str
    """The message's id; the same for every attempt."""
    timestamp_s: int
    """When this attempt was made."""
    attempt: int
    """From 1."""


def verify(
    secrets: str | Iterable[str],
    headers: Mapping[str, str],
    body: bytes,
    *,
    tolerance_s: float = TOLERANCE_S,
    now_s: float | None = None,
) -> Webhook:
    """The webhook that a request is; raises ``WebhookNotVerified`` when it is none that can be trusted."""
    keys = [key_of(secret) for secret in ([secrets] if isinstance(secrets, str) else secrets)]
    if not keys:
        raise InvalidArgument("verify needs at least one secret")
    found = {name.lower(): value for name, value in headers.items()}
    try:
        message_id, stamp, given = (
            found[name] for name in ("webhook-id", "webhook-timestamp", "webhook-signature")
        )
    except KeyError as missing:
        raise WebhookNotVerified(f"the request has no header {missing.args[0]!r}") from None
    if not re.fullmatch(r"\d{1,12}", stamp, re.ASCII):
        raise WebhookNotVerified("the timestamp of the request is not a number")
    now_s = time.time() if now_s is None else now_s
    if abs(now_s - int(stamp)) > tolerance_s:
        raise WebhookNotVerified(
            f"the request is {now_s - int(stamp):.0f} s old; {tolerance_s:g} are allowed"
        )
    claimed = [part[3:] for part in given.split(" ") if part.startswith("v1,")]
    is_known = False
    for key in keys:
        wanted = digest(key, message_id, int(stamp), body)
        for claim in claimed:
            is_known |= hmac.compare_digest(wanted.encode(), claim.encode("utf-8", "replace"))
    if not is_known:
        raise WebhookNotVerified("no signature of the request fits")
    attempt = found.get("x-pubsub-attempt", "1")
    return Webhook(message_id, int(stamp), int(attempt) if attempt.isascii() and attempt.isdigit() else 1)


def sign(secret: str, message_id: str, timestamp_s: int, body: bytes) -> str:
    """The ``webhook-signature`` of a request; good for testing a receiver."""
    return "v1," + digest(key_of(secret), message_id, timestamp_s, body)


def digest(key: bytes, message_id: str, timestamp_s: int, body: bytes) -> str:
    """HMAC-SHA256 of ``id.timestamp.body`` in base64."""
    content = b"%s.%d.%s" % (message_id.encode(), timestamp_s, body)
    return base64.b64encode(hmac.digest(key, content, hashlib.sha256)).decode()


def key_of(secret: str) -> bytes:
    """The bytes of a secret in its form ``whsec_<base64>``."""
    try:
        if not secret.startswith(PREFIX):
            raise ValueError(f"it does not start with {PREFIX}")
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
        if not SECRET_BYTES_MIN <= len(key) <= SECRET_BYTES_MAX:
            raise ValueError(f"it has {len(key)} bytes, not {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX}")
    except (ValueError, AttributeError, binascii.Error) as error:
        raise InvalidArgument(
            f"this is not a webhook secret: {error}", hint="A secret looks like whsec_ and base64."
        ) from None
    return key
