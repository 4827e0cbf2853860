"""The OpenAPI document and the server say the same: Schemathesis asks for everything that it describes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import SkipTest

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode, checks

from tests.server.api.conftest import Served

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 60
KNOWN = {"topic": "orders", "subscription": "billing", "snapshot": "saved"}
"""Things that are there; a path names them now and then, so that not every answer is 404."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A broker in a process of its own, with something in it."""
    data = tmp_path_factory.mktemp("openapi")
    words = ["up", "--json", "--data", str(data), "--log-level", "error", "--tcp", "none"]
    command = [sys.executable, "-c", "from sparrow.cli.main import main; main()", *words]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPARROW_")}
    process = subprocess.Popen(
        [*command, "--http", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=kept
    )
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["http"]
        fill(url)
        yield url
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)


def fill(url: str) -> None:
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:
        client.post("/v1/topics", json={"name": "orders", "partitions": 2}).raise_for_status()
        options = {"name": "billing", "topic_id": "orders", "dead_letter_topic_id": "billing.dead"}
        client.post("/v1/subscriptions", json=options).raise_for_status()
        messages = [{"data": {"n": n}, "attributes": {"a": "b"}} for n in range(100)]
        client.post("/v1/topics/orders/messages/batch", json={"messages": messages}).raise_for_status()
        client.post("/v1/subscriptions/billing/snapshots", json={"name": "saved"}).raise_for_status()


CHECKED = re.compile(
    r"(?!/api/v1/admin/(shutdown|maintenance|support-bundle)|/metrics|/health/deep|/api/v1/health)"
    r"(?!/topics/[^/]*/messages$)/"
)
"""All but what stops the broker, checks all of it or waits for messages."""
EXAMPLED = re.compile(r"/v1/(topics|subscriptions|snapshots)")
ENDLESS = ("GET", "/v1/subscriptions/{subscription}/messages")
"""A stream has no end; see test_stream.py."""


def test_no_answer_is_a_server_error_or_one_that_the_document_does_not_describe(address: str) -> None:
    schema = schemathesis.openapi.from_dict(told(address))
    schema.config.update(base_url=address)
    asked = 0
    for operation in (result.ok() for result in schema.get_all_operations()):
        if (operation.method.upper(), operation.path) != ENDLESS:
            for mode in GenerationMode:
                ask(operation, mode)
                asked += 1
    assert asked > 50


def told(address: str) -> dict[str, Any]:
    """The document, without the paths and the schemas that are not asked about."""
    document = httpx.get(f"{address}/openapi.json", timeout=TIMEOUT_S).json()
    document["paths"] = {path: told for path, told in document["paths"].items() if CHECKED.match(path)}
    schemas, wanted = document["components"]["schemas"], list[str]()
    waiting = named(document["paths"])
    while waiting:
        name = waiting.pop()
        if name not in wanted:
            wanted.append(name)
            waiting += named(schemas[name])
    document["components"]["schemas"] = {name: schemas[name] for name in wanted}
    return dict(document)


def named(part: Any) -> list[str]:
    return re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(part))


def ask(operation: Any, mode: GenerationMode) -> None:
    """Asks for an operation with what the document allows, or with what it does not."""

    @settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        for name, value in (case.path_parameters or {}).items():
            if len(str(value)) % 2 and operation.method.upper() != "DELETE":
                case.path_parameters[name] = KNOWN.get(name, value)
        if isinstance(case.body, dict) and isinstance(case.body.get("timeout_ms"), int):
            case.body["timeout_ms"] = min(case.body["timeout_ms"], 20)
        case.call_and_validate(
            checks=[
                checks.not_a_server_error,
                checks.status_code_conformance,
                checks.content_type_conformance,
                checks.response_schema_conformance,
            ],
            timeout=TIMEOUT_S,
        )

    # Where nothing can be wrong there is nothing to ask.
    with contextlib.suppress(SkipTest, Unsatisfiable):
        check()


async def test_every_route_is_described_with_a_summary_a_tag_and_its_answers(served: Served) -> None:
    document = (await served.http.get("/openapi.json")).json()
    assert document["openapi"] == "3.1.0"
    operations = [
        (f"{method} {path}", operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    assert len(operations) > 30
    assert len({operation["operationId"] for _, operation in operations}) == len(operations)
    for name, operation in operations:
        assert operation["summary"], name
        assert operation.get("tags"), name
        assert any(status < "300" for status in operation["responses"]), name
        if "requestBody" in operation and EXAMPLED.match(name.split()[1]):
            assert "example" in operation["requestBody"]["content"]["application/json"], name


async def test_the_page_needs_no_other_host(served: Served) -> None:
    page = await served.http.get("/docs")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert "http://" not in page.text
    assert "https://" not in page.text


async def test_the_topics_are_an_asyncapi_document(served: Served) -> None:
    await served.broker.create_topic("orders.us", partitions=3)
    document = (await served.http.get("/asyncapi.json")).json()
    assert document["asyncapi"] == "3.0.0"
    assert document["channels"]["orders.us"]["address"] == "orders.us"
    assert {each["action"] for each in document["operations"].values()} == {"send", "receive"}
