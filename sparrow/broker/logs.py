"""The broker's log: one line an event, with the same keys everywhere.

A line has ``timestamp`` (UTC, milliseconds), ``level``, ``component``, ``event_type``,
``correlation_id``, ``message`` and ``details``. The event type is a stable name for machines
(``journal-rotated``); the message is for people; everything else is a detail.

    log = logs.get("journal")
    log.info("journal-rotated", "started a new file", number=12)

Manners of a library. A ``Log`` is a thin face of the standard logger
``sparrow.<component>``, and nothing is configured until a program calls ``configure``, which only
``sparrow up`` does. So an application that embeds a broker gets Sparrow's records where its own
go, at the levels it has set; and one that has set up no logging sees nothing below a warning, which
is what the standard library does with a logger nobody has configured. Importing this module or
opening a broker changes no handler, no level and no global structlog configuration.

A call below the level costs one method call and one look into the standard logger's level cache;
neither the details nor the message are touched. Values whose key ends in token, secret, password or
authorization are masked before anybody sees them, at any depth.

The correlation id is a context variable: set where a request enters, seen by everything that runs
on its behalf, in whatever task.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

import msgspec

ROOT = "sparrow"
MASK = "***"
RECENT_LINES = 1000
RECENT_LENGTH_MAX = 4096
"""Lines that are kept in memory, and characters of each: some megabytes at most."""

_SECRET = re.compile(r"(?:.*[_-])?(?:token|secret|password|authorization)\Z", re.IGNORECASE)
_correlation_id: ContextVar[str] = ContextVar("sparrow_correlation_id", default="")


class Log:
    """A component's log. Takes an event type, a message for people, and details by name."""

    __slots__ = ("_bound", "_logger")

    def __init__(self, logger: logging.Logger, bound: dict[str, Any] | None = None) -> None:
        self._logger = logger
        self._bound = bound or {}

    def bind(self, **details: Any) -> Log:
        """The same log, with these details on every line."""
        return Log(self._logger, {**self._bound, **details})

    def debug(self, event_type: str, message: str = "", /, **details: Any) -> None:
        """Something that only matters while looking for a fault."""
        if self.is_enabled_for(logging.DEBUG):
            self._emit(logging.DEBUG, event_type, message, details)

    def info(self, event_type: str, message: str = "", /, **details: Any) -> None:
        """Something an operator may want to see."""
        if self.is_enabled_for(logging.INFO):
            self._emit(logging.INFO, event_type, message, details)

    def warning(self, event_type: str, message: str = "", /, **details: Any) -> None:
        """Something an operator should look at."""
        if self.is_enabled_for(logging.WARNING):
            self._emit(logging.WARNING, event_type, message, details)

    def error(self, event_type: str, message: str = "", /, **details: Any) -> None:
        """Something that went wrong; pass ``exc_info=True`` to add the traceback."""
        if self.is_enabled_for(logging.ERROR):
            self._emit(logging.ERROR, event_type, message, details)

    def is_enabled_for(self, level: int) -> bool:
        """Whether a line of this level would be written."""
        return bool(self._logger.isEnabledFor(level))

    def _emit(self, level: int, event_type: str, message: str, details: dict[str, Any]) -> None:
        exc_info = details.pop("exc_info", None)
        fields = {
            "event_type": event_type,
            "correlation_id": correlation_id(),
            "details": _masked({**self._bound, **details}),
        }
        text = message or event_type.replace("-", " ")
        # The caller's own line is three frames up: this method, the level's, theirs.
        self._logger.log(level, "%s", text, exc_info=exc_info, extra={ROOT: fields}, stacklevel=3)


def get(component: str) -> Log:
    """The log of a component; cheap to make, and fit to be a module's constant."""
    return Log(logging.getLogger(f"{ROOT}.{component}"))


def configure(
    level: str = "info", format: Literal["json", "console"] = "json", stream: TextIO | None = None
) -> None:
    """Take over this process's logging: Sparrow's lines from ``level`` on, anybody else's warnings.

    For programs, never for libraries. Calling it again replaces what the last call set up.
    """
    target = stream if stream is not None else sys.stderr
    handler = _SparrowHandler(target)
    handler.setFormatter(_LineFormatter(_renderer(format, target)))
    kept = _RecentHandler()
    kept.setFormatter(_LineFormatter(_to_json))
    root = logging.getLogger()
    ours = (_SparrowHandler, _RecentHandler)
    for earlier in [each for each in root.handlers if isinstance(each, ours)]:
        root.removeHandler(earlier)
    root.addHandler(handler)
    root.addHandler(kept)
    root.setLevel(logging.WARNING)
    logging.getLogger(ROOT).setLevel(level.upper())


def set_level(level: str) -> None:
    """Sparrow's lines from this level on, from now on."""
    logging.getLogger(ROOT).setLevel(level.upper())


def recent() -> list[str]:
    """The last lines that were written, as JSON; none in a program that did not call ``configure``."""
    kept = [each for each in logging.getLogger().handlers if isinstance(each, _RecentHandler)]
    return [line for handler in kept for line in handler.lines]


@contextlib.contextmanager
def correlated(correlation_id: str) -> Iterator[None]:
    """Give every line of the block, and of the tasks it starts, this correlation id."""
    token = _correlation_id.set(correlation_id)
    try:
        yield
    finally:
        _correlation_id.reset(token)


def correlation_id() -> str:
    """The correlation id in force, or an empty string."""
    return _correlation_id.get()


# At the call: what a record carries.


def _masked(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: MASK if _SECRET.match(str(key)) else _masked(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(inner) for inner in value]
    return value


# At the handler: how a record, ours or another library's, becomes a line.

_Renderer = Callable[[dict[str, Any]], str]


class _SparrowHandler(logging.StreamHandler[TextIO]):
    """Marks the one handler that ``configure`` owns."""


class _RecentHandler(logging.Handler):
    """Keeps the last lines, for support bundles."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: deque[str] = deque(maxlen=RECENT_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001 - as every handler of logging does
            self.handleError(record)
        else:
            self.lines.append(line if len(line) <= RECENT_LENGTH_MAX else line[:RECENT_LENGTH_MAX] + "…")


class _LineFormatter(logging.Formatter):
    def __init__(self, render: _Renderer) -> None:
        super().__init__()
        self._render = render

    def format(self, record: logging.LogRecord) -> str:
        return self._render(self._line(record))

    def _line(self, record: logging.LogRecord) -> dict[str, Any]:
        fields = getattr(record, ROOT, None) or {"event_type": "log"}
        details = dict(fields.get("details", {}))
        if record.exc_info and record.exc_info[0] is not None:
            details["exception"] = self.formatException(record.exc_info)
        return {
            "timestamp": _timestamp(record.created),
            "level": record.levelname.lower(),
            "component": record.name.removeprefix(f"{ROOT}."),
            "event_type": fields["event_type"],
            "correlation_id": fields.get("correlation_id", correlation_id()),
            "message": record.getMessage(),
            "details": details,
        }


def _timestamp(created_s: float) -> str:
    moment = datetime.fromtimestamp(created_s, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _renderer(format: str, stream: TextIO) -> _Renderer:
    return _to_json if format == "json" else _console(is_coloured=stream.isatty())


def _to_json(line: dict[str, Any]) -> str:
    try:
        return msgspec.json.encode(line, enc_hook=repr).decode()
    except (TypeError, ValueError):
        # A line is worth more than its details: what JSON cannot hold is written as Python shows it.
        plain = {key: ascii(value) if key == "details" else str(value) for key, value in line.items()}
        safe = {key: value.encode("ascii", "backslashreplace").decode() for key, value in plain.items()}
        return msgspec.json.encode({**safe, "details": {"unencodable": safe["details"]}}).decode()


def _console(*, is_coloured: bool) -> _Renderer:
    import structlog.dev  # 5 MB and 50 ms that JSON lines need not pay

    renderer = structlog.dev.ConsoleRenderer(colors=is_coloured, sort_keys=False)

    def render(line: dict[str, Any]) -> str:
        event: dict[str, Any] = {
            "timestamp": line["timestamp"],
            "level": line["level"],
            "logger": line["component"],
            "event": line["message"],
            **{str(key): value for key, value in line["details"].items() if key not in _CONSOLE_KEYS},
        }
        if line["correlation_id"]:
            event["correlation_id"] = line["correlation_id"]
        return str(renderer(None, "", event))

    return render


_CONSOLE_KEYS = frozenset({"timestamp", "level", "logger", "event", "correlation_id"})
