"""``sparrow tail``: watches topics without taking anything from anybody.

It reads the log itself and makes no subscription: nothing is acked, nobody's lag changes, and nothing is left
behind when it is killed. Messages of several partitions are shown in the order of their publish times, as far
as they were there when it looked; a filter is applied here, with the broker's own rules.
"""

from __future__ import annotations

import time
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from sparrow.cli.messages import Format, chosen_format, print_messages
from sparrow.cli.output import is_terminal, reflow
from sparrow.cli.target import Data, Json, Url, opened
from sparrow.cli.values import parse_start
from sparrow.model.errors import OffsetOutOfRange, TopicNotFound

if TYPE_CHECKING:
    import pyarrow as pa

    from sparrow.client.blocking import BlockingBroker
    from sparrow.kernel.filter import Filter
    from sparrow.model.message import Message
    from sparrow.model.topic import Topic

app = typer.Typer()

LAST_DEFAULT = 10
_LOOK_S = 0.2
_NEW_TOPICS_S = 2.0
_WINDOW = 1000
_READ_BYTES = 1024 * 1024

Place = tuple[str, int]
"""A topic and a partition."""


@app.command(epilog="Example: sparrow tail 'orders.#' --follow --filter 'attributes.env = \"prod\"'")
def tail(
    pattern: Annotated[
        str, typer.Argument(metavar="TOPIC|PATTERN", help="What to watch: orders.us, orders.#")
    ],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    filter: Annotated[str, typer.Option(help="Only messages for which it holds.")] = "",
    start: Annotated[
        str | None,
        typer.Option("--from", metavar="WHERE", help="Begin at earliest, latest or a time: 2h ago."),
    ] = None,
    last: Annotated[
        int | None, typer.Option("--last", "-n", min=0, help=f"Begin with the last N; {LAST_DEFAULT}.")
    ] = None,
    form: Annotated[Format | None, typer.Option("--format", help="How messages are printed; text.")] = None,
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Watch topics: the last messages, or those from a time on, and with --follow what comes.

    Nothing is acked and no subscription is made, so nobody notices. With --from and --last, the last N of
    what there is from that time on.
    """
    from sparrow.kernel.filter import parse_filter

    chosen = chosen_format(form, as_json)
    begin = parse_start(start) if start is not None else "earliest"
    limit = LAST_DEFAULT if last is None and start is None else last
    with opened(url, data) as broker:
        view = View(broker, pattern, parse_filter(filter))
        if not view.topics and not follow:
            raise TopicNotFound(f"no topic matches {pattern!r}")
        shown = view.begin(begin, limit, chosen)
        if not shown and is_terminal() and chosen is Format.TEXT:
            typer.echo("nothing yet; Ctrl-C ends" if follow else "no messages", err=True)
        if follow:
            view.follow(chosen)


class View:
    """What is watched, and how far it has been shown."""

    def __init__(self, broker: BlockingBroker, pattern: str, chosen: Filter | None) -> None:
        from sparrow.kernel.pattern import parse_pattern

        self._broker = broker
        self._pattern = parse_pattern(pattern)
        self._filter = chosen
        self._next: dict[Place, int] = {}
        self._looked_s = 0.0
        self.topics: dict[str, Topic] = {}
        self._find_topics()

    def begin(self, start: str | datetime, limit: int | None, form: Format) -> int:
        """Shows what is there from a place on, the last ``limit`` of it or all; how many were shown."""
        places = list(self._next)
        starts = {place: self._offset(place, start) for place in places}
        ends = {place: self._broker.bounds(*place).end_offset for place in places}
        self._next = dict(ends)
        if limit is None:
            self._next = dict(starts)
            return self._show_up_to(ends, form)
        found = [m for place in places for m in self._last(place, starts[place], ends[place], limit)]
        found.sort(key=lambda message: message.publish_time_us)
        print_messages(found[len(found) - min(limit, len(found)) :], form)
        return min(limit, len(found))

    def follow(self, form: Format) -> None:
        """Shows what comes, for ever."""
        while True:
            if time.monotonic() - self._looked_s > _NEW_TOPICS_S:
                self._find_topics()
            try:
                ends = {place: self._broker.bounds(*place).end_offset for place in self._next}
                if not self._show_up_to(ends, form):
                    time.sleep(_LOOK_S)
            except TopicNotFound:  # It was deleted while we watched.
                self._find_topics()

    def _find_topics(self) -> None:
        self._looked_s = time.monotonic()
        self.topics = {each.name: each for each in self._broker.topics() if self._pattern.matches(each.name)}
        places = [
            (topic.name, number) for topic in self.topics.values() for number in range(topic.partitions)
        ]
        self._next = {place: self._next.get(place, 0) for place in places}

    def _offset(self, place: Place, start: str | datetime) -> int:
        topic, partition = place
        if isinstance(start, datetime):
            return self._broker.offset_at(topic, start, partition=partition)
        bounds = self._broker.bounds(topic, partition)
        return bounds.start_offset if start == "earliest" else bounds.end_offset

    def _show_up_to(self, ends: dict[Place, int], form: Format) -> int:
        """Shows everything below the ends, some of each partition at a time; how many were shown."""
        count = 0
        while waiting := [place for place, end in ends.items() if self._next[place] < end]:
            found: list[Message] = []
            for place in waiting:
                some, self._next[place] = self._read(place, self._next[place], ends[place])
                found += some
            found.sort(key=lambda message: message.publish_time_us)
            print_messages(found, form)
            count += len(found)
        return count

    def _last(self, place: Place, start: int, end: int, limit: int) -> list[Message]:
        """The last messages of a partition that pass the filter; looks back until there are enough."""
        found: list[Message] = []
        window, high = max(limit, _WINDOW if self._filter is not None else limit), end
        while len(found) < limit and high > start:
            low = max(start, high - window)
            earlier: list[Message] = []
            position = low
            while position < high:
                some, position = self._read(place, position, high)
                earlier += some
            found, high, window = earlier + found, low, window * 2
        return found[-limit:] if limit else []

    def _read(self, place: Place, offset: int, end: int) -> tuple[list[Message], int]:
        """Messages of a partition from an offset on that pass the filter, and where to go on."""
        from sparrow.model.message import StreamId
        from sparrow.store.handover import messages
        from sparrow.store.ports import LogBatch

        topic, partition = place
        try:
            batches = self._batches(place, offset)
        except OffsetOutOfRange:  # Retention was faster than we.
            offset = self._broker.bounds(*place).start_offset
            batches = self._batches(place, offset)
        if not batches:
            return [], end
        stream = StreamId(self.topics[topic].id, partition)
        found: list[Message] = []
        for batch in batches:
            kept = batch if self._filter is None else batch.filter(self._filter.mask(batch))
            page = messages(LogBatch(stream, 0, 0, kept), topic)
            found += [message for message in page if offset <= message.offset < end]
        last = batches[-1].column("offset")
        return found, min(end, last[len(last) - 1].as_py() + 1)

    def _batches(self, place: Place, offset: int) -> list[pa.RecordBatch]:
        topic, partition = place
        return self._broker.read_batches(topic, partition=partition, offset=offset, max_bytes=_READ_BYTES)


reflow(app)
