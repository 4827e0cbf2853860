"""Receipts as they come over the wire."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from sparrow.model.message import Receipt, Receipts, Run
from sparrow.wire.heads import WireReceipts


def to_receipts(head: WireReceipts) -> Receipts:
    """The receipts of one batch."""
    if (
        head.rows is None
        and len(head.runs) == 1
        and not (head.runs[0].is_dropped or head.runs[0].is_duplicate)
    ):
        return Receipts(head.topic, head.topic_id, [Run(*head.runs[0][:4])])
    places = list(_places(head))
    stored = [place for place in places if place is not None]
    rows = [(number, 0) for number in range(len(stored))]
    duplicates = {number: run for number, run in enumerate(stored) if run.is_duplicate}
    found = Receipts(head.topic, head.topic_id, stored, rows, duplicates)
    if len(stored) == len(places):
        return found
    return found.spread_over(place is not None for place in places)


def _places(head: WireReceipts) -> Iterator[Run | None]:
    """Where each message went; None for one that was dropped."""
    for number, within in _rows(head):
        run = head.runs[number]
        if run.is_dropped:
            yield None
        else:
            yield Run(run.partition, run.base_offset + within, 1, run.publish_time_us, run.is_duplicate)


def _rows(head: WireReceipts) -> Iterator[tuple[int, int]]:
    if head.rows is not None:
        return iter(head.rows)
    lengths = [zip(itertools.repeat(n), range(run.length), strict=False) for n, run in enumerate(head.runs)]
    return itertools.chain.from_iterable(lengths)


def each(head: WireReceipts) -> list[Receipt]:
    """One receipt a message, quickly where all went to one place."""
    if head.rows is not None or len(head.runs) != 1 or head.runs[0].is_dropped:
        return list(to_receipts(head))
    topic, (partition, base, length, time_us, is_duplicate, _) = head.topic, head.runs[0]
    stem = f"{head.topic_id}-{partition}-"
    return [
        Receipt(topic, partition, offset, f"{stem}{offset}", time_us, is_duplicate)
        for offset in range(base, base + length)
    ]
