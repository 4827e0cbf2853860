"""Metrics: the text for Prometheus, the figures as JSON, and what a scrape costs."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from sparrow.broker.broker import Broker
from sparrow.broker.telemetry import CATEGORIES, Extra
from sparrow.model.settings import MonitoringSettings, Settings
from sparrow.server import exposition

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(text: str) -> Samples:
    """Samples by name and labels; refuses what is not the format."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def of(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


async def scraped(broker: Broker) -> Samples:
    await broker.telemetry.look(is_new=True)
    return parsed((await exposition.render(broker.telemetry)).decode())


async def test_the_names_that_the_specification_fixes_are_there_per_topic(served: Any) -> None:
    broker = served.broker
    await broker.subscribe("billing", "orders")
    await broker.publish_batch("orders", [b"x"] * 10)
    answer = await served.http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    await broker.telemetry.look(is_new=True)
    samples = parsed((await served.http.get("/metrics")).text)
    assert of(samples, "queue_depth", topic="orders") == 10
    assert of(samples, "consumer_lag", topic="orders", consumer_group="billing") == 10
    assert of(samples, "message_throughput", topic="orders", window="1m") >= 0
    assert of(samples, "sparrow_messages_published_total", topic="orders") == 10


async def test_what_becomes_of_messages_is_counted_exactly(tmp_path: Path) -> None:
    async with await Broker.open(Settings(data=str(tmp_path))) as broker:
        retry = {"min_backoff_s": 0.01, "immediate_retries": 10}
        billing = await broker.subscribe("billing", "orders", dead_letter_topic="dead", retry=retry)
        await broker.publish_batch("orders", [b"x"] * 10)
        first = await billing.pull(10, timeout_s=5)
        await billing.ack(first[:6])
        await billing.nack(first[6:9])
        await billing.nack(first[9:], retry=False)
        await billing.flush()
        again = await billing.pull(10, timeout_s=5)
        await billing.ack(again, wait=True)
        await billing.flush()
        samples = await scraped(broker)
    expected = {"delivered": 13, "redelivered": 3, "acked": 9, "nacked": 4, "dead_lettered": 1}
    for name, count in expected.items():
        assert of(samples, f"sparrow_messages_{name}_total", subscription="billing") == count, name
    assert of(samples, "sparrow_lag_messages", subscription="billing") == 0
    assert of(samples, "sparrow_messages_published_total", topic="dead") == 1


async def test_leases_that_run_out_and_messages_that_expire_are_counted(tmp_path: Path) -> None:
    async with await Broker.open(Settings(data=str(tmp_path))) as broker:
        slow = await broker.subscribe("slow", "orders", ack_deadline_s=0.05)
        await broker.publish("orders", b"x")
        await slow.pull(timeout_s=5)
        async with asyncio.timeout(20):
            while not (await slow.pull(timeout_s=1)):
                pass
        await broker.subscribe("fresh", "brief")
        await broker.publish("brief", b"x", ttl_s=0.05)
        fresh = await broker.subscription("fresh")
        await asyncio.sleep(0.1)
        async with asyncio.timeout(20):
            while await fresh.lag():
                await fresh.pull(timeout_s=0.1)
        samples = await scraped(broker)
    assert of(samples, "sparrow_messages_timed_out_total", subscription="slow") >= 1
    assert of(samples, "sparrow_messages_expired_total", subscription="fresh") == 1


async def test_a_group_a_sync_and_the_store_have_their_figures(tmp_path: Path) -> None:
    async with await Broker.open(Settings(data=str(tmp_path))) as broker:
        billing = await broker.subscribe("billing", "orders")
        member = await billing.join("one")
        await broker.publish("orders", b"x")
        await member.pull(timeout_s=5)
        async with asyncio.timeout(20):
            while not (await billing.group()).rebalances:  # noqa: ASYNC110 - as a person would look
                await asyncio.sleep(0.02)
        await broker.seal()
        samples = await scraped(broker)
        await member.leave()
    assert of(samples, "sparrow_group_members", subscription="billing") == 1
    assert of(samples, "sparrow_rebalances_total", subscription="billing") >= 1
    assert of(samples, "sparrow_in_flight_messages", subscription="billing") == 1
    count = of(samples, "sparrow_fsync_seconds_count")
    assert count >= 1
    assert of(samples, "sparrow_fsync_seconds_bucket", le="+Inf") == count
    assert of(samples, "sparrow_fsync_seconds_sum") > 0
    assert of(samples, "sparrow_sealed_messages_total") == 1
    assert of(samples, "sparrow_lake_segments") == 1
    assert of(samples, "sparrow_journal_written_bytes_total") > 0
    assert of(samples, "process_resident_memory_bytes") > 0
    assert of(samples, "sparrow_service_level", level="normal") == 1


async def test_beyond_the_bound_topics_and_subscriptions_are_one(tmp_path: Path) -> None:
    settings = Settings(data=str(tmp_path), monitoring=MonitoringSettings(labels_max=2))
    async with await Broker.open(settings) as broker:
        for name in ("a", "b", "c", "d"):
            await broker.create_topic(name)
            await broker.subscribe(f"of-{name}", name)
            await broker.publish_batch(name, [b"x"] * 5)
        samples = await scraped(broker)
        topics = {dict(labels)["topic"] for name, labels in samples if name == "queue_depth"}
        assert topics == {"a", "b", "_other"}
        assert of(samples, "sparrow_messages_published_total", topic="_other") == 10
        assert of(samples, "sparrow_lag_messages", subscription="_other") == 10
        await broker.delete_topic("c", force=True)
        after = await scraped(broker)
        assert of(after, "sparrow_messages_published_total", topic="_other") == 10, "a counter never falls"
        await broker.delete_topic("a", force=True)
        await broker.create_topic("e")
        topics = {dict(labels)["topic"] for name, labels in await scraped(broker) if name == "queue_depth"}
        assert topics == {"b", "e", "_other"}


async def test_other_parts_of_the_broker_add_figures_of_their_own(tmp_path: Path) -> None:
    async with await Broker.open(Settings(data=str(tmp_path))) as broker:
        extra = Extra("sparrow_things_total", "Things.", "counter", [({"kind": 'a"b\\c'}, 3.0)])
        broker.telemetry.sources.append(lambda: [extra])
        assert of(await scraped(broker), "sparrow_things_total", kind='a"b\\c') == 3


async def test_the_broker_in_figures_with_series_by_category(served: Any) -> None:
    broker, http = served.broker, served.http
    await broker.subscribe("billing", "orders")
    await broker.publish_batch("orders", [b"x"] * 10)
    await broker.telemetry.record(await broker.telemetry.look(is_new=True))
    found = (await http.get("/api/v1/metrics")).json()
    assert found["totals"]["published"] == 10
    assert found["current"]["lag"] == 10
    assert found["current"]["connections"] == 1
    assert {each["name"] for each in found["series"]} == {""}
    assert set(found["rates"]["published"]) == {"one_minute", "five_minutes", "fifteen_minutes"}
    depth = (await http.get("/api/v1/metrics", params={"category": "queue_depth", "duration": "1h"})).json()
    (series,) = [each for each in depth["series"] if each["name"] == "orders"]
    assert series["metric"] == "topic.depth"
    assert series["points"][-1][1] == 10
    day = (await http.get("/api/v1/metrics", params={"category": "resources", "duration": "24h"})).json()
    assert day["resolution_s"] == 60
    assert [each for each in day["series"] if each["metric"] == "broker.memory_bytes"]


async def test_every_metric_of_every_category_gets_a_series(served: Any) -> None:
    broker = served.broker
    await broker.subscribe("billing", "orders")
    await broker.publish("orders", b"x")
    await broker.telemetry.record(await broker.telemetry.look(is_new=True))
    kept = {metric for metric, _ in broker.telemetry.series.names()}
    assert {metric for metrics in CATEGORIES.values() for metric in metrics} == kept


async def test_a_wrong_question_is_answered_with_what_is_allowed(served: Any) -> None:
    for query in ("category=nothing", "duration=soon", "duration=2d", "duration=0s", "limit=0", "unknown=1"):
        answer = await served.http.get(f"/api/v1/metrics?{query}")
        assert answer.status_code == 400, query
        assert answer.json()["error"]["code"] == "INVALID_ARGUMENT"


async def test_topics_and_consumers_in_figures_come_in_pages(served: Any) -> None:
    broker, http = served.broker, served.http
    for name in ("orders.a", "orders.b", "visits"):
        await broker.create_topic(name)
        await broker.subscribe(f"of-{name}", name)
        await broker.publish(name, b"x")
    found = await http.get("/api/v1/metrics/topics", params={"topic_pattern": "orders.*", "limit": 1})
    assert [each["topic"] for each in found.json()["topics"]] == ["orders.a"]
    assert found.headers["x-total-count"] == "2"
    found = await http.get("/api/v1/metrics/consumers", params={"group_name": "of-visits"})
    (group,) = found.json()["consumers"]
    assert (group["group"], group["pattern"], group["lag"]) == ("of-visits", "visits", 1)
    answer = await http.get("/api/v1/metrics/consumers", params={"group_name": "nobody"})
    assert answer.status_code == 404


async def test_a_rate_is_about_what_was_published_in_its_window(served: Any) -> None:
    broker = served.broker
    await broker.create_topic("orders")
    before = await broker.telemetry.look(is_new=True)
    await broker.publish_batch("orders", [b"x"] * 600)
    seen = await broker.telemetry.look(is_new=True)
    assert before.rates["orders"] == (0.0, 0.0, 0.0)
    assert all(per_s > 0 for per_s in seen.rates["orders"])
    assert seen.totals["published"][0] > 0


async def test_a_scrape_costs_little_and_is_done_in_slices(tmp_path: Path) -> None:
    """By the processor's time, because the machine may be busy; a thousand are measured by a benchmark."""
    count = 60
    async with await Broker.open(Settings(data=str(tmp_path))) as broker:
        for number in range(count):
            await broker.create_topic(f"t.{number}", durability="none")
            await broker.subscribe(f"s.{number}", f"t.{number}")
        await asyncio.gather(*(broker.publish(f"t.{number}", b"x") for number in range(count)))
        await scraped(broker)
        times = []
        for _ in range(5):
            start_s = time.thread_time()
            seen = await broker.telemetry.look(is_new=True)
            text = exposition._text(seen, [])
            times.append(time.thread_time() - start_s)
    per_thing_us = min(times) * 1e6 / count
    print(f"scrape: {len(text)} bytes, {per_thing_us:.0f} us for a topic with a subscription")
    assert per_thing_us * 1000 < 200_000, "a thousand of them in 200 ms"


async def test_receivers_of_webhooks_are_counted_by_state(tmp_path: Path) -> None:
    async with await Broker.open(Settings(data=str(tmp_path))) as broker:
        assert ("sparrow_push_receivers", (("state", "active"),)) not in await scraped(broker)
        await broker.subscribe("hook", "orders", push={"url": "https://receiver.example/in"})
        samples = await scraped(broker)
    assert of(samples, "sparrow_push_receivers", state="active") == 1
    assert of(samples, "sparrow_push_receivers", state="open") == 0
    assert of(samples, "sparrow_push_requests_total", result="failed") == 0
    assert of(samples, "sparrow_push_in_flight") == 0
