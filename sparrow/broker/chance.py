"""The one place where the broker throws dice: jitter, session numbers, names for jobs, secrets."""

from __future__ import annotations

import random
import secrets


def jitter() -> float:
    """A number from 0 to 1 that spreads retries apart."""
    return random.random()


def session() -> int:
    """A number that differs between two runs of a broker."""
    return secrets.randbits(32)


def key() -> bytes:
    """256 bits to sign with."""
    return secrets.token_bytes(32)


def name() -> str:
    """A short unique name."""
    return secrets.token_hex(8)


def secret() -> str:
    """256 bits that nobody can guess, as text that fits a header."""
    return secrets.token_urlsafe(32)
