"""Rewriting the lake by Spark: compaction, merge and archive, by hand and by command, beside publishers."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest

from sparrow.cli.main import main
from sparrow.client.blocking import BlockingBroker
from sparrow.model.errors import InvalidArgument, PreconditionFailed
from sparrow.spark.pipelines import archive, compact, merge
from sparrow.store.offline.verification import verify

pytestmark = pytest.mark.soak
"""Minutes of Spark: `make test-spark` runs them."""


def contents(broker: Any, topic: str, partition: int = 0) -> dict[int, tuple[str | None, bytes | None]]:
    at = broker.bounds(topic, partition).start_offset
    found: dict[int, tuple[str | None, bytes | None]] = {}
    while batches := broker.read_batches(topic, partition=partition, offset=at):
        for batch in batches:
            rows = zip(*(batch.column(n).to_pylist() for n in ("offset", "key", "data")), strict=True)
            found |= {offset: (key, data) for offset, key, data in rows}
            at = batch.column("offset")[-1].as_py() + 1
    return found


def changelog(
    broker: Any, topic: str, rounds: int, count: int = 300, keys: int = 50
) -> dict[str, bytes | None]:
    """Publishes rounds of changes, each sealed; the last state of every key."""
    dice = random.Random(rounds)
    state: dict[str, bytes | None] = {}
    for number in range(rounds):
        names = [f"k{dice.randrange(keys)}" for _ in range(count)]
        values = [None if dice.random() < 0.1 else b"%d-%d" % (number, row) for row in range(count)]
        broker.publish_batch(topic, values, keys=names)
        broker.seal()
        state |= dict(zip(names, values, strict=True))
    return state


def test_compaction_keeps_the_last_state_of_every_key_and_the_order(spark: Any, served: Any) -> None:
    broker = served.client
    broker.create_topic("state", partitions=2, compaction="key")
    state = changelog(broker, "state", 5)
    before = [contents(broker, "state", partition) for partition in range(2)]
    told: list[tuple[int, int]] = []
    outcome = compact.run(
        spark, broker, "state", segment_bytes=12_000, on_progress=lambda *step: told.append(step)
    )
    after = [contents(broker, "state", partition) for partition in range(2)]
    for old, new in zip(before, after, strict=True):
        assert new.items() <= old.items(), "offsets and contents are kept"
        newest = {key: offset for offset, (key, _) in old.items()}
        assert set(newest.values()) <= set(new), "tombstones stay for their delay"
        assert len(new) == len(newest)
    found = {key: data for each in after for key, data in each.values()}
    assert found == state
    assert outcome.messages_before == 1500
    assert outcome.messages == sum(map(len, after)) == len(state)
    assert outcome.bytes < 0.7 * outcome.bytes_before
    assert (outcome.conflicts, told[-1][0]) == (0, told[-1][1])
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    again = compact.run(spark, broker, "state")
    assert (again.messages, again.messages_before) == (outcome.messages, outcome.messages)
    assert compact.run(spark, broker, "state", if_due=True).swaps == 0


def test_tombstones_go_from_the_front_and_nothing_deleted_comes_back(spark: Any, served: Any) -> None:
    broker = served.client
    broker.create_topic("state", compaction="key", tombstone_delay_s=0, dedupe_window_s=0)
    broker.publish_batch("state", [b"1"] * 40, keys=[f"k{n}" for n in range(40)])
    broker.seal()
    broker.publish_batch("state", [None] * 40, keys=[f"k{n}" for n in range(40)])
    broker.seal()
    broker.publish_batch("state", [b"2"] * 5, keys=[f"k{n}" for n in range(5)])
    broker.seal()
    outcome = compact.run(spark, broker, "state", segment_bytes=1)
    assert contents(broker, "state") == {80 + n: (f"k{n}", b"2") for n in range(5)}
    assert (outcome.messages, outcome.segments) == (5, 1)
    assert broker.bounds("state") == (0, 85)


def test_compaction_of_a_stopped_brokers_directory(spark: Any, tmp_path: Path) -> None:
    from sparrow.broker.broker import Broker
    from sparrow.model.settings import Settings

    data = tmp_path / "data"
    with BlockingBroker(lambda: Broker.open(Settings(data=str(data)))) as broker:
        broker.create_topic("state", compaction="key")
        broker.create_topic("plain")
        changelog(broker, "state", 3)
    outcome = compact.run(spark, data, "state")
    assert outcome.messages < outcome.messages_before == 900
    with pytest.raises(PreconditionFailed, match="not compacted"):
        compact.run(spark, data, "plain")
    verdict = verify(data)
    assert (verdict.damages, verdict.notes) == ([], [])


def test_a_merge_leaves_every_row_and_fewer_files(spark: Any, served: Any) -> None:
    broker = served.client
    broker.create_topic("orders", partitions=2)
    for number in range(12):
        broker.publish_batch("orders", [b"%d" % number] * 20, keys=[f"k{row}" for row in range(20)])
        broker.seal()
    before = [contents(broker, "orders", partition) for partition in range(2)]
    outcome = merge.run(spark, broker, "orders")
    assert (outcome.segments_before, outcome.segments, outcome.swaps) == (24, 2, 2)
    assert [contents(broker, "orders", partition) for partition in range(2)] == before
    assert merge.run(spark, broker, "orders").swaps == 0


def test_publishing_and_consuming_go_on_beside_the_jobs(spark: Any, served: Any) -> None:
    """Lake and source agree: rows come once, whatever is sealed, merged, compacted and expired meanwhile."""
    place = served
    broker = place.client
    broker.create_topic("state", compaction="key", tombstone_delay_s=0, dedupe_window_s=0)
    subscription = broker.subscribe("all", "state", start="earliest")
    sent: list[tuple[str, bytes]] = []
    over = threading.Event()
    seen: dict[int, tuple[str | None, bytes | None]] = {}

    def publish() -> None:
        with _client(place) as own:
            number = 0
            while not over.is_set():
                rows = [(f"k{(number + row) % 17}", b"%d" % (number + row)) for row in range(50)]
                own.publish_batch("state", [data for _, data in rows], keys=[key for key, _ in rows])
                sent.extend(rows)
                number += 50
                over.wait(0.02)

    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        for number in range(3):
            broker.seal()
            for message in subscription.pull(max_messages=60, timeout_s=1):
                assert message.offset not in seen
                seen[message.offset] = (message.key, message.data)
                message.ack()
            job = (merge, compact, compact)[number]
            job.run(spark, f"sparrow://{place.address}", "state")
    finally:
        over.set()
        publisher.join()
    while found := subscription.pull(max_messages=500, timeout_s=0.3):
        for message in found:
            assert message.offset not in seen, "a row comes once"
            seen[message.offset] = (message.key, message.data)
            message.ack()
    subscription.flush()
    assert seen.items() <= dict(enumerate(sent)).items(), "each is what was published there"
    there = contents(broker, "state")
    assert there.items() <= seen.items(), "all that is left was delivered"
    newest = {key: offset for offset, (key, _) in enumerate(sent)}
    assert set(newest.values()) <= set(there)
    assert subscription.lag() == 0
    rows = spark.read.format("sparrow").option("servers", place.address).option("subscribe", "state").load()
    assert {row["offset"] for row in rows.select("offset").collect()} == set(there)


def _client(place: Any) -> Any:
    import sparrow

    return sparrow.connect(f"sparrow://{place.address}")


def rows_of(path: Path) -> list[dict[str, Any]]:
    table = ds.dataset(path, format="parquet", partitioning="hive").to_table()
    return sorted(table.to_pylist(), key=lambda row: (row["partition"], row["offset"]))


def test_the_archive_holds_every_sealed_message_once_however_often_it_runs(
    spark: Any, served: Any, tmp_path: Path
) -> None:
    broker, target = served.client, tmp_path / "archive"
    broker.create_topic("orders.new", partitions=2)
    for number in range(3):
        broker.publish_batch("orders.new", [b"%d" % number] * 30, keys=[f"k{row}" for row in range(30)])
        broker.seal()
    first = archive.run(spark, broker, "orders.new", target)
    assert (first.messages, first.missed) == (90, 0)
    assert archive.run(spark, broker, "orders.new", target).messages == 0
    broker.publish_batch("orders.new", [b"later"] * 5, keys=["k1"] * 5)
    broker.seal()
    merge.run(spark, broker, "orders.new")
    assert archive.run(spark, broker, "orders.new", target.as_uri()).messages == 5, "offsets decide"
    found = rows_of(target)
    expected = [
        (partition, offset, *row)
        for partition in range(2)
        for offset, row in contents(broker, "orders.new", partition).items()
    ]
    assert [(row["partition"], row["offset"], row["key"], row["data"]) for row in found] == expected
    assert {row["topic"] for row in found} == {"orders.new"}
    by_spark = spark.read.parquet(str(target))
    assert by_spark.count() == 95
    assert by_spark.where("topic = 'orders.new'").select("date").distinct().count() >= 1
    old = target / "topic=orders.new" / "date=2001-01-01"
    old.mkdir()
    (old / "x.parquet").write_bytes(b"")
    assert archive.run(spark, broker, "orders.new", target, retention_s=86400).expired_files == 1
    assert (old.exists(), len(rows_of(target))) == (False, 95)
    with pytest.raises(InvalidArgument, match="cannot be opened"):
        archive.run(spark, broker, "orders.new", "nowhere-known://x")


@pytest.mark.parametrize("after_record", [False, True])
def test_an_archive_run_that_was_stopped_is_finished_or_forgotten_by_the_next(
    spark: Any, served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after_record: bool
) -> None:
    broker, target = served.client, tmp_path / "archive"
    broker.create_topic("orders")
    broker.publish_batch("orders", [b"x"] * 20)
    broker.seal()

    def stop(*anything: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(archive._Archive, "_move" if after_record else "commit", stop)
        with pytest.raises(KeyboardInterrupt):
            archive.run(spark, broker, "orders", target)
    assert not list(target.glob("topic=*/**/*.parquet"))
    broker.publish_batch("orders", [b"y"] * 20)
    broker.seal()
    merge.run(spark, broker, "orders")  # The next run finds other segments.
    again = archive.run(spark, broker, "orders", target)
    assert again.messages == (20 if after_record else 40)
    assert [row["offset"] for row in rows_of(target)] == list(range(40))
    assert not list((target / "_staging/orders").iterdir())


def test_the_commands_tell_what_they_did(
    spark: Any,
    served: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sparrow.cli.output.is_terminal", lambda: True)
    broker = served.client
    broker.create_topic("state", compaction="key")
    changelog(broker, "state", 2)
    url = f"sparrow://{served.address}"

    def run(*words: str) -> str:
        with pytest.raises(SystemExit) as left:
            main([*words, "--url", url])
        shown = capsys.readouterr()
        assert left.value.code == 0, shown.err
        return shown.out

    outcome = json.loads(run("compact", "state", "--json"))
    assert outcome["messages"] < outcome["messages_before"] == 600
    assert "state is merged" in run("merge", "state")
    assert f"{outcome['messages']} messages in 1 file" in run("archive", "state", str(tmp_path / "archive"))
    assert len(rows_of(tmp_path / "archive")) == outcome["messages"]
    with pytest.raises(SystemExit) as left:
        main(["compact", "nothing", "--url", url])
    assert left.value.code == 3
