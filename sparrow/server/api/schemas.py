"""Schemas of topics over HTTP: set, look, delete."""

from __future__ import annotations

from typing import Any

import msgspec

from sparrow.model.access import Action
from sparrow.model.errors import SchemaNotFound
from sparrow.model.schema import SchemaType, TopicSchema
from sparrow.server.api.family import Answer, Api, Req, answer, body, no_content
from sparrow.server.api.operation import described
from sparrow.server.api.routing import delete, get, put

TAG = "topics"
ONE = "/v1/topics/{topic:str}/schema"
_EXAMPLE = {
    "type": "avro",
    "definition": {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]},
}


class NewSchema(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What the payloads of a topic are."""

    type: SchemaType
    definition: dict[str, Any] | str
    """JSON Schema or Avro as an object or its text; for Protobuf a FileDescriptorSet as base64."""
    message: str = ""
    """The full name of the Protobuf message."""


def routes(api: Api) -> list[Any]:
    """The handlers."""

    @put(
        ONE,
        opt=described(
            "Say what the payloads of a topic are",
            tag=TAG,
            description="Spark shows the fields of typed topics as columns. Payloads are not checked "
            "when they are published.",
            body=NewSchema,
            body_example=_EXAMPLE,
            answers={200: TopicSchema},
            errors=(404,),
        ),
    )
    async def set_topic_schema(request: Req, topic: str) -> Answer:
        wanted = await body(request, NewSchema)
        async with api.audited(request, "set_topic_schema", topic):
            api.require(request, Action.ADMIN, topic)
            found = await api.broker.set_topic_schema(
                topic, type=wanted.type.value, definition=wanted.definition, message=wanted.message
            )
        return answer(found)

    @get(
        ONE,
        opt=described("Look at the schema of a topic", tag=TAG, answers={200: TopicSchema}, errors=(404,)),
    )
    async def get_topic_schema(request: Req, topic: str) -> Answer:
        api.access.require_any(api.principal(request), topic)
        found = await api.broker.topic_schema(topic)
        if found is None:
            raise SchemaNotFound(f"the topic {topic!r} has no schema")
        return answer(found)

    @delete(
        ONE,
        status_code=200,
        opt=described("Take the schema of a topic away", tag=TAG, answers={204: None}, errors=(404,)),
    )
    async def delete_topic_schema(request: Req, topic: str) -> Answer:
        async with api.audited(request, "delete_topic_schema", topic):
            api.require(request, Action.ADMIN, topic)
            await api.broker.delete_topic_schema(topic)
        return no_content()

    return [set_topic_schema, get_topic_schema, delete_topic_schema]
