"""Positions of a query, as Spark keeps them in its checkpoint.

    {"version": 1, "epochs": {"orders": 3}, "orders/0": 17, "orders/1": 12, "subscription": "billing"}

A number is the next offset to read. The epoch of a topic is its id, by which a topic that was deleted and
made anew is told from the old one. The subscription is there for the listener that commits after the last
batch. A text is always written in the same order: Spark takes two texts for the same position when they are
equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sparrow.model.errors import InvalidArgument

VERSION = 1


@dataclass(frozen=True)
class Offsets:
    """Next offsets by topic and partition, and the id of each topic."""

    next: Mapping[tuple[str, int], int] = field(default_factory=dict)
    epochs: Mapping[str, int] = field(default_factory=dict)
    subscription: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The form that Spark keeps."""
        found: dict[str, Any] = {"version": VERSION, "epochs": dict(sorted(self.epochs.items()))}
        if self.subscription is not None:
            found["subscription"] = self.subscription
        for (topic, partition), offset in sorted(self.next.items()):
            found[f"{topic}/{partition}"] = offset
        return found

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Offsets:
        """What a checkpoint holds."""
        if given.get("version") != VERSION:
            raise InvalidArgument(
                f"the checkpoint has offsets of version {given.get('version')!r}; this one knows {VERSION}",
                hint="Is the checkpoint of another source, or of a newer Sparrow?",
            )
        found: dict[tuple[str, int], int] = {}
        for name, value in given.items():
            topic, slash, partition = name.rpartition("/")
            if slash:
                found[topic, int(partition)] = int(value)
        return cls(found, dict(given.get("epochs", {})), given.get("subscription"))
