"""Which web pages may use the API from a browser (CORS). None may, unless ``access.cors_origins`` names them.

A broker that listens on this machine is within reach of every page that its user opens, so the answer to
pages that are not named is silence: the browser then keeps the answer from the page.
"""

from __future__ import annotations

from sparrow.server.api.routing import ASGIApp, Message, Receive, Scope, Send

METHODS = "GET, POST, PUT, PATCH, DELETE"
ASKED_HEADERS = "authorization, content-type, x-request-id, traceparent, tracestate, last-event-id"
TOLD_HEADERS = "X-Request-Id, X-Total-Count, X-Limit, X-Offset, Retry-After, Location"
KEPT_S = 600
"""How long a browser may remember the answer."""
ALL = "*"


def parse_origins(text: str) -> frozenset[str]:
    """The origins of a setting."""
    return frozenset(origin for origin in (part.strip().rstrip("/") for part in text.split(",")) if origin)


def shared(app: ASGIApp, origins: frozenset[str]) -> ASGIApp:
    """The application, for the pages of these origins."""
    if not origins:
        return app

    async def share(scope: Scope, receive: Receive, send: Send) -> None:
        found = dict(scope["headers"])
        origin = found.get(b"origin", b"").decode("latin-1")
        if not origin or not (ALL in origins or origin in origins):
            await app(scope, receive, send)
            return
        told = [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin")]
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in found:
            told += [
                (b"access-control-allow-methods", METHODS.encode()),
                (b"access-control-allow-headers", ASKED_HEADERS.encode()),
                (b"access-control-max-age", str(KEPT_S).encode()),
            ]
            await send({"type": "http.response.start", "status": 204, "headers": told})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        told.append((b"access-control-expose-headers", TOLD_HEADERS.encode()))

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *told]
            await send(message)

        await app(scope, receive, tell)

    return share
