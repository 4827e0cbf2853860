"""Access: whether scopes cover a request, and what a token's text looks like.

``Rights`` are the scopes of one token with their patterns parsed. A request names an action and perhaps a
topic, or the pattern of a subscription: then every topic that the pattern can ever match must be covered by
one scope. A request that names neither is about the broker as a whole, and needs a scope on ``#``.

A token's text is ``sparrow_<id>_<secret>``: the id is public and finds the record, the secret is 256 random
bits. Because it cannot be guessed, one SHA-256 keeps it; a slow hash would protect nothing more. Digests are
compared in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence

from sparrow.kernel.pattern import ONE, REST, Pattern, parse_pattern
from sparrow.model.access import EVERYTHING, INCLUDED, Action, Scope

TOKEN_PREFIX = "sparrow_"
KNOWN_MAX = 1024
"""Answers remembered for one token."""
TOKEN_LENGTH_MAX = 512
"""Longer texts are not even looked at."""
_TOKEN = re.compile(r"sparrow_([0-9a-f]{16})_[A-Za-z0-9_-]{43}\Z")


class Rights:
    """What the scopes of one token allow."""

    __slots__ = ("_known", "_patterns")

    def __init__(self, scopes: Sequence[Scope]) -> None:
        self._known: dict[tuple[Action, str], bool] = {}
        """Answers given before, because the same topics are asked about again and again."""
        self._patterns: dict[Action, list[Pattern]] = {action: [] for action in Action}
        for scope in scopes:
            pattern = parse_pattern(scope.topics)
            for action in INCLUDED[scope.action]:
                self._patterns[action].append(pattern)

    def allow(self, action: Action, topics: str | None = None) -> bool:
        """Whether an action is allowed on a topic or on all topics of a pattern; ``None`` is the broker."""
        asked = (action, EVERYTHING if topics is None else topics)
        found = self._known.get(asked)
        if found is None:
            found = self._decide(*asked)
            if len(self._known) >= KNOWN_MAX:
                self._known.clear()
            self._known[asked] = found
        return found

    def _decide(self, action: Action, topics: str) -> bool:
        patterns = self._patterns[action]
        if ONE in topics or REST in topics:
            asked = parse_pattern(topics)
            return any(pattern.covers(asked) for pattern in patterns)
        return any(pattern.matches(topics) for pattern in patterns)

    def allow_any(self, topics: str) -> bool:
        """Whether any action is allowed there: enough to know that a topic exists and how it is divided."""
        return any(self.allow(action, topics) for action in Action)

    def hold(self, action: Action) -> bool:
        """Whether an action is allowed on some topics."""
        return bool(self._patterns[action])


def token_text(token_id: str, secret: str) -> str:
    """What the holder of a token is given."""
    text = f"{TOKEN_PREFIX}{token_id}_{secret}"
    assert _TOKEN.match(text), "an id has 16 hexadecimal digits, a secret 43 characters"
    return text


def token_id(text: str) -> str | None:
    """The public part of a token's text; none when it does not look like one."""
    match = _TOKEN.match(text)
    return match[1] if match else None


def digest(text: str) -> bytes:
    """What is kept of a token."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def is_same(known: bytes, given: bytes) -> bool:
    """Whether two digests are equal, in a time that does not tell where they differ."""
    return hmac.compare_digest(known, given)
