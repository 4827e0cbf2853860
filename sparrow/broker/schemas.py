"""The schemas of topics: kept beside them, by the topic's id, so that a new topic of the same name has none.

A schema says what payloads are for; nothing is checked by it when messages are published.
"""

from __future__ import annotations

import msgspec

from sparrow.broker.topics import Topics
from sparrow.kernel.schema import parse_schema
from sparrow.model.errors import SchemaNotFound
from sparrow.model.schema import DOCUMENTS, TopicSchema
from sparrow.model.topic import Topic
from sparrow.store.ports import Store


class Schemas:
    """See the module's text."""

    def __init__(self, store: Store, topics: Topics) -> None:
        self._store = store
        self._topics = topics
        self._kept: dict[int, TopicSchema] = {}

    async def load(self) -> None:
        """Takes up what there is, and drops what a crash left of topics that are gone."""
        for key, raw in (await self._store.documents(DOCUMENTS)).items():
            if self._topics.find(int(key)) is None:
                await self._store.delete_document(DOCUMENTS, key)
            else:
                self._kept[int(key)] = msgspec.json.decode(raw, type=TopicSchema)

    def get(self, topic: str) -> TopicSchema | None:
        return self._kept.get(self._topics.get(topic).id)

    async def set(self, topic: str, type: object, definition: object, message: object) -> TopicSchema:
        """From now on; what was published before may be of another."""
        found = self._topics.get(topic)
        schema = parse_schema(type, definition, message)
        await self._store.put_document(DOCUMENTS, str(found.id), msgspec.json.encode(schema))
        if self._topics.find(found.id) is not None:
            self._kept[found.id] = schema
        return schema

    async def delete(self, topic: str) -> None:
        found = self._topics.get(topic)
        if found.id not in self._kept:
            raise SchemaNotFound(f"the topic {topic!r} has no schema")
        await self._forget(found.id)

    async def topic_deleted(self, topic: Topic) -> None:
        """It goes with its topic."""
        if topic.id in self._kept:
            await self._forget(topic.id)

    async def _forget(self, topic_id: int) -> None:
        await self._store.delete_document(DOCUMENTS, str(topic_id))
        self._kept.pop(topic_id, None)
