"""The guard before every route: who asks is known before anything is done, or nothing is done.

It reads ``Authorization: Bearer <token>`` and leaves the principal in the state of the request, where
``Api.principal`` finds it. Whoever cannot be let in is refused here, also on paths that no route has, so that
a handler that forgets to ask is not a door, and strangers do not learn what there is. What a principal may do
is asked by the handlers, which know the topic.

Open to all are the probes of supervisors, documents that are the same for every broker, and OPTIONS, with
which browsers ask before they send a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparrow.broker.access import Access
from sparrow.model.access import Principal
from sparrow.model.errors import SparrowError, Unauthenticated
from sparrow.server.api.routing import Answer, ASGIApp, Receive, Scope, Send

OPEN_PATHS = frozenset({"/health/live", "/health/ready", "/openapi.json", "/docs"})
_KEY = "principal"
_HEADER = b"authorization"


def guarded(app: ASGIApp, access: Access, refusal: Callable[[SparrowError], Answer]) -> ASGIApp:
    """The application behind the guard; ``refusal`` says how an error is told."""

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        if _is_open(scope):
            await app(scope, receive, send)
            return
        try:
            principal = access.authenticate(token_of(scope))
        except SparrowError as error:
            await refusal(error)(scope, receive, send)
            return
        scope.setdefault("state", {})[_KEY] = principal
        await app(scope, receive, send)

    return guard


def principal_of(scope: Scope) -> Principal | None:
    """Who asks, when the guard has let them in."""
    found: Principal | None = scope.get("state", {}).get(_KEY)
    return found


def token_of(scope: Scope) -> str | None:
    """The token of a request; refuses a header that holds something else, and two of them."""
    given = [value for name, value in scope["headers"] if name.lower() == _HEADER]
    if not given:
        return None
    scheme, _, token = given[0].decode("latin-1").partition(" ")
    if len(given) > 1 or scheme.lower() != "bearer" or not token.strip():
        raise Unauthenticated(
            "the Authorization header is not of the form `Bearer <token>`",
            hint="Send one header: Authorization: Bearer <token>",
        )
    found: str = token.strip()
    return found


def _is_open(scope: Any) -> bool:
    return scope["method"] == "OPTIONS" or scope["path"].rstrip("/") in OPEN_PATHS
