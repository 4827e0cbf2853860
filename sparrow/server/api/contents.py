"""The data of messages in JSON: a value when it is JSON itself, as it was stored, and base64 otherwise."""

from __future__ import annotations

from base64 import b64encode
from typing import NamedTuple

import msgspec
from msgspec import UNSET, Raw, UnsetType

from sparrow.model.errors import InvalidArgument

_decoder = msgspec.json.Decoder()


class Contents(NamedTuple):
    """The two forms; one of them is set."""

    value: Raw | UnsetType
    base64: str | UnsetType | None
    """``None`` for a message without data."""


def shown(data: bytes | None) -> Contents:
    """Stored data, as it is shown."""
    if data is None:
        return Contents(UNSET, None)
    try:
        _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return Contents(UNSET, b64encode(data).decode())
    return Contents(Raw(data), UNSET)


def stored(value: Raw | UnsetType, base64: bytes | UnsetType | None, noun: str) -> bytes | None:
    """What was sent, as it is stored: the bytes of a JSON value, or those that base64 stands for."""
    if value is not UNSET:
        if base64 is not UNSET:
            raise InvalidArgument(f"a message has {noun} or {noun}_base64, not both")
        return bytes(value)
    if base64 is UNSET:
        raise InvalidArgument(
            f"a message has neither {noun} nor {noun}_base64",
            hint=f'Give "{noun}" any JSON value, or "{noun}_base64": null for a message without data.',
        )
    return base64
