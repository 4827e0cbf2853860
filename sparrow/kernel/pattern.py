"""A pattern: which topics a subscription reads.

A pattern is a dotted path like a topic name, in which a whole level may be a wildcard:

- ``*`` stands for exactly one level: ``orders.*.created`` matches ``orders.us.created`` only.
- ``#`` stands for zero or more levels and is the last level: ``orders.#`` matches ``orders`` itself
  and everything below it; ``#`` alone matches every topic.

A pattern without wildcards is literal and matches the one topic of that name. The rules of names
hold for the levels in between, so a literal pattern is always a legal topic name. Repeated
separators collapse (``a..b`` is ``a.b``); one at either end is refused, because there it is a typing
error that changes the meaning.

The separator is the dot. A shell that is set up to speak ``/`` passes ``separator="/"`` here; the
parsed pattern is the same, written with dots.

Matching one pattern costs by its levels; matching many at once is the router's business.
"""

from __future__ import annotations

import re

import msgspec

from sparrow.model.errors import InvalidPattern
from sparrow.model.names import NAME_LENGTH_MAX

ONE = "*"
REST = "#"
_LEVEL = re.compile(r"[A-Za-z0-9_~%+-]*")


class Pattern(msgspec.Struct, frozen=True):
    """A parsed pattern; made by ``parse_pattern`` alone."""

    text: str
    """The canonical form, with dots."""
    levels: tuple[str, ...]
    """The levels without a closing ``#``; ``*`` among them is the wildcard."""
    has_rest: bool
    """True when the pattern ends in ``#``."""

    @property
    def is_literal(self) -> bool:
        """True when the pattern names exactly one topic."""
        return not self.has_rest and ONE not in self.levels

    @property
    def is_broad(self) -> bool:
        """True when no level is named and depth is open (``#``, ``*.#``): worth a warning."""
        return self.has_rest and all(level == ONE for level in self.levels)

    def matches(self, topic: str) -> bool:
        """True when the pattern covers the topic."""
        given = topic.split(".")
        if len(given) < len(self.levels) or (len(given) > len(self.levels) and not self.has_rest):
            return False
        return all(want in (ONE, level) for want, level in zip(self.levels, given, strict=False))

    def covers(self, other: Pattern) -> bool:
        """True when every topic that ``other`` matches is matched by this one."""
        if other.has_rest and not self.has_rest:
            return False
        # A topic has at least one level, so # says the same as *.#.
        given = other.levels or (ONE,)
        if len(given) < len(self.levels) or (len(given) > len(self.levels) and not self.has_rest):
            return False
        return all(want in (ONE, level) for want, level in zip(self.levels, given, strict=False))

    def __str__(self) -> str:
        return self.text


def parse_pattern(text: object, *, separator: str = ".") -> Pattern:
    """The pattern that ``text`` describes; an InvalidPattern names the position of the fault."""
    if not isinstance(text, str):
        raise InvalidPattern(f"a pattern is a string, not {type(text).__name__}")
    if not text:
        raise InvalidPattern("a pattern must not be empty; # matches every topic", position=0)
    if len(text) > NAME_LENGTH_MAX:
        raise InvalidPattern(
            f"the pattern has {len(text)} characters; {NAME_LENGTH_MAX} are allowed",
            position=NAME_LENGTH_MAX,
        )
    _check_ends(text, separator)
    levels = _parse_levels(text, separator)
    has_rest = levels[-1] == REST
    return Pattern(".".join(levels), tuple(levels[:-1] if has_rest else levels), has_rest)


def _check_ends(text: str, separator: str) -> None:
    if text.startswith(separator):
        raise InvalidPattern(
            f"{text!r} begins with {separator!r}: a level is missing at position 0", position=0
        )
    if text.endswith(separator):
        position = len(text)
        raise InvalidPattern(
            f"{text!r} ends with {separator!r}: a level is missing at position {position}",
            position=position,
        )


def _parse_levels(text: str, separator: str) -> list[str]:
    levels: list[str] = []
    position = 0
    for level in text.split(separator):
        if level:
            _check_level(text, level, position)
            levels.append(level)
        position += len(level) + len(separator)
    return levels


def _check_level(text: str, level: str, position: int) -> None:
    if level == ONE:
        return
    if level == REST:
        if position + 1 < len(text):
            raise InvalidPattern(
                f"{text!r} goes on after the # at position {position}; # may only be the last level",
                position=position,
            )
        return
    match = _LEVEL.match(level)
    assert match is not None
    if match.end() == len(level):
        return
    fault = level[match.end()]
    position += match.end()
    if fault in (ONE, REST):
        complaint = (
            f"{fault} at position {position} is only a part of its level {level!r}; it must be the whole"
        )
    else:
        complaint = f"{fault!r} at position {position} is not allowed"
    raise InvalidPattern(f"{text!r} is not a pattern: {complaint}", position=position)
