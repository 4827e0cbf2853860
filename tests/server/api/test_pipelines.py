"""Pipelines over HTTP: declared, looked at, started, stopped, sought, deleted."""

from __future__ import annotations

import asyncio
from typing import Any

from .conftest import Served

DECLARED: dict[str, Any] = {
    "source": {"topic": "orders.#", "start": "earliest"},
    "sql": "SELECT * FROM source",
    "sinks": [{"topic": "large"}],
}


async def test_a_pipeline_is_operated_over_http(served: Served) -> None:
    await served.broker.create_topic("orders.us")
    await served.broker.publish("orders.us", b"1")
    http = served.http
    made = await http.put("/v1/pipelines/large", json=DECLARED)
    assert (made.status_code, made.json()["state"], made.json()["lag"]) == (200, "waiting", 1)
    shown = (await http.get("/v1/subscriptions/large")).json()
    assert (shown["topic_id"], shown["delivery"]) == ("orders.#", {"type": "pipeline"})
    stopped = await http.post("/v1/pipelines/large/stop")
    assert stopped.json()["state"] == "stopped"
    sought = await http.post("/v1/pipelines/large/seek", json={"position": "latest"})
    assert (sought.json()["run"], sought.json()["lag"]) == (1, 0)
    started = await http.post("/v1/pipelines/large/start")
    assert started.json()["is_wanted"] is True
    listed = (await http.get("/v1/pipelines")).json()
    assert [each["pipeline"]["name"] for each in listed["pipelines"]] == ["large"]
    assert (await http.get("/v1/pipelines/large/log")).json() == {"lines": []}
    metrics = ""
    async with asyncio.timeout(30):
        while 'sparrow_lag_messages{subscription="large"} 0' not in metrics:
            metrics = (await http.get("/metrics")).text
    assert 'sparrow_pipeline_running{pipeline="large"} 0' in metrics
    assert (await http.delete("/v1/pipelines/large")).status_code == 204
    assert (await http.get("/v1/pipelines/large")).status_code == 404


async def test_a_wrong_declaration_is_refused_by_its_key(served: Served) -> None:
    refused = await served.http.put("/v1/pipelines/large", json={**DECLARED, "mode": "all"})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["code"], error["details"]["key"]) == ("INVALID_PIPELINE", "mode")
    other = await served.http.put("/v1/pipelines/large", json={**DECLARED, "name": "small"})
    assert other.json()["error"]["details"]["key"] == "name"


async def test_a_job_is_operated_over_http(served: Served) -> None:
    http = served.http
    made = await http.put(
        "/v1/pipelines/tidy", json={"source": "state.#", "builtin": "compact", "every": "1h"}
    )
    assert (made.status_code, made.json()["state"], made.json()["is_due"]) == (200, "waiting", True)
    await served.broker.pipeline_desk.pass_over()
    shown = (await http.get("/v1/pipelines/tidy")).json()
    assert (shown["state"], shown["turns"]["outcome"], shown["turns"]["count"]) == ("scheduled", "idle", 1)
    assert shown["turns"]["next_at_us"] - shown["turns"]["ended_at_us"] == 3_600_000_000
    assert (await http.post("/v1/pipelines/tidy/seek", json={"position": "latest"})).status_code == 409
    assert (await http.post("/v1/pipelines/tidy/stop")).json()["state"] == "stopped"
    assert (await http.delete("/v1/pipelines/tidy")).status_code == 204
