"""Where is this message? Asks every subscription that reads its topic."""

from __future__ import annotations

from sparrow.broker.pages import Pages
from sparrow.broker.subscriptions import Subscriptions
from sparrow.broker.topics import Topics
from sparrow.kernel.trace import Trace
from sparrow.model.errors import MessageNotFound
from sparrow.model.message import MessageId, parse_message_id
from sparrow.store.ports import Store


class Tracer:
    """See the module's text."""

    def __init__(self, store: Store, topics: Topics, subscriptions: Subscriptions, pages: Pages) -> None:
        self._store = store
        self._topics = topics
        self._subscriptions = subscriptions
        self._pages = pages

    async def trace(self, message_id: str) -> list[Trace]:
        """One answer a subscription, by name; an id that was never given is refused."""
        place = parse_message_id(message_id)
        topic = self._topics.find(place.topic_id)
        if topic is None or place.partition >= topic.partitions:
            raise MessageNotFound(f"no topic holds the message {message_id}")
        end = self._store.bounds(place.stream).end_offset
        if place.offset >= end:
            raise MessageNotFound(f"the message {message_id} has not been stored; offsets end at {end}")
        found = []
        for courier in self._subscriptions:
            if place.stream in courier.streams:
                is_selected = await self._is_selected(place, courier.subscription.id)
                where = courier.delivery.trace(place, end, is_selected=is_selected)
                found.append(where._replace(subscription=courier.subscription.name))
        return found

    async def _is_selected(self, place: MessageId, subscription_id: int) -> bool:
        courier = self._subscriptions.find(subscription_id)
        if courier is None or courier.filter is None:
            return True
        if place.offset < self._store.bounds(place.stream).start_offset:
            return True
        page = await self._pages.at(place.stream, place.offset)
        if page is None or page.first_offset > place.offset:
            return True
        filters = self._subscriptions.filters(place.topic_id)
        return place.offset in page.selected(courier.filter, filters)
