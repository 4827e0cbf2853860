"""The health family of the HTTP API: two probes, for whoever restarts and whoever routes.

``/health/live`` says that the process answers, and nothing else: a supervisor restarts on it, and a
full disk is not cured by a restart. ``/health/ready`` says whether work should be sent here; it is
503 with a reason when the broker's own report is critical or unknown.
"""

from __future__ import annotations

from importlib import metadata

import msgspec

from sparrow.broker.clock import Clock
from sparrow.model.health import Check, Health, HealthSource, Status
from sparrow.server.api.operation import described
from sparrow.server.api.routing import Answer, Request, Route, get


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of both probes."""

    status: Status
    checks: tuple[Check, ...]
    uptime_s: float
    version: str
    reason: str | None = None
    recommendations: tuple[str, ...] = ()


def routes(source: HealthSource, clock: Clock) -> list[Route]:
    """The probes of one broker; its uptime counts from this call."""
    started_at_s = clock.monotonic_s()
    version = metadata.version("sparrow-broker")

    def report(health: Health, reason: str | None = None) -> Report:
        return Report(
            status=health.status,
            checks=health.checks,
            uptime_s=round(clock.monotonic_s() - started_at_s, 3),
            version=version,
            reason=reason,
            recommendations=health.recommendations,
        )

    @get("/health/live", opt=described("Say that the process answers", tag="health", answers={200: Report}))
    def live(request: Request) -> Answer:
        return Answer(msgspec.json.encode(report(Health(Status.HEALTHY))), 200)

    @get(
        "/health/ready",
        opt=described(
            "Say whether work should be sent here, and why not",
            tag="health",
            answers={200: Report, 503: Report},
        ),
    )
    def ready(request: Request) -> Answer:
        health = source.health()
        if health.is_ready:
            return Answer(msgspec.json.encode(report(health)), 200)
        return Answer(msgspec.json.encode(report(health, reason=_reason(health))), 503)

    return [live, ready]


def _reason(health: Health) -> str:
    """The checks that keep the broker from being ready, in words."""
    blocking = (Status.CRITICAL, Status.UNKNOWN)
    found = [check for check in health.checks if check.status in blocking]
    named = [f"{check.name}: {check.message or check.status}" for check in found]
    return "; ".join(named) or f"the broker is {health.status}"
