"""What clients of a simulated broker know, and what must therefore be true.

The model sees only what a client sees: what was sent and receipted, handed over, asked for and confirmed.
Where a client cannot know (a lost reply, a crash in the middle) the model does not know either: an item is
then *excused*, it may or may not come again. Everything else is exact, and a broken promise raises
``Broken`` in the moment it is seen:

* an item is *acked* when its ack was asked for, *done* when that was confirmed. What is done never comes
  again, until a seek or a replay asks for it.
* what is neither acked nor excused must come, before later ones of its lane, until it is acked, in the
  dead letters, past its time to live or past retention.
* an attempt counts when a consumer failed or let the deadline pass; the death of a broker counts for none.
* nobody is handed what another one holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from sparrow.kernel.pattern import parse_pattern
from sparrow.model.message import Delivered, StreamId
from sparrow.model.subscription import Guarantee, Ordering, SubscriptionPolicy
from sparrow.testing.simclock import SimClock

FILTERS = {
    "": "abc",
    'attributes.env = "a"': "a",
    'attributes.env != "a"': "bc",
    'attributes.env = "a" OR attributes.env = "b"': "ab",
}
"""Filters, and the values of ``env`` that they let pass."""


class Broken(AssertionError):
    """A promise is broken."""


class Place(NamedTuple):
    """Where a message lies."""

    stream: StreamId
    offset: int

    def __str__(self) -> str:
        return f"{self.stream.topic_id}-{self.stream.partition}-{self.offset}"


class Record:
    """A message that somebody sent; its data is its name."""

    def __init__(self, number: int, topic: str, key: str | None, env: str, options: dict[str, Any]) -> None:
        self.data = b"m%d" % number
        self.topic = topic
        self.key = key
        self.env = env
        self.options = options
        """What else it was published with: ttl_s, deliver_at, priority, depends_on."""
        self.producer = ""
        self.place: Place | None = None
        self.time_us: int | None = None
        self.is_refused = False

    def __repr__(self) -> str:
        return f"{self.data.decode()}@{self.place}"

    @property
    def attributes(self) -> dict[str, str]:
        return {"env": self.env}

    @property
    def expires_at_us(self) -> int | None:
        ttl_s: float | None = self.options.get("ttl_s")
        if ttl_s is None:
            return None
        return 0 if self.time_us is None else self.time_us + int(ttl_s * 1000) * 1000

    @property
    def deliver_at_us(self) -> int | None:
        deliver_at: float | None = self.options.get("deliver_at")
        return None if deliver_at is None else int(deliver_at * 1_000_000)


class TopicFacts(NamedTuple):
    """A topic as it was made."""

    name: str
    id: int
    partitions: int
    is_durable: bool
    is_shortened: bool
    """Whether retention may take its front."""
    is_kept: bool
    """Whether retention spares what is not acked."""


class Handed:
    """One hand-over of an item."""

    def __init__(self, message: Delivered, consumer: str, life: int, deadline_us: int) -> None:
        self.ack_id = message.ack_id
        self.attempt = message.attempt
        self.consumer = consumer
        self.life = life
        self.deadline_us = deadline_us
        self.taken_at_us = 0
        """In a group: when the lease was made, or earlier."""
        self.is_over = False
        """Settled, or ended by something that does not count as a failure."""
        self.is_doubtful = False
        """Taken before or after a change that ended all leases; who knows."""
        self.is_nacked = False
        self.is_rejected = False


class Item:
    """One message as one subscription knows it."""

    def __init__(self, record: Record, place: Place) -> None:
        self.record = record
        self.place = place
        self.is_acked = False
        self.is_done = False
        self.is_excused = False
        self.acked_at = 0
        """The tick of the last ack that was asked for."""
        self.attempt_min = 1
        self.handed: list[Handed] = []

    def __repr__(self) -> str:
        state = "done" if self.is_done else "acked" if self.is_acked else "open"
        return f"{self.record} {state}{' excused' if self.is_excused else ''}"


class SubscriptionModel:
    """One subscription: its items, and the rules for handing them over."""

    def __init__(self, world: World, name: str, pattern: str, policy: SubscriptionPolicy) -> None:
        self.name = name
        self.pattern = pattern
        self.policies = [policy]
        """All it ever had, the one in force last; of one that may or may not be in force, both."""
        self.starts: dict[StreamId, int] = {}
        self.items: dict[Place, Item] = {}
        self.resets = 0
        """Seeks and replays: each may bring back anything."""
        self.is_changing = False
        """A change of the whole subscription is under way, and nobody knows how far it got."""
        self.pulls = 0
        """Under way now."""
        self._lost_until_us = 0
        """Under *at most once*: what was published up to here may be gone with a lost reply."""
        self._skips: dict[StreamId, int] = {}
        self._changed_at = 0
        self._world = world

    @property
    def policy(self) -> SubscriptionPolicy:
        return self.policies[-1]

    @property
    def is_at_most_once(self) -> bool:
        return self.policy.guarantee is Guarantee.AT_MOST_ONCE

    @property
    def is_strict(self) -> bool:
        return all(policy.key_window == 1 for policy in self.policies)

    def item(self, record: Record, place: Place) -> Item:
        found = self.items.get(place)
        if found is None:
            found = self.items[place] = Item(record, place)
            found.is_excused = place.offset < self._skips.get(place.stream, 0)
        return found

    def responsible(self) -> Iterator[Item]:
        """Everything that it must account for, as far as is known."""
        for place, record in list(self._world.by_place.items()):
            if self.is_meant(record, place):
                yield self.item(record, place)

    def is_meant(self, record: Record, place: Place) -> bool:
        """Whether the record is surely for this subscription."""
        start = self.starts.get(place.stream)
        return start is not None and place.offset >= start and self._passes(record, all)

    def _passes(self, record: Record, quantifier: Any) -> bool:
        return bool(quantifier(record.env in FILTERS[policy.filter] for policy in self.policies))

    # Handing over.

    def delivered(self, message: Delivered, consumer: str, began: int) -> Item:
        """A consumer was handed this, or its reply was lost on the way; its pull ``began`` at a tick."""
        world = self._world
        record = world.identify(message)
        place = Place(StreamId(message.topic_id, message.partition), message.offset)
        item = self.item(record, place)
        if message.id == str(place):
            world.learn(record, place, message.publish_time_us, by=self.name)
        start = self.starts.get(place.stream)
        if start is None or place.offset < start:
            raise self._broken(item, f"was handed over, though {self.name} starts at {start}")
        if not self._passes(record, any):
            raise self._broken(item, f"was handed over, though no filter lets {record.env} pass")
        if item.is_done:
            raise self._broken(item, "was handed over after its ack was confirmed")
        if world.topics[record.topic].is_durable and not world.is_safe(place):
            raise self._broken(item, "was handed over before its publisher could have a receipt")
        self._check_time(item, message)
        self._check_attempt(item, message)
        handed = Handed(message, consumer, world.life, message.deadline_us)
        if began < self._changed_at or self.is_changing:
            handed.is_doubtful = True
        else:
            self._check_alone(item, consumer)
            self._check_order(item)
            self._check_dependencies(item)
        item.handed.append(handed)
        if self.is_at_most_once:
            item.is_acked = item.is_done = handed.is_over = True
            item.acked_at = began
        return item

    def _broken(self, item: Item, what: str) -> Broken:
        return Broken(f"{self.name} ({self.policy.ordering}, {self.policy.guarantee}): {item} {what}")

    def _check_time(self, item: Item, message: Delivered) -> None:
        latest_us = self._world.clock.latest_us
        deliver_at_us, expires_at_us = item.record.deliver_at_us, item.record.expires_at_us
        if deliver_at_us is not None and latest_us < deliver_at_us:
            raise self._broken(item, f"was handed over {deliver_at_us - latest_us} us too early")
        if expires_at_us and not self.is_at_most_once:
            leased_at_us = message.deadline_us - round(self.policy.ack_deadline_s * 1_000_000)
            if len(self.policies) == 1 and not self.resets and leased_at_us >= expires_at_us:
                raise self._broken(item, "was handed over after its time to live")

    def _check_attempt(self, item: Item, message: Delivered) -> None:
        failed = [handed.attempt for handed in item.handed if self._may_have_failed(handed)]
        highest = 1 + max(failed, default=0)
        if not item.attempt_min <= message.attempt <= highest:
            raise self._broken(
                item, f"came as attempt {message.attempt}, not {item.attempt_min} to {highest}"
            )
        limits = [policy.attempts_max for policy in self.policies]
        known = [limit for limit in limits if limit is not None]
        if len(known) == len(limits) and message.attempt > max(known):
            raise self._broken(item, f"came as attempt {message.attempt} of {max(known)}")

    def _may_have_failed(self, handed: Handed) -> bool:
        return handed.is_nacked or handed.deadline_us <= self._world.latest_in(handed.life)

    def _check_alone(self, item: Item, consumer: str) -> None:
        if not self.is_strict:
            return
        for handed in item.handed:
            if self._is_held(handed):
                raise self._broken(item, f"was handed to {consumer} while {handed.consumer} held it")

    def _is_held(self, handed: Handed) -> bool:
        """Whether the consumer surely has it still."""
        if handed.life != self._world.life or handed.is_over or handed.is_doubtful:
            return False
        return handed.deadline_us > self._world.clock.latest_us

    def _check_order(self, item: Item) -> None:
        """Earlier ones of its lane are acked, when strict; were handed over before, otherwise."""
        if item.record.deliver_at_us is not None or len({p.ordering for p in self.policies}) > 1:
            return
        for record, place in self._lane_before(item):
            if not self.is_meant(record, place) or record.deliver_at_us is not None:
                continue
            earlier = self.item(record, place)
            if not self.is_strict and earlier.handed:
                continue
            if self.is_open(earlier):
                raise self._broken(item, f"was handed over before {earlier}")

    def _lane_before(self, item: Item) -> Iterator[tuple[Record, Place]]:
        ordering, own = self.policy.ordering, item.record
        if ordering is Ordering.NONE or (ordering is Ordering.KEY and own.key is None):
            return
        if ordering is Ordering.PUBLISHER and not own.producer:
            return
        for place, record in list(self._world.by_place.items()):
            if ordering is Ordering.KEY:
                is_before = place.stream == item.place.stream and record.key == own.key
                is_before = is_before and place.offset < item.place.offset
            else:
                is_before = self._is_before(record, place, item)
                is_before = is_before and (ordering is Ordering.TOTAL or record.producer == own.producer)
            if is_before:
                yield record, place

    def _is_before(self, record: Record, place: Place, item: Item) -> bool:
        if place.stream == item.place.stream:
            return place.offset < item.place.offset
        assert record.time_us is not None
        assert item.record.time_us is not None
        return record.time_us < item.record.time_us

    def _check_dependencies(self, item: Item) -> None:
        for needed in item.record.options.get("depends_on") or ():
            place = self._world.places.get(needed)
            if place is None:
                continue
            record = self._world.by_place[place]
            if self.is_meant(record, place) and self.is_open(self.item(record, place)):
                raise self._broken(item, f"was handed over before {record}, which it depends on")

    # What may have become of an item.

    def is_open(self, item: Item) -> bool:
        """Whether nothing that is known could have ended it."""
        if item.is_acked or item.is_excused or self.may_be_dead(item) or self.may_have_expired(item):
            return False
        if self.is_at_most_once and (self.pulls or (item.record.time_us or 0) <= self._lost_until_us):
            return False
        return not self._world.may_be_dropped(item.place)

    def may_be_dead(self, item: Item) -> bool:
        """Whether it may be in the dead letters or on its way there."""
        for policy in self.policies:
            limit = policy.attempts_max
            for handed in item.handed:
                is_last = limit is not None and (handed.attempt >= limit or policy.poison_rules)
                if handed.is_rejected or (is_last and self._may_have_failed(handed)):
                    return True
        return False

    def may_have_expired(self, item: Item) -> bool:
        expires_at_us = item.record.expires_at_us
        return expires_at_us is not None and expires_at_us <= self._world.clock.latest_us

    # Settling.

    def find(self, ack_id: str) -> tuple[Item, Handed] | None:
        for item in self.items.values():
            for handed in item.handed:
                if handed.ack_id == ack_id:
                    return item, handed
        return None

    def ack_asked(self, item: Item, handed: Handed) -> None:
        item.is_acked = True
        item.acked_at = self._world.next_tick()
        handed.is_over = True

    def ack_confirmed(self, item: Item, asked_at: int) -> None:
        """Durable; unless a seek came between."""
        if item.acked_at == asked_at and item.is_acked:
            item.is_done = True

    def ack_refused(self, item: Item, asked_at: int, was_acked: bool) -> None:
        if item.acked_at == asked_at:
            item.is_acked = was_acked

    def nack_confirmed(self, item: Item, handed: Handed) -> None:
        item.attempt_min = max(item.attempt_min, handed.attempt + 1)

    # What happens to all items at once.

    def reply_lost(self) -> None:
        """Of a pull; what it took under *at most once* is gone."""
        self._lost_until_us = self._world.clock.latest_us

    def leases_ended(self) -> None:
        """Without a failed attempt; or they will have, when a change is still under way."""
        self._changed_at = self._world.next_tick()
        for item in self.items.values():
            for handed in item.handed:
                handed.is_doubtful = handed.is_doubtful or (self.is_changing and not handed.is_over)
                handed.is_over = handed.is_over or not self.is_changing

    def in_doubt(self, ends: dict[StreamId, int]) -> None:
        """Nobody knows what is acked and what is not, up to these offsets."""
        self.resets += 1
        self.leases_ended()
        self._skips.update({stream: end for stream, end in ends.items() if stream in self.starts})
        for item in [*self.responsible(), *self.items.values()]:
            item.is_excused, item.is_done, item.attempt_min = True, False, 1

    def commit_asked(self, stream: StreamId, end_offset: int) -> None:
        """Everything below may be done, and what was taken out before may come still."""
        self._skips[stream] = max(self._skips.get(stream, 0), end_offset)
        for item in [*self.responsible(), *self.items.values()]:
            if item.place.stream == stream and item.place.offset < end_offset:
                item.is_excused = True
                for handed in item.handed:
                    handed.is_doubtful = True

    def renewed(self, item: Item, since: int) -> None:
        """A confirmed seek made it new; an ack asked for after the seek was counts still."""
        if item.acked_at < since:
            item.is_acked = item.is_done = item.is_excused = False

    def replay_asked(self) -> None:
        """What may be in the dead letters may come again."""
        self.resets += 1
        for item in self.items.values():
            if self.may_be_dead(item) or self.may_have_expired(item):
                item.is_excused, item.is_done, item.attempt_min = True, False, 1


class World:
    """Everything that all clients together know."""

    def __init__(self, clock: SimClock) -> None:
        self.clock = clock
        self.life = 0
        self.topics: dict[str, TopicFacts] = {}
        self.records: list[Record] = []
        self.by_data: dict[bytes, Record] = {}
        self.by_place: dict[Place, Record] = {}
        self.places: dict[str, Place] = {}
        self.subscriptions: dict[str, SubscriptionModel] = {}
        self.start_of: Callable[[StreamId], int] = lambda stream: 0
        """Where the log of a stream starts now."""
        self.is_safe: Callable[[Place], bool] = lambda place: True
        """Whether a message is on the disk."""
        self.trace: list[str] | None = None
        self.operations = 0
        self._tick = 0
        self._latest: dict[int, int] = {}

    def next_tick(self) -> int:
        self._tick += 1
        return self._tick

    def note(self, *words: object) -> None:
        """A line of the trace."""
        self.operations += 1
        if self.trace is not None:
            now_s = self.clock.monotonic_s()
            self.trace.append(f"{self.life} {now_s:9.4f} " + " ".join(str(word) for word in words))

    def end_life(self) -> None:
        """The broker is gone, and with it every lease."""
        self._latest[self.life] = self.clock.latest_us
        self.life += 1

    def latest_in(self, life: int) -> int:
        """The latest wall time that the broker of a life can have seen."""
        return self._latest.get(life, self.clock.latest_us)

    # Messages.

    def may_be_dropped(self, place: Place) -> bool:
        """Whether retention took the message, and had the right to, though it was not acked."""
        facts = next(topic for topic in self.topics.values() if topic.id == place.stream.topic_id)
        return not facts.is_kept and place.offset < self.start_of(place.stream)

    def new_record(self, topic: str, key: str | None, env: str, options: dict[str, Any]) -> Record:
        record = Record(len(self.records), topic, key, env, options)
        self.records.append(record)
        self.by_data[record.data] = record
        return record

    def identify(self, message: Delivered) -> Record:
        record = self.by_data.get(message.data or b"")
        if record is None or record.topic != message.topic:
            raise Broken(f"{message!r} with {message.data!r} was never sent")
        if record.key != message.key or message.attributes.get("env") != record.env:
            raise Broken(f"{message!r} is not as it was sent: {record}")
        return record

    def learn(self, record: Record, place: Place, time_us: int, by: str) -> None:
        """Somebody has seen where a message lies."""
        if record.is_refused:
            raise Broken(f"{record} was refused, and yet {by} found it at {place}")
        other = self.by_place.get(place)
        is_moved = record.place is not None and record.place != place and not self._is_gone(record.place)
        if is_moved or (other is not None and other != record):
            raise Broken(f"{by} found {record} at {place}, where {other} lies")
        record.place, record.time_us = place, time_us
        self.by_place[place] = record
        self.places[str(place)] = place

    def _is_gone(self, place: Place) -> bool:
        """Whether retention dropped it. A key is then forgotten with the next start, and may come again."""
        return place.offset < self.start_of(place.stream)

    def forget(self, record: Record) -> None:
        """A message of a topic that promises less was lost, as it may be."""
        assert record.place is not None
        del self.by_place[record.place]
        del self.places[str(record.place)]
        for subscription in self.subscriptions.values():
            subscription.items.pop(record.place, None)
        record.place = None

    def streams(self, pattern: str) -> list[StreamId]:
        """The streams of the topics that a pattern matches."""
        parsed = parse_pattern(pattern)
        return [
            StreamId(topic.id, partition)
            for topic in self.topics.values()
            if parsed.matches(topic.name)
            for partition in range(topic.partitions)
        ]
