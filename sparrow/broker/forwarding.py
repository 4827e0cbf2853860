"""Dead letters for another subscription: which of them it can get, and as what.

A letter becomes a message of its own topic again, stored for the destination alone (``pages.REPLAY_FOR``).
So the destination must read that topic and its filter must let the message pass: otherwise it would be
stored for nobody, and the letter lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sparrow.broker.courier import Courier
from sparrow.broker.pages import REPLAY_FOR, REPLAY_FROM, REPLAY_ROUND
from sparrow.broker.topics import Topics
from sparrow.kernel.deadletter import PREFIX
from sparrow.kernel.filter import Filter
from sparrow.kernel.replay import original_of
from sparrow.model.deadletter import DeadLetter
from sparrow.model.errors import PreconditionFailed
from sparrow.model.message import StreamId
from sparrow.model.topic import Topic
from sparrow.store.admission import Row, check_row, rows_to_batch


class Again(NamedTuple):
    """A dead letter as a message that is stored again."""

    stream: StreamId
    topic: Topic
    row: Row


def stored_again(letter: DeadLetter, rounds: int, subscription: str, source: str = "") -> Row:
    """The message that a dead letter was, under its id, for one subscription."""
    kept = {k: v for k, v in letter.message.attributes.items() if not k.startswith(PREFIX)}
    kept |= {REPLAY_FOR: subscription, REPLAY_ROUND: str(rounds)}
    if source:
        kept[REPLAY_FROM] = source
    return check_row(letter.message.data, letter.message.key, kept, original_id=letter.message_id)


def forwarded(
    letters: Sequence[DeadLetter], source: str, target: Courier, topics: Topics
) -> list[Again | PreconditionFailed]:
    """What the subscription ``target`` gets for each dead letter of ``source``, or why it cannot get it."""
    found = [_placed(letter, source, target, topics) for letter in letters]
    rows = [one.row for one in found if isinstance(one, Again)]
    passing = iter(_passing(target.filter, rows))
    return [
        _filtered_out(letter, target) if isinstance(one, Again) and not next(passing) else one
        for letter, one in zip(letters, found, strict=True)
    ]


def _placed(letter: DeadLetter, source: str, target: Courier, topics: Topics) -> Again | PreconditionFailed:
    origin = original_of(letter.message.attributes)
    if origin is None:
        return PreconditionFailed(f"{letter.message_id!r} does not say which message it is a copy of")
    place, rounds = origin
    name, topic = target.subscription.name, topics.find(place.topic_id)
    if topic is None:
        return PreconditionFailed(
            f"the topic {letter.topic!r} of the dead letter {letter.message_id!r} is gone",
            hint="Leave such letters out of the selection: they can be listed and purged only.",
        )
    if place.stream not in target.streams:
        return PreconditionFailed(
            f"the subscription {name!r} does not read the topic {topic.name!r}"
            f" of the dead letter {letter.message_id!r}",
            hint=f"Name a destination that reads {topic.name!r}, or choose letters of topics that {name!r}"
            f" reads by a filter such as 'attributes.{PREFIX}topic = \"…\"'.",
        )
    return Again(place.stream, topic, stored_again(letter, rounds + 1, name, source))


def _passing(chosen: Filter | None, rows: list[Row]) -> list[bool]:
    if chosen is None or not rows:
        return [True] * len(rows)
    return [one is True for one in chosen.mask(rows_to_batch(rows)).to_pylist()]


def _filtered_out(letter: DeadLetter, target: Courier) -> PreconditionFailed:
    name = target.subscription.name
    return PreconditionFailed(
        f"the dead letter {letter.message_id!r} does not pass the filter of the subscription {name!r}",
        hint=f"Choose letters that pass {target.subscription.policy.filter!r}, or change it with update.",
    )
