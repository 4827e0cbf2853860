"""Values as people write them on a command line: times, stretches of time, sizes, options by name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from sparrow.model.errors import InvalidArgument

_UNITS_S = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}
_PIECE = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|min|s|m|h|d|w)")
_PIECES = re.compile(rf"(?:{_PIECE.pattern}\s*)+\Z")
_NUMBER = re.compile(r"\d+(?:\.\d+)?\Z")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?\Z", re.IGNORECASE)
_UNLIMITED = frozenset({"none", "never", "forever", "unlimited"})
_EPOCH_S_MIN = 1e8
"""A bare number this large is seconds since 1970 (1973 and later); a smaller one is no date."""

TIME_HINT = "Times look like 2026-07-01T12:00:00Z, 2026-07-01 (UTC unless it says otherwise) or 2h ago."
SPAN_HINT = "Stretches of time look like 30s, 15m, 1h30m or 7d; a bare number is seconds."


def parse_span(text: str) -> float:
    """Seconds of ``90``, ``30s``, ``1h30m`` or ``7d``."""
    text = text.strip().lower()
    if _NUMBER.match(text):
        return float(text)
    if not _PIECES.match(text):
        raise InvalidArgument(f"{text!r} is not a stretch of time", hint=SPAN_HINT)
    return sum(float(amount) * _UNITS_S[unit] for amount, unit in _PIECE.findall(text))


def parse_limit_span(text: str) -> float | None:
    """The same, or None for ``forever``."""
    return None if text.strip().lower() in _UNLIMITED else parse_span(text)


def parse_limit_size(text: str) -> int | None:
    """Bytes of ``500``, ``10MB`` or ``2GiB``; None for ``unlimited``."""
    text = text.strip()
    if text.lower() in _UNLIMITED:
        return None
    match = _SIZE.match(text)
    if match is None:
        raise InvalidArgument(f"{text!r} is not a size", hint="Sizes look like 500, 10MB, 2GiB or unlimited.")
    unit = (match[2] or "").lower()
    scale = 1024 if unit.endswith("i") else 1000
    power: int = " kmgt".index(unit[:1] or " ")
    return round(float(match[1]) * float(scale**power))


def parse_limit_count(text: str) -> int | None:
    """A whole number; None for ``unlimited``."""
    if text.strip().lower() in _UNLIMITED:
        return None
    if not text.strip().isdigit():
        raise InvalidArgument(f"{text!r} is not a count", hint="Give a whole number, or unlimited.")
    return int(text)


def is_time(text: str) -> bool:
    """Whether a text is written as a time at all."""
    try:
        parse_time(text, now=datetime(2000, 1, 1, tzinfo=UTC))
    except InvalidArgument:
        return False
    return True


def parse_time(text: str, *, now: datetime | None = None) -> datetime:
    """A point in time: ISO 8601, ``2h ago``, ``in 5m``, ``now`` or seconds since 1970."""
    now = now or datetime.now(UTC)
    words = text.strip().lower()
    if words == "now":
        return now
    if words.endswith(" ago"):
        return now - timedelta(seconds=parse_span(words.removesuffix(" ago")))
    if words.startswith("in "):
        return now + timedelta(seconds=parse_span(words.removeprefix("in ")))
    try:
        if _NUMBER.match(words) and float(words) >= _EPOCH_S_MIN and len(words) != 8:
            return datetime.fromtimestamp(float(words), UTC)
        found = datetime.fromisoformat(text.strip())
    except (ValueError, OverflowError, OSError) as error:
        raise InvalidArgument(f"{text!r} is not a time", hint=TIME_HINT) from error
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def parse_start(text: str) -> str | datetime:
    """Where reading begins: ``earliest``, ``latest`` or a time."""
    return text if text in ("earliest", "latest") else parse_time(text)


def parse_pairs(pairs: Iterable[str] | None, option: str) -> dict[str, str]:
    """``k=v`` texts as a map."""
    found = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise InvalidArgument(f"{option} {pair!r} is not name=value", hint=f"As in {option} env=prod.")
        found[name] = value
    return found


def parse_set(pairs: Iterable[str] | None) -> dict[str, Any]:
    """``--set`` options: values are JSON where they can be, else text; a dot leads into a group."""
    found: dict[str, Any] = {}
    for name, text in parse_pairs(pairs, "--set").items():
        *groups, last = name.split(".")
        place = found
        for group in groups:
            place = place.setdefault(group, {})
            if not isinstance(place, dict):
                raise InvalidArgument(f"--set {name}: {group} was given whole before")
        place[last] = _json_or_text(text)
    return found


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def merged(named: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    """Options that were given by name and those by ``--set``; one given twice is refused."""
    found = {name: value for name, value in named.items() if value is not None and value != {}}
    for name, value in rest.items():
        if isinstance(value, dict) and isinstance(found.get(name), dict):
            found[name] = merged(found[name], value)
        elif name in found:
            raise InvalidArgument(f"{name} is given twice", hint="Use the named option or --set, not both.")
        else:
            found[name] = value
    return found
