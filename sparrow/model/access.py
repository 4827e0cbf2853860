"""Who may do what: actions, scopes, roles, and the tokens that carry them.

A **scope** is an action on a topic pattern, written ``publish:orders.#``. A **role** is a named set of
actions, given on one pattern. A **token** has scopes, and perhaps a moment at which it ends. A **principal**
is whoever asks: the holder of a token, or anybody where no token is wanted.

Actions include others: whoever may administer a topic may do everything with it, and whoever may subscribe
to it may read it. Whether a scope covers a request is decided in ``kernel/access``.

``TokenInfo`` is what may be shown. The secret itself is known to its holder alone; its digest stays with
the broker (``TokenRecord``).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from sparrow.model.errors import InvalidArgument

EVERYTHING = "#"
"""The pattern of all topics, and of what belongs to no topic."""
NAME_LENGTH_MAX = 255
SCOPES_MAX = 100
EXPIRES_IN_S_MAX = 100 * 365 * 86400.0


class AccessSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Who may reach the broker, and how often."""

    insecure: Annotated[
        bool,
        Meta(
            description="Whether addresses that other machines reach are served although no token is wanted."
        ),
    ] = False
    cors_origins: Annotated[
        str,
        Meta(
            description="Web pages that may use the HTTP API from a browser, as origins separated by commas; "
            "* is all, and empty none.",
        ),
    ] = ""
    read_calls_per_min: Annotated[
        float, Meta(ge=0.1, le=1e9, description="Calls of the admin API that a token may make to look.")
    ] = 100.0
    admin_calls_per_min: Annotated[
        float, Meta(ge=0.1, le=1e9, description="Calls of the admin API that a token may make to change.")
    ] = 10.0


class Action(StrEnum):
    """What can be allowed."""

    PUBLISH = "publish"
    SUBSCRIBE = "subscribe"
    READ = "read"
    ADMIN = "admin"


class Role(StrEnum):
    """Usual sets of actions."""

    READ_ONLY = "read-only"
    PUBLISHER = "publisher"
    SUBSCRIBER = "subscriber"
    ADMIN = "admin"


ACTIONS_OF: dict[Role, tuple[Action, ...]] = {
    Role.READ_ONLY: (Action.READ,),
    Role.PUBLISHER: (Action.PUBLISH,),
    Role.SUBSCRIBER: (Action.SUBSCRIBE,),
    Role.ADMIN: (Action.ADMIN,),
}
INCLUDED: dict[Action, frozenset[Action]] = {
    Action.PUBLISH: frozenset([Action.PUBLISH]),
    Action.SUBSCRIBE: frozenset([Action.SUBSCRIBE, Action.READ]),
    Action.READ: frozenset([Action.READ]),
    Action.ADMIN: frozenset(Action),
}
"""What each action allows."""


class Scope(msgspec.Struct, frozen=True):
    """An action on the topics of a pattern."""

    action: Action
    topics: str = EVERYTHING

    def __str__(self) -> str:
        return f"{self.action}:{self.topics}"


class Principal(msgspec.Struct, frozen=True):
    """Whoever asks."""

    name: str
    token_id: str
    """Empty for those who came without a token."""
    scopes: tuple[Scope, ...]

    @property
    def is_anonymous(self) -> bool:
        return not self.token_id


ALL_SCOPES = (Scope(Action.ADMIN, EVERYTHING),)
ANONYMOUS = Principal("anonymous", "", ALL_SCOPES)
"""Anybody, where no token is wanted."""


class TokenInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A token as it may be shown."""

    id: str
    name: str
    scopes: tuple[Scope, ...]
    created_at_us: int
    expires_at_us: int | None = None

    def is_expired(self, now_us: int) -> bool:
        return self.expires_at_us is not None and now_us >= self.expires_at_us

    @property
    def is_lasting_admin(self) -> bool:
        """Whether its holder may do everything, for ever."""
        return Scope(Action.ADMIN, EVERYTHING) in self.scopes and self.expires_at_us is None


class TokenRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A token as the catalog keeps it: what may be shown, and the SHA-256 of its text."""

    info: TokenInfo
    digest: bytes


class NewToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token just made. Its text is known now and never again."""

    info: TokenInfo
    text: str

    def __repr__(self) -> str:
        return f"<NewToken {self.info.name!r} {self.info.id}>"


class CallLimit(msgspec.Struct, frozen=True):
    """How often each token may make calls of a kind: a bucket that holds a minute's worth."""

    name: str
    per_min: float


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the audit log."""

    at: str
    """UTC, as in 2026-01-31T12:00:00.000Z."""
    who: str
    token_id: str
    action: str
    what: str
    outcome: str
    request_id: str = ""


def parse_action(action: object) -> Action:
    """An action by its name."""
    names = [known.value for known in Action]
    if not isinstance(action, str) or action not in names:
        raise InvalidArgument(f"an action is one of {', '.join(names)}, not {action!r}")
    return Action(action)


def parse_role(role: object) -> Role:
    """A role by its name."""
    names = [known.value for known in Role]
    if not isinstance(role, str) or role not in names:
        raise InvalidArgument(f"a role is one of {', '.join(names)}, not {role!r}")
    return Role(role)


def scopes_of(role: Role, topics: str = EVERYTHING) -> tuple[Scope, ...]:
    """What a role allows on the topics of a pattern."""
    return tuple(Scope(action, topics) for action in ACTIONS_OF[role])


def parse_scope(text: object) -> Scope:
    """The scope that ``publish:orders.#`` describes; the pattern is checked by whoever compiles it."""
    if isinstance(text, Scope):
        return text
    if not isinstance(text, str):
        raise InvalidArgument(f"a scope is a text like publish:orders.#, not {text!r}")
    action, colon, topics = text.partition(":")
    if not (colon and topics):
        raise InvalidArgument(
            f"{text!r} is not a scope", hint="Write an action and a pattern: publish:orders.#"
        )
    return Scope(parse_action(action), topics)


def parse_scopes(scopes: Sequence[object]) -> tuple[Scope, ...]:
    """Scopes without repeats, in their order; at least one."""
    if isinstance(scopes, str) or not isinstance(scopes, Sequence):
        raise InvalidArgument(f"scopes are a list of texts like publish:orders.#, not {scopes!r}")
    found = tuple(dict.fromkeys(parse_scope(scope) for scope in scopes))
    if not 1 <= len(found) <= SCOPES_MAX:
        raise InvalidArgument(f"a token has 1 to {SCOPES_MAX} scopes, not {len(found)}")
    return found


def parse_token_name(name: object) -> str:
    """The name of a token: what logs and quotas call its holder."""
    if not isinstance(name, str) or not 1 <= len(name) <= NAME_LENGTH_MAX or not name.isprintable():
        raise InvalidArgument(f"a token's name has 1 to {NAME_LENGTH_MAX} printable characters, not {name!r}")
    return name
