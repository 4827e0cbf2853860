"""What every family of the HTTP API shares: reading a request, asking whether it may, answering it.

A family is a module with ``routes(api: Api) -> Sequence[Router | handler]``, listed in ``http.FAMILIES``. Its
handlers take the ``Request`` and path parameters, nothing else: bodies and queries are decoded here, so that
they have the same limits and the same errors everywhere. A handler raises the typed errors of the registry
and never builds an error answer.

    class NewThing(msgspec.Struct, forbid_unknown_fields=True):
        name: str

    def routes(api: Api) -> list[Any]:
        @post("/things", opt=described("Make a thing", body=NewThing, answers={201: Thing}, errors=(409,)))
        async def create(request: Req) -> Answer:
            api.require(request, Action.ADMIN)
            wanted = await body(request, NewThing)
            return answer(await api.broker..., 201)

        return [create]

``described`` (module ``operation``) is what the OpenAPI document is made of.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import msgspec

from sparrow.broker import logs
from sparrow.broker.access import Access
from sparrow.broker.broker import Broker
from sparrow.broker.clock import Clock
from sparrow.model.access import Action, CallLimit, Principal
from sparrow.model.errors import (
    ConnectionLost,
    InvalidArgument,
    MessageTooLarge,
    MethodNotAllowed,
    SparrowError,
    UnsupportedContentType,
)
from sparrow.model.message import from_us
from sparrow.model.settings import Settings
from sparrow.server.api.guard import principal_of, token_of
from sparrow.server.api.routing import JSON as JSON
from sparrow.server.api.routing import Answer as Answer
from sparrow.server.api.routing import Request

BODY_BYTES_MAX = 16 * 1024 * 1024
"""Bytes of a request's body: a publish of the largest size, in base64."""

_log = logs.get("http")

Req = Request
T = TypeVar("T")


class Api(NamedTuple):
    """What a family works with."""

    broker: Broker
    clock: Clock
    settings: Settings
    access: Access
    closing: asyncio.Event
    """Set when the server stops: streams and long polls end."""

    def principal(self, request: Req) -> Principal:
        """Who asks: known from the guard before the server, else from the request itself."""
        return principal_of(request.scope) or self.access.authenticate(token_of(request.scope))

    def require(
        self, request: Req, action: Action, topic: str | None = None, *, limit: CallLimit | None = None
    ) -> Principal:
        """Who asks, if they may do this to a topic, to all of a pattern, or to the broker; else refused. With
        ``limit`` the call counts against the rate of its token."""
        principal = self.principal(request)
        self.access.require(principal, action, topic, limit=limit)
        return principal

    def may_any(self, principal: Principal, topic: str) -> bool:
        """Whether a principal may know how a topic is made."""
        return self.access.may(principal, Action.READ) or self.access.may_any(principal, topic)

    @contextlib.asynccontextmanager
    async def audited(self, request: Req, verb: str, what: str) -> AsyncIterator[Principal]:
        """Writes into the audit log what is done in this block, or why it was refused."""
        principal, outcome = self.principal(request), "done"
        try:
            yield principal
        except SparrowError as error:
            outcome = error.code
            raise
        finally:
            await self.access.audit(principal, verb, what[:255], outcome)


# Requests.


async def read(request: Req, bytes_max: int = BODY_BYTES_MAX) -> bytes:
    """The body of a request, within its limit. That it comes in time is seen to by the connection."""
    message = await request.receive()
    if message["type"] == "http.request" and not message.get("more_body"):
        whole: bytes = message.get("body", b"")
        if len(whole) > bytes_max:
            raise _too_large(bytes_max)
        return whole
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > bytes_max:
        raise _too_large(bytes_max)
    chunks: list[Any] = []
    size = 0
    while True:
        if message["type"] == "http.disconnect":
            raise ConnectionLost("the client went away before its request was whole")
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > bytes_max:
            raise _too_large(bytes_max)
        if not message.get("more_body"):
            return b"".join(chunks)
        message = await request.receive()


def _too_large(bytes_max: int) -> MessageTooLarge:
    return MessageTooLarge(f"the body has more than {bytes_max} bytes", bytes_max=bytes_max)


def content_type(request: Req) -> str:
    """The media type of the body, without its parameters."""
    given: str = request.headers.get("content-type", "")
    return given.partition(";")[0].strip().lower()


async def body(request: Req, kind: type[T], *, is_optional: bool = False) -> T:
    """The body as a value of the type; with ``is_optional`` no body means an empty object."""
    raw = await read(request)
    if not raw and is_optional:
        raw = b"{}"
    else:
        _check_json(request, raw)
    return decode(raw, kind)


def _check_json(request: Req, raw: bytes) -> None:
    given = content_type(request)
    if given != JSON and not given.endswith("+json") and (given or not raw):
        if not raw:
            raise InvalidArgument("the body is empty", hint="Send a JSON object as the body.")
        raise UnsupportedContentType(
            f"the body is {given[:100]}, not {JSON}", hint=f"Send JSON with Content-Type: {JSON}."
        )


def decode(raw: bytes, kind: type[T]) -> T:
    """JSON as a value of the type; what is wrong is named with its path."""
    if not raw:
        raise InvalidArgument("the body is empty", hint="Send a JSON object as the body.")
    try:
        str(raw, "utf-8")  # Values kept as they were sent are not looked at by the decoder.
        found: T = _decoder(kind).decode(raw)  # type: ignore[arg-type]
        return found
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `")
        where = path.rstrip("`") or "$"
        raise InvalidArgument(f"{where}: {message}", path=where) from error
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"the body is not UTF-8 at byte {error.start}", position=error.start) from error
    except msgspec.DecodeError as error:
        raise InvalidArgument(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise InvalidArgument("the body is nested too deeply") from error


@lru_cache(maxsize=256)
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def query(request: Req, kind: type[T]) -> T:
    """The query of the URL as a value of the type; unknown and repeated parameters are refused."""
    given: dict[str, str] = {}
    for name, value in request.query:
        if name in given:
            raise InvalidArgument(f"the query has {name[:100]!r} twice")
        given[name] = value
    return convert(given, kind, "query parameter")


def convert(given: Mapping[str, str], kind: type[T], noun: str) -> T:
    """Texts by name as a value of the type; unknown names are refused."""
    known = msgspec.structs.fields(kind)  # type: ignore[arg-type]
    names = {field.encode_name for field in known}
    unknown = sorted(set(given) - names)
    if unknown:
        raise InvalidArgument(
            f"unknown {noun} {', '.join(name[:100] for name in unknown[:5])}",
            hint=f"It may be one of: {', '.join(sorted(names)) or 'none'}.",
        )
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"bad {noun}: {error}") from error


def parse_moment(given: str | float) -> datetime | float:
    """A point in time: ISO 8601 with a time zone, or seconds since 1970."""
    if not isinstance(given, str):
        return given
    try:
        return msgspec.convert(given, datetime)
    except msgspec.ValidationError as error:
        raise InvalidArgument(
            f"{given[:100]!r} is not a time",
            hint="Write it as 2026-01-31T12:00:00Z, or in seconds since 1970.",
        ) from error


# Answers.

_encoder = msgspec.json.Encoder(decimal_format="number")


def encode(value: Any) -> bytes:
    """A value as JSON."""
    return _encoder.encode(value)


def answer(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    """A JSON answer."""
    return Answer(_encoder.encode(value), status, headers)


def no_content() -> Answer:
    """204."""
    return Answer(b"", 204)


class Page(msgspec.Struct, forbid_unknown_fields=True):
    """Which part of a list is wanted."""

    limit: int = 100
    offset: int = 0


def paged(request: Req, name: str, found: Sequence[Any], page: Page, show: Any = None) -> Answer:
    """One page of a list, as ``{name: […], "total": n}``; what is beside it is in headers too."""
    if not 1 <= page.limit <= 1000 or not 0 <= page.offset <= 2**53:
        raise InvalidArgument(
            f"limit is from 1 to 1000 and offset from 0, not {page.limit} and {page.offset}"
        )
    part = found[page.offset : page.offset + page.limit]
    shown = [show(each) for each in part] if show is not None else list(part)
    headers = {
        "X-Total-Count": str(len(found)),
        "X-Limit": str(page.limit),
        "X-Offset": str(page.offset),
        "Cache-Control": "no-cache",
    }
    return answer({name: shown, "total": len(found)}, headers=headers)


def timestamp(time_us: int | None, precision: str = "microseconds") -> str | None:
    """Microseconds since 1970 as ISO 8601 in UTC."""
    if time_us is None:
        return None
    return from_us(time_us).isoformat(timespec=precision).replace("+00:00", "Z")


# Errors.


def error_response(error: Exception, clock: Clock) -> Answer:
    """The one shape of everything that goes wrong."""
    typed = _typed(error)
    status, headers = typed.status, dict[str, str]()
    shown = {
        **typed.to_dict(),
        "suggestions": [typed.hint],
        "request_id": logs.correlation_id(),
        "timestamp": timestamp(clock.now_us(), "milliseconds"),
    }
    if status in (429, 503):
        wait_s = typed.details.get("retry_after_s", 1)
        headers["Retry-After"] = str(max(1, math.ceil(wait_s)))
    elif status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    elif isinstance(typed, MethodNotAllowed):
        headers["Allow"] = typed.details["allow"]
    return Answer(_encode_error(shown), status, headers)


def _encode_error(shown: dict[str, Any]) -> bytes:
    return _error_encoder.encode({"error": shown})


_error_encoder = msgspec.json.Encoder(enc_hook=str)


def _typed(error: Exception) -> SparrowError:
    """Any exception as a typed error."""
    if isinstance(error, SparrowError):
        return error
    _log.error("request-failed", "a request met a bug", exc_info=error)
    return SparrowError("the broker met an error of its own")
