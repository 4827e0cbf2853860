"""The broker's verbs for schemas of topics; the rules are in schemas.py."""

from __future__ import annotations

from typing import Any

from sparrow.broker.schemas import Schemas
from sparrow.model.schema import TopicSchema


class SchemaVerbs:
    """A part of the broker."""

    _schemas: Schemas

    def _check_open(self) -> None:
        raise NotImplementedError

    async def set_topic_schema(
        self, topic: str, *, type: str, definition: Any, message: str = ""
    ) -> TopicSchema:
        """Says what the payloads of a topic are: "json" with a JSON Schema, "avro" with an Avro schema, or
        "protobuf" with a FileDescriptorSet (bytes or base64) and the name of a message. Spark's tables of the
        topic are typed from now on. Payloads are not checked when they are published."""
        self._check_open()
        return await self._schemas.set(topic, type, definition, message)

    async def topic_schema(self, topic: str) -> TopicSchema | None:
        """What the payloads of a topic are; None when nobody said."""
        self._check_open()
        return self._schemas.get(topic)

    async def delete_topic_schema(self, topic: str) -> None:
        """The topic goes on without a schema."""
        self._check_open()
        await self._schemas.delete(topic)
