"""``sparrow compact``, ``merge`` and ``archive``: jobs of Spark on the sealed segments of a topic.

They run where the data directory can be reached: on the broker's machine, or with Spark's workers on machines
that share the directory. Publishing and delivery go on meanwhile.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparrow.cli.output import count, print_done, print_json, progress, reflow, size, span
from sparrow.cli.target import Data, Json, Url, opened

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sparrow.spark.pipelines.rewrites import Outcome

app = typer.Typer()

TopicName = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.")]
Master = Annotated[
    str | None,
    typer.Option(
        "--master",
        metavar="URL",
        help="Spark's master; else $SPARK_MASTER, else local[*].",
        show_default=False,
    ),
]
SegmentSize = Annotated[
    int, typer.Option("--segment-mib", min=1, max=4096, help="How large new segments may get, in MiB.")
]
_MIB = 1024 * 1024


@app.command(epilog="Example: sparrow compact customers --if-due")
def compact(
    topic: TopicName,
    if_due: Annotated[
        bool, typer.Option("--if-due", help="Only when enough is new (compaction_dirty_ratio).")
    ] = False,
    segment_mib: SegmentSize = 128,
    master: Master = None,
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Keep the newest message of each key of a topic whose option compaction is key.

    Offsets and order stay as they are. Messages without a key stay. A message with a key and without data
    deletes its key, and goes itself after the topic's tombstone_delay_s.
    """
    from sparrow.spark.pipelines import compact as job

    with opened(url, data) as broker, progress("compacting", as_json=as_json, is_bytes=True) as told:
        outcome = job.run(
            _spark("compact", master),
            broker,
            topic,
            if_due=if_due,
            segment_bytes=segment_mib * _MIB,
            on_progress=told,
        )
    _print(outcome, as_json, "is compacted")


@app.command(epilog="Example: sparrow merge orders.us.created")
def merge(
    topic: TopicName,
    segment_mib: SegmentSize = 128,
    master: Master = None,
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Put small neighbouring segments of a topic together; every message stays."""
    from sparrow.spark.pipelines import merge as job

    with opened(url, data) as broker, progress("merging", as_json=as_json, is_bytes=True) as told:
        outcome = job.run(
            _spark("merge", master), broker, topic, segment_bytes=segment_mib * _MIB, on_progress=told
        )
    _print(outcome, as_json, "is merged")


@app.command(epilog="Example: sparrow archive orders.us.created /mnt/archive --retention-days 365")
def archive(
    topic: TopicName,
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="A directory, or an address such as s3://bucket/archive.")
    ],
    retention_days: Annotated[
        float | None,
        typer.Option("--retention-days", min=0.0, help="How long the archive keeps a day; else for ever."),
    ] = None,
    seal: Annotated[bool, typer.Option("--seal", help="Seal first, to archive all there is.")] = False,
    master: Master = None,
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Add what was sealed since the last run to a lake table by topic and date.

    The table is Parquet for any reader. Running twice archives once: offsets decide what is new.
    """
    from sparrow.spark.pipelines import archive as job

    with opened(url, data) as broker, progress("archiving", as_json=as_json) as told:
        if seal:
            broker.seal()
        outcome = job.run(
            _spark("archive", master),
            broker,
            topic,
            target if "://" in target else Path(target),
            retention_s=None if retention_days is None else retention_days * 86400,
            on_progress=told,
        )
    if as_json:
        print_json(outcome)
        return
    print_done(
        f"{topic}: {count(outcome.messages, 'message')} in {count(outcome.files, 'file')} "
        f"({size(outcome.bytes)}) added to {outcome.target} in {span(outcome.seconds)}"
    )
    if outcome.missed:
        print_done(f"retention had taken {count(outcome.missed, 'message')} before")
    if outcome.expired_files:
        print_done(
            f"{count(outcome.expired_files, 'file')} of the archive went after {retention_days:g} days"
        )


def _spark(name: str, master: str | None) -> SparkSession:
    from sparrow.spark.sessions import session

    return session(f"sparrow-{name}", master=master)


def _print(outcome: Outcome, as_json: bool, done: str) -> None:
    if as_json:
        print_json(outcome)
        return
    before: Any = outcome.bytes_before
    share = f", {1 - outcome.bytes / before:.0%} smaller" if before and outcome.bytes < before else ""
    print_done(
        f"{outcome.topic} {done}: {count(outcome.messages_before, 'message')} in "
        f"{count(outcome.segments_before, 'segment')} ({size(before)}) became {outcome.messages:,} in "
        f"{outcome.segments:,} ({size(outcome.bytes)}{share}) in {span(outcome.seconds)}"
    )
    if outcome.conflicts:
        print_done(f"{count(outcome.conflicts, 'piece')} had changed meanwhile and stayed; run it again")


reflow(app)
