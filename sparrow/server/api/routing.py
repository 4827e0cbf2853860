"""From a request to its handler: routes, a tree of their paths, and what handlers are given and return.

It does what the families need and no more: handlers are functions of the ``Request`` and of the parameters of
their path, and return an answer that is ready. Bodies, queries, errors and documents are other modules'
business. A framework in its place cost 18 MB and half of the start (docs/decisions/0011).

Routes are declared beside their handlers:

    @get("/v1/topics/{topic:str}", opt=described("Look at a topic", …))
    async def get_topic(request: Request, topic: str) -> Answer: ...
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import msgspec

from sparrow.model.errors import InvalidArgument, MethodNotAllowed, NotFound

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

JSON = "application/json"
QUERY_FIELDS_MAX = 100


class Headers(dict[str, str]):
    """The headers of a request by their names in lower case; of repeated ones the last."""

    def __getitem__(self, name: str) -> str:
        return super().__getitem__(name.lower())

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and super().__contains__(name.lower())

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name.lower(), default)


class Request:
    """What a client asks. What is not looked at is not decoded."""

    __slots__ = ("_headers", "receive", "scope")

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.scope = scope
        self.receive = receive
        self._headers: Headers | None = None

    @property
    def headers(self) -> Headers:
        if self._headers is None:
            given = self.scope["headers"]
            self._headers = Headers(
                (name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in given
            )
        return self._headers

    @property
    def query(self) -> list[tuple[str, str]]:
        """The query of the URL, name by name."""
        text = self.scope["query_string"].decode("latin-1")
        try:
            return parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=QUERY_FIELDS_MAX)
        except ValueError as error:
            raise InvalidArgument(f"the query of the URL cannot be read: {error}") from error


class Answer:
    """An answer that is whole: bytes, their type, and headers."""

    __slots__ = ("content", "headers", "media_type", "status_code")

    def __init__(
        self, content: bytes, status: int, headers: Mapping[str, str] | None = None, media_type: str = JSON
    ) -> None:
        self.content = content
        self.status_code = status
        self.headers = headers
        self.media_type = media_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = []
        if self.status_code != 204:
            headers.append((b"content-type", self.media_type.encode()))
            headers.append((b"content-length", b"%d" % len(self.content)))
        await _start(send, self.status_code, headers, self.headers)
        await send({"type": "http.response.body", "body": self.content, "more_body": False})


class Stream:
    """An answer that goes on as long as there are chunks."""

    __slots__ = ("_chunks", "headers", "media_type", "status_code")

    def __init__(
        self, chunks: AsyncIterator[bytes], media_type: str, headers: Mapping[str, str] | None = None
    ) -> None:
        self._chunks = chunks
        self.status_code = 200
        self.media_type = media_type
        self.headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _start(send, 200, [(b"content-type", self.media_type.encode())], self.headers)
        gone = asyncio.ensure_future(_until_gone(receive))
        chunks = aiter(self._chunks)
        try:
            while True:
                following = asyncio.ensure_future(anext(chunks, None))
                try:
                    await asyncio.wait({following, gone}, return_when=asyncio.FIRST_COMPLETED)
                    if not following.done():
                        return
                    chunk = following.result()
                finally:
                    await _end(following)
                if chunk is None:
                    break
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            gone.cancel()
            if hasattr(chunks, "aclose"):
                await chunks.aclose()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(task: asyncio.Future[Any]) -> None:
    if not task.done():
        task.cancel()
        await asyncio.wait({task})


async def _start(
    send: Send, status: int, own: list[tuple[bytes, bytes]], headers: Mapping[str, str] | None
) -> None:
    if headers is not None:
        own += [
            (name.lower().encode(), value.encode("latin-1", "replace")) for name, value in headers.items()
        ]
    await send({"type": "http.response.start", "status": status, "headers": own})


# Routes.


class Route(NamedTuple):
    """A handler and where it is found."""

    method: str
    path: str
    handler: Callable[..., Any]
    opt: Mapping[str, Any]
    status: int
    aliases: tuple[str, ...] = ()
    """Other paths to the same handler."""

    @property
    def methods(self) -> tuple[str, ...]:
        return (self.method,)


Declared = Callable[[Callable[..., Any]], Route]


def _declare(method: str, path: str | Sequence[str], opt: Mapping[str, Any] | None, status: int) -> Declared:
    first, *others = [path] if isinstance(path, str) else path

    def declare(handler: Callable[..., Any]) -> Route:
        return Route(method, first, handler, opt or {}, status, tuple(others))

    return declare


def get(
    path: str | Sequence[str], *, opt: Mapping[str, Any] | None = None, status_code: int = 200
) -> Declared:
    """Declares the handler of GET."""
    return _declare("GET", path, opt, status_code)


def post(
    path: str | Sequence[str], *, opt: Mapping[str, Any] | None = None, status_code: int = 201
) -> Declared:
    """Declares the handler of POST."""
    return _declare("POST", path, opt, status_code)


def put(
    path: str | Sequence[str], *, opt: Mapping[str, Any] | None = None, status_code: int = 200
) -> Declared:
    """Declares the handler of PUT."""
    return _declare("PUT", path, opt, status_code)


def patch(
    path: str | Sequence[str], *, opt: Mapping[str, Any] | None = None, status_code: int = 200
) -> Declared:
    """Declares the handler of PATCH."""
    return _declare("PATCH", path, opt, status_code)


def delete(
    path: str | Sequence[str], *, opt: Mapping[str, Any] | None = None, status_code: int = 200
) -> Declared:
    """Declares the handler of DELETE."""
    return _declare("DELETE", path, opt, status_code)


class _Node:
    """A place in the tree of paths."""

    __slots__ = ("fixed", "methods", "names", "variable")

    def __init__(self) -> None:
        self.fixed: dict[str, _Node] = {}
        self.variable: _Node | None = None
        self.methods: dict[str, Route] = {}
        self.names: dict[str, tuple[str, ...]] = {}
        """The parameters of each method's path, in order."""


class App:
    """The application: finds the handler, lets ``refuse`` answer for what goes wrong."""

    def __init__(self, routes: Iterable[Route], refuse: Callable[[Exception], Answer]) -> None:
        self.routes: list[Route] = []
        self.state = SimpleNamespace()
        """What the server of the application wants to know."""
        self.on_startup: list[Callable[[], Any]] = []
        self._refuse = refuse
        self._root = _Node()
        for route in routes:
            for path in (route.path, *route.aliases):
                self._add(route._replace(path=path))

    def _add(self, route: Route) -> None:
        node, names = self._root, []
        for segment in _segments(route.path):
            if segment.startswith("{"):
                names.append(segment.strip("{}").partition(":")[0])
                node.variable = node.variable or _Node()
                node = node.variable
            else:
                node = node.fixed.setdefault(segment, _Node())
        assert route.method not in node.methods, f"{route.method} {route.path} has two handlers"
        node.methods[route.method] = route
        node.names[route.method] = tuple(names)
        self.routes.append(route)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            made = await self._answer(scope, receive)
            await made(scope, receive, watched)
        except Exception as error:
            if started:
                raise
            await self._refuse(error)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive) -> Any:
        path, method = scope["path"], scope["method"]
        node, values = self._find(path)
        if node is None:
            raise NotFound(f"there is nothing at {path[:200]}", hint="GET /openapi.json tells what there is.")
        route = node.methods.get(method)
        if route is None:
            allowed = ", ".join(sorted([*node.methods, "OPTIONS"]))
            if method == "OPTIONS":
                return Answer(b"", 204, {"Allow": allowed})
            raise MethodNotAllowed(f"{path[:200]} has no {method[:20]}", allow=allowed)
        names = node.names[method]
        return await _call(route, Request(scope, receive), dict(zip(names, values, strict=True)))

    def _find(self, path: str) -> tuple[_Node | None, list[str]]:
        return _descend(self._root, _segments(path), 0, [])


def _descend(
    node: _Node, segments: Sequence[str], place: int, values: list[str]
) -> tuple[_Node | None, list[str]]:
    """The node of a path; what is fixed goes before what is variable."""
    if place == len(segments):
        return (node if node.methods else None), values
    segment = segments[place]
    following = node.fixed.get(segment)
    if following is not None:
        found, taken = _descend(following, segments, place + 1, values)
        if found is not None:
            return found, taken
    if node.variable is not None and segment:
        return _descend(node.variable, segments, place + 1, [*values, segment])
    return None, values


def _segments(path: str) -> list[str]:
    return path.removeprefix("/").removesuffix("/").split("/")


async def _call(route: Route, request: Request, parameters: dict[str, str]) -> Any:
    made = route.handler(request, **parameters)
    if inspect.isawaitable(made):
        made = await made
    if isinstance(made, Answer | Stream):
        return made
    return Answer(msgspec.json.encode(made), route.status)
