"""What every error is: a code, a status, a hint, and its way over a wire and back.

The errors themselves are in errors.py, which is where they are imported from.
"""

from __future__ import annotations

from typing import Any, ClassVar


class SparrowError(Exception):
    """Root of everything Sparrow raises on purpose."""

    code: ClassVar[str] = "SPARROW_ERROR"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    default_hint: ClassVar[str] = "See the broker's log for the cause."

    def __init__(self, message: str, *, hint: str | None = None, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint or self.default_hint
        self.details = details

    def __str__(self) -> str:
        return f"{self.message} [{self.code}] {self.hint}"

    def to_dict(self) -> dict[str, Any]:
        """The form that travels over HTTP, TCP and in ``--json`` output."""
        return {
            "code": self.code,
            "message": self.message,
            "hint": self.hint,
            "details": self.details,
            "retryable": self.retryable,
        }


def registry() -> dict[str, type[SparrowError]]:
    """Every error class by its code."""
    found: dict[str, type[SparrowError]] = {}
    waiting: list[type[SparrowError]] = [SparrowError]
    while waiting:
        error = waiting.pop()
        assert error.code not in found, f"two errors share the code {error.code}"
        found[error.code] = error
        waiting.extend(error.__subclasses__())
    return found


def from_dict(fields: dict[str, Any]) -> SparrowError:
    """The typed error that ``to_dict`` described; an unknown code becomes a SparrowError."""
    kind = registry().get(str(fields.get("code")), SparrowError)
    details = fields.get("details") or {}
    return kind(str(fields.get("message", "")), hint=fields.get("hint"), **details)
