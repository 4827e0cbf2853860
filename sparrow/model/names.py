"""Names of topics and subscriptions.

A topic name is a dotted path of levels, ``orders.us.created``: at most 255 characters of
``A-Z a-z 0-9 . _ ~ % + -``, no empty level. The allowed set is what fits a file name, a URL path and
a Kafka topic (after escaping), so a name means the same on every surface. Wildcards are patterns,
never names. What begins with ``~sparrow.`` is the broker's own business: no wildcard matches it and no list
shows it.
"""

from __future__ import annotations

import re

from sparrow.model.errors import InvalidName

NAME_LENGTH_MAX = 255
INTERNAL_PREFIX = "~sparrow."
_NAME = re.compile(r"[A-Za-z0-9_~%+-]+(?:\.[A-Za-z0-9_~%+-]+)*\Z")


def parse_topic(name: object) -> str:
    """The name itself when it is valid."""
    return _parse(name, "topic")


def parse_subscription(name: object) -> str:
    """The name itself when it is valid; subscriptions follow the rules of topics."""
    return _parse(name, "subscription")


def parse_producer(name: object) -> str:
    """The name itself when it is valid; producers follow the rules of topics."""
    return _parse(name, "producer")


def is_internal(name: str) -> bool:
    """Whether a name is of the broker's own business."""
    return name.startswith(INTERNAL_PREFIX)


def _parse(name: object, noun: str) -> str:
    if not isinstance(name, str):
        raise InvalidName(f"a {noun} name is a string, not {type(name).__name__}")
    if not name:
        raise InvalidName(f"a {noun} name must not be empty")
    if len(name) > NAME_LENGTH_MAX:
        raise InvalidName(f"the {noun} name has {len(name)} characters; {NAME_LENGTH_MAX} are allowed")
    if not _NAME.match(name):
        raise InvalidName(f"{name!r} is not a {noun} name: {_complaint(name)}")
    return name


def _complaint(name: str) -> str:
    for position, character in enumerate(name):
        if character in "*#":
            return f"{character!r} at position {position} is a wildcard; use it in a subscription"
        if not re.match(r"[A-Za-z0-9._~%+-]", character):
            return f"{character!r} at position {position} is not allowed"
    return "a level between two dots is empty"
