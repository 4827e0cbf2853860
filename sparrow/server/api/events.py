"""The events family of the HTTP API: topics, messages, subscriptions (docs/guides/http.md)."""

from __future__ import annotations

from typing import Any

from sparrow.server.api import letters, publishing, receiving, schemas, stream, subscriptions, topics
from sparrow.server.api.family import Api


def routes(api: Api) -> list[Any]:
    """All handlers of the family."""
    parts = (topics, schemas, publishing, subscriptions, receiving, stream, letters)
    return [route for part in parts for route in part.routes(api)]
