"""Staged publishes: batches that wait until a commit publishes them, or drops them.

A *part* is staged by one writer, in order. A *transaction* gathers the parts of one attempt to write
something: it is what is aborted. A commit names parts and publishes them once for each application and
batch number (docs/decisions/0010-staged-publishes.md).
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from sparrow.model.errors import InvalidArgument, InvalidName

NAME_LENGTH_MAX = 255
BATCH_MAX = 2**62
PARTS_MAX = 100_000
_MIB = 1024 * 1024
_GIB = 1024 * _MIB
_DAY_S = 86400.0


class StagingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Batches that are staged and published by a commit."""

    bytes_max: Annotated[
        int, Meta(ge=_MIB, le=1024 * _GIB, description="Bytes that may be staged, of all parts together.")
    ] = 16 * _GIB
    chain_bytes_max: Annotated[
        int,
        Meta(
            ge=_MIB // 16,
            le=_GIB,
            description="Up to this size a commit appears to readers all at once; a larger one bit by bit.",
        ),
    ] = 32 * _MIB
    keep_s: Annotated[
        float,
        Meta(ge=1.0, le=365 * _DAY_S, description="How long a part stays that nobody writes to or commits."),
    ] = 6 * 3600.0
    remember_s: Annotated[
        float,
        Meta(
            ge=60.0,
            le=36_500 * _DAY_S,
            description="How long the newest batch of an application is known after its commit.",
        ),
    ] = 365 * _DAY_S


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """A part as it stands."""

    transaction: str
    part: str
    calls: int
    """How many calls it holds; the next one has this number."""
    messages: int
    bytes: int
    written_at_us: int


class Part(NamedTuple):
    """A part as a commit names it; ``messages`` is how many its writer staged."""

    transaction: str
    part: str
    messages: int


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a commit."""

    application: str
    batch: int
    messages: int
    is_repeat: bool = False
    """The batch, or a newer one, was committed before; nothing was published by this call."""


def parse_name(noun: str, name: object) -> str:
    """The name itself: 1 to 255 printable characters."""
    if not isinstance(name, str):
        raise InvalidName(f"the name of {noun} is a string, not {type(name).__name__}", hint=_HINT)
    if not 1 <= len(name) <= NAME_LENGTH_MAX or not name.isprintable():
        raise InvalidName(f"{name[:300]!r} cannot be the name of {noun}", hint=_HINT)
    return name


_HINT = f"Use 1 to {NAME_LENGTH_MAX} printable characters."


def parse_batch(batch: object) -> int:
    """The number itself when it is one."""
    if not isinstance(batch, int) or isinstance(batch, bool) or not 0 <= batch < BATCH_MAX:
        raise InvalidArgument(f"a batch is a whole number from 0, not {batch!r}")
    return batch


def parse_parts(parts: Any) -> list[Part]:
    """Parts as a commit names them, in their order."""
    if isinstance(parts, str) or not hasattr(parts, "__len__"):
        raise InvalidArgument("parts are a list of (transaction, part, messages)")
    if len(parts) > PARTS_MAX:
        raise InvalidArgument(f"a commit has {len(parts)} parts; {PARTS_MAX} are allowed")
    try:
        found = [Part(transaction, part, messages) for transaction, part, messages in parts]
    except (TypeError, ValueError) as error:
        raise InvalidArgument("parts are a list of (transaction, part, messages)") from error
    for transaction, part, messages in found:
        parse_name("a transaction", transaction)
        parse_name("a part", part)
        if not isinstance(messages, int) or isinstance(messages, bool) or messages < 0:
            raise InvalidArgument(f"part {part!r} has a count of messages, not {messages!r}")
    if len({one[:2] for one in found}) < len(found):
        raise InvalidArgument("a part is named twice")
    return found
