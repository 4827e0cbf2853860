"""What a tool found, in words that say what it means for the messages."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from sparrow.store.ports import Damage


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that was found: where it is, what it is, and what it means for the user."""

    file: str
    what: str
    meaning: str
    position: int | None = None
    end_position: int | None = None
    topic: str | None = None
    partition: int | None = None
    start_offset: int | None = None
    end_offset: int | None = None

    @property
    def has_offsets(self) -> bool:
        return self.start_offset is not None and self.end_offset is not None

    def covers(self, other: Finding) -> bool:
        """Whether all offsets that the other names are named here."""
        if (self.topic, self.partition) != (other.topic, other.partition):
            return False
        if None in (self.start_offset, self.end_offset, other.start_offset, other.end_offset):
            return False
        return (
            self.start_offset <= other.start_offset  # type: ignore[operator]
            and other.end_offset <= self.end_offset  # type: ignore[operator]
        )


def span(start_offset: int, end_offset: int) -> str:
    """Offsets as people read them: both ends included."""
    if end_offset - start_offset == 1:
        return f"offset {start_offset}"
    return f"offsets {start_offset}–{end_offset - 1}"  # noqa: RUF001 - an en dash is meant


def unreadable(topic: str, partition: int, start_offset: int, end_offset: int) -> str:
    return f"{span(start_offset, end_offset)} of {topic} partition {partition} cannot be read"


def gap(
    file: str, what: str, topic: str, partition: int, start_offset: int, end_offset: int, position: int = 0
) -> Finding:
    """Messages that cannot be read."""
    return Finding(
        file=file,
        what=what,
        meaning=unreadable(topic, partition, start_offset, end_offset),
        position=position or None,
        topic=topic,
        partition=partition,
        start_offset=start_offset,
        end_offset=end_offset,
    )


def from_damage(damage: Damage, names: Mapping[int, str]) -> Finding:
    """What recovery reports, in the words used here."""
    file = f"journal/{damage.file}"
    if damage.end_offset > damage.start_offset:
        topic = names.get(damage.topic_id, f"topic id {damage.topic_id}")
        return gap(
            file,
            damage.what,
            topic,
            damage.partition,
            damage.start_offset,
            damage.end_offset,
            damage.position,
        )
    if damage.end_offset:
        meaning = "the first copy is served; the repeated batch is not"
    elif damage.end_position:
        meaning = "what these bytes held is lost; entries behind them are read"
    else:
        meaning = "what only this file held is lost"
    return Finding(
        file=file,
        what=damage.what,
        meaning=meaning,
        position=damage.position if damage.end_position else None,
        end_position=damage.end_position or None,
    )
