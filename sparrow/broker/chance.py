"""The one place where the broker throws dice: jitter, session numbers, names for jobs."""

from __future__ import annotations

import random
import secrets


def jitter() -> float:
    """A number from 0 to 1 that spreads retries apart."""
    return random.random()


def session() -> int:
    """A number that differs between two runs of a broker."""
    return secrets.randbits(32)


def name() -> str:
    """A short unique name."""
    return secrets.token_hex(8)
