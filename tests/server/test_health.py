"""The health probes, over real HTTP on a real server."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import metadata

import httpx
import pytest

from sparrow.broker.clock import Clock
from sparrow.model.errors import AddressUnavailable, StorageFull
from sparrow.model.health import Check, Health, Status, overall
from sparrow.model.settings import Address
from sparrow.server import health as family
from sparrow.server.api.routing import App
from sparrow.server.http import HttpServer, bind, compose

ANY_PORT = Address("127.0.0.1", 0)


class Patient:
    """A source of whatever health a test gives it."""

    def __init__(self, health: Health | Exception) -> None:
        self.report = health

    def health(self) -> Health:
        if isinstance(self.report, Exception):
            raise self.report
        return self.report


class HandClock(Clock):
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def now_us(self) -> int:
        return int(self.seconds * 1_000_000)

    def monotonic_s(self) -> float:
        return self.seconds


def probes(patient: Patient, clock: Clock | None = None) -> App:
    ticking = clock or Clock()
    return compose(family.routes(patient, ticking), ticking)


@asynccontextmanager
async def serving(patient: Patient, clock: Clock | None = None) -> AsyncIterator[httpx.AsyncClient]:
    server = await HttpServer.start(probes(patient, clock), bind(ANY_PORT))
    try:
        async with httpx.AsyncClient(base_url=f"http://{server.address}") as client:
            yield client
    finally:
        await server.close()


HEALTHY = Health(Status.HEALTHY, (Check("journal", Status.HEALTHY, "writes"),))
FROZEN = Health(
    Status.CRITICAL,
    (Check("catalog", Status.HEALTHY), Check("journal", Status.CRITICAL, "a sync failed")),
    ("Check the disk, then restart.",),
)


async def test_a_healthy_broker_is_ready_and_tells_checks_uptime_and_version() -> None:
    clock = HandClock()
    async with serving(Patient(HEALTHY), clock) as client:
        clock.seconds += 12.5
        answer = await client.get("/health/ready")
    assert answer.status_code == 200
    assert answer.json() == {
        "status": "healthy",
        "checks": [{"name": "journal", "status": "healthy", "message": "writes"}],
        "uptime_s": 12.5,
        "version": metadata.version("sparrow-broker"),
    }


async def test_a_degraded_broker_still_takes_work() -> None:
    async with serving(Patient(Health(Status.DEGRADED))) as client:
        answer = await client.get("/health/ready")
    assert answer.status_code == 200
    assert answer.json()["status"] == "degraded"


async def test_a_critical_broker_is_not_ready_and_says_why_and_what_to_do() -> None:
    async with serving(Patient(FROZEN)) as client:
        answer = await client.get("/health/ready")
    assert answer.status_code == 503
    assert answer.json()["reason"] == "journal: a sync failed"
    assert answer.json()["recommendations"] == ["Check the disk, then restart."]


async def test_a_broker_of_unknown_health_is_not_ready() -> None:
    async with serving(Patient(Health(Status.UNKNOWN))) as client:
        answer = await client.get("/health/ready")
    assert answer.status_code == 503
    assert answer.json()["reason"] == "the broker is unknown"


@pytest.mark.parametrize("health", [FROZEN, RuntimeError("a bug in a check")])
async def test_a_process_that_answers_is_alive_whatever_its_checks_say(health: Health | Exception) -> None:
    async with serving(Patient(health)) as client:
        answer = await client.get("/health/live")
    assert answer.status_code == 200
    assert set(answer.json()) == {"status", "checks", "uptime_s", "version"}


async def test_a_typed_error_has_its_status_and_the_one_error_body() -> None:
    error = StorageFull("the disk is full", free_bytes=0)
    async with serving(Patient(error), HandClock()) as client:
        answer = await client.get("/health/ready", headers={"X-Request-Id": "r-1"})
    assert answer.status_code == 507
    assert answer.json() == {
        "error": {
            **error.to_dict(),
            "suggestions": [error.hint],
            "request_id": "r-1",
            "timestamp": "1970-01-01T00:16:40.000Z",
        }
    }


async def test_a_bug_is_a_500_that_keeps_its_secrets() -> None:
    async with serving(Patient(RuntimeError("inner workings"))) as client:
        answer = await client.get("/health/ready")
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "SPARROW_ERROR"
    assert "inner workings" not in answer.text


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "NOT_FOUND"),
        ("POST", "/health/ready", 405, "METHOD_NOT_ALLOWED"),
    ],
)
async def test_a_wrong_request_has_the_same_error_body(
    method: str, path: str, status: int, code: str
) -> None:
    async with serving(Patient(HEALTHY)) as client:
        answer = await client.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
    assert answer.json()["error"]["request_id"] == answer.headers["x-request-id"]


async def test_a_request_keeps_its_sane_id_and_gets_a_new_one_otherwise() -> None:
    async with serving(Patient(HEALTHY)) as client:
        kept = await client.get("/health/live", headers={"X-Request-Id": "r-1"})
        replaced = await client.get("/health/live", headers={"X-Request-Id": "a b" * 100})
    assert kept.headers["x-request-id"] == "r-1"
    assert re.fullmatch(r"[0-9a-f]{16}", replaced.headers["x-request-id"])


async def test_the_server_leaves_the_signals_of_the_process_alone() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    async with serving(Patient(HEALTHY)) as client:
        await client.get("/health/live")
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


async def test_a_closed_server_gives_its_address_back() -> None:
    server = await HttpServer.start(probes(Patient(HEALTHY)), bind(ANY_PORT))
    await server.close()
    await server.wait_closed()
    bind(server.address).close()


async def test_a_bound_address_refuses_connections_until_the_server_starts() -> None:
    with bind(ANY_PORT) as bound:
        async with httpx.AsyncClient() as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(f"http://127.0.0.1:{bound.getsockname()[1]}/health/live")


def test_a_taken_address_is_a_clear_typed_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = Address("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(AddressUnavailable) as caught:
            bind(address)
    assert caught.value.message == f"cannot listen on {address}: another process listens there"
    assert caught.value.details == {"address": str(address)}


async def test_an_address_taken_between_bind_and_start_is_the_same_error() -> None:
    bound = bind(ANY_PORT)
    with bind(Address("127.0.0.1", bound.getsockname()[1])) as faster:
        faster.listen()
        with pytest.raises(AddressUnavailable, match="another process listens there"):
            await HttpServer.start(probes(Patient(HEALTHY)), bound)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_a_typed_error(host: str) -> None:
    with pytest.raises(AddressUnavailable, match=f"cannot listen on {host}:8080"):
        bind(Address(host, 8080))


def test_the_overall_status_is_the_worst_of_the_checks() -> None:
    def check(status: Status) -> Check:
        return Check("x", status)

    assert overall([]) is Status.UNKNOWN
    assert overall([check(Status.HEALTHY)]) is Status.HEALTHY
    assert overall([check(Status.HEALTHY), check(Status.DEGRADED)]) is Status.DEGRADED
    assert overall([check(Status.CRITICAL), check(Status.UNKNOWN)]) is Status.CRITICAL
