"""Documents about the API: OpenAPI, AsyncAPI, and a page to read and try it, which needs no other host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sparrow.server.api import asyncapi, openapi
from sparrow.server.api.family import Answer, Api, Req, answer, encode
from sparrow.server.api.operation import described
from sparrow.server.api.routing import Route, get

TAG = "documents"
HTML = "text/html; charset=utf-8"
_POLICY = "default-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"


def routes(api: Api, all_routes: Callable[[], Sequence[Route]]) -> list[Any]:
    """The handlers; ``all_routes`` gives those of the whole application."""
    made: list[bytes] = []

    @get(
        "/openapi.json",
        opt=described("This API as an OpenAPI 3.1 document", tag=TAG, answers={200: "application/json"}),
    )
    def get_openapi(request: Req) -> Answer:
        if not made:
            made.append(encode(openapi.document(all_routes())))
        return Answer(made[0], 200, {"Access-Control-Allow-Origin": "*"})

    @get(
        "/asyncapi.json",
        opt=described("The topics as an AsyncAPI 3 document", tag=TAG, answers={200: "application/json"}),
    )
    async def get_asyncapi(request: Req) -> Answer:
        principal = api.principal(request)
        found = [topic for topic in await api.broker.topics() if api.may_any(principal, topic.name)]
        return answer(asyncapi.document(found, request.headers.get("host", "localhost")))

    @get("/docs", opt=described("A page to read and try this API", tag=TAG, answers={200: HTML}))
    def get_docs(request: Req) -> Answer:
        from sparrow.server.api.docspage import PAGE

        return Answer(PAGE.encode(), 200, {"Content-Security-Policy": _POLICY}, HTML)

    return [get_openapi, get_asyncapi, get_docs]
