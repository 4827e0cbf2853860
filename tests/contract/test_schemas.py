"""The schema of a topic, over every surface."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

import sparrow
from sparrow.model.errors import InvalidArgument, InvalidSchema, SchemaNotFound, TopicNotFound
from sparrow.model.schema import SchemaType
from sparrow.model.settings import Settings
from sparrow.store.offline.log import OfflineLog
from tests.spark.descriptors import ORDER, files

AVRO = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}


async def test_a_topic_carries_its_schema_until_it_is_taken_away(broker: Any) -> None:
    await broker.create_topic("orders")
    assert await broker.topic_schema("orders") is None
    made = await broker.set_topic_schema("orders", type="avro", definition=AVRO)
    assert (made.type, made.definition, made.message) == (SchemaType.AVRO, AVRO, "")
    assert await broker.topic_schema("orders") == made
    raw = base64.b64encode(files().SerializeToString()).decode()
    await broker.set_topic_schema("orders", type="protobuf", definition=raw, message=ORDER)
    found = await broker.topic_schema("orders")
    assert (found.type, found.definition, found.message) == (SchemaType.PROTOBUF, raw, ORDER)
    await broker.delete_topic_schema("orders")
    assert await broker.topic_schema("orders") is None
    with pytest.raises(SchemaNotFound):
        await broker.delete_topic_schema("orders")


async def test_a_bad_definition_is_refused_with_the_place_and_changes_nothing(broker: Any) -> None:
    await broker.create_topic("orders")
    made = await broker.set_topic_schema("orders", type="json", definition={"properties": {"id": {}}})
    bad = {"type": "record", "name": "R", "fields": [{"name": "id", "type": {"type": "array"}}]}
    with pytest.raises(InvalidSchema, match=r"definition\.id\.items: it is missing") as refused:
        await broker.set_topic_schema("orders", type="avro", definition=bad)
    assert refused.value.details == {"place": "definition.id.items"}
    with pytest.raises(InvalidArgument, match="xml"):
        await broker.set_topic_schema("orders", type="xml", definition=AVRO)
    assert await broker.topic_schema("orders") == made


async def test_a_schema_goes_with_its_topic(broker: Any) -> None:
    await broker.create_topic("orders")
    await broker.set_topic_schema("orders", type="avro", definition=AVRO)
    await broker.delete_topic("orders")
    for verb in (broker.topic_schema, broker.delete_topic_schema):
        with pytest.raises(TopicNotFound):
            await verb("orders")
    await broker.create_topic("orders")
    assert await broker.topic_schema("orders") is None


async def test_a_schema_survives_a_restart_and_is_seen_in_a_stopped_directory(tmp_path: Path) -> None:
    async with sparrow.aopen(tmp_path / "data") as broker:
        await broker.create_topic("orders")
        await broker.create_topic("plain")
        made = await broker.set_topic_schema("orders", type="avro", definition=AVRO)
    log = OfflineLog(tmp_path / "data")
    assert (log.topic_schema("orders"), log.topic_schema("plain")) == (made, None)
    async with sparrow.aopen(tmp_path / "data") as broker:
        assert await broker.topic_schema("orders") == made


async def test_what_a_crash_left_of_a_topic_that_is_gone_is_dropped(tmp_path: Path) -> None:
    settings = Settings(data=str(tmp_path / "data"))
    async with sparrow.aopen(tmp_path / "data", settings=settings) as broker:
        await broker._store.put_document("schema", "4711", b'{"type":"avro","definition":{}}')
    async with sparrow.aopen(tmp_path / "data", settings=settings) as broker:
        assert await broker._store.documents("schema") == {}
