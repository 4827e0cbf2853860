"""The AsyncAPI 3 document: the topics of a broker as channels, each with what may be sent and received."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata
from typing import Any

from sparrow.model.topic import Topic


def document(topics: Iterable[Topic], host: str) -> dict[str, Any]:
    """The document of some topics."""
    channels: dict[str, Any] = {}
    operations: dict[str, Any] = {}
    for topic in topics:
        reference = f"#/channels/{_pointer(topic.name)}"
        channels[topic.name] = {
            "address": topic.name,
            "messages": {"message": {"$ref": "#/components/messages/message"}},
            "bindings": {"http": {}},
            "x-partitions": topic.partitions,
        }
        for action, verb in (("send", "publish"), ("receive", "subscribe")):
            operations[f"{verb}.{topic.name}"] = {
                "action": action,
                "channel": {"$ref": reference},
                "messages": [{"$ref": f"{reference}/messages/message"}],
            }
    return {
        "asyncapi": "3.0.0",
        "info": {"title": "Sparrow", "version": metadata.version("sparrow-broker")},
        "servers": {"http": {"host": host, "protocol": "http"}},
        "defaultContentType": "application/json",
        "channels": channels,
        "operations": operations,
        "components": {
            "messages": {
                "message": {
                    "contentType": "application/json",
                    "headers": {
                        "type": "object",
                        "description": "The attributes of the message.",
                        "additionalProperties": {"type": "string"},
                    },
                    "payload": {"description": "Any bytes; often JSON."},
                }
            }
        },
    }


def _pointer(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
