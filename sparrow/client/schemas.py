"""The verbs for schemas of topics, over a connection and for blocking code; as in broker/schemaverbs.py."""

from __future__ import annotations

from typing import Any

from sparrow.model.schema import TopicSchema


class RemoteSchemas:
    """A part of the remote broker."""

    async def _call(self, verb: str, result: Any = None, /, **arguments: Any) -> Any:
        raise NotImplementedError

    async def set_topic_schema(
        self, topic: str, *, type: str, definition: Any, message: str = ""
    ) -> TopicSchema:
        """Says what the payloads of a topic are: "json", "avro" or "protobuf" with its definition."""
        found: TopicSchema = await self._call(
            "set_topic_schema", TopicSchema, topic=topic, type=type, definition=definition, message=message
        )
        return found

    async def topic_schema(self, topic: str) -> TopicSchema | None:
        """What the payloads of a topic are; None when nobody said."""
        found: TopicSchema | None = await self._call("topic_schema", TopicSchema | None, topic=topic)
        return found

    async def delete_topic_schema(self, topic: str) -> None:
        """The topic goes on without a schema."""
        await self._call("delete_topic_schema", topic=topic)


class BlockingSchemas:
    """A part of the broker for blocking code; the same verbs."""

    _target: Any

    def _run(self, work: Any) -> Any:
        raise NotImplementedError

    def set_topic_schema(self, topic: str, *, type: str, definition: Any, message: str = "") -> TopicSchema:
        """Says what the payloads of a topic are: "json", "avro" or "protobuf" with its definition."""
        found: TopicSchema = self._run(
            self._target.set_topic_schema(topic, type=type, definition=definition, message=message)
        )
        return found

    def topic_schema(self, topic: str) -> TopicSchema | None:
        """What the payloads of a topic are; None when nobody said."""
        found: TopicSchema | None = self._run(self._target.topic_schema(topic))
        return found

    def delete_topic_schema(self, topic: str) -> None:
        """The topic goes on without a schema."""
        self._run(self._target.delete_topic_schema(topic))
