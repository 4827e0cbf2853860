"""Planning: options and what the log holds become ranges, and ranges tasks. Runs on Spark's driver.

Everything that can be wrong with a query is found here: topics that do not exist, offsets that are not there,
messages that retention took before they were read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from sparrow.model.errors import DataLost, InvalidOption, TopicNotFound, TopicRecreated
from sparrow.model.segment import Extent, Stretch
from sparrow.spark.offsets import Offsets
from sparrow.spark.options import EARLIEST, LATEST, Edge, Moment, Positions, ReadOptions
from sparrow.spark.origins import Origin
from sparrow.spark.ranges import Range, along_segments, to_tasks

_LARGE_ROWS = 20_000
"""From here on it pays to ask which segment files hold a range."""
_FOR_EVER = 2**62


def find_topics(origin: Origin, options: ReadOptions) -> list[Extent]:
    """The topics that are read; a topic that is named must exist, a pattern may match none yet."""
    found = origin.extents(options.patterns)
    missing = set() if options.is_pattern else set(options.patterns) - {extent.topic for extent in found}
    if missing:
        raise TopicNotFound(
            f"option subscribe: there is no topic {', '.join(sorted(missing))}",
            hint="Create it, correct the name, or give subscribePattern to wait for topics that come.",
        )
    return found


def resolve(
    origin: Origin, extents: Sequence[Extent], edge: Edge, option: str, *, is_loss_fatal: bool, missing: int
) -> Positions:
    """The offset of every partition at an edge; ``missing`` is taken for those that offsets do not name."""
    if isinstance(edge, dict):
        _check_named(extents, edge, option)
    found: Positions = {}
    for extent in extents:
        for partition, (start, end) in enumerate(extent.bounds):
            at = edge.get((extent.topic, partition), missing) if isinstance(edge, dict) else edge
            if isinstance(at, Moment):
                at = origin.offset_at(extent.topic, partition, at.time_us)
            if at in (EARLIEST, LATEST):
                at = start if at == EARLIEST else end
            found[extent.topic, partition] = _checked(
                extent.topic, partition, at, start, end, option, is_loss_fatal
            )
    return found


def _check_named(extents: Sequence[Extent], named: Iterable[tuple[str, int]], option: str) -> None:
    known = {(extent.topic, number) for extent in extents for number in range(len(extent.bounds))}
    for topic, partition in named:
        if (topic, partition) not in known:
            raise InvalidOption(
                f"option {option}: there is no partition {partition} of a topic {topic!r} that is read",
                hint="Name topics and partitions that exist and are subscribed to.",
                option=option,
            )


def _checked(
    topic: str, partition: int, at: int, start: int, end: int, option: str, is_loss_fatal: bool
) -> int:
    if at > end:
        raise InvalidOption(
            f"option {option}: {topic}/{partition} ends at {end}; there is no offset {at}",
            hint="Give an offset up to the end, or latest.",
            option=option,
        )
    if at < start and is_loss_fatal:
        raise DataLost(
            f"option {option}: {topic}/{partition} begins at {start} by now; offset {at} is gone",
            hint="Give earliest, a later offset, or failOnDataLoss=false to begin with what is left.",
        )
    return max(at, start)


def batch_ranges(origin: Origin, options: ReadOptions) -> list[Range]:
    """What a batch reads: from the starting to the ending edge of every partition, as the log is now."""
    extents = find_topics(origin, options)
    expected = dict(options.epochs)
    for extent in extents:
        if expected.get(extent.topic, extent.topic_id) != extent.topic_id:
            raise gone(extent.topic, extent)
    start_edge = EARLIEST if options.start is None else options.start
    fatal = options.is_loss_fatal
    starts = resolve(
        origin, extents, start_edge, _name(start_edge, "starting"), is_loss_fatal=fatal, missing=EARLIEST
    )
    # A partition that ending offsets do not name is not read: it came after they were written.
    ends = resolve(
        origin, extents, options.end, _name(options.end, "ending"), is_loss_fatal=False, missing=EARLIEST
    )
    ids = {extent.topic: extent.topic_id for extent in extents}
    return [
        Range(topic, ids[topic], partition, start, ends[topic, partition])
        for (topic, partition), start in starts.items()
        if start < ends[topic, partition]
    ]


def _name(edge: Edge, which: str) -> str:
    return f"{which}Timestamp" if isinstance(edge, Moment) else f"{which}Offsets"


def stream_ranges(
    extents: Sequence[Extent], start: Offsets, end: Offsets, is_loss_fatal: bool
) -> list[Range]:
    """What a micro-batch reads. Positions were checked when they were new; time has passed since."""
    now = {extent.topic: extent for extent in extents}
    found = []
    for (topic, partition), last in end.next.items():
        extent = now.get(topic)
        if extent is None or extent.topic_id != end.epochs.get(topic):
            if is_loss_fatal:
                raise gone(topic, extent)
            continue
        first, kept = start.next.get((topic, partition)), extent.bounds[partition][0]
        if first is not None and start.epochs.get(topic) != extent.topic_id:
            if is_loss_fatal:
                raise gone(topic, extent)
            first = None
        if first is None:
            first = kept
        if first < kept and first < last:
            if is_loss_fatal:
                raise overtaken(topic, partition, first, kept)
            first = kept
        if first < last:
            found.append(Range(topic, extent.topic_id, partition, first, last))
    return found


def gone(topic: str, extent: Extent | None) -> DataLost:
    """The complaint about a topic that is no longer what it was."""
    if extent is None:
        return DataLost(f"the topic {topic!r} was deleted; the query had not read all of it")
    return TopicRecreated(f"the topic {topic!r} was deleted and made anew since the checkpoint was written")


def overtaken(topic: str, partition: int, next_offset: int, kept: int) -> DataLost:
    """The complaint about retention that was faster than the query."""
    return DataLost(
        f"{topic}/{partition}: the query is at offset {next_offset}, and retention has removed everything "
        f"below {kept}: {kept - next_offset} messages are lost to it"
    )


def plan(
    origin: Origin, options: ReadOptions, ranges: Sequence[Range], *, is_batch: bool
) -> list[list[Range]]:
    """Tasks for ranges: sized, cut along segment files where that pays, split and gathered."""
    sized: list[Range] = []
    for topic in dict.fromkeys(each.topic for each in ranges):
        own = [each for each in ranges if each.topic == topic]
        stretches = [Stretch(each.partition, each.start, each.end) for each in own]
        measured = origin.measure(topic, stretches, _FOR_EVER)
        own = [
            _sized(each, found.end_offset, found.size_bytes)
            for each, found in zip(own, measured, strict=True)
        ]
        is_large = is_batch or any(len(each) >= _LARGE_ROWS for each in own)
        if is_large and options.reads_local_files and options.where.path is None:
            own = _located(origin, topic, own)
        sized += own
    return to_tasks(
        sized,
        bytes_max=options.task_bytes_max,
        rows_max=options.task_rows_max,
        tasks_min=options.tasks_min,
    )


def _located(origin: Origin, topic: str, ranges: Sequence[Range]) -> list[Range]:
    """The ranges with the files that hold them, which tasks on the broker's machine read by themselves."""
    seen = origin.segments(topic)
    files = {each.partition: each.segments for each in seen.partitions}
    parts = [part for each in ranges for part in along_segments(each, seen.directory, files[each.partition])]
    hot = [part for part in parts if part.file is None]
    places = origin.places(topic, [Stretch(part.partition, part.start, part.end) for part in hot])
    lying = dict(zip(hot, places, strict=True))
    return [
        replace(part, directory=seen.directory, places=tuple(lying[part])) if lying.get(part) else part
        for part in parts
    ]


def _sized(each: Range, measured_end: int, size_bytes: int) -> Range:
    """With its bytes; what was too long to be measured is taken to be like the rest."""
    part = max(1, measured_end - each.start)
    return Range(
        each.topic, each.topic_id, each.partition, each.start, each.end, size_bytes * len(each) // part
    )
