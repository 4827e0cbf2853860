"""The secrets of one receiver, and the headers that prove who sent a webhook.

At most two secrets are in force: the newest, and for a while the one before it, so that a receiver can be
given a new one without a gap. A webhook is signed with all of them. A secret is told once, when it is made;
nothing shows it again.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterable, Sequence

import msgspec

from sparrow.webhooks import PREFIX, digest, key_of


class Secret(msgspec.Struct, frozen=True, kw_only=True):
    """One secret, as it is stored."""

    text: str
    created_at_us: int
    expires_at_us: int | None = None
    """When it ceases to be in force; the newest one never does."""

    @property
    def key(self) -> bytes:
        """What is signed with."""
        return key_of(self.text)

    def __repr__(self) -> str:
        return f"<Secret of {self.created_at_us}>"


def new_secret(randomness: bytes) -> str:
    """A secret in the form that receivers are given."""
    return PREFIX + base64.b64encode(randomness).decode()


def rotated(held: Sequence[Secret], text: str, now_us: int, overlap_us: int) -> list[Secret]:
    """The secrets with a new one; the newest of those before stays for the overlap, older ones go."""
    key_of(text)
    kept = [
        msgspec.structs.replace(secret, expires_at_us=now_us + overlap_us)
        for secret in in_force(held, now_us)
    ]
    return [Secret(text=text, created_at_us=now_us), *(kept[:1] if overlap_us > 0 else [])]


def in_force(held: Iterable[Secret], now_us: int) -> list[Secret]:
    """Those that count now, the newest first."""
    return [secret for secret in held if secret.expires_at_us is None or now_us < secret.expires_at_us]


def headers(
    keys: Sequence[bytes], message_id: str, attempt: int, timestamp_s: int, body: bytes
) -> dict[str, str]:
    """What a signed webhook carries."""
    standard = [f"v1,{digest(key, message_id, timestamp_s, body)}" for key in keys]
    plain = [f"sha256={hmac.digest(key, body, hashlib.sha256).hex()}" for key in keys]
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp_s),
        "webhook-signature": " ".join(standard),
        "X-PubSub-Signature": ",".join(plain),
        "X-PubSub-Message-Id": message_id,
        "X-PubSub-Attempt": str(attempt),
    }
